"""The first hour with a GPU goes on after a part that fails, and a second start runs only the other parts."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import first_hour
from benchmarks.first_hour import run_first_hour
from benchmarks.first_hour_parts import training_command
from benchmarks.gpu import MIDDLE, SMALL
from benchmarks.gpu_sizes import SIZES
from benchmarks.report import Machine
from benchmarks.timed_parts import Attempt, Outcome, Part
from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.errors import InputError, RunError

MACHINE = Machine("a-gpu", "A GPU", 2, "a CPU", 1, "Linux", "3.11", 0.0)


def finds(attempt: Attempt) -> None:
    attempt.run("version", "python -V")
    attempt.outcome = Outcome({"number": 1}, "found 1")


def fails(attempt: Attempt) -> None:
    attempt.outcome.figures["before"] = 1
    attempt.run("fails", "python -c raise(SystemExit('no|kernel'))")


def hangs(attempt: Attempt) -> None:
    attempt.run("hangs", "python -c __import__('time').sleep(60)")


def reads_nothing(attempt: Attempt) -> None:
    json.loads(attempt.run("prints no JSON", "python -V"))


def disagrees(attempt: Attempt) -> None:
    attempt.outcome = Outcome({"difference": 0.5}, "differs", ["a loss is 0.5 from the CPU's"])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("gpu")
def test_a_part_that_fails_is_reported_and_the_next_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = (
        Part("a", 1, fails),
        Part("b", 0.001, hangs),
        Part("c", 1, disagrees),
        Part("d", 1, finds),
        Part("e", 1, reads_nothing),
        Part("f", 1, finds),
    )
    monkeypatch.setattr(first_hour, "PARTS", parts)
    with pytest.raises(RunError, match="of 6 parts, 4 did not pass: a; b; c; e; "):
        run_first_hour("tiny", tmp_path, MACHINE, "commit")
    (result,) = (tmp_path / "a-gpu-tiny").glob("gpu-first-hour-*.json")
    runs = {name: record for name, (record,) in json.loads(result.read_text())["runs"].items()}
    assert {name: record["status"] for name, record in runs.items()} == {
        "a": "failed",
        "b": "stopped",
        "c": "failed",
        "d": "done",
        "e": "failed",
        "f": "done",
    }
    assert runs["e"]["line"].startswith("JSONDecodeError(")
    assert runs["a"]["figures"] == {"before": 1}
    assert runs["a"]["last_lines"] == ["no|kernel"]
    assert runs["b"]["commands"] == {"hangs": "python -c '__import__('\"'\"'time'\"'\"').sleep(60)'"}
    table = result.with_suffix(".md").read_text()
    assert "| c | failed | a loss is 0.5 from the CPU's |" in table
    assert "| d | done | found 1 |" in table
    assert "    no|kernel\n" in table


@pytest.mark.usefixtures("gpu")
def test_a_second_start_runs_only_what_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(attempt: Attempt) -> None:
        calls.append(attempt)
        finds(attempt)

    monkeypatch.setattr(first_hour, "PARTS", (Part("a", 1, counted), Part("b", 1, fails)))
    with pytest.raises(RunError):
        run_first_hour("tiny", tmp_path, MACHINE, "one")
    monkeypatch.setattr(first_hour, "PARTS", (Part("a", 1, counted), Part("b", 1, finds)))
    path = run_first_hour("tiny", tmp_path, MACHINE, "two")
    assert len(calls) == 1
    runs = json.loads(path.with_suffix(".json").read_text())["runs"]
    assert {name: record["commit"] for name, (record,) in runs.items()} == {"a": "one", "b": "two"}


def test_the_first_hour_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="torch finds no GPU"):
        run_first_hour("full", tmp_path / "work", MACHINE, None)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("preset", [SMALL, MIDDLE])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_training_command_of_the_first_hour_is_valid(sizes: str, preset: str) -> None:
    command = training_command(SIZES[sizes], preset, 2, Path("rows"), Path("run"))
    given = parse(TrainArguments, list(command.words[3:]))
    assert given.model.num_layers == 2
    assert given.model.hidden_width == (64 if sizes == "tiny" else {SMALL: 2048, MIDDLE: 4096}[preset])
