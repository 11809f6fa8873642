"""Runs on several token datasets in shares and phases see the planned tokens; resumed, they go on in their order."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fabric_train.arguments import TrainArguments, TrainingArguments
from fabric_train.checkpoint import read_trainer_json
from fabric_train.cli.argument_types import Shares
from fabric_train.cli.errors import InputError
from fabric_train.cli.parser import parse_arguments
from fabric_train.data.token_mixture import TokenMixture, open_mixture
from fabric_train.export.card_facts import all_stages, read_record
from fabric_train.export.model_card import CardFacts, write_model_card
from fabric_train.optim.learning_rate import learning_rate
from fabric_train.preflight.phases import plan_phases, read_stretches
from fabric_train.report.reported_run import ReportedRun
from fabric_train.report.sections import run_sections
from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.run_comparison import differences
from tests.support.short_runs import argv, at_point, metrics
from tests.support.token_datasets import TEXTS, manifest_of, tokenize, write_jsonl

pytestmark = pytest.mark.slow
NAMES = ("va", "es", "en")
OPTIONS: dict[str, Any] = {"lr_schedule": "constant", "eval_step_interval": 100, "eval_iters": 1, "micro_batch_size": 4}
TWO_EPOCHS: dict[str, Any] = {"max_step": None, "number_epochs": 2, "total_batch_size": 24, "micro_batch_size": 12}


class Mixing:
    """Trains on three token datasets in the folder of the runs."""

    def __init__(self, folder: Path, model: Path, runs: ForkedRuns) -> None:
        self.folder = folder
        self.model = model
        self._runs = runs
        for name, texts in zip(NAMES, (TEXTS[:20], TEXTS * 4, TEXTS[:10]), strict=True):
            documents = write_jsonl(folder / f"{name}.jsonl", [f"{name} {text}" for text in texts])
            tokenize(folder / name, model, documents, validation_split=0.1)

    def start(
        self,
        run: str,
        num_ranks: int,
        *shares: object,
        before: str = "",
        names: tuple[str, ...] = NAMES,
        **options: Any,
    ) -> ForkedRun:
        words = argv(self.model, Path("TOKENS"), Path(run), **{**OPTIONS, **options})
        place = words.index("TOKENS")
        return self._runs.start(
            [*words[:place], *names, *map(str, shares), *words[place + 1 :]], num_ranks, cwd=self.folder, before=before
        )

    def state(self, run: str, step: int) -> dict[str, Any]:
        file = self.folder / run / "checkpoints" / f"step-{step:08d}" / "trainer.json"
        return dict(json.loads(file.read_text()))


@pytest.fixture(scope="module")
def mixing(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, forked_runs: ForkedRuns) -> Mixing:
    return Mixing(tmp_path_factory.mktemp("mixing"), tiny_model_dir, forked_runs)


@pytest.fixture(scope="module")
def whole(mixing: Mixing) -> ForkedRun:
    """A run on two ranks over two epochs of a mixture."""
    run = mixing.start("whole", 2, "--shares", 1.0, 0.15, 2, **TWO_EPOCHS, save_step_interval=4)
    run.finish()
    return run


def last_step(run: ForkedRun) -> int:
    (steps,) = re.findall(r"^steps +([0-9]+), the last", run.stdout(), re.MULTILINE)
    return int(steps)


def test_what_a_run_saw_of_each_source_is_what_was_planned(mixing: Mixing, whole: ForkedRun) -> None:
    rows = [manifest_of(mixing.folder / name).ledger.splits["train"].rows for name in NAMES]
    wanted = [2 * rows[0], 2 * round(0.15 * rows[1]), 4 * rows[2]]
    state = mixing.state("whole", last_step(whole))
    assert state["rows_of_sources"] == wanted
    assert state["num_tokens"] == 16 * sum(wanted)
    before, after = whole.stdout().split("Done\n")
    for name, total, seen in zip(NAMES, rows, wanted, strict=True):
        share = f"{seen / sum(wanted):.2%}"
        epochs = f"{seen / total:.2f}"
        planned = [name, f"{total * 16:,}", share, epochs, f"{seen * 16:,}"]
        assert planned in [line.split() for line in before.splitlines()]
        assert [*planned, planned[-1]] in [line.split() for line in after.splitlines()]


def test_checkpoint_of_a_mixture_has_its_order_and_describes_all_sources(mixing: Mixing, whole: ForkedRun) -> None:
    order = mixing.state("whole", 4)["data"]
    assert order["version"] == 2
    assert sum(order["rows_per_epoch"]) == order["num_rows"]
    checkpoint = manifest_of(mixing.folder / "whole" / "checkpoints" / "step-00000004")
    parts = [manifest_of(mixing.folder / name).ledger.splits["train"].rows for name in NAMES]
    assert checkpoint.ledger.splits["train"].rows == sum(parts)
    assert [part.name for part in checkpoint.parts] == list(NAMES)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_resumed_mixture_reads_the_same_rows_on_any_number_of_ranks(
    mixing: Mixing, whole: ForkedRun, num_ranks: int
) -> None:
    end = last_step(whole)
    checkpoint = mixing.folder / "whole" / "checkpoints" / "step-00000004"
    options: dict[str, Any] = {"checkpoint": checkpoint, "resume": "true", **TWO_EPOCHS}
    run = f"resumed-{num_ranks}"
    mixing.start(run, num_ranks, "--shares", 1.0, 0.15, 2, **options).finish()
    here, there = (mixing.state(each, end) for each in (run, "whole"))
    for name in ("rows_hash", "rows_of_sources", "counted_of_sources", "num_tokens", "data"):
        assert here[name] == there[name]
    ours = metrics(mixing.folder / run)
    theirs = metrics(mixing.folder / "whole")[4:]
    if num_ranks == 2:
        assert ours == theirs
    for row, same in zip(ours, theirs, strict=True):
        assert row[0] == same[0]
        assert float(row[2]) == pytest.approx(float(same[2]), abs=1e-5)


def test_mixture_is_not_resumed_in_other_shares(mixing: Mixing, whole: ForkedRun) -> None:
    options: dict[str, Any] = {
        "checkpoint": mixing.folder / "whole" / "checkpoints" / "step-00000004",
        "resume": "true",
        **TWO_EPOCHS,
    }
    other = mixing.start("other", 1, "--shares", 1.0, 0.25, 2, **options)
    assert other.wait() == [2]
    assert "an epoch has other numbers of rows of each source (" in other.stderr()
    assert not (mixing.folder / "other").exists()


def test_token_shares_are_those_of_every_step(mixing: Mixing) -> None:
    run = mixing.start(
        "tokens",
        1,
        "--token_shares",
        "en=0.25",
        "va=0.5",
        "es=0.25",
        max_step=3,
        save_step_interval=1,
        keep_checkpoints=9,
    )
    run.finish()
    assert [mixing.state("tokens", step)["rows_of_sources"] for step in (1, 2, 3)] == [[4, 2, 2], [8, 4, 4], [12, 6, 6]]
    assert mixing.state("tokens", 3)["mixture_sources"] == list(NAMES)
    (stage,) = all_stages(read_record(read_trainer_json(mixing.folder / "tokens" / "checkpoints" / "step-00000003")))
    seen = {f"{name}.jsonl": share for name, share in zip(NAMES, (0.5, 0.25, 0.25), strict=True)}
    assert {source.name: source.share for source in stage.sources} == pytest.approx(seen)


def trained_on(run: Path) -> dict[str, str]:
    """Return the shares of the sources in the summary of a run's report."""
    text = run_sections(ReportedRun(run))[0].body
    (line,) = [line for line in text.splitlines() if "trained on" in line]
    return dict(re.findall(r"(\w+)\S* \(([0-9.]+%)\)", line))


def test_a_report_says_what_the_steps_consumed_of_each_source(mixing: Mixing, whole: ForkedRun) -> None:
    rows = mixing.state("whole", last_step(whole))["rows_of_sources"]
    assert trained_on(mixing.folder / "whole") == {
        name: f"{count / sum(rows):.1%}" for name, count in zip(NAMES, rows, strict=True)
    }
    # a branch with other data counts on from what the steps before it consumed
    branch = f"{mixing.folder / 'whole'}@4"
    options: dict[str, Any] = {"branch": branch, "max_step": 6, "save_step_interval": 1, "total_batch_size": 24}
    mixing.start("on-en", 1, names=("en",), **options, micro_batch_size=12).finish()
    before = mixing.state("whole", 4)["counted_of_sources"]
    after = mixing.state("on-en", 6)["counted_of_sources"]
    (english,) = [name for name in after if Path(name).stem == "en"]
    assert {**after, english: 0} == {**before, english: 0}
    assert after[english] > before[english]
    shares = {Path(name).stem: f"{count / sum(after.values()):.1%}" for name, count in after.items()}
    assert trained_on(mixing.folder / "on-en") == shares


def test_sources_of_a_folder_share_what_was_seen_of_it(mixing: Mixing) -> None:
    merged = mixing.folder / "merged"
    tokenize(merged, mixing.model, mixing.folder / "va.jsonl", mixing.folder / "es.jsonl")
    run = mixing.start("parts", 1, "--token_shares", 0.5, 0.5, names=("en", "merged"), max_step=1, save_step_interval=1)
    run.finish()
    (stage,) = all_stages(read_record(read_trainer_json(mixing.folder / "parts" / "checkpoints" / "step-00000001")))
    tokens = manifest_of(merged).ledger.splits["train"].sources
    of_merged = {Path(name).name: one.tokens_in_rows for name, one in tokens.items()}
    seen = {name: 0.5 * number / sum(of_merged.values()) for name, number in of_merged.items()}
    assert {source.name: source.share for source in stage.sources} == pytest.approx(seen | {"en.jsonl": 0.5})


def test_shares_of_named_sources_are_those_of_the_others_too(mixing: Mixing) -> None:
    folder = mixing.folder / "named"
    places = [f"{name}={mixing.folder}/{name}.jsonl" for name in NAMES]
    tokenize(folder, mixing.model, *places)
    run = mixing.start("named-run", 1, "--token_shares", "named:es=0.25", "named=0.75", names=("named",), max_step=1)
    run.finish()
    (stage,) = all_stages(read_record(read_trainer_json(mixing.folder / "named-run" / "checkpoints" / "step-00000001")))
    tokens = {name: one.tokens_in_rows for name, one in manifest_of(folder).ledger.splits["train"].sources.items()}
    seen = {name: 0.75 * tokens[name] / (tokens["va"] + tokens["en"]) for name in ("va", "en")} | {"es": 0.25}
    assert {source.name: source.share for source in stage.sources} == pytest.approx(seen)


def test_share_of_less_than_a_row_is_refused(mixing: Mixing) -> None:
    run = mixing.start("none", 1, "--shares", 1, 0.0001, 1)
    assert run.wait() == [2]
    (line,) = run.stderr().splitlines()
    assert re.fullmatch(
        "error: --shares takes no row of es in an epoch, which has [0-9]+; give it more, or leave it out", line
    )


PHASES = """
- {from: 0.5, shares: [1, 0, 2]}
- {from: 9, token_shares: [0.25, 0.75, 0], lr: 0.01, min_lr: 0.001, lr_schedule: linear}
"""
IN_PHASES: dict[str, Any] = {"max_step": 12, "save_step_interval": 5, "phases": "phases.yaml"}


@pytest.fixture(scope="module")
def phased(mixing: Mixing) -> ForkedRun:
    """A run on two ranks with other shares after half of its steps, and a schedule of its own from step 9 on."""
    (mixing.folder / "phases.yaml").write_text(PHASES)
    run = mixing.start("phased", 2, "--shares", 1.0, 0.15, 2, **IN_PHASES, keep_checkpoints=9)
    run.finish()
    return run


def test_phases_are_planned_and_taken(mixing: Mixing, phased: ForkedRun) -> None:
    before, after = phased.stdout().split("Done\n")
    assert "12, the last one in phase 3 of 3\n" in after
    total = [manifest_of(mixing.folder / name).ledger.splits["train"].rows for name in NAMES]
    rows = [mixing.state("phased", step)["rows_of_sources"] for step in (6, 8, 12)]  # borders are saved
    seen = [[late - early for early, late in zip(*pair, strict=True)] for pair in pairwise([[0, 0, 0], *rows])]
    assert seen[2] == [8, 24, 0]
    assert seen[1][1] == 0
    starts = ["1–6 constant, 0.001", "7–8 constant, 0.001", "9–12 linear, 0.01 to 0.00325"]
    timeline = [" ".join(line.split()) for line in before.split("Phases\n")[1].splitlines()]
    wanted = [
        f"{name} {count / sum(counts):.2%} {count * 16:,}"
        for counts in seen
        for name, count in zip(NAMES, counts, strict=True)
        if count
    ]
    for start, place in zip(starts, (0, 3, 5), strict=True):
        wanted[place] = f"{start} {wanted[place]}"
    assert timeline[1 : len(wanted) + 1] == wanted
    for name, num_rows, count in zip(NAMES, total, rows[2], strict=True):
        share = f"{count / sum(rows[2]):.2%}"
        epochs = f"{count / num_rows:.2f}"
        planned = [name, f"{num_rows * 16:,}", share, epochs, f"{count * 16:,}"]
        assert planned in [line.split() for line in before.splitlines()]
        assert [*planned, planned[-1]] in [line.split() for line in after.splitlines()]


def test_a_phase_has_its_schedule_and_begins_and_ends_an_epoch(mixing: Mixing, phased: ForkedRun) -> None:
    rows = metrics(mixing.folder / "phased")
    own = TrainingArguments(lr=0.01, min_lr=0.001, lr_schedule="linear")
    rates = [0.001] * 8 + [learning_rate(step, 4, own) for step in range(1, 5)]
    assert [float(row[5]) for row in rows] == rates
    assert {6, 8, 12} <= {int(row[0]) for row in rows if row[3]}  # evaluated
    epochs = [int(row[1]) for row in rows]
    assert epochs[5] < epochs[6]
    assert epochs[7] < epochs[8]
    trainer = mixing.state("phased", 12)
    assert [phase["first_step"] for phase in trainer["data"]["phases"]] == [7, 9]
    (schedule,) = trainer["phase_schedules"]
    assert (schedule["first_step"], schedule["last_step"], schedule["num_steps"]) == (9, 12, 4)


def test_the_model_card_has_sources_and_phases(mixing: Mixing, phased: ForkedRun, tmp_path: Path) -> None:
    write_model_card(mixing.folder / "phased" / "checkpoints" / "step-00000012", tmp_path, CardFacts("model"))
    card = (tmp_path / "README.md").read_text()
    for name, count in zip(NAMES, mixing.state("phased", 12)["rows_of_sources"], strict=True):
        assert f"| `{name}` | {count / 96:.2%} | {count * 16:,} |" in card
    assert re.search(r"\| 1 \| `va` [0-9.]+%, `es` [0-9.]+%, `en` [0-9.]+% \| as in the run \|", card)
    assert "| 9 | `va` 24.87%, `es` 75.13% | linear, `lr` 0.01, `min_lr` 0.001 |" in card


def test_a_killed_run_resumes_across_a_phase_border_bit_for_bit(mixing: Mixing, phased: ForkedRun) -> None:
    die = at_point("os.kill(os.getpid(), signal.SIGKILL)", 7, "OPTIMIZER")
    killed = mixing.start("killed", 2, "--shares", 1.0, 0.15, 2, **IN_PHASES, before=die)
    assert -9 in killed.wait()  # the other may be ended by its watch first
    mixing.start("killed", 2, "--shares", 1.0, 0.15, 2, **IN_PHASES, resume="true").finish()
    assert metrics(mixing.folder / "killed") == metrics(mixing.folder / "phased")
    assert differences(mixing.folder / "killed", mixing.folder / "phased") == []


def test_one_rank_reads_the_same_rows_in_every_phase(mixing: Mixing, phased: ForkedRun) -> None:
    mixing.start("alone", 1, "--shares", 1.0, 0.15, 2, **IN_PHASES, keep_checkpoints=9).finish()
    for step in (6, 8, 12):
        here, there = (mixing.state(run, step) for run in ("alone", "phased"))
        assert [here[name] for name in ("rows_hash", "rows_of_sources", "epoch")] == [
            there[name] for name in ("rows_hash", "rows_of_sources", "epoch")
        ]


def test_only_phases_that_have_not_begun_may_change(mixing: Mixing, phased: ForkedRun) -> None:
    checkpoint = mixing.folder / "phased" / "checkpoints" / "step-00000008"
    given = {**IN_PHASES, "phases": "other.yaml", "checkpoint": checkpoint, "resume": "true"}

    def resume(name: str, phases: str, **options: object) -> ForkedRun:
        (mixing.folder / "other.yaml").write_text(phases)
        return mixing.start(name, 1, "--shares", 1.0, 0.15, 2, **{**given, **options})

    begun = resume("begun", "- {from: 7, shares: [1, 0, 1]}")
    assert begun.wait() == [2]
    assert "--phases differs in a phase that has begun: " in begun.stderr()
    later = resume("later", PHASES.replace("0.75, 0]", "0.5, 0.25]"))
    later.finish()
    assert "note: the phases that begin after step 8 are others than at step-00000008: from step 9 " in later.stdout()
    ended = mixing.folder / "phased" / "checkpoints" / "step-00000010"
    own = resume("own", PHASES.replace("0.01", "0.02"), checkpoint=ended)
    assert own.wait() == [2]
    (line,) = own.stderr().splitlines()
    assert line.startswith("error: --phases from step 9, lr: 0.01 -> 0.02 since ")
    # more steps alone: the phase that has begun keeps its schedule, and the rate does not jump
    longer = resume("longer", PHASES.replace("0.5", "7"), checkpoint=ended, max_step=14)
    longer.finish()
    assert "note: the phase has 6 steps now and had 4: so that the learning rate does not jump" in longer.stdout()
    rates = [float(row[5]) for row in metrics(mixing.folder / "longer")]
    assert rates == pytest.approx([0.0055, 0.00325, 0.00325, 0.00325])


def test_a_branch_takes_other_phases_from_a_border(mixing: Mixing, phased: ForkedRun) -> None:
    (mixing.folder / "branch.yaml").write_text(
        "- {from: 7, shares: [1, 0, 2]}\n- {from: 9, shares: [{va: 0}, {es: 0, en: 1}]}\n"
    )
    options = {**IN_PHASES, "phases": "branch.yaml", "branch": f"{mixing.folder / 'phased'}@8"}
    mixing.start("branch", 1, "--shares", 1.0, 0.15, 2, **options).finish()
    there = mixing.state("phased", 8)["rows_of_sources"]
    here = mixing.state("branch", 12)["rows_of_sources"]
    assert here[:2] == there[:2]
    assert here[2] > there[2]
    (branch,) = mixing.state("branch", 12)["lineage"]
    assert branch["continues_data"]
    assert "lr 0.01" in branch["changed"]["phases"][0]
    assert "lr" not in branch["changed"]["phases"][1]


@pytest.fixture(scope="module")
def opened(mixing: Mixing) -> TokenMixture:
    return open_mixture([str(mixing.folder / name) for name in NAMES], Shares("", None), True, mixing.folder)


@pytest.mark.parametrize(
    ("phases", "fault"),
    [
        ("- {shares: [1, 1, 1]}", "phase 1: 'from' is missing: the first step of the phase, or the share of the run "),
        (
            "- {from: 0.5, shares: [1, 1]}",
            "phase 1: shares: 2 numbers for 3 folders of --train_data_dir; give one each",
        ),
        ("- {from: 0.5, shares: [0, 0, 0]}", "phase 1: shares: nothing is left to train on; give a number above 0"),
        ("- {from: 0.5, lrr: 1}", "phase 1: 'lrr': no such value; a phase has from, shares, "),
        ("- {from: 0.5}", "phase 1: it changes nothing: give shares, token_shares, lr, train_only or"),
        ("- {from: 3.5, lr: 1}", "phase 1: from: expected a step, or a share of the run below 1; got 3.5"),
        ("- {from: 1.0, lr: 1}", "phase 1: from: 1.0 is a step or a share of the run; write 1 for the first step"),
        ("- {from: 5, lr: 1}\n- {from: 5, lr: 2}", "phase 2 begins at step 5, not after the phase before it"),
        ("- {from: 99, lr: 1}", "phase 1 begins at step 99, after the last one, --max_step 12"),
        ("- {from: 0, shares: [1, 1, 1]}", "phase 1 begins with the run and has shares: leave the command "),
        ("- {from: 7, lr_schedule: wsd, decay_steps: 9}", "phase 1 of 6 steps: --decay_steps 9: the phase has 6 steps"),
        ("from: 0.5", "expected a list of phases, such as "),
    ],
)
def test_phases_that_cannot_be_are_refused_in_one_line(
    mixing: Mixing, opened: TokenMixture, phases: str, fault: str
) -> None:
    file = mixing.folder / "wrong.yaml"
    file.write_text(phases)
    words = ["--train_data_dir", *NAMES, "--shares", "1", "1", "1", "--max_step", "12", "--output_dir", "wrong"]
    arguments = parse_arguments(TrainArguments, [*words, "--phases", str(file)])

    def plan() -> None:
        for stretch in read_stretches(arguments):
            plan_phases(stretch, opened)

    with pytest.raises(InputError) as refused:
        plan()
    (line,) = refused.value.faults
    assert f"{file}: {fault}" in line


def test_phases_need_the_length_of_the_run(mixing: Mixing, phased: ForkedRun) -> None:
    run = mixing.start("endless", 1, "--shares", 1, 1, 1, **{**IN_PHASES, "max_step": None})
    assert run.wait() == [2]
    assert run.stderr() == "error: --phases divides a run of known length: give --max_step\n"
