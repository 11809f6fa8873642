"""The training loop: take a step (``step.py``), then log, evaluate and save when due, until the end of the run.

``--profile`` is here too.
"""

import gc
import itertools
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from fabric_train.checkpoint import TrainerState, read_trainer_json
from fabric_train.checkpoint.manager import CheckpointManager
from fabric_train.cli.errors import RunError
from fabric_train.data.step_sampler import Window, WindowSource
from fabric_train.distributed.ranks import StepSync, sync_step
from fabric_train.distributed.signals import Heartbeat, RunStopped, StepPhase
from fabric_train.training import summary
from fabric_train.training.evaluation import Validation
from fabric_train.training.loggers import Outputs
from fabric_train.training.metrics import (
    Metrics,
    columns_of,
    read_columns,
    with_evaluation,
    with_objective,
)
from fabric_train.training.prepared_run import PreparedRun
from fabric_train.training.run_log import note, warn
from fabric_train.training.step import Stepper, StepReport, TakenStep, own_flags

_COLLECTED_STEPS = 50
"""Steps between garbage collections, see :func:`manual_collection`."""
_RECORDED_EVENTS = 200_000  # of the GPU's allocator; older ones are dropped


@dataclass(frozen=True)
class End:
    """The state at the end of a run, its checkpoint (None before the first step), and the stop signal, or 0."""

    state: TrainerState
    checkpoint: Path | None
    stopped_by: int = 0


class Stopwatch:
    """Wall-clock time between two readings, and the share spent waiting for data; evaluation and saves are left out."""

    def __init__(self, peak_flops: float | None = None) -> None:
        self._peak_flops = peak_flops
        self.restart()

    def restart(self) -> None:
        self._started = time.perf_counter()
        self._waited = 0.0
        self._num_steps = self._num_tokens = self._num_samples = 0
        self._flops = 0.0
        self._own_seconds: list[Sequence[float]] = []

    def waited(self, seconds: float) -> None:
        self._waited += seconds

    def stepped(self, num_tokens: int, num_samples: int, flops: float, own_seconds: Sequence[float] = ()) -> None:
        self._num_steps += 1
        self._num_tokens += num_tokens
        self._num_samples += num_samples
        self._flops += flops
        self._own_seconds.append(own_seconds)

    def read(self) -> dict[str, Any]:
        """Return step_time, data_wait, tokens and samples per second, then restart.

        Also mfu if the peak is known, and of several ranks the slowest and its lag.
        """
        elapsed = time.perf_counter() - self._started
        reading = {
            "step_time": elapsed / self._num_steps,
            "data_wait": self._waited / elapsed,
            "tokens_per_second": self._num_tokens / elapsed,
            "samples_per_second": self._num_samples / elapsed,
        }
        if self._peak_flops:
            reading["mfu"] = self._flops / elapsed / self._peak_flops
        by_rank = [sum(of_rank) / self._num_steps for of_rank in zip(*self._own_seconds, strict=True)]
        if len(by_rank) > 1:
            reading["slowest_rank"] = by_rank.index(max(by_rank))
            reading["rank_lag"] = max(by_rank) - statistics.median_low(by_rank)
        self.restart()
        return reading


@dataclass(frozen=True)
class Loop:
    """A run that is built, up to step ``num_steps``: the last one, or the last one before other parts train.

    ``peak_flops`` is the FLOP/s of all devices, None if unknown.
    """

    run: PreparedRun
    stepper: Stepper
    batches: WindowSource
    num_steps: int
    checkpoints: CheckpointManager
    validation: Validation | None
    outputs: Outputs
    peak_flops: float | None

    def train(self) -> End:
        """Train from the start of the run to step ``num_steps``, or until a signal stops it at the next micro-batch.

        The unfinished window is dropped: the model is as after the step before, which is saved, and a resumed run
        repeats the window.

        Raises:
            RunError: The loss or the gradient is not finite, with ``--on_nonfinite stop``.
        """
        heartbeat = self.stepper.heartbeat
        stopwatch = Stopwatch(self.peak_flops)
        state = self.run.start.state
        cursors = None
        checkpoint = self.run.start.checkpoint if self.run.start.resumes else None  # of ``state``
        if metrics := self._metrics_to_begin_with(state):
            state = self._evaluate_and_log(state, metrics, evaluates=True)
            if state.unlogged:
                return End(state, checkpoint, self._sync().stop_signal)
            if checkpoint and self._is_best(state):
                checkpoint = self._save_with_evaluation(state, checkpoint)
            if state.step and self._ends_early(state):
                return End(state, checkpoint)
            stopwatch.restart()
        for window in self._windows(state.step, stopwatch):
            try:
                step = self.stepper.take_step(window)
            except RunStopped:  # before a micro-batch: only gradients have changed since the step before
                return End(state, self._save_unless_saved(state, checkpoint, cursors), heartbeat.stop_border.signal)
            if step.check.fault is not None:
                self._report(step.check.fault, state, checkpoint, cursors)
            if not step.check.has_targets and state.steps_without_targets == 0:  # the end of the run has their number
                note(summary.describe_step_without_targets(window.step, self.stepper.objective))
            if window.step % _COLLECTED_STEPS == 0:
                gc.collect()  # while the device is busy with the optimizer's step
            heartbeat.enter(StepPhase.COMPLETING)
            self.checkpoints.advance(step.report.sync)
            evaluates, keeps, saves, logs = self._due(window, step)
            report = step.report
            stopwatch.stepped(report.num_tokens, window.num_rows, report.flops, report.own_seconds)
            state = self._state_after(state, window, step)
            checkpoint = None
            cursors = window.cursors
            if not logs:
                continue
            state = self._evaluate_and_log(state, self._metrics(state, step, stopwatch), evaluates)
            stop_signal = (self._sync() if state.unlogged else step.report.sync).stop_signal
            ends_early = evaluates and self._ends_early(state)
            is_last = window.step == self.run.plan.num_steps or ends_early
            if saves or is_last or stop_signal or self._is_best(state):
                checkpoint = self._save(state, cursors, keeps or is_last, is_last or bool(stop_signal))
            if stop_signal and (state.unlogged or not is_last):
                return End(state, checkpoint, stop_signal)
            if ends_early:
                break
            stopwatch.restart()
        heartbeat.enter(StepPhase.SAVING)
        self.checkpoints.finish()
        return End(state, checkpoint)

    def _windows(self, after_step: int, stopwatch: Stopwatch) -> Iterator[Window]:
        """Yield the remaining windows and measure the time spent waiting for them."""
        iterator = self.batches.windows(after_step, self.num_steps)
        for step in itertools.count(after_step + 1):
            self.stepper.heartbeat.enter(StepPhase.DATA, step=step)
            started = time.perf_counter()
            window = next(iterator, None)
            if window is None:
                return
            stopwatch.waited(time.perf_counter() - started)
            yield window

    def _due(self, window: Window, step: TakenStep) -> tuple[bool, bool, bool, bool]:
        """Return whether a step is evaluated, its checkpoint stays whatever its loss, it is saved, and logged."""
        given = self.run.arguments
        number = window.step
        always = number == self.num_steps or window.ends_epoch
        evaluates = always or number % given.evaluation.eval_step_interval == 0
        keeps = always or number % given.save.save_step_interval == 0
        saves = keeps or bool(step.report.sync.stop_signal)
        logs = evaluates or saves or step.check.fault is not None or number % given.logging.log_step_interval == 0
        return evaluates, keeps, saves, logs

    def _metrics_to_begin_with(self, state: TrainerState) -> Metrics | None:
        """Return the metrics to log after an evaluation before the first step; None if there is none."""
        if state.unlogged:
            return read_columns(state.unlogged)
        begins = state.step == 0 and self.validation is not None and self.run.arguments.evaluation.eval_at_start
        return Metrics(step=0, epoch=0, num_tokens=0, skipped_steps=0) if begins else None

    def _metrics(self, state: TrainerState, step: TakenStep, stopwatch: Stopwatch) -> Metrics:
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
        names = self.stepper.objective.metric_names
        sources = self.run.logged_sources
        report = step.report
        further = {
            name: dict(zip(names, of_source, strict=True))
            for name, of_source in zip(sources, report.metrics_of_sources, strict=True)
            if of_source
        }
        means = dict(zip(names, report.metrics, strict=True)) if step.check.has_targets else {}
        return with_objective(metrics, means, dict(zip(sources, report.of_sources, strict=True)), further)

    def _state_after(self, state: TrainerState, window: Window, step: TakenStep) -> TrainerState:
        has_fault = step.check.fault is not None
        rows = window.rows_of_sources
        if rows is not None:
            rows = [sum(both) for both in zip(state.rows_of_sources or [0] * len(rows), rows, strict=True)]
        counted = Counter(state.counted_of_sources or {})
        counted.update(self._counted_of_sources(step.report))
        return replace(
            state,
            step=window.step,
            epoch=window.epoch,
            num_tokens=state.num_tokens + step.report.num_tokens,
            num_samples=state.num_samples + window.num_rows,
            skipped_steps=state.skipped_steps + has_fault,
            steps_without_targets=state.steps_without_targets + (not step.check.has_targets),
            train_loss=None if has_fault else step.check.loss,
            rows_hash=window.rows_hash,
            rows_of_sources=rows,
            counted_of_sources=dict(counted) or None,
            val_loss=None,
            evaluation=None,
        )

    def _counted_of_sources(self, report: StepReport) -> dict[str, int]:
        """Return what the objective counted of each source in a step; nothing if sources are not told apart."""
        if len(self.run.data.source_names) == 1:
            return {self.run.data.source_names[0]: report.count}
        return {
            name: number
            for name, number in zip(self.run.logged_sources, report.counted_of_sources, strict=True)
            if number
        }

    def _evaluate_and_log(self, state: TrainerState, metrics: Metrics, evaluates: bool) -> TrainerState:
        """Evaluate if it is due, and log the step; after a signal, return a state with the unlogged metrics instead."""
        if evaluates and self.validation:
            evaluation = self.validation.evaluate(state.step)
            samples = self.validation.sample(state.step) if evaluation else None
            if evaluation is None or samples is None:
                return replace(state, unlogged=columns_of(metrics))
            if samples:
                self.outputs.log_samples(samples)
            first = state.first_evaluation or evaluation
            progress = state.progress
            if not evaluation.is_comparable(first):
                first = replace(evaluation, follows_other_rows=True)
                progress = None
            stopping = self.run.early_stopping
            progress = stopping.after(progress, evaluation) if stopping else None
            state = replace(state, evaluation=evaluation, first_evaluation=first, progress=progress)
            state = replace(state, val_loss=evaluation.whole.loss)
            metrics = with_evaluation(metrics, evaluation, self.run.logged_sources)
        self.outputs.log(metrics)
        return replace(state, unlogged=None)

    def _ends_early(self, state: TrainerState) -> bool:
        return self.run.early_stopping is not None and self.run.early_stopping.ends(state)

    def _is_best(self, state: TrainerState) -> bool:
        """Return whether ``--save_best`` saves a state; never step 0, which the run did not train."""
        return self.run.arguments.save.save_best and state.step > 0 and self.checkpoints.is_best(state)

    def _sync(self) -> StepSync:
        """Exchange flags between two steps, outside of the per-step all-reduce."""
        self.stepper.heartbeat.enter(StepPhase.SYNC)
        return sync_step(self.stepper.fabric, own_flags(self.checkpoints))

    def _save(self, state: TrainerState, cursors: np.ndarray | None, scheduled: bool, waits: bool) -> Path:
        self.stepper.heartbeat.enter(StepPhase.SAVING)
        self.outputs.flush()
        interim = (self._is_best(state) or bool(state.unlogged)) and not scheduled
        return self.checkpoints.save(state, cursors, waits, interim, scheduled)

    def _save_with_evaluation(self, state: TrainerState, checkpoint: Path) -> Path:
        """Save a state again, with the evaluation that a signal interrupted before ``checkpoint`` was saved."""
        self.stepper.heartbeat.enter(StepPhase.SAVING)
        self.outputs.flush()
        before = read_trainer_json(checkpoint)
        return self.checkpoints.save(state, checkpoint, True, before.interim, before.scheduled)

    def _save_unless_saved(self, state: TrainerState, saved: Path | None, cursors: np.ndarray | None) -> Path | None:
        """Return the checkpoint of a state, complete; save it if there is none yet, except at step 0."""
        self.stepper.heartbeat.enter(StepPhase.SAVING)
        if saved is None and state.step:
            self.outputs.flush()
            saved = self.checkpoints.save(state, cursors, waits=True)
        self.checkpoints.finish()
        return saved

    def _report(self, fault: str, state: TrainerState, checkpoint: Path | None, cursors: np.ndarray | None) -> None:
        """Warn of a step that is left out; with ``--on_nonfinite stop``, save the state before it and end the run."""
        if self.run.arguments.training.on_nonfinite != "stop":
            warn(f"{fault}; the step is left out")
            return
        saved = self._save_unless_saved(state, checkpoint, cursors)
        if saved is None:
            raise RunError(f"{fault}; no step was taken before it, so nothing is saved")
        raise RunError(
            f"{fault}; the step is not taken, and the state before it is {saved}; "
            "--resume true --on_nonfinite skip continues without such steps (docs/reference/errors.md#not-finite)"
        )


@contextmanager
def manual_collection() -> Iterator[None]:
    """Leave garbage collection to the training loop; objects that exist before the block are never scanned again."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def peak_memory_gb(device: torch.device) -> float:
    """Return the peak memory so far, in 1e9 bytes: allocated on the GPU, or resident in this process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


@dataclass(frozen=True)
class ProfiledWindows:
    """The windows of ``source``. Steps ``first`` to ``last`` are traced on this rank.

    chrome://tracing and ui.perfetto.dev open the trace, ``steps-10-12-rank-0.json``. On a GPU there is also
    ``steps-10-12-rank-0-memory.html``. The trace is also written if the run ends within these steps.
    """

    source: WindowSource
    first: int
    last: int
    folder: Path
    rank: int
    on_gpu: bool
    heartbeat: Heartbeat

    def windows(self, after_step: int, last_step: int) -> Iterator[Window]:
        windows = self.source.windows(after_step, last_step)
        for window in windows:
            if self.first <= window.step <= self.last:
                yield from self._trace(window, windows)
            else:
                yield window

    def _trace(self, window: Window, windows: Iterator[Window]) -> Iterator[Window]:
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"steps-{window.step}-{self.last}-rank-{self.rank}"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        if self.on_gpu:
            # without C++ frames: to look up their names takes minutes, in which this rank would give no sign
            torch.cuda.memory._record_memory_history(max_entries=_RECORDED_EVENTS, stacks="python")
        trace = profile(activities=activities, record_shapes=True, profile_memory=True)
        trace.start()
        try:
            yield window
            while window.step < self.last:
                following = next(windows, None)
                if following is None:
                    break
                window = following
                yield window
        finally:
            self.heartbeat.take_time()  # the other ranks may wait while the files are written
            trace.stop()
            trace.export_chrome_trace(str(self.folder / f"{name}.json"))
            if self.on_gpu:
                from torch.cuda._memory_viz import trace_plot

                page = trace_plot(torch.cuda.memory._snapshot())
                (self.folder / f"{name}-memory.html").write_text(page, encoding="utf-8")
                torch.cuda.memory._record_memory_history(enabled=None)
