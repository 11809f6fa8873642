"""Runs on several token datasets in shares and phases see the planned tokens; resumed, they go on in their order."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_train.arguments import TrainArguments, TrainingArguments
from fabric_train.checkpoint import read_trainer_json
from fabric_train.cli.errors import InputError
from fabric_train.cli.parser import parse_arguments
from fabric_train.cli.shares import Shares
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
        """Start a run on the token datasets ``names``; ``shares`` are words of the command line after them."""
        words = argv(self.model, Path("TOKENS"), Path(run), **{**OPTIONS, **options})
        index = words.index("TOKENS")
        words[index : index + 1] = [*names, *map(str, shares)]  # argv takes one token dataset
        return self._runs.start(words, num_ranks, cwd=self.folder, before=before)

    def num_rows(self) -> list[int]:
        """Return the number of training rows of each token dataset."""
        return [manifest_of(self.folder / name).ledger.splits["train"].rows for name in NAMES]

    def state(self, run: str, step: int) -> dict[str, Any]:
        """Return the trainer.json of a checkpoint."""
        file = self.folder / run / "checkpoints" / f"step-{step:08d}" / "trainer.json"
        return dict(json.loads(file.read_text()))

    def shares_seen(self, run: str, step: int) -> dict[str, float]:
        """Return the share of each source in what a run has seen, as a model card has it."""
        saved = read_trainer_json(self.folder / run / "checkpoints" / f"step-{step:08d}")
        (stage,) = all_stages(read_record(saved))
        return {source.name: source.share for source in stage.sources}


@pytest.fixture(scope="module")
def mixing(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, forked_runs: ForkedRuns) -> Mixing:
    return Mixing(tmp_path_factory.mktemp("mixing"), tiny_model_dir, forked_runs)


@pytest.fixture(scope="module")
def whole(mixing: Mixing) -> ForkedRun:
    """A run on two ranks over two epochs of a mixture."""
    run = mixing.start("whole", 2, "--shares", 1.0, 0.15, 2, **TWO_EPOCHS, save_step_interval=4)
    run.finish()
    return run


def rows_by_column(run: Path) -> list[dict[str, str]]:
    """Return the rows of a run's metrics.csv."""
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def last_step(run: ForkedRun) -> int:
    (steps,) = re.findall(r"^steps +([0-9]+), the last", run.stdout(), re.MULTILINE)
    return int(steps)


def check_tables(run: ForkedRun, num_rows: list[int], rows_seen: list[int]) -> None:
    """Check the tables of sources that a run prints before it trains and at its end.

    Args:
        run: The run, which has done all that it planned.
        num_rows: The rows of each token dataset.
        rows_seen: The rows that the run has read of each.
    """
    before, after = run.stdout().split("Done\n")
    lines_before = [line.split() for line in before.splitlines()]
    lines_after = [line.split() for line in after.splitlines()]
    for name, source_rows, seen in zip(NAMES, num_rows, rows_seen, strict=True):
        tokens_seen = f"{seen * 16:,}"
        share = f"{seen / sum(rows_seen):.2%}"
        epochs = f"{seen / source_rows:.2f}"
        planned_cells = [name, f"{source_rows * 16:,}", share, epochs, tokens_seen]
        assert planned_cells in lines_before
        assert [*planned_cells, tokens_seen] in lines_after


def test_what_a_run_saw_of_each_source_is_what_was_planned(mixing: Mixing, whole: ForkedRun) -> None:
    va_rows, es_rows, en_rows = mixing.num_rows()
    rows_seen = [2 * va_rows, 2 * round(0.15 * es_rows), 2 * 2 * en_rows]  # in two epochs
    state = mixing.state("whole", last_step(whole))
    assert state["rows_of_sources"] == rows_seen
    assert state["num_tokens"] == 16 * sum(rows_seen)
    check_tables(whole, mixing.num_rows(), rows_seen)


def test_checkpoint_of_a_mixture_has_its_order_and_describes_all_sources(mixing: Mixing, whole: ForkedRun) -> None:
    order = mixing.state("whole", 4)["data"]
    assert order["version"] == 2
    assert sum(order["rows_per_epoch"]) == order["num_rows"]
    checkpoint = manifest_of(mixing.folder / "whole" / "checkpoints" / "step-00000004")
    assert checkpoint.ledger.splits["train"].rows == sum(mixing.num_rows())
    assert [part.name for part in checkpoint.parts] == list(NAMES)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_resumed_mixture_reads_the_same_rows_on_any_number_of_ranks(
    mixing: Mixing, whole: ForkedRun, num_ranks: int
) -> None:
    checkpoint = mixing.folder / "whole" / "checkpoints" / "step-00000004"
    options: dict[str, Any] = {"checkpoint": checkpoint, "resume": "true", **TWO_EPOCHS}
    run = f"resumed-{num_ranks}"
    mixing.start(run, num_ranks, "--shares", 1.0, 0.15, 2, **options).finish()
    state = mixing.state(run, last_step(whole))
    whole_state = mixing.state("whole", last_step(whole))
    for name in ("rows_hash", "rows_of_sources", "counted_of_sources", "num_tokens", "data"):
        assert state[name] == whole_state[name]

    # the logged rows, which have the step and the loss in the columns 0 and 2
    rows = metrics(mixing.folder / run)
    whole_rows = metrics(mixing.folder / "whole")[4:]
    if num_ranks == 2:
        assert rows == whole_rows
    for row, whole_row in zip(rows, whole_rows, strict=True):
        assert row[0] == whole_row[0]
        assert float(row[2]) == pytest.approx(float(whole_row[2]), abs=1e-5)


def test_mixture_is_not_resumed_in_other_shares(mixing: Mixing, whole: ForkedRun) -> None:
    options: dict[str, Any] = {
        "checkpoint": mixing.folder / "whole" / "checkpoints" / "step-00000004",
        "resume": "true",
        **TWO_EPOCHS,
    }
    other = mixing.start("other", 1, "--shares", 1.0, 0.25, 2, **options)
    assert other.wait() == [2]
    assert "an epoch has a different number of rows per source (" in other.stderr()
    assert not (mixing.folder / "other").exists()


def test_token_shares_are_those_of_every_step(mixing: Mixing) -> None:
    shares = ("--token_shares", "en=0.25", "va=0.5", "es=0.25")
    mixing.start("tokens", 1, *shares, max_step=3, save_step_interval=1, keep_checkpoints=9).finish()
    for step in (1, 2, 3):
        assert mixing.state("tokens", step)["rows_of_sources"] == [4 * step, 2 * step, 2 * step]  # va, es, en
    assert mixing.state("tokens", 3)["mixture_sources"] == list(NAMES)
    expected = {"va.jsonl": 0.5, "es.jsonl": 0.25, "en.jsonl": 0.25}
    assert mixing.shares_seen("tokens", 3) == pytest.approx(expected)


def trained_on(run: Path) -> dict[str, str]:
    """Return the shares of the sources in the summary of a run's report."""
    text = run_sections(ReportedRun(run))[0].body
    (line,) = [line for line in text.splitlines() if "trained on" in line]
    return dict(re.findall(r"(\w+)\S* \(([0-9.]+%)\)", line))


def test_a_report_says_what_the_steps_consumed_of_each_source(mixing: Mixing, whole: ForkedRun) -> None:
    rows_seen = mixing.state("whole", last_step(whole))["rows_of_sources"]
    expected = {name: f"{count / sum(rows_seen):.1%}" for name, count in zip(NAMES, rows_seen, strict=True)}
    assert trained_on(mixing.folder / "whole") == expected

    # a branch with other data counts on from what the steps before it consumed
    branch = f"{mixing.folder / 'whole'}@4"
    options: dict[str, Any] = {"branch": branch, "max_step": 6, "save_step_interval": 1, "total_batch_size": 24}
    mixing.start("on-en", 1, names=("en",), **options, micro_batch_size=12).finish()
    counts_at_branch = mixing.state("whole", 4)["counted_of_sources"]
    counts = mixing.state("on-en", 6)["counted_of_sources"]
    for name, count in counts.items():
        if Path(name).stem == "en":
            assert count > counts_at_branch[name]
        else:
            assert count == counts_at_branch[name]
    expected = {Path(name).stem: f"{count / sum(counts.values()):.1%}" for name, count in counts.items()}
    assert trained_on(mixing.folder / "on-en") == expected


def test_sources_of_a_folder_share_what_was_seen_of_it(mixing: Mixing) -> None:
    merged = mixing.folder / "merged"
    tokenize(merged, mixing.model, mixing.folder / "va.jsonl", mixing.folder / "es.jsonl")
    run = mixing.start("parts", 1, "--token_shares", 0.5, 0.5, names=("en", "merged"), max_step=1, save_step_interval=1)
    run.finish()
    ledgers = manifest_of(merged).ledger.splits["train"].sources
    num_tokens = {Path(name).name: ledger.tokens_in_rows for name, ledger in ledgers.items()}
    expected = {name: 0.5 * count / sum(num_tokens.values()) for name, count in num_tokens.items()}
    expected["en.jsonl"] = 0.5
    assert mixing.shares_seen("parts", 1) == pytest.approx(expected)


def test_shares_of_named_sources_are_those_of_the_others_too(mixing: Mixing) -> None:
    folder = mixing.folder / "named"
    tokenize(folder, mixing.model, *(f"{name}={mixing.folder}/{name}.jsonl" for name in NAMES))
    run = mixing.start("named-run", 1, "--token_shares", "named:es=0.25", "named=0.75", names=("named",), max_step=1)
    run.finish()

    # the two other sources share 0.75 by their tokens
    ledgers = manifest_of(folder).ledger.splits["train"].sources
    va_tokens = ledgers["va"].tokens_in_rows
    en_tokens = ledgers["en"].tokens_in_rows
    va_share = 0.75 * va_tokens / (va_tokens + en_tokens)
    expected = {"va": va_share, "es": 0.25, "en": 0.75 - va_share}
    assert mixing.shares_seen("named-run", 1) == pytest.approx(expected)


def test_share_of_less_than_a_row_is_refused(mixing: Mixing) -> None:
    run = mixing.start("none", 1, "--shares", 1, 0.0001, 1)
    assert run.wait() == [2]
    (line,) = run.stderr().splitlines()
    assert re.fullmatch(
        "error: --shares reads none of the [0-9]+ rows of es in an epoch; give es a larger share, or leave it out",
        line,
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

    # the rows of va, es and en that each phase has read; its last step is saved
    totals = np.array([[0, 0, 0], *(mixing.state("phased", step)["rows_of_sources"] for step in (6, 8, 12))])
    first_phase, second_phase, third_phase = np.diff(totals, axis=0).tolist()
    assert second_phase[1] == 0
    assert third_phase == [8, 24, 0]

    # the table of phases: steps and learning rate stand in the first line of each
    expected_lines = []
    for heading, rows_read in (
        ("1–6 constant, 0.001 ", first_phase),
        ("7–8 constant, 0.001 ", second_phase),
        ("9–12 linear, 0.01 to 0.00325 ", third_phase),
    ):
        lines = []
        for name, count in zip(NAMES, rows_read, strict=True):
            if count:
                lines.append(f"{name} {count / sum(rows_read):.2%} {count * 16:,}")
        expected_lines += [heading + lines[0], *lines[1:]]
    lines_of_table = [" ".join(line.split()) for line in before.split("Phases\n")[1].splitlines()]
    assert lines_of_table[1 : len(expected_lines) + 1] == expected_lines
    check_tables(phased, mixing.num_rows(), totals[-1].tolist())


def test_a_phase_has_its_schedule_and_begins_and_ends_an_epoch(mixing: Mixing, phased: ForkedRun) -> None:
    rows = rows_by_column(mixing.folder / "phased")
    last_phase = TrainingArguments(lr=0.01, min_lr=0.001, lr_schedule="linear")
    rates = [0.001] * 8 + [learning_rate(step, 4, last_phase) for step in range(1, 5)]
    assert [float(row["learning_rate"]) for row in rows] == rates
    evaluated_steps = {int(row["step"]) for row in rows if row["val_loss"]}
    assert {6, 8, 12} <= evaluated_steps
    epochs = {int(row["step"]): int(row["epoch"]) for row in rows}
    assert epochs[6] < epochs[7]
    assert epochs[8] < epochs[9]
    trainer = mixing.state("phased", 12)
    assert [phase["first_step"] for phase in trainer["data"]["phases"]] == [7, 9]
    (schedule,) = trainer["phase_schedules"]
    assert (schedule["first_step"], schedule["last_step"], schedule["num_steps"]) == (9, 12, 4)


def test_the_model_card_has_sources_and_phases(mixing: Mixing, phased: ForkedRun, tmp_path: Path) -> None:
    write_model_card(
        read_record(read_trainer_json(mixing.folder / "phased" / "checkpoints" / "step-00000012")),
        tmp_path,
        CardFacts("model"),
    )
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
        alone = mixing.state("alone", step)
        on_two_ranks = mixing.state("phased", step)
        for name in ("rows_hash", "rows_of_sources", "epoch"):
            assert alone[name] == on_two_ranks[name]


def test_only_phases_that_have_not_begun_may_change(mixing: Mixing, phased: ForkedRun) -> None:
    def resume(name: str, step: int, phases: str, **options: Any) -> ForkedRun:
        """Resume the run from the checkpoint of a step with other phases."""
        (mixing.folder / "changed.yaml").write_text(phases)
        checkpoint = mixing.folder / "phased" / "checkpoints" / f"step-{step:08d}"
        all_options: dict[str, Any] = {
            **IN_PHASES,
            "phases": "changed.yaml",
            "checkpoint": checkpoint,
            "resume": "true",
            **options,
        }
        return mixing.start(name, 1, "--shares", 1.0, 0.15, 2, **all_options)

    # at step 8 the second phase has begun, and the third has not
    second_changed = resume("second-changed", 8, "- {from: 7, shares: [1, 0, 1]}")
    assert second_changed.wait() == [2]
    assert "--phases differs in a phase that has begun: " in second_changed.stderr()
    third_changed = resume("third-changed", 8, PHASES.replace("0.75, 0]", "0.5, 0.25]"))
    third_changed.finish()
    note = "note: the phases after step 8 have changed since step-00000008: from step 9 "
    assert note in third_changed.stdout()

    # at step 10 the third has begun too, and keeps its learning rate
    rate_changed = resume("rate-changed", 10, PHASES.replace("0.01", "0.02"))
    assert rate_changed.wait() == [2]
    (line,) = rate_changed.stderr().splitlines()
    assert line.startswith("error: --phases from step 9, lr: 0.01 -> 0.02 since ")

    # with more steps alone, it keeps its schedule, and the rate does not jump
    longer = resume("longer", 10, PHASES.replace("0.5", "7"), max_step=14)
    longer.finish()
    assert (
        "note: the phase now has 6 steps instead of 4: to avoid a jump, the learning rate keeps following its"
        in longer.stdout()
    )
    rates = [float(row["learning_rate"]) for row in rows_by_column(mixing.folder / "longer")]
    assert rates == pytest.approx([0.0055, 0.00325, 0.00325, 0.00325])


def test_a_branch_takes_other_phases_from_a_border(mixing: Mixing, phased: ForkedRun) -> None:
    (mixing.folder / "branch.yaml").write_text(
        "- {from: 7, shares: [1, 0, 2]}\n- {from: 9, shares: [{va: 0}, {es: 0, en: 1}]}\n"
    )
    options = {**IN_PHASES, "phases": "branch.yaml", "branch": f"{mixing.folder / 'phased'}@8"}
    mixing.start("branch", 1, "--shares", 1.0, 0.15, 2, **options).finish()

    # from step 9 on, the branch reads en alone
    va_before, es_before, en_before = mixing.state("phased", 8)["rows_of_sources"]
    va_rows, es_rows, en_rows = mixing.state("branch", 12)["rows_of_sources"]
    assert va_rows == va_before
    assert es_rows == es_before
    assert en_rows > en_before
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
        (
            "- {shares: [1, 1, 1]}",
            "phase 1: 'from' is missing; give the first step of the phase, or the share of the run ",
        ),
        (
            "- {from: 0.5, shares: [1, 1]}",
            "phase 1: shares: 2 numbers for 3 folders of --train_data_dir; give one number for each",
        ),
        ("- {from: 0.5, shares: [0, 0, 0]}", "phase 1: shares: nothing is left to train on; give a number above 0"),
        ("- {from: 0.5, lrr: 1}", "phase 1: 'lrr': unknown name; a phase can have from, shares, "),
        ("- {from: 0.5}", "phase 1: it changes nothing; give shares, token_shares, lr, train_only or"),
        ("- {from: 3.5, lr: 1}", "phase 1: from: expected a step, or a share of the run below 1; got 3.5"),
        ("- {from: 1.0, lr: 1}", "phase 1: from: 1.0 is ambiguous; write 1 for the first step"),
        (
            "- {from: 5, lr: 1}\n- {from: 5, lr: 2}",
            "phase 2 begins at step 5, which is not after the previous phase begins; list phases in ascending order",
        ),
        ("- {from: 99, lr: 1}", "phase 1 begins at step 99, after the last step, --max_step 12"),
        (
            "- {from: 0, shares: [1, 1, 1]}",
            "phase 1 begins with the run and has shares; leave out the shares on the command ",
        ),
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
    assert run.stderr() == "error: --phases needs a run of known length; give --max_step\n"
