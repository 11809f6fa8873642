"""``python -m fabric_train.replay`` trains steps again, and names the first digit, row or argument that differs."""

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fabric_train.data.step_sampler import WindowOrder
from fabric_train.distributed.strategy import device_name, use_threads_of
from fabric_train.trace.run_history import RunHistory
from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.short_runs import argv, saved_steps
from tests.support.token_datasets import TEXTS, alter_token, manifest_of, tokenize, write_jsonl

pytestmark = pytest.mark.slow
OPTIONS: dict[str, Any] = {"max_step": 6, "save_step_interval": 2, "warmup_steps": 2}


class Replaying:
    """A run of six steps on two ranks with checkpoints at the steps 2, 4 and 6, and replays of it and of copies."""

    def __init__(self, folder: Path, model: Path, runs: ForkedRuns) -> None:
        self.folder = folder
        self._model = model
        self._runs = runs
        for name, texts in (("tokens", [*TEXTS, *(text.upper() for text in TEXTS)]), ("others", TEXTS[::-1])):
            documents = write_jsonl(folder / f"{name}.jsonl", texts)
            tokenize(folder / name, model, f"{name}={documents}", max_length=32, validation_split=0.1)
        self.run = self.train("run", 2, **OPTIONS)

    def train(self, name: str, num_ranks: int, *words: object, **options: object) -> Path:
        line = argv(self._model, self.folder / "tokens", self.folder / name, **options)
        self._runs.start([*line, *map(str, words)], num_ranks).finish()
        return self.folder / name

    def replay(self, run: Path, steps: str, num_ranks: int = 1) -> ForkedRun:
        words = [run, "--steps", steps, *([] if num_ranks > 1 else ["--devices", 1])]
        replay = self._runs.start(words, num_ranks, program="fabric_train.replay")
        replay.wait()
        return replay

    def copy(self, name: str) -> Path:
        """Return a copy of the run that a test may alter."""
        return Path(shutil.copytree(self.run, self.folder / name))


@pytest.fixture(scope="module")
def replaying(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, forked_runs: ForkedRuns) -> Replaying:
    return Replaying(tmp_path_factory.mktemp("replaying"), tiny_model_dir, forked_runs)


FACTS = ("steps", "run", "replay", "figures", "compared", "not compared", "content of rows")


def facts_of(replay: ForkedRun) -> dict[str, str]:
    """Return what a replay has printed below its table, by name."""
    facts = {}
    for line in replay.lines():
        name, separator, fact = line.partition("  ")
        if separator and name in FACTS and name not in facts:
            facts[name] = fact.strip()
    return facts


def differences_of(replay: ForkedRun) -> list[float]:
    """Return the last column of the table: the largest relative difference of each step."""
    lines = replay.lines()
    start = next(index for index, line in enumerate(lines) if line.startswith("step  loss in run")) + 1
    end = next(index for index, line in enumerate(lines) if line.startswith("steps  "))
    return [float(line.split()[-1]) for line in lines[start:end]]


def check_holds(replay: ForkedRun) -> dict[str, str]:
    """Check that a replay agrees with the run, and return its facts."""
    assert set(replay.codes()) == {0}, replay.report()
    assert replay.lines()[-1] == "passed: every compared value is reproduced"
    return facts_of(replay)


def fault_of(replay: ForkedRun) -> str:
    """Return the only difference that a replay has found."""
    assert set(replay.codes()) == {1}, replay.report()
    lines = replay.lines()
    (fault,) = lines[lines.index("differs:") + 1 :]
    return fault


def rows_of(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def files(run: Path) -> dict[str, bytes]:
    return {str(file.relative_to(run)): file.read_bytes() for file in run.rglob("*") if file.is_file()}


def test_the_same_ranks_reproduce_a_run_bit_for_bit(replaying: Replaying) -> None:
    before = files(replaying.run)
    replay = replaying.replay(replaying.run, "5:6", num_ranks=2)
    facts = check_holds(replay)
    assert facts["figures"] == "bit-identical: same number and kind of devices, same parallelism"
    assert facts["steps"] == "5 to 6, trained from step-00000004, 2 logged steps compared"
    assert facts["content of rows"] == "16 rows checked, 0 altered"
    assert differences_of(replay) == [0.0, 0.0]
    assert files(replaying.run) == before


def test_one_rank_reproduces_two_to_the_fifth_digit_from_the_start(replaying: Replaying) -> None:
    replay = replaying.replay(replaying.run, "1:6")
    facts = check_holds(replay)
    rule = (
        "equal within a relative difference of 1.0e-05: devices 2 in the run, 1 in the replay; parallelism fsdp in "
        "the run, single in the replay"
    )
    assert facts["figures"].startswith(rule)
    assert facts["steps"] == "1 to 6, trained from the beginning, 6 logged steps compared"
    assert 0 < max(differences_of(replay)) < 1e-5


def test_steps_of_sessions_on_other_devices_are_compared_as_taken(replaying: Replaying) -> None:
    run = replaying.copy("sessions")
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    replaying.train("sessions", 1, "--resume", "true", **OPTIONS)
    reasons = (
        "devices 1 in the run, 2 in the replay; parallelism single in the run, fsdp in the replay; "
        "gradient_accumulation_steps 4 in the run, 2 in the replay"
    )
    facts = check_holds(replaying.replay(run, "3:6", num_ranks=2))
    assert (
        facts["figures"] == f"bit-identical up to step 4, then equal within a relative difference of 1.0e-05: {reasons}"
    )
    assert facts["run"].startswith("2 × fsdp, CPU")
    assert "; from step 5 1 × single, CPU" in facts["run"]
    last = check_holds(replaying.replay(run, "5:6"))
    assert last["figures"].startswith("bit-identical: ")
    shutil.rmtree(run / "checkpoints" / "step-00000004")  # the next one is of the session on one rank
    history = RunHistory(run)
    assert [history.ranks_of(step)[0].num_ranks for step in range(1, 7)] == [2, 2, 2, 2, 1, 1]


def write_rows(run: Path, rows: list[dict[str, str]]) -> None:
    with (run / "metrics.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_what_was_removed_from_metrics_csv_is_named(replaying: Replaying) -> None:
    run = replaying.copy("removed")
    whole = rows_of(run)
    write_rows(run, [*whole[:4], *whole[5:]])
    assert fault_of(replaying.replay(run, "5:6")) == "step 5: its row is missing from metrics.csv"
    write_rows(run, [*whole[:5], {**whole[5], "val_loss": "1.5"}])
    logged = float(whole[5]["val_loss"])
    fault = fault_of(replaying.replay(run, "5:6"))
    assert fault == f"step 6, val_loss: 1.5 in metrics.csv, {logged} in the checkpoint of the step"
    write_rows(run, [*whole[:4], {**whole[4], "grad_norm": ""}, whole[5]])
    fault = fault_of(replaying.replay(run, "5:6"))
    assert fault.startswith("step 5, grad_norm: empty in metrics.csv, ")


def test_a_replay_says_what_was_not_compared(replaying: Replaying) -> None:
    assert saved_steps(replaying.run) == [2, 4, 6]  # step 5 was the best one, and made way for step 6
    facts = check_holds(replaying.replay(replaying.run, "5:6"))
    assert {"val_loss", "train_loss", "grad_norm", "rows_hash"} <= set(facts["compared"].split(", "))
    assert facts["not compared"] == "validation losses of step 5, which are in no checkpoint; times, speeds and memory"


@pytest.mark.parametrize("column", ["train_loss", "rows_hash"])
def test_an_altered_digit_is_named_with_its_step_and_column(replaying: Replaying, column: str) -> None:
    run = replaying.copy(f"digit-of-{column}")
    rows = rows_of(run)
    whole = rows[4][column]
    rows[4][column] = whole[:12] + ("5" if whole[12] != "5" else "6") + whole[13:]
    write_rows(run, rows)
    fault = fault_of(replaying.replay(run, "5:6", num_ranks=2))
    assert fault.startswith(f"step 5, {column}: {rows[4][column][:13]}")
    assert f" in metrics.csv, {whole[:13]}" in fault


def test_an_altered_row_is_named_with_its_document(replaying: Replaying) -> None:
    run = replaying.copy("row")
    tokens = replaying.folder / "tokens"
    num_rows = manifest_of(tokens).ledger.splits["train"].rows
    row = int(WindowOrder(num_rows, 8, 2, 1, 0, seed=0).rows_of(5)[-1])
    shutil.copytree(tokens, replaying.folder / "whole")
    try:
        alter_token(tokens, "train", row)
        replay = replaying.replay(run, "5:6")
        fault = fault_of(replay)
    finally:
        shutil.rmtree(tokens)
        (replaying.folder / "whole").rename(tokens)
    assert fault.startswith(
        f"{tokens / 'train'}, row {row} has changed since it was tokenized; its documents: tokens: "
    )
    assert f"tokens: {replaying.folder / 'tokens.jsonl'}:" in fault
    assert facts_of(replay)["steps"] == "5 to 6, nothing was trained, 0 logged steps compared"


def test_an_altered_argument_is_named(replaying: Replaying) -> None:
    run = replaying.copy("argument")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("\nlr: 0.001\n", "\nlr: 0.002\n"))
    fault = fault_of(replaying.replay(run, "5:6"))
    assert fault == "--lr: 0.001 in step-00000006/trainer.json, 0.002 in config.yaml"


def test_a_branch_with_shares_and_a_phase_is_reproduced(replaying: Replaying) -> None:
    phases = replaying.folder / "phases.yaml"
    phases.write_text("- from: 6\n  shares: [1, 2]\n  lr: 2e-4\n")
    folders = ["--train_data_dir", replaying.folder / "tokens", replaying.folder / "others", "--shares", 1, 0.5]
    branch = ["--branch", f"{replaying.run}@4", "--lr", 5e-4, "--phases", phases]
    run = replaying.train("branch", 1, *folders, *branch, **{**OPTIONS, "save_step_interval": 9})
    assert saved_steps(run) == [5, 6]
    facts = check_holds(replaying.replay(run, "5:6"))
    assert facts["figures"].startswith("bit-identical")
    assert facts["steps"].startswith("5 to 6, trained from step-00000004")
    assert {"train_loss", "train_loss/tokens", "train_loss/others"} <= set(facts["compared"].split(", "))
    assert facts["content of rows"] == "16 rows checked, 0 altered"


def test_what_cannot_be_replayed_is_one_line(replaying: Replaying) -> None:
    beyond = replaying.replay(replaying.run, "6:9")
    missing = replaying.replay(replaying.folder, "1:2")
    words = replaying.replay(replaying.run, "6")
    faults = {
        beyond: f"error: --steps 6:9: {replaying.run / 'metrics.csv'} has the steps 1 to 6; give steps that are logged",
        missing: f"error: {replaying.folder}: not a run folder (no config.yaml); give a run folder, the --output_dir "
        "of training",
        words: "error: --steps: expected a first and a last step such as 120:125, got '6'",
    }
    for replay, fault in faults.items():
        assert replay.codes() == [2]
        (line,) = replay.stderr().splitlines()
        assert line.startswith(fault)


def test_a_replay_computes_with_as_many_threads_as_the_run() -> None:
    cpu = torch.device("cpu")
    before = torch.get_num_threads()
    name = device_name(cpu)
    try:
        use_threads_of(name.replace(f"threads {before}", "threads 3"))
        assert device_name(cpu) == name.replace(f"threads {before}", "threads 3")
        for other in (None, "NVIDIA H100 80GB HBM3"):
            use_threads_of(other)
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
