"""The training loop: window → count → accumulate → clip → check → step → log → evaluate → save."""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning import Fabric

from fabric_train.checkpoint import CheckpointManager, Evaluation, TrainerState, read_trainer_json
from fabric_train.cli.errors import RunError
from fabric_train.data.batch import count_supervised
from fabric_train.data.step_sampler import Window, WindowSource
from fabric_train.distributed.collectives import StepSync, data_ranks, gather_over_data_ranks, sync_step
from fabric_train.distributed.shards import clip_grad_norm
from fabric_train.distributed.signals import Heartbeat, RunStopped, StepPhase, stop_signals
from fabric_train.distributed.xla import seed_xla
from fabric_train.model.flops import ModelFlops
from fabric_train.optim.lr_schedule import Schedules, set_learning_rate
from fabric_train.training.evaluation import EarlyStopping
from fabric_train.training.loss import LocalLoss, WindowLoss, exchange_step, sum_by_piece, sum_by_source, summed_loss
from fabric_train.training.metrics import (
    Metrics,
    StepWork,
    Stopwatch,
    columns_of,
    peak_memory_gb,
    read_columns,
    with_evaluation,
    with_train_losses,
)
from fabric_train.training.nonfinite_guard import StepCheck, StepGuard
from fabric_train.training.profiler import collect

if TYPE_CHECKING:
    from arguments import TrainArguments


@dataclass(frozen=True)
class LoopParts:
    """What the loop works with.

    ``start`` is the checkpoint of the state that the loop starts from, None at step 0. ``evaluate`` is None without
    validation rows; it returns None if a signal interrupts it. ``log`` and ``warn`` show the user metrics and a line.
    ``flush`` waits until all logged metrics are written. ``flops`` is the cost of tokens, ``peak_flops`` the FLOP/s of
    all devices together, None if unknown. ``source_names`` are the sources that the run's losses are told apart by,
    none if there are fewer than two. ``early_stopping`` is None without it. ``sample`` generates and logs the samples
    of a step that was evaluated; it returns False if a signal interrupts it, and is None without prompts.
    """

    fabric: Fabric
    model: Any
    optimizer: Any
    batches: WindowSource
    num_steps: int
    schedules: Schedules
    start: Path | None
    checkpoints: CheckpointManager
    guard: StepGuard
    evaluate: Callable[[], Evaluation | None] | None
    log: Callable[[Metrics], None]
    flush: Callable[[], None]
    warn: Callable[[str], None]
    heartbeat: Heartbeat
    flops: ModelFlops
    peak_flops: float | None
    source_names: tuple[str, ...] = ()
    early_stopping: EarlyStopping | None = None
    sample: Callable[[int], bool] | None = None


@dataclass(frozen=True)
class End:
    """The state at the end of a run, and its checkpoint; None if a signal came before the first step was taken.

    ``stopped_by`` is the number of the signal that stopped the run, else 0.
    """

    state: TrainerState
    checkpoint: Path | None
    stopped_by: int = 0


@dataclass(frozen=True)
class _Step:
    """One optimizer step, taken or left out. ``sync`` has the flags that the ranks exchanged before it.

    ``of_sources`` are the mean losses of the sources, None for one without supervised tokens.
    """

    check: StepCheck
    of_sources: list[float | None]
    learning_rate: float
    work: StepWork
    sync: StepSync


@dataclass(frozen=True)
class _Due:
    """What follows a step. ``keeps``: its checkpoint stays, whatever its validation loss."""

    evaluates: bool
    keeps: bool
    saves: bool
    logs: bool


def train(parts: LoopParts, arguments: "TrainArguments", state: TrainerState) -> End:
    """Train from ``state`` to the last step, or until a signal stops the run.

    A signal stops it at the next micro-batch. The unfinished window is dropped: the model is still that of the step
    before, which is saved, and a resumed run repeats the window.

    Raises:
        RunError: the loss or the gradient is not finite, with ``--on_nonfinite stop``.
    """
    stopwatch = Stopwatch(parts.peak_flops)
    checkpoint, cursors = parts.start, None  # of ``state``
    if metrics := _metrics_to_begin_with(parts, arguments, state):
        state = _evaluate_and_log(parts, state, metrics, evaluates=True)
        if state.unlogged:
            return End(state, checkpoint, _sync(parts).stop_signal)
        if checkpoint and _is_best(parts, arguments, state):
            checkpoint = _save_with_evaluation(parts, state, checkpoint)
        if state.step and _ends_early(parts, state):
            return End(state, checkpoint)
        stopwatch.restart()
    for window in _timed(parts, state.step, stopwatch):
        try:
            step = _take_step(parts, arguments, window)
        except RunStopped:  # before a micro-batch: only gradients have changed since the step before
            saved = _save_unless_saved(parts, state, checkpoint, cursors)
            return End(state, saved, parts.heartbeat.stop_border.signal)
        fault = step.check.fault
        if fault is not None:
            if arguments.training.on_nonfinite == "stop":
                saved = _save_unless_saved(parts, state, checkpoint, cursors)
                raise RunError(_describe_fault(fault, saved))
            parts.guard.leave_out()
            parts.warn(f"{fault}; the step is left out")
        collect(window.step)  # while the device is busy with the optimizer's step
        parts.heartbeat.enter(StepPhase.COMPLETING)
        sync = step.sync
        parts.checkpoints.advance(sync)
        due = _due(parts, arguments, window, stops=bool(sync.stop_signal), has_fault=fault is not None)
        stopwatch.stepped(step.work)
        state = _state_after(state, window, step)
        checkpoint, cursors = None, window.cursors
        if not due.logs:
            continue
        state = _evaluate_and_log(parts, state, _metrics(parts, state, step, stopwatch), due.evaluates)
        if state.unlogged:
            sync = _sync(parts)
        ends_early = due.evaluates and _ends_early(parts, state)
        is_last, is_best = window.step == parts.num_steps or ends_early, _is_best(parts, arguments, state)
        if due.saves or is_last or is_best or sync.stop_signal:
            parts.heartbeat.enter(StepPhase.SAVING)
            parts.flush()
            waits = is_last or bool(sync.stop_signal)
            scheduled = due.keeps or is_last
            interim = (is_best or bool(state.unlogged)) and not scheduled
            checkpoint = parts.checkpoints.save(state, cursors, waits, interim, scheduled)
        if sync.stop_signal and (state.unlogged or not is_last):
            return End(state, checkpoint, sync.stop_signal)
        if ends_early:
            break
        stopwatch.restart()
    parts.heartbeat.enter(StepPhase.SAVING)
    parts.checkpoints.finish()
    return End(state, checkpoint)


def _metrics_to_begin_with(parts: LoopParts, arguments: "TrainArguments", state: TrainerState) -> Metrics | None:
    """Return the metrics to log after an evaluation before the first step, None if there is nothing to evaluate.

    A run that continues after a signal completes the evaluation that it interrupted; a new one begins with one.
    """
    if state.unlogged:
        return read_columns(state.unlogged)
    begins = state.step == 0 and parts.evaluate is not None and arguments.evaluation.eval_at_start
    return Metrics(step=0, epoch=0, num_tokens=0, skipped_steps=0) if begins else None


def _take_step(parts: LoopParts, arguments: "TrainArguments", window: Window) -> _Step:
    """Compute the gradient of a window, clip and check it, and take the step unless the check finds a fault."""
    seed_step(arguments.data.seed, window.step, data_ranks(parts.fabric).rank, parts.fabric.device)
    rate = parts.schedules.rate(window.step)
    set_learning_rate(parts.optimizer, rate)
    reduces_each = arguments.fsdp.gradient_reduction == "micro_batch"
    num_sources = len(parts.source_names)
    loss = backpropagate(parts.fabric, parts.model, window, parts.heartbeat, reduces_each, num_sources)
    parts.heartbeat.enter(StepPhase.OPTIMIZER)
    grad_norm = clip_grad_norm(parts.fabric, parts.model, parts.optimizer, arguments.training.grad_clip)
    lengths = [length for batch in window.batches for length in batch.lengths]
    own_flops = parts.flops.of(lengths)
    report = exchange_step(parts.fabric, loss, grad_norm, sum(lengths), own_flops, _own_flags(parts))
    check = parts.guard.check(window, report.loss, report.grad_norm, report.of_pieces)
    if check.fault is None:
        parts.checkpoints.wait_until_copied()
        parts.optimizer.step()
    parts.optimizer.zero_grad()
    work = StepWork(report.num_tokens, window.num_rows, report.flops)
    return _Step(check, report.of_sources, rate, work, report.sync)


def accumulate(fabric: Fabric, model: Any, window: Window) -> WindowLoss:
    """Add the gradient of the window's mean token loss to the parameters, and return the losses of all ranks.

    See :func:`backpropagate`.
    """
    loss = backpropagate(fabric, model, window)
    return WindowLoss(gather_over_data_ranks(fabric, loss.summed), loss.num_supervised)


def backpropagate(
    fabric: Fabric,
    model: Any,
    window: Window,
    heartbeat: Heartbeat | None = None,
    reduces_each: bool = False,
    num_sources: int = 0,
) -> LocalLoss:
    """Add the gradient of the window's mean token loss to the parameters.

    The mean is over the supervised tokens of the whole window on all ranks, counted before the first backward pass. So
    loss and gradient do not depend on how the window is split into ranks and micro-batches. Ranks average their
    gradients, hence the factor of their number.

    Args:
        fabric: that the model is set up with; all ranks call this together.
        model: in training mode.
        window: this rank's micro-batches of one optimizer step.
        heartbeat: where this rank marks its position for the watchdog.
        reduces_each: reduce gradients over the ranks after every micro-batch, instead of once a window.
        num_sources: number of the sources to tell apart; 0 tells none apart.

    Returns:
        The losses of this rank's micro-batches.

    Raises:
        RunStopped: the ranks have agreed to stop before one of the micro-batches.
    """
    if heartbeat:
        heartbeat.enter(StepPhase.COMPUTING)  # before the first wait for the other ranks
        heartbeat.stop_border.enter(window.step, 0)
    counts = torch.stack([count_supervised(batch.labels) for batch in window.batches])
    num_supervised = gather_over_data_ranks(fabric, counts)
    scale = data_ranks(fabric).size / num_supervised.sum().clamp(min=1).double()
    losses, by_piece, last = [], [], len(window.batches) - 1
    for index, batch in enumerate(window.batches):
        if heartbeat and index:
            heartbeat.enter(StepPhase.COMPUTING, index)
            heartbeat.stop_border.enter(window.step, index)
        # every backward pass is inside the context: FSDP2's leaves synchronization off for those after it
        with fabric.no_backward_sync(model, enabled=index < last and not reduces_each):
            there = batch.to(fabric.device)
            loss = summed_loss(model, there.input_ids, there.labels, there.documents, there.targets, scale)
            fabric.backward(loss.total * scale)
        losses.append(loss.total.detach())
        if batch.pieces is not None:
            by_piece.append(sum_by_piece(loss.of_tokens, batch))
    summed = torch.stack(losses)
    of_pieces = torch.cat(by_piece) if by_piece else summed[:0]
    of_sources, tokens_of_sources = summed.new_zeros(num_sources), torch.zeros(num_sources).double()
    if by_piece and num_sources:
        pieces = [batch.pieces for batch in window.batches if batch.pieces is not None]
        sources = torch.cat([part.sources for part in pieces])
        of_sources = sum_by_source(of_pieces, sources, num_sources).to(fabric.device)
        tokens_of_sources = torch.stack([part.count_by_source(num_sources)[0] for part in pieces]).sum(dim=0)
    return LocalLoss(summed, num_supervised, of_pieces, of_sources, tokens_of_sources)


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed the random streams (dropout) from seed, step and rank, so that a resumed run draws the same numbers."""
    number = int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
    torch.manual_seed(number)
    seed_xla(number, device)


def _ends_early(parts: LoopParts, state: TrainerState) -> bool:
    """Return whether early stopping ends the run after the state's step."""
    return parts.early_stopping is not None and parts.early_stopping.ends(state)


def _is_best(parts: LoopParts, arguments: "TrainArguments", state: TrainerState) -> bool:
    """Return whether ``--save_best`` saves a state; never that of step 0, which the run did not train."""
    return arguments.save.save_best and state.step > 0 and parts.checkpoints.is_best(state)


def _save_with_evaluation(parts: LoopParts, state: TrainerState, checkpoint: Path) -> Path:
    """Save a state again, with the evaluation that a signal interrupted before ``checkpoint`` was saved."""
    parts.heartbeat.enter(StepPhase.SAVING)
    parts.flush()
    before = read_trainer_json(checkpoint)
    return parts.checkpoints.save(state, checkpoint, True, before.interim, before.scheduled)


def _own_flags(parts: LoopParts) -> StepSync:
    """Return this rank's flags for the per-step all-reduce."""
    saves = parts.checkpoints
    return StepSync(stop_signals.received, is_saving=saves.is_writing, save_failed=saves.has_failed)


def _sync(parts: LoopParts) -> StepSync:
    """Exchange flags between two steps, outside of the per-step all-reduce."""
    parts.heartbeat.enter(StepPhase.SYNC)
    return sync_step(parts.fabric, _own_flags(parts))


def _due(parts: LoopParts, arguments: "TrainArguments", window: Window, *, stops: bool, has_fault: bool) -> _Due:
    """Return what follows a window's step."""
    is_last = window.step == parts.num_steps
    evaluates = is_last or window.ends_epoch or window.step % arguments.evaluation.eval_step_interval == 0
    keeps = is_last or window.ends_epoch or window.step % arguments.save.save_step_interval == 0
    saves = keeps or stops
    logs = evaluates or saves or has_fault or window.step % arguments.logging.log_step_interval == 0
    return _Due(evaluates, keeps, saves, logs)


def _state_after(state: TrainerState, window: Window, step: _Step) -> TrainerState:
    """Return the state after a step that was taken or left out."""
    has_fault = step.check.fault is not None
    return replace(
        state,
        step=window.step,
        epoch=window.epoch,
        num_tokens=state.num_tokens + step.work.num_tokens,
        num_samples=state.num_samples + step.work.num_samples,
        skipped_steps=state.skipped_steps + has_fault,
        train_loss=None if has_fault else step.check.loss,
        rows_hash=window.rows_hash,
        rows_of_sources=_rows_of_sources(state, window),
        val_loss=None,
        evaluation=None,
    )


def _rows_of_sources(state: TrainerState, window: Window) -> list[int] | None:
    """Return the rows of each source after a window; None without a mixture."""
    if window.rows_of_sources is None:
        return None
    before = state.rows_of_sources or [0] * len(window.rows_of_sources)
    return [rows + more for rows, more in zip(before, window.rows_of_sources, strict=True)]


def _metrics(parts: LoopParts, state: TrainerState, step: _Step, stopwatch: Stopwatch) -> Metrics:
    metrics = Metrics(
        step=state.step,
        epoch=state.epoch,
        train_loss=step.check.loss,
        learning_rate=step.learning_rate,
        grad_norm=step.check.grad_norm,
        skipped_steps=state.skipped_steps,
        rows_hash=state.rows_hash,
        num_tokens=state.num_tokens,
        peak_memory_gb=peak_memory_gb(parts.fabric.device),
        **stopwatch.read(),
    )
    return with_train_losses(metrics, dict(zip(parts.source_names, step.of_sources, strict=True)))


def _evaluate_and_log(parts: LoopParts, state: TrainerState, metrics: Metrics, evaluates: bool) -> TrainerState:
    """Evaluate if it is due, and log the step.

    If a signal interrupts the evaluation, return a state with the unlogged metrics: a resumed run does both.
    """
    if evaluates and parts.evaluate:
        evaluation = parts.evaluate()
        if evaluation is None or (parts.sample and not parts.sample(state.step)):
            return replace(state, unlogged=columns_of(metrics))
        evaluation = replace(evaluation, step=state.step)
        first, progress = state.first_evaluation or evaluation, state.progress
        if not evaluation.is_comparable(first):
            first, progress = replace(evaluation, follows_other_rows=True), None
        progress = parts.early_stopping.after(progress, evaluation) if parts.early_stopping else None
        state = replace(
            state,
            val_loss=evaluation.whole.loss,
            evaluation=evaluation,
            first_evaluation=first,
            progress=progress,
        )
        metrics = with_evaluation(metrics, evaluation, parts.source_names)
    parts.log(metrics)
    return replace(state, unlogged=None)


def _save_unless_saved(
    parts: LoopParts, state: TrainerState, checkpoint: Path | None, cursors: np.ndarray | None
) -> Path | None:
    """Return the checkpoint of a state, complete; save it if there is none yet. At step 0 there is nothing to save."""
    parts.heartbeat.enter(StepPhase.SAVING)
    if checkpoint is None and state.step:
        parts.flush()
        checkpoint = parts.checkpoints.save(state, cursors, waits=True)
    parts.checkpoints.finish()
    return checkpoint


def _describe_fault(fault: str, saved: Path | None) -> str:
    if saved is None:
        return f"{fault}; no step was taken before it, so nothing is saved"
    return (
        f"{fault}; the step is not taken, and the state before it is {saved}; "
        "--resume true --on_nonfinite skip continues without such steps"
    )


def _timed(parts: LoopParts, after_step: int, stopwatch: Stopwatch) -> Iterator[Window]:
    """Yield the remaining windows and measure the time spent waiting for them."""
    iterator = parts.batches.windows(after_step, parts.num_steps)
    for step in itertools.count(after_step + 1):
        parts.heartbeat.enter(StepPhase.DATA, step=step)
        started = time.perf_counter()
        window = next(iterator, None)
        if window is None:
            return
        stopwatch.waited(time.perf_counter() - started)
        yield window
