"""Train steps of a run again without writing anything, for ``fabric-train replay``."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning import Fabric

from fabric_train.checkpoint import TrainerState
from fabric_train.checkpoint.manager import CheckpointManager
from fabric_train.data.streaming import Stream
from fabric_train.distributed.signals import Heartbeat
from fabric_train.training.build_run import build_loop, set_up_optimizer
from fabric_train.training.logger import Logger, Outputs
from fabric_train.training.loop import manual_collection
from fabric_train.training.metrics import Metrics
from fabric_train.training.objective import build_objective, connect_objective
from fabric_train.training.prepared_run import PreparedRun
from fabric_train.training.reference import compare_with_reference
from fabric_train.training.run import set_up_checked_model
from fabric_train.training.run_log import log, progress


class _NoCheckpoints(CheckpointManager):
    """The checkpoint manager of a run that only repeats steps, which writes none."""

    def save(self, state: TrainerState, *_: Any, **__: Any) -> Path:
        """Return the path that the checkpoint would have."""
        return self.path(state)


def repeat_steps(fabric: Fabric, run: PreparedRun, last_step: int, heartbeat: Heartbeat) -> list[Metrics]:
    """Train to ``last_step`` and return each step's metrics; all ranks call this together.

    The output folder of ``run`` is a temporary folder of this rank.
    """
    run = compare_with_reference(fabric, run, heartbeat)
    objective = build_objective(run.arguments)
    run = connect_objective(objective, fabric, run)
    model, decayed_names = set_up_checked_model(fabric, run)
    if isinstance(run.data, Stream):
        run.data.tokenizer.save(run.data.tokenizer_folder)
    optimizer = set_up_optimizer(fabric, model, decayed_names, run)
    recorder = _MetricsRecorder(last_step)
    outputs = Outputs([recorder], "none")
    loop = build_loop(
        fabric, model, optimizer, objective, run, heartbeat, validation=None, outputs=outputs, manager=_NoCheckpoints
    )
    progress.info("%s", heartbeat)
    with manual_collection():
        replace(loop, num_steps=last_step).train()
    return recorder.steps


class _MetricsRecorder(Logger):
    """Keeps the metrics of each step, and shows the step's loss."""

    def __init__(self, last_step: int) -> None:
        self._last_step = last_step
        self.steps = list[Metrics]()

    def log(self, metrics: Metrics) -> None:
        progress.info("")
        loss = "none" if metrics.train_loss is None else f"{metrics.train_loss:.6f}"
        log.info("step %d of %d: loss %s", metrics.step, self._last_step, loss)
        self.steps.append(metrics)
