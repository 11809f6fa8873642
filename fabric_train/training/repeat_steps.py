"""Train steps of a run again, without saving anything."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning import Fabric

from fabric_train.checkpoint import CheckpointManager, TrainerState
from fabric_train.data.streaming import Stream
from fabric_train.distributed.heartbeat import Heartbeat
from fabric_train.distributed.host_memory import reuse_freed_memory
from fabric_train.model.attention import check_isolation
from fabric_train.training.build_run import build_loop_parts, set_up_model, set_up_optimizer
from fabric_train.training.gc_control import manual_collection
from fabric_train.training.loggers import Outputs
from fabric_train.training.loop import train
from fabric_train.training.metrics import Metrics
from fabric_train.training.prepared_run import PreparedRun
from fabric_train.training.run_log import log, progress, warn


class NoCheckpoints(CheckpointManager):
    """Checkpoints of a run that only repeats steps: none is written."""

    def save(self, state: TrainerState, *_: Any, **__: Any) -> Path:
        """Return the path that the checkpoint would have."""
        return self.path(state)


def repeat_steps(fabric: Fabric, run: PreparedRun, last_step: int, heartbeat: Heartbeat) -> list[Metrics]:
    """Train from the run's starting point to ``last_step``, and return the metrics of each step.

    Args:
        fabric: launched; all ranks call this together.
        run: its folder is this rank's own, and temporary.
        last_step: the last one to train.
        heartbeat: where this rank marks its position for the watchdog.
    """
    model, decayed = set_up_model(fabric, run)
    if fabric.device.type == "cpu":
        reuse_freed_memory()
    if run.data.isolates:
        check_isolation(fabric, model, run.model.source)
    if isinstance(run.data, Stream):
        run.data.tokenizer.save(run.data.tokenizer_folder)
    optimizer = set_up_optimizer(fabric, model, decayed, run)
    steps: list[Metrics] = []

    def record(metrics: Metrics) -> None:
        progress.info("")
        log.info("step %d of %d: loss %.6f", metrics.step, last_step, metrics.train_loss)
        steps.append(metrics)

    parts = build_loop_parts(
        fabric, model, optimizer, None, run, heartbeat, Outputs([], "none"), warn, lambda _: None, NoCheckpoints
    )
    progress.info("%s", heartbeat)
    with manual_collection():
        train(replace(parts, num_steps=last_step, log=record), run.arguments, run.start.state)
    return steps
