"""The training loop: window → count → accumulate → clip → judge → step → log → evaluate → save."""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning import Fabric

from fabric_train.checkpoint import Checkpoints, TrainerState
from fabric_train.cli.errors import RunError
from fabric_train.data.batch import count_supervised
from fabric_train.data.step_sampler import Window, WindowSource
from fabric_train.distributed.collectives import (
    StepSync,
    data_ranks,
    gather_over_data_ranks,
    start_step_sync,
    sum_over_data_ranks,
    sync_step,
)
from fabric_train.distributed.grad_norm import clip
from fabric_train.distributed.heartbeat import Phase, Progress
from fabric_train.distributed.signals import stop_signals
from fabric_train.model.flops import ModelFlops
from fabric_train.optim.lr_schedule import learning_rate, set_learning_rate
from fabric_train.training.evaluation import Evaluation
from fabric_train.training.gc_control import collect
from fabric_train.training.loss import WindowLoss, summed_loss
from fabric_train.training.metrics import Metrics, StepWork, Stopwatch, peak_memory_gb
from fabric_train.training.nonfinite_guard import StepCheck, StepGuard

if TYPE_CHECKING:
    from arguments import TrainArguments


@dataclass(frozen=True)
class LoopParts:
    """What the loop drives.

    ``start`` is the checkpoint that the state it begins with was read from, None at step 0; ``evaluate`` is None where
    there is no validation, and returns None where a signal has cut it short; ``log`` and ``warn`` tell the user, and
    ``flush`` waits until what was logged is written. ``flops`` is what tokens cost the model, ``peak_flops`` what all
    devices together could do in a second, None where it is not known.
    """

    fabric: Fabric
    model: Any
    optimizer: Any
    batches: WindowSource
    num_steps: int
    start: Path | None
    checkpoints: Checkpoints
    guard: StepGuard
    evaluate: Callable[[], Evaluation | None] | None
    log: Callable[[Metrics], None]
    flush: Callable[[], None]
    warn: Callable[[str], None]
    progress: Progress
    flops: ModelFlops
    peak_flops: float | None


@dataclass(frozen=True)
class End:
    """Where a run stands at its end, and the number of the signal that has stopped it, 0 where none has."""

    state: TrainerState
    stopped_by: int = 0


def train(run: LoopParts, arguments: "TrainArguments", state: TrainerState) -> End:
    """Train from ``state`` to the last step, or to the border at which a signal stops the run.

    Raises:
        RunError: at a loss or gradient that is not finite, with ``--on_nonfinite stop``.
    """
    stopwatch = Stopwatch(run.peak_flops)
    reduces_each = arguments.fsdp.gradient_reduction == "micro_batch"
    checkpoint, cursors = run.start, None  # of ``state``
    if state.unlogged:
        state = _conclude(run, state, Metrics(**state.unlogged), evaluates=True)
        if state.unlogged:
            return End(state, _border(run).stops)
    for window in _timed(run, state.step, stopwatch):
        seed_step(arguments.data.seed, window.step, data_ranks(run.fabric).rank)
        rate = learning_rate(window.step, run.num_steps, arguments.training)
        set_learning_rate(run.optimizer, rate)
        loss = accumulate(run.fabric, run.model, window, run.progress, reduces_each)
        tokens_and_flops = _tokens_and_flops(run, window)
        run.progress.at(Phase.OPTIMIZER)
        grad_norm = clip(run.fabric, run.model, run.optimizer, arguments.training.grad_clip)
        answer = start_step_sync(run.fabric, _wishes(run))
        verdict = run.guard.judge(window, loss, grad_norm)  # only here the loop waits for the device
        num_tokens, flops = tokens_and_flops.tolist()
        work = StepWork(int(num_tokens), window.num_rows, flops)
        if verdict.fault is None:
            run.checkpoints.wait_until_copied()
            run.optimizer.step()
        run.optimizer.zero_grad()
        if verdict.fault is not None:
            if arguments.training.on_nonfinite == "stop":
                raise _stopped(run, verdict.fault, state, checkpoint, cursors)
            run.guard.leave_out()
            run.warn(f"{verdict.fault}; the step is left out")
        collect(window.step)  # while the device is busy with the optimizer's step
        run.progress.at(Phase.COMPLETING)
        border = answer()
        run.checkpoints.at_border(border)

        is_last = window.step == run.num_steps
        evaluates = is_last or window.ends_epoch or window.step % arguments.evaluation.eval_step_interval == 0
        interval = arguments.save.save_step_interval
        saves = is_last or window.ends_epoch or window.step % interval == 0 or bool(border.stops)
        logs = evaluates or saves or bool(verdict.fault) or window.step % arguments.logging.log_step_interval == 0
        stopwatch.stepped(work)
        state = _after(state, window, verdict, work)
        checkpoint, cursors = None, window.cursors
        if not logs:
            continue
        metrics = Metrics(
            step=state.step,
            epoch=state.epoch,
            train_loss=verdict.loss,
            learning_rate=rate,
            grad_norm=verdict.grad_norm,
            skipped_steps=state.skipped_steps,
            num_tokens=state.num_tokens,
            peak_memory_gb=peak_memory_gb(run.fabric.device),
            **stopwatch.read(),
        )
        state = _conclude(run, state, metrics, evaluates)
        if state.unlogged:
            border = _border(run)
        if saves or border.stops:
            run.progress.at(Phase.SAVING)
            run.flush()
            checkpoint = run.checkpoints.save(state, cursors, waits=is_last or bool(border.stops))
        if border.stops and (state.unlogged or not is_last):
            return End(state, border.stops)
        stopwatch.restart()
    run.progress.at(Phase.SAVING)
    run.checkpoints.finish()
    return End(state)


def _wishes(run: LoopParts) -> StepSync:
    """What this rank has to tell the others between two steps."""
    saves = run.checkpoints
    return StepSync(stop_signals.received, saving=saves.is_writing, failed=saves.has_failed)


def _tokens_and_flops(run: LoopParts, window: Window) -> torch.Tensor:
    """Return the window's tokens without padding, and what they cost the model, over all ranks: fp64 [2]."""
    lengths = [length for batch in window.batches for length in batch.lengths]
    own = torch.tensor([sum(lengths), run.flops.of(lengths)], dtype=torch.float64)
    return sum_over_data_ranks(run.fabric, own)


def _border(run: LoopParts) -> StepSync:
    """Agree with the other ranks on what is to be done between two steps."""
    run.progress.at(Phase.BORDER)
    return sync_step(run.fabric, _wishes(run))


def _after(state: TrainerState, window: Window, verdict: StepCheck, work: StepWork) -> TrainerState:
    """Where the run stands once a window's step was taken, or left out."""
    return replace(
        state,
        step=window.step,
        epoch=window.epoch,
        num_tokens=state.num_tokens + work.num_tokens,
        num_samples=state.num_samples + work.num_samples,
        skipped_steps=state.skipped_steps + bool(verdict.fault),
        train_loss=None if verdict.fault else verdict.loss,
        rows_hash=window.rows_hash,
        val_loss=None,
    )


def _conclude(run: LoopParts, state: TrainerState, metrics: Metrics, evaluates: bool) -> TrainerState:
    """Evaluate where it is due and log the step; where a signal comes before that is done, leave both to whoever goes
    on from the checkpoint.
    """
    evaluation = run.evaluate() if evaluates and run.evaluate else None
    if evaluates and run.evaluate and evaluation is None:
        return replace(state, unlogged=asdict(metrics))
    if evaluation:
        state = replace(state, val_loss=evaluation.loss)
        metrics = replace(metrics, val_loss=evaluation.loss, perplexity=evaluation.perplexity)
    run.log(metrics)
    return replace(state, unlogged=None)


def _stopped(
    run: LoopParts, fault: str, state: TrainerState, checkpoint: Path | None, cursors: np.ndarray | None
) -> RunError:
    """Return what ends the run, after the state before the fault has been saved; at step 0 there is none."""
    run.progress.at(Phase.SAVING)
    if state.step == 0:
        return RunError(f"{fault}; no step was taken before it, so nothing is saved")
    if checkpoint is None:
        run.flush()
        checkpoint = run.checkpoints.save(state, cursors, waits=True)
    run.checkpoints.finish()
    return RunError(
        f"{fault}; the step is not taken, and the state before it is {checkpoint}; "
        "--resume true --on_nonfinite skip goes on without such steps"
    )


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed the random streams (dropout) from seed, step and rank, so that a resumed run draws what it would have
    drawn.
    """
    torch.manual_seed(int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0]))


def accumulate(
    fabric: Fabric, model: Any, window: Window, progress: Progress | None = None, reduces_each: bool = False
) -> WindowLoss:
    """Add the gradient of the window's mean token loss to the parameters and return what its micro-batches cost.

    The mean is over the supervised tokens of the whole window on all ranks, counted before the first backward pass:
    however the window is cut into ranks and micro-batches, loss and gradient are the same. Ranks average their
    gradients, hence the factor of their number; once a window, or with ``reduces_each`` after every micro-batch.
    """
    if progress:
        progress.at(Phase.COMPUTING)  # before the first word from the other ranks is waited for
    counts = torch.stack([count_supervised(batch.labels) for batch in window.batches])
    num_supervised = gather_over_data_ranks(fabric, counts)
    scale = data_ranks(fabric).size / num_supervised.sum().clamp(min=1).double()
    losses, last = [], len(window.batches) - 1
    for index, batch in enumerate(window.batches):
        if progress and index:
            progress.at(Phase.COMPUTING, index)
        # every backward pass stands inside the context: FSDP2's would leave the synchronization off for those outside
        # it
        with fabric.no_backward_sync(model, enabled=index < last and not reduces_each):
            batch = batch.to(fabric.device)
            loss = summed_loss(model, batch.input_ids, batch.labels, batch.documents, batch.targets, scale)
            fabric.backward(loss * scale)
        losses.append(loss.detach())
    return WindowLoss(gather_over_data_ranks(fabric, torch.stack(losses)), num_supervised)


def _timed(run: LoopParts, after_step: int, stopwatch: Stopwatch) -> Iterator[Window]:
    """Yield the windows that are left and count the time spent waiting for them."""
    iterator = run.batches.windows(after_step, run.num_steps)
    for step in itertools.count(after_step + 1):
        run.progress.at(Phase.DATA, step=step)
        started = time.perf_counter()
        window = next(iterator, None)
        if window is None:
            return
        stopwatch.waited(time.perf_counter() - started)
        yield window
