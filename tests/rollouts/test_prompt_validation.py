"""--validation_prompts: the rewards of held-out prompts, the best checkpoint by them, and stops while evaluating."""

import csv
import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fabric_train.arguments import TrainArguments, parse
from fabric_train.checkpoint import read_best, read_trainer_json
from fabric_train.cli.errors import STOPPED, InputError
from fabric_train.preflight.paths import check_paths
from fabric_train.preflight.prepare import prepare
from fabric_train.report.health import find_unusual
from fabric_train.report.reported_run import ReportedRun
from fabric_train.report.sections import run_sections
from fabric_train.run_folder.run_summary import summarize_run
from fabric_train.training.metrics import Metrics, read_metrics
from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.rl_runs import KILL, MAX_STEP, SETTINGS, TOLERANCE, Reinforcing
from tests.support.run_comparison import differences, metrics
from tests.support.short_runs import TERMINATE, at_point, saved_steps
from tests.support.vllm_stand_in import write_stand_in

pytestmark = pytest.mark.slow

WAIT_FOR_BORDER = (
    f"{TERMINATE}; any(self.stop_border._is_frozen or time.sleep(0.01) for _ in range(3000))  # the ranks agree"
)
REWARDS = """
def vowels(completions, **columns):
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]

def consonants(completions, prompts, **columns):
    return [1 - value for value in vowels(completions)]
"""
HANGING = """
import pathlib, time

def waits(completions, prompts, **columns):
    if prompts[0].startswith("say"):
        pathlib.Path("hangs").touch()
        time.sleep(600)
    return [1.0] * len(completions)
"""
VALIDATION_SETTINGS = {
    **SETTINGS,
    "prompts": "prompts.jsonl",
    "validation_prompts": ["add=held_out.jsonl", "say=other.jsonl"],
    "rewards": ["judge.py:vowels", "judge.py:consonants"],
    "reward_weights": '{"consonants": 0.25}',
    "prompts_per_step": 2,
    "group_size": 2,
    "sampler_batch_size": 3,
    "lr": 1e-2,
    "eval_step_interval": 2,
    "save_step_interval": 3,
    "keep_checkpoints": None,
}
NUM_PROMPTS = 7


class Validating(Reinforcing):
    """Starts runs with held-out prompts, on several ranks with DDP."""

    def start(self, run: str, num_ranks: int = 1, before: str = "", **options: Any) -> ForkedRun:
        if num_ranks > 1:
            options = {"devices": num_ranks, "parallelism": "ddp", **options}
        return super().start(run, num_ranks, before, **options)

    def evaluations(self, run: str) -> list[Metrics]:
        """Return the rows of metrics.csv with an evaluation."""
        return [row for row in read_metrics(self.folder / run / "metrics.csv", 99) if row.has_evaluation]

    def rewards(self, run: str) -> list[float]:
        return [row.extra["val_reward"] for row in self.evaluations(run)]


@pytest.fixture(scope="module")
def validating(tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns, tiny_model_dir: Path) -> Validating:
    folder = tmp_path_factory.mktemp("validating")
    (folder / "model").symlink_to(tiny_model_dir)
    prompts_of_files = {
        "prompts.jsonl": [f"{number} and" for number in range(12)],
        "held_out.jsonl": [f"{number} and" for number in range(20, 24)],
        "other.jsonl": [f"say {number}" for number in range(3)],
    }
    for name, prompts in prompts_of_files.items():
        (folder / name).write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (folder / "judge.py").write_text(REWARDS)
    validating = Validating(folder, forked_runs, VALIDATION_SETTINGS)
    validating.train("whole")
    return validating


def test_an_evaluation_has_the_mean_rewards_and_their_standard_errors(validating: Validating) -> None:
    rows = validating.evaluations("whole")
    assert [row.step for row in rows] == [0, 2, 4]
    for row in rows:
        figures = row.extra
        assert row.val_loss is None
        assert figures["val_reward"] == pytest.approx(
            figures["val_reward_vowels"] + 0.25 * figures["val_reward_consonants"], rel=1e-12
        )
        assert figures["val_reward_vowels"] + figures["val_reward_consonants"] == pytest.approx(1, rel=1e-12)
        assert 0 < figures["val_stderr_reward"] < figures["val_stderr_reward_vowels"]  # 0.75 times as large
        assert 1 <= figures["val_completion_tokens"] <= 12
        by_source = row.by_source["val_reward/add"] * 4 + row.by_source["val_reward/say"] * 3
        assert by_source / NUM_PROMPTS == pytest.approx(figures["val_reward"], rel=1e-12)
    assert len(set(validating.rewards("whole"))) == 3  # the model changes


def test_a_model_that_stays_the_same_keeps_its_reward_and_ends_early(validating: Validating) -> None:
    options: dict[str, Any] = {"lr": 1e-12, "eval_step_interval": 1, "early_stopping": "all:2"}  # below fp32's rounding
    run = validating.train("constant", **options)
    assert [row.step for row in validating.evaluations("constant")] == [0, 1, 2]
    assert len(set(validating.rewards("constant"))) == 1
    assert any("the validation reward has not risen above" in line for line in run.lines())


@pytest.mark.parametrize(("num_ranks", "parallelism"), [(2, "ddp"), (2, "fsdp2"), (3, "ddp")])
def test_the_rewards_do_not_depend_on_the_ranks(validating: Validating, num_ranks: int, parallelism: str) -> None:
    """On three ranks, one of them completes one prompt more than the others; each scores two at a time."""
    run = f"{parallelism}-{num_ranks}"
    validating.train(run, num_ranks, parallelism=parallelism)
    for row, expected in zip(validating.evaluations(run), validating.evaluations("whole"), strict=True):
        for name, value in expected.extra.items():
            if name.startswith("val_"):
                assert row.extra[name] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE)


def test_training_is_the_same_bit_for_bit_without_evaluations(validating: Validating) -> None:
    validating.train("blind", validation_prompts=None)
    expected_rows = [row for row in metrics(validating.folder / "whole") if row["step"] != "0"]
    for row, expected in zip(metrics(validating.folder / "blind"), expected_rows, strict=True):
        for name, value in row.items():
            assert value == expected[name] or name.startswith("val_"), name


def test_a_killed_run_has_the_same_evaluations(validating: Validating) -> None:
    killed = validating.start("killed", before=at_point(KILL, 4, "VALIDATION", 2))
    assert killed.wait() == [-9]
    validating.train("killed", resume="true")
    assert differences(validating.folder / "killed", validating.folder / "whole") == []
    assert validating.rewards("killed") == validating.rewards("whole")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_signal_during_an_evaluation_saves_and_the_resumed_run_evaluates(
    validating: Validating, num_ranks: int
) -> None:
    run = f"stopped-{num_ranks}"
    stopped = validating.start(run, num_ranks, at_point(WAIT_FOR_BORDER, 2, "VALIDATION", 1))
    assert stopped.wait() == [STOPPED] * num_ranks
    assert saved_steps(validating.folder / run)[-1] == 2
    assert [row.step for row in validating.evaluations(run)] == [0]
    validating.train(run, num_ranks, resume="true")
    assert validating.rewards(run) == pytest.approx(validating.rewards("whole"), rel=TOLERANCE)


def test_a_signal_while_a_reward_hangs_ends_an_evaluation_before_the_first_step(validating: Validating) -> None:
    (validating.folder / "hanging.py").write_text(HANGING)
    options: dict[str, Any] = {"rewards": "hanging.py:waits", "reward_weights": None, "reward_timeout": 60}
    stopped = validating.start("hanging", **options)
    assert stopped.wait_until((validating.folder / "hangs").exists), stopped.report()
    started = time.monotonic()
    stopped.kill(signal.SIGTERM, ranks=[0])
    assert stopped.wait() == [STOPPED]
    assert time.monotonic() - started < 30  # half of the time limit of the reward
    assert any("before the first step, with nothing to save" in line for line in stopped.lines())


def test_a_server_samples_held_out_prompts_that_are_longer_than_the_others(validating: Validating) -> None:
    """It gets the weights for an evaluation and again for the next step, which samples the same completions."""
    (validating.folder / "long.jsonl").write_text(json.dumps({"prompt": "say 1 and 2 and 3 and 4 and 5 and 6"}) + "\n")
    options: dict[str, Any] = {
        "sampler": "vllm",
        "vllm_python": write_stand_in(validating.folder / "python").name,
        "sampler_batch_size": None,
        "max_step": 2,
    }
    validating.train("served", validation_prompts=["long.jsonl", "held_out.jsonl"], **options)
    validating.train("served-blind", validation_prompts=None, **options)
    assert [row.step for row in validating.evaluations("served")] == [0, 2]
    expected_rows = [row for row in metrics(validating.folder / "served") if row["step"] != "0"]
    for row, expected in zip(metrics(validating.folder / "served-blind"), expected_rows, strict=True):
        assert row["train_reward"] == expected["train_reward"]
        assert row["train_loss"] == expected["train_loss"]


@pytest.fixture(scope="module")
def reported(validating: Validating) -> ForkedRun:
    """Return a run with a report that keeps only its best and its last checkpoint."""
    return validating.train("reported", eval_step_interval=1, keep_checkpoints=1, report="true")


def test_the_best_checkpoint_has_the_highest_reward(validating: Validating, reported: ForkedRun) -> None:
    folder = validating.folder / "reported"
    rewards = {row.step: row.extra["val_reward"] for row in validating.evaluations("reported")}
    trained_rewards = {step: reward for step, reward in rewards.items() if step}
    best_step = max(trained_rewards, key=lambda step: trained_rewards[step])
    assert min(trained_rewards.values()) < trained_rewards[best_step]  # so the lowest one is at another step
    best = read_best(folder)
    assert best is not None
    assert best.state.step == best_step
    assert any(f"validation reward {rewards[best_step]:.4f}" in line for line in reported.lines())

    # the list of runs counts the evaluation before the first step, too
    best_of_all = max(rewards, key=lambda step: rewards[step])
    summary = summarize_run(folder)
    assert (summary.best, summary.best_step) == (rewards[best_of_all], best_of_all)
    assert summary.higher_is_better


def test_what_a_user_reads_has_the_validation_reward(validating: Validating, reported: ForkedRun) -> None:
    folder = validating.folder / "reported"
    *_, last = validating.evaluations("reported")
    reward = f"{last.extra['val_reward']:.4f}"
    lines = reported.lines()
    assert any(f"step {MAX_STEP}: validation reward {reward} ± " in line for line in lines)
    assert not any("nothing will be evaluated" in line for line in lines)
    evaluation = read_trainer_json(folder / "checkpoints" / f"step-{MAX_STEP:08d}").state.evaluation
    assert evaluation is not None
    assert evaluation.whole.of_completions
    assert "loss" not in evaluation.whole.figures()

    sections = {section.key: section for section in run_sections(ReportedRun(folder))}
    texts = {key: section.body for key, section in sections.items()}
    assert f"validation reward | {reward}" in texts["summary"]
    assert "best validation" in texts["summary"]
    assert "completions evaluated" in texts["results"]
    assert "Loss" not in texts["results"]
    assert "no evaluation" not in texts["health"]
    assert f"| {reward} |" in texts["checkpoints"]
    (rewards_chart,) = [chart for chart in sections["curves"].charts if chart.key == "rewards"]
    assert "weighted sum, validation" in [series.name for series in rewards_chart.series]


def edit_newest(run: Path, **values: Any) -> None:
    """Change values of the newest trainer.json; a dict changes values of the one that is there."""
    trainer_json = run / "checkpoints" / f"step-{MAX_STEP:08d}" / "trainer.json"
    content = json.loads(trainer_json.read_text())
    for name, value in values.items():
        content[name] = {**content[name], **value} if isinstance(value, dict) else value
    trainer_json.write_text(json.dumps(content))


def test_the_best_step_of_a_report_is_that_of_the_deciding_source(validating: Validating, tmp_path: Path) -> None:
    run = Path(shutil.copytree(validating.folder / "whole", tmp_path / "run"))
    column_by_name = {
        "all": "val_reward",
        "say": "val_reward/say",
        "reward_consonants": "val_reward_consonants",
        "reward_consonants/say": "val_reward_consonants/say",
    }
    best_steps = set()
    for name, column in column_by_name.items():
        edit_newest(run, arguments={"best_by": name})
        values = {}
        for row in validating.evaluations("whole"):
            values[row.step] = {**row.extra, **row.by_source}[column]
        best_step = max(values, key=lambda step: values[step])
        assert ReportedRun(run).best_step == best_step, name
        best_steps.add(best_step)
    assert len(best_steps) > 1  # the argument matters

    # the mark in the curves says what decided
    edit_newest(run, arguments={"best_by": "say"})
    reported_run = ReportedRun(run)
    reported_run.metrics.columns["val_reward/say"][-1] = 9.0
    texts = [mark.text for mark in reported_run.marks if mark.kind == "best"]
    assert texts == [f"the validation reward of say is the best after step {MAX_STEP}"]


def test_rewards_of_other_prompts_are_not_compared(validating: Validating, tmp_path: Path) -> None:
    """A run whose prompts changed after step 0 had a much higher reward there."""
    run = Path(shutil.copytree(validating.folder / "whole", tmp_path / "run"))
    rows = metrics(run)
    rows[0] |= {"val_reward": "9.0"}
    with (run / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    assert ReportedRun(run).best_step == 0
    assert summarize_run(run).best_step == 0
    assert any("reward has fallen" in finding.text for finding in find_unusual(ReportedRun(run)))

    edit_newest(run, first_evaluation={"step": 2, "follows_other_rows": True})
    assert ReportedRun(run).best_step in (2, 4)
    assert summarize_run(run).best_step in (2, 4)
    assert not any("reward has fallen" in finding.text for finding in find_unusual(ReportedRun(run)))


def check(words: list[str]) -> tuple[str, ...]:
    """Check the arguments of a run as the program does before it begins, and return its notes."""
    arguments = parse(TrainArguments, words, {})
    check_paths(arguments)
    return prepare(arguments).notes


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"prompts": None, "objective": "sft", "train_data_dir": "tokens"}, "only applies to --prompts"),
        (
            {"objective": "distill", "teacher": "model", "rewards": None, "reward_weights": None},
            "--validation_prompts only applies to --objective rl",
        ),
        ({"eval_iters": 2}, "--eval_iters does not apply to --validation_prompts"),
        ({"validation_prompts": "missing.jsonl"}, "missing.jsonl"),
        ({"validation_prompts": "empty.jsonl"}, "--validation_prompts empty.jsonl: there is no row"),
        ({"validation_prompts": "chats.jsonl"}, "--validation_prompts has chats, but --prompts has only texts"),
        (
            {"rewards": "exact_answer", "prompts": "answers.jsonl", "reward_weights": None},
            "needs a column answer of every prompt in --validation_prompts",
        ),
        (
            {"best_by": "math"},
            "--validation_prompts has no such source or reward; give all, add, say, reward_vowels, reward_consonants",
        ),
        ({"best_by": "entropy"}, "--validation_prompts has no such source"),
        (
            {"validation_prompts": ["add=held_out.jsonl", "say=long_only.jsonl"], "best_by": "say"},
            "--validation_prompts has no such source or reward; give all, add, reward_vowels",
        ),
        ({"validation_prompts": None, "best_by": "reward_vowels"}, "there is no --validation_prompts"),
        (
            {"validation_prompts": None, "early_stopping": "all"},
            "there is no --validation_prompts; give held-out prompts",
        ),
        ({"validation_prompts": None, "sample_prompts": "prompts.jsonl"}, "there is none; give --validation_prompts"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_run(
    validating: Validating, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], reason: str
) -> None:
    monkeypatch.chdir(validating.folder)
    (validating.folder / "empty.jsonl").write_text("")
    chat = {"prompt": [{"role": "user", "content": "Name a fruit."}]}
    (validating.folder / "chats.jsonl").write_text(json.dumps(chat) + "\n")
    (validating.folder / "answers.jsonl").write_text(json.dumps({"prompt": "1 and", "answer": "2"}) + "\n")
    (validating.folder / "long_only.jsonl").write_text(json.dumps({"prompt": "say 1 and " * 60}) + "\n")
    with pytest.raises(InputError, match=reason):
        check(validating.words("refused", **options))
    assert not (validating.folder / "refused").exists()


def test_a_note_says_that_held_out_prompts_are_trained_on(
    validating: Validating, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(validating.folder)
    notes = check(validating.words("noted", validation_prompts=["prompts.jsonl", "held_out.jsonl"]))
    assert any("12 of 16 prompts are also in --prompts" in note for note in notes)


def test_a_note_names_a_source_whose_prompts_are_all_too_long(
    validating: Validating, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(validating.folder)
    (validating.folder / "too_long.jsonl").write_text(json.dumps({"prompt": "say 1 and " * 60}) + "\n")
    notes = check(validating.words("noted", validation_prompts=["add=held_out.jsonl", "say=too_long.jsonl"]))
    assert "--validation_prompts: all prompts of say are too long, so this source will not be used" in notes
