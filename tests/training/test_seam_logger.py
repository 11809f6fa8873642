"""A logger from outside gets metrics, samples and checkpoints, and one that fails changes nothing of the run."""

import json
import logging
from pathlib import Path

import pytest

from fabric_train.training.logger import GuardedLogger, Logger
from fabric_train.training.loggers import JSONLinesLogger
from fabric_train.training.metrics import Metrics
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv, metrics

NOTES = """
from fabric_train import LOGGERS
from fabric_train.training.logger import Logger

class Notes(Logger):
    def __init__(self, run):
        self.file = (run.folder / "notes.txt").open("a")
        self.note("after", run.last_step, run.config["max_step"])

    def note(self, *words):
        print(*words, file=self.file, flush=True)

    def log(self, metrics):
        self.note("step", metrics.step, metrics.train_loss)

    def log_samples(self, samples):
        self.note("samples", samples[0].step, len(samples))

    def log_model(self, checkpoint):
        self.note("model", checkpoint.name)

    def flush(self):
        self.note("flush")

    def close(self):
        self.note("close")

LOGGERS["notes"] = Notes
"""
BROKEN = """
import sys
from fabric_train import LOGGERS
from fabric_train.training.logger import Logger

def fail(*_):
    raise {error}

Broken = type("Broken", (Logger,), {{"{method}": fail}})
LOGGERS["broken"] = lambda run: Broken(run) if "{method}" == "__init__" else Broken()
"""
OPTIONS = {
    "max_step": 2,
    "eval_step_interval": 2,
    "save_step_interval": 1,
    "log_step_interval": 1,
    "log_model": "all",
    "async_save": "false",
    "sample_tokens": 2,
}
ENVIRONMENT = {"WANDB_MODE": "disabled"}  # which --log_model would open


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("To be\nOr not")
    return file


def test_a_logger_from_outside_gets_everything_in_order(
    forked_runs: ForkedRuns, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, prompts: Path
) -> None:
    given = argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run", **OPTIONS, sample_prompts=prompts, loggers=None)
    forked_runs.start(given, 2, before=NOTES, env=ENVIRONMENT).finish()
    losses = [row[2] for row in metrics(tmp_path / "run")]
    assert (tmp_path / "run" / "notes.txt").read_text().splitlines() == [
        *("after -1 2", f"step 1 {losses[0]}", "flush", "model step-00000001"),
        *("samples 2 2", f"step 2 {losses[1]}", "flush", "model step-00000002", "close"),
    ]


@pytest.mark.parametrize("method", ["__init__", "log", "log_samples", "log_model", "flush", "close"])
def test_no_logger_ends_a_run_or_changes_its_exit_code(
    forked_runs: ForkedRuns,
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_tokens_dir: Path,
    prompts: Path,
    method: str,
) -> None:
    error = "SystemExit(3)" if method == "log" else "RuntimeError('no room')"
    given = argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run", **OPTIONS, sample_prompts=prompts, loggers=None)
    run = forked_runs.start(given, 1, before=BROKEN.format(method=method, error=error), env=ENVIRONMENT)
    run.finish()
    assert [row[0] for row in metrics(tmp_path / "run")] == ["1", "2"]
    (line,) = [line for line in run.lines() if line.startswith("warning: --loggers broken: ")]
    assert line.endswith("; the run continues without it, and metrics.csv has every step")


def test_a_failed_logger_that_cannot_be_stopped_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Logger):
        def log(self, metrics: Metrics) -> None:
            raise OSError("no room")

        def abandon(self) -> None:
            raise RuntimeError("its process is still there")

    guarded = GuardedLogger("broken", Broken)
    with caplog.at_level(logging.WARNING, "fabric_train"):
        for step in (1, 2):
            guarded.log(Metrics(step=step, epoch=0))
    assert [record.getMessage().split("; ")[0].removeprefix("warning: ") for record in caplog.records] == [
        "broken: no room",
        "broken: could not stop everything that it started: its process is still there",
    ]


def test_json_lines_have_each_step_once_also_after_a_resume(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    for last_step, steps in ((-1, (1, 2, 3)), (2, (3, 4))):
        logger = JSONLinesLogger(file, last_step)
        for step in steps:
            logger.log(Metrics(step=step, epoch=0, train_loss=None if step == 2 else 1.5, extra={"val_x": 2.0}))
        logger.flush()
        logger.close()
        with file.open("a") as damaged:
            damaged.write('{"step": 9')
    lines = file.read_text().splitlines()[:-1]
    assert [json.loads(line) for line in lines] == [
        {"step": step, "epoch": 0, **({} if step == 2 else {"train_loss": 1.5}), "val_x": 2.0} for step in (1, 2, 3, 4)
    ]
