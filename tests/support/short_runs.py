"""Arguments of short runs of the tiny model, code that acts at a chosen point of a run, and readers of its output."""

import csv
from pathlib import Path

from tests.support.programs import option_words

SETTINGS = {
    "accelerator": "cpu",
    "precision": "32-true",
    "micro_batch_size": 2,
    "total_batch_size": 8,
    "max_step": 8,
    "lr": 1e-3,
    "eval_step_interval": 5,
    "eval_iters": 4,
    "eval_at_start": "false",  # it would take time in every test
    "save_step_interval": 3,
    "num_workers": 0,
    "loggers": "csv",
    "report": "false",  # it takes more time than a run of a few steps
}
_ACT_AT_POINT = """
import os, signal, time
from fabric_train.distributed.signals import Heartbeat, StepPhase
from fabric_train.distributed.signals import stop_signals

def enter(self, phase, index=0, step=None, original=Heartbeat.enter):
    original(self, phase, index, step)
    if (self.position.step, phase, index) == ({step}, StepPhase.{phase}, {index}) and rank in {ranks}:
        {action}

Heartbeat.enter = enter
"""
# times and speeds differ in every repetition
_REPRODUCIBLE_COLUMNS = (
    "step",
    "epoch",
    "train_loss",
    "val_loss",
    "perplexity",
    "learning_rate",
    "grad_norm",
    "num_tokens",
)

TERMINATE = "os.kill(os.getpid(), signal.SIGTERM); any(stop_signals.received or time.sleep(0.01) for _ in range(3000))"
"""An action for :func:`at_point`: the rank gets a SIGTERM, and continues when its thread for signals has seen it."""


def at_point(action: str, step: int, phase: str, index: int = 0, ranks: tuple[int, ...] = (0, 1)) -> str:
    """Return source for ``ForkedRuns.start(before=)`` that acts when a rank reaches a point of the run.

    Args:
        action: a statement, which may use ``os``, ``signal``, ``stop_signals``, ``time``, and the rank's heartbeat as
            ``self``.
        step: number of the optimizer step, from 1.
        phase: name of a ``StepPhase``, such as ``OPTIMIZER``.
        index: of the micro-batch in that phase.
        ranks: the ranks that act.
    """
    return _ACT_AT_POINT.format(action=action, step=step, phase=phase, index=index, ranks=ranks)


def argv(model: Path, tokens: Path, run: Path, **options: object) -> list[str]:
    """Return the arguments of a run.

    Args:
        model: Hugging Face folder of the model.
        tokens: token dataset.
        run: output folder.
        options: other arguments, in addition to ``SETTINGS`` or instead of them; None leaves an argument out.
    """
    arguments = {"model_name": model, "train_data_dir": tokens, "output_dir": run, **SETTINGS, **options}
    return option_words({name: value for name, value in arguments.items() if value is not None})


def metrics(run: Path) -> list[tuple[str, ...]]:
    """Return the rows of metrics.csv without times, speeds and memory; empty if there is no file."""
    file = run / "metrics.csv"
    if not file.is_file():
        return []
    with file.open(newline="", encoding="utf-8") as lines:
        return [tuple(row[name] for name in _REPRODUCIBLE_COLUMNS) for row in csv.DictReader(lines)]


def saved_steps(run: Path) -> list[int]:
    """Return the steps with a complete checkpoint, in ascending order."""
    return sorted(int(folder.name.removeprefix("step-")) for folder in run.glob("checkpoints/step-*"))
