"""The training loop: take a step (``step.py``), then log, evaluate and save when due, until the end of the run."""

import gc
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy as np

from fabric_train.checkpoint import TrainerState
from fabric_train.checkpoint.manager import CheckpointManager
from fabric_train.cli.errors import RunError
from fabric_train.data.step_sampler import Window, WindowSource
from fabric_train.distributed.ranks import StepSync, sync_step
from fabric_train.distributed.signals import RunStopped, StepPhase
from fabric_train.training import summary
from fabric_train.training.evaluation import Validation
from fabric_train.training.expected_speed import measured_peak_share
from fabric_train.training.first_steps import FirstSteps
from fabric_train.training.logger import Outputs
from fabric_train.training.metrics import (
    Metrics,
    columns_of,
    read_columns,
    with_evaluation,
    with_objective,
)
from fabric_train.training.objective import name_metrics
from fabric_train.training.prepared_run import PreparedRun, logged_sources
from fabric_train.training.run_log import log, note, warn
from fabric_train.training.step import Stepper, TakenStep, read_flags
from fabric_train.training.step_exchange import StepReport
from fabric_train.training.stopwatch import Stopwatch, peak_memory_gb

_STEPS_BETWEEN_COLLECTIONS = 50
"""See :func:`manual_collection`."""


@dataclass(frozen=True)
class End:
    """The end of a run, or of its steps with the same parts and data."""

    state: TrainerState
    checkpoint: Path | None
    """The checkpoint of the state; None before the first step."""
    stopped_by: int = 0
    """The number of the signal that stopped the run; 0 if none did."""


@dataclass(frozen=True)
class Due:
    """The actions that are due after a step."""

    evaluate: bool
    keep: bool
    """Whether the checkpoint is scheduled and therefore kept, whatever its loss."""
    save: bool
    log: bool


@dataclass(frozen=True)
class TrainingPoint:
    """A point between two steps."""

    state: TrainerState
    checkpoint: Path | None
    """The checkpoint of the state; None until it is saved."""
    cursors: np.ndarray | None = None
    """The positions of a stream after the last window, see ``StreamBatch``."""


@dataclass(frozen=True)
class Loop:
    """A built run, up to step ``num_steps``: its last step, or the last step before other parts or data."""

    run: PreparedRun
    stepper: Stepper
    batches: WindowSource
    num_steps: int
    checkpoints: CheckpointManager
    validation: Validation | None
    outputs: Outputs
    peak_flops: float | None
    """The peak FLOP/s of all devices; None if unknown."""

    def train(self) -> End:
        """Train from the start of the run to step ``num_steps``, or until a signal stops it at the next micro-batch.

        After a signal, the unfinished window is dropped: the model is as after the previous step, which is saved, and a
        resumed run repeats the window.

        Raises:
            RunError: The loss or the gradient is not finite, with ``--on_nonfinite stop``.
        """
        heartbeat = self.stepper.heartbeat
        stopwatch = Stopwatch(self.peak_flops)
        first_steps = FirstSteps()
        start = self.run.start
        point = TrainingPoint(start.state, start.checkpoint if start.resumes else None)

        # An evaluation before the first step: of the start, or the one that a signal interrupted.
        initial_metrics = self._initial_metrics(point.state)
        if initial_metrics:
            state = self._evaluate_and_log(point.state, initial_metrics, evaluates=True)
            point = replace(point, state=state)
            if state.unlogged:
                return End(state, point.checkpoint, self._sync().stop_signal)
            if point.checkpoint and self._is_best(state):
                point = replace(point, checkpoint=self._save_with_evaluation(state))
            if state.step and self._ends_early(state):
                return End(state, point.checkpoint)
            stopwatch.restart()
            first_steps.restart()

        windows = self._windows(point.state.step, stopwatch)
        while True:
            # Take the step. A stop comes before a micro-batch, when only gradients have changed since the last step, or
            # while the window is made.
            try:
                window = next(windows, None)
                if window is None:
                    break
                step = self.stepper.take_step(window)
            except RunStopped:
                return End(point.state, self._save_unless_saved(point), heartbeat.stop_border.signal)
            if step.check.fault is not None:
                self._report_fault(step.check.fault, point)
            if not step.check.has_targets and point.state.steps_without_targets == 0:
                # once: the summary at the end of the run has the number of these steps
                note(summary.describe_step_without_targets(window.step, self.stepper.objective))
            if window.step % _STEPS_BETWEEN_COLLECTIONS == 0:
                gc.collect()  # while the device is busy with the optimizer's step

            # Continue a background save, and count the step.
            heartbeat.enter(StepPhase.COMPLETING)
            self.checkpoints.advance(step.report.sync)
            due = self._find_due(window, step)
            report = step.report
            stopwatch.stepped(report.num_tokens, window.num_rows, report.flops, report.own_seconds)
            if first_steps.stepped(report.num_tokens, report.flops):
                self._log_speed(first_steps, window.step)
            state = self._next_state(point.state, window, step)
            point = TrainingPoint(state, checkpoint=None, cursors=window.cursors)
            if not due.log:
                continue

            # Evaluate and log. The metrics come first: they read the stopwatch.
            metrics = self._measure(state, step, stopwatch)
            state = self._evaluate_and_log(state, metrics, evaluates=due.evaluate)
            point = replace(point, state=state)
            sync = self._sync() if state.unlogged else step.report.sync  # a signal has interrupted the evaluation

            # Save, and end the run if it is over or stopped.
            ends_early = due.evaluate and self._ends_early(state)
            is_last = window.step == self.run.plan.num_steps or ends_early
            if due.save or is_last or sync.stop_signal or self._is_best(state):
                is_scheduled = due.keep or is_last
                waits = is_last or bool(sync.stop_signal)
                checkpoint = self._save(point, is_scheduled=is_scheduled, waits=waits)
                point = replace(point, checkpoint=checkpoint)
            is_unfinished = bool(state.unlogged) or not is_last
            if sync.stop_signal and is_unfinished:
                return End(state, point.checkpoint, sync.stop_signal)
            if ends_early:
                break
            stopwatch.restart()
            first_steps.restart()

        heartbeat.enter(StepPhase.SAVING)
        self.checkpoints.finish()
        return End(point.state, point.checkpoint)

    def _windows(self, after_step: int, stopwatch: Stopwatch) -> Iterator[Window]:
        """Yield the remaining windows and measure the time spent waiting for them."""
        iterator = self.batches.windows(after_step, self.num_steps)
        for step in itertools.count(after_step + 1):
            self.stepper.heartbeat.enter(StepPhase.DATA, step=step)
            started = time.perf_counter()
            window = next(iterator, None)
            if window is None:
                return
            waited_seconds = time.perf_counter() - started
            if window.rollout_seconds is not None:
                waited_seconds -= window.rollout_seconds.total
                stopwatch.rolled_out(window.rollout_seconds)
            stopwatch.waited(waited_seconds)
            yield window

    def _find_due(self, window: Window, step: TakenStep) -> Due:
        """Return the actions that are due after a step."""
        arguments = self.run.arguments
        # the end of the run or of a phase, and of each epoch
        is_border = window.step == self.num_steps or window.ends_epoch
        evaluate = is_border or window.step % arguments.evaluation.eval_step_interval == 0
        keep = is_border or window.step % arguments.save.save_step_interval == 0
        # a signal is agreed on in the exchange of the step, so all ranks save here
        save = keep or bool(step.report.sync.stop_signal)
        has_fault = step.check.fault is not None
        log = evaluate or save or has_fault or window.step % arguments.logging.log_step_interval == 0
        return Due(evaluate=evaluate, keep=keep, save=save, log=log)

    def _log_speed(self, first_steps: FirstSteps, step: int) -> None:
        """Log the speed of the first steps, the last of which is ``step``, beside the expected speed."""
        num_steps_left = self.run.plan.num_steps - step
        expected = measured_peak_share(self.run.arguments, is_partly_frozen=bool(self.run.model.frozen))
        log.info("%s", first_steps.describe(num_steps_left, expected, self.peak_flops))

    def _initial_metrics(self, state: TrainerState) -> Metrics | None:
        """Return the metrics to log after an evaluation before the first step; None if there is none."""
        if state.unlogged:
            return read_columns(state.unlogged)
        if state.step == 0 and self.validation is not None and self.run.arguments.evaluation.eval_at_start:
            return Metrics(step=0, epoch=0, num_tokens=0, skipped_steps=0)
        return None

    def _measure(self, state: TrainerState, step: TakenStep, stopwatch: Stopwatch) -> Metrics:
        """Return the metrics of a step, and restart the stopwatch."""
        metrics = Metrics(
            step=state.step,
            epoch=state.epoch,
            train_loss=step.check.loss,
            learning_rate=step.learning_rate,
            grad_norm=step.check.grad_norm,
            skipped_steps=state.skipped_steps,
            rows_hash=state.rows_hash,
            num_tokens=state.num_tokens,
            peak_memory_gb=peak_memory_gb(self.stepper.fabric.device),
            **stopwatch.read(),
        )

        # The objective's metrics, and what a source has in this window.
        objective = self.stepper.objective
        means: dict[str, float | None] = {}
        if step.check.has_targets:
            means = name_metrics(objective, step.report.metrics, step.report.count)
        losses_by_source = {}
        metrics_by_source = {}
        for source, report in zip(logged_sources(self.run.data), step.report.sources, strict=True):
            if report.loss is None:
                continue
            losses_by_source[source] = report.loss
            if report.metrics:
                metrics_by_source[source] = name_metrics(objective, report.metrics, report.count)
        return with_objective(metrics, means, losses_by_source, metrics_by_source)

    def _next_state(self, state: TrainerState, window: Window, step: TakenStep) -> TrainerState:
        """Return the state after a step that is not evaluated yet."""
        has_fault = step.check.fault is not None
        lacks_targets = not step.check.has_targets
        counts_by_source = Counter(state.counted_of_sources or {})
        counts_by_source.update(self._count_by_source(step.report))
        return replace(
            state,
            step=window.step,
            epoch=window.epoch,
            num_tokens=state.num_tokens + step.report.num_tokens,
            num_samples=state.num_samples + window.num_rows,
            skipped_steps=state.skipped_steps + int(has_fault),
            steps_without_targets=state.steps_without_targets + int(lacks_targets),
            train_loss=None if has_fault else step.check.loss,  # None: the step was not taken
            rows_hash=window.rows_hash,
            rows_of_sources=_add_rows(state.rows_of_sources, window.rows_of_sources),
            counted_of_sources=dict(counts_by_source) or None,
            val_loss=None,
            evaluation=None,
        )

    def _count_by_source(self, report: StepReport) -> dict[str, int]:
        """Return the objective's count for each source in a step; empty if sources are not distinguished."""
        source_names = self.run.data.source_names
        if len(source_names) == 1:
            return {source_names[0]: report.count}
        sources = zip(logged_sources(self.run.data), report.sources, strict=True)
        return {name: source.count for name, source in sources if source.count}

    def _evaluate_and_log(self, state: TrainerState, metrics: Metrics, *, evaluates: bool) -> TrainerState:
        """Log a step, after its evaluation if that is due; after a signal, return a state with the unlogged metrics."""
        if not evaluates or not self.validation:
            self.outputs.log(metrics)
            return replace(state, unlogged=None)

        # Evaluate, and generate samples.
        evaluation = self.validation.evaluate(state.step)
        samples = None
        if evaluation is not None:
            samples = self.validation.sample(state.step)
        if evaluation is None or samples is None:  # a signal has stopped one of them
            return replace(state, unlogged=columns_of(metrics))
        if samples:
            self.outputs.log_samples(samples)

        # Early stopping compares with earlier evaluations of the same rows.
        first_evaluation = state.first_evaluation or evaluation
        stopping_progress = state.progress
        if not evaluation.is_comparable(first_evaluation):
            first_evaluation = replace(evaluation, follows_other_rows=True)
            stopping_progress = None
        if self.run.early_stopping:
            stopping_progress = self.run.early_stopping.after(stopping_progress, evaluation)
        else:
            stopping_progress = None

        self.outputs.log(with_evaluation(metrics, evaluation, logged_sources(self.run.data)))
        return replace(
            state,
            val_loss=None if evaluation.whole.of_completions else evaluation.whole.loss,
            evaluation=evaluation,
            first_evaluation=first_evaluation,
            progress=stopping_progress,
            unlogged=None,
        )

    def _ends_early(self, state: TrainerState) -> bool:
        return self.run.early_stopping is not None and self.run.early_stopping.ends(state)

    def _is_best(self, state: TrainerState) -> bool:
        """Return whether ``--save_best`` saves a state; it never saves step 0, which the run did not train."""
        return self.run.arguments.save.save_best and state.step > 0 and self.checkpoints.is_best(state)

    def _sync(self) -> StepSync:
        """Exchange flags between two steps, outside of the per-step all-reduce."""
        self.stepper.heartbeat.enter(StepPhase.SYNC)
        return sync_step(self.stepper.fabric, read_flags(self.checkpoints))

    def _save(self, point: TrainingPoint, *, is_scheduled: bool, waits: bool) -> Path:
        """Save a state; an interim checkpoint, which is neither scheduled nor the last, may be removed later."""
        self.stepper.heartbeat.enter(StepPhase.SAVING)
        self.outputs.flush()
        state = point.state
        is_interim = not is_scheduled and (self._is_best(state) or bool(state.unlogged))
        return self.checkpoints.save(state, point.cursors, waits=waits, interim=is_interim, scheduled=is_scheduled)

    def _save_with_evaluation(self, state: TrainerState) -> Path:
        """Save the starting state again, with the evaluation that a signal had interrupted."""
        self.stepper.heartbeat.enter(StepPhase.SAVING)
        self.outputs.flush()
        saved = self.run.start.saved
        assert saved is not None  # a run that resumes
        return self.checkpoints.save(
            state, saved.checkpoint, waits=True, interim=saved.interim, scheduled=saved.scheduled
        )

    def _save_unless_saved(self, point: TrainingPoint) -> Path | None:
        """Return the complete checkpoint of a state, after saving it if there is none; there is none at step 0."""
        self.stepper.heartbeat.enter(StepPhase.SAVING)
        checkpoint = point.checkpoint
        if checkpoint is None and point.state.step:
            self.outputs.flush()
            checkpoint = self.checkpoints.save(point.state, point.cursors, waits=True)
        self.checkpoints.finish()
        return checkpoint

    def _report_fault(self, fault: str, point: TrainingPoint) -> None:
        """Warn that a step is left out; with ``--on_nonfinite stop``, end the run instead."""
        if self.run.arguments.training.on_nonfinite == "stop":
            self._stop_at_fault(fault, point)
        warn(f"{fault}; the step is skipped")

    def _stop_at_fault(self, fault: str, point: TrainingPoint) -> NoReturn:
        """Save the state before a step with a fault, and end the run."""
        checkpoint = self._save_unless_saved(point)
        if checkpoint is None:
            raise RunError(f"{fault}; no step was taken before it, so nothing was saved")
        raise RunError(
            f"{fault}; the step was not taken, and the state before it is saved in {checkpoint}; to continue and "
            "skip such steps, give --resume true --on_nonfinite skip (docs/reference/errors.md#not-finite)"
        )


def _add_rows(rows_by_source: list[int] | None, window_rows: list[int] | None) -> list[int] | None:
    """Add a window's rows of each source to the counts so far; None without a mixture."""
    if window_rows is None:
        return None
    if rows_by_source is None:
        return window_rows
    return [total + num_rows for total, num_rows in zip(rows_by_source, window_rows, strict=True)]


@contextmanager
def manual_collection() -> Iterator[None]:
    """Let the training loop decide when to collect garbage; objects from before the block are never scanned again.

    A collection at an arbitrary moment would make one rank slow, and all others would wait for it.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
