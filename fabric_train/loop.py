"""The training loop: window → count → accumulate → clip → step → log → evaluate → save."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning import Fabric

from fabric_train.batches import Window, WindowSource
from fabric_train.checkpoint import Checkpoints, TrainerState
from fabric_train.loss import count_supervised, sum_over_ranks, summed_loss
from fabric_train.optimizer import learning_rate, set_learning_rate
from fabric_train.telemetry import Metrics, Stopwatch, peak_memory_gb
from fabric_train.validation import Evaluation

if TYPE_CHECKING:
    from arguments import TrainArguments


@dataclass(frozen=True)
class Run:
    """What the loop drives; ``evaluate`` is None where there is no validation; ``log`` and ``saved`` tell the user, and
    ``flush`` waits until what was logged is written.
    """

    fabric: Fabric
    model: Any
    optimizer: Any
    batches: WindowSource
    num_steps: int
    checkpoints: Checkpoints
    evaluate: Callable[[], Evaluation] | None
    log: Callable[[Metrics], None]
    flush: Callable[[], None]
    saved: Callable[[Path], None]


def train(run: Run, arguments: "TrainArguments", state: TrainerState) -> TrainerState:
    """Train from ``state`` to the last step and return where the run then stands."""
    stopwatch = Stopwatch()
    for window in _timed(run.batches.windows(state.step, run.num_steps), stopwatch):
        seed_step(arguments.data.seed, window.step, run.fabric.global_rank)
        rate = learning_rate(window.step, run.num_steps, arguments.training)
        set_learning_rate(run.optimizer, rate)
        loss = accumulate(run.fabric, run.model, window)
        grad_norm = clip(run.fabric, run.model, run.optimizer, arguments.training.grad_clip)
        run.optimizer.step()
        run.optimizer.zero_grad()

        is_last = window.step == run.num_steps
        evaluates = is_last or window.ends_epoch or window.step % arguments.evaluation.eval_step_interval == 0
        saves = is_last or window.ends_epoch or window.step % arguments.save.save_step_interval == 0
        logs = evaluates or saves or window.step % arguments.logging.log_step_interval == 0
        stopwatch.stepped(window.num_tokens)
        state = replace(
            state,
            step=window.step,
            epoch=window.epoch,
            num_tokens=state.num_tokens + window.num_tokens,
            num_samples=state.num_samples + window.num_rows,
            train_loss=None,
            val_loss=None,
        )
        if not logs:
            continue
        state = replace(state, train_loss=loss.item())  # the one place where the loop waits for the device
        metrics = Metrics(
            step=state.step,
            epoch=state.epoch,
            train_loss=state.train_loss,
            learning_rate=rate,
            grad_norm=float(grad_norm),
            num_tokens=state.num_tokens,
            peak_memory_gb=peak_memory_gb(run.fabric.device),
            **stopwatch.read(),
        )
        if evaluates and run.evaluate:
            evaluation = run.evaluate()
            state = replace(state, val_loss=evaluation.loss)
            metrics = replace(metrics, val_loss=evaluation.loss, perplexity=evaluation.perplexity)
        run.log(metrics)
        if saves:
            run.flush()
            run.saved(run.checkpoints.save(state, window.cursors))
        stopwatch.restart()
    return state


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed the random streams (dropout) from seed, step and rank, so that a resumed run draws what it would have
    drawn.
    """
    torch.manual_seed(int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0]))


def accumulate(fabric: Fabric, model: Any, window: Window) -> torch.Tensor:
    """Add the gradient of the window's mean token loss to the parameters and return that loss.

    The mean is over the supervised tokens of the whole window on all ranks, counted before the first backward pass:
    however the window is cut into ranks and micro-batches, loss and gradient are the same. Ranks average their
    gradients, hence the factor ``world_size``.

    Returns:
        The loss, a 0-dim fp32 tensor equal on all ranks.
    """
    num_supervised = torch.stack([count_supervised(batch.labels) for batch in window.batches]).sum()
    num_supervised = sum_over_ranks(fabric, num_supervised).clamp(min=1)
    total = torch.zeros((), device=fabric.device)
    for index, batch in enumerate(window.batches):
        # every backward pass stands inside the context: FSDP2's would leave the synchronization off for those outside
        # it
        with fabric.no_backward_sync(model, enabled=index < len(window.batches) - 1):
            batch = batch.to(fabric.device)
            loss = summed_loss(model, batch.input_ids, batch.labels, batch.documents)
            fabric.backward(loss * fabric.world_size / num_supervised)
        total += loss.detach()
    return sum_over_ranks(fabric, total) / num_supervised


def clip(fabric: Fabric, model: Any, optimizer: Any, largest: float) -> torch.Tensor:
    """Scale the gradient to a global norm of at most ``largest`` (0: leave it) and return the norm before, a 0-dim
    tensor.
    """
    norm = fabric.clip_gradients(model, optimizer, max_norm=largest or torch.inf, error_if_nonfinite=False)
    assert norm is not None
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _timed(windows: Iterable[Window], stopwatch: Stopwatch) -> Iterator[Window]:
    """Pass the windows on and count the time spent waiting for them."""
    iterator = iter(windows)
    while True:
        started = time.perf_counter()
        window = next(iterator, None)
        if window is None:
            return
        stopwatch.waited(time.perf_counter() - started)
        yield window
