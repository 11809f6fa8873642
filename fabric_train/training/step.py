"""One optimizer step: count, accumulate the gradient of a window, clip, check, update the parameters.

The loss of a window is the mean over everything that its objective counts (the supervised tokens) on all ranks. It is
counted before the first backward pass. So loss and gradient do not depend on how the window is split.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from lightning import Fabric
from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer

from fabric_train.checkpoint.manager import CheckpointManager
from fabric_train.data.step_sampler import Window
from fabric_train.distributed.gradients import average_replicated, clip_grad_norm
from fabric_train.distributed.ranks import StepSync, data_ranks, gather_over_data_ranks, sum_over_data_ranks
from fabric_train.distributed.signals import Heartbeat, StepPhase, stop_signals
from fabric_train.distributed.xla import seed_xla
from fabric_train.model.context_parallel import place_batch
from fabric_train.model.flops import ModelFlops
from fabric_train.optim.learning_rate import Schedules, set_learning_rate
from fabric_train.training.objective import CrossEntropy, Objective, WindowLoss, prepare_window
from fabric_train.training.own_time import OwnTime
from fabric_train.training.source_losses import SourceLossCollector
from fabric_train.training.step_exchange import LocalLoss, RankReport, StepReport, exchange_step
from fabric_train.training.step_guard import StepCheck, StepGuard

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments


@dataclass(frozen=True)
class TakenStep:
    """An optimizer step that was taken, or left out because of a fault or because the window has no targets."""

    check: StepCheck
    report: StepReport
    learning_rate: float


@dataclass(frozen=True)
class Stepper:
    """Takes the steps of a run, on all ranks together."""

    fabric: Fabric
    model: _FabricModule
    optimizer: _FabricOptimizer
    objective: Objective
    arguments: "TrainArguments"
    schedules: Schedules
    guard: StepGuard
    checkpoints: CheckpointManager
    heartbeat: Heartbeat
    flops: ModelFlops
    num_sources: int
    """The number of sources whose losses are logged separately; 0 for none."""
    own_time: OwnTime

    def take_step(self, window: Window) -> TakenStep:
        """Compute the gradient of a window, clip and check it, and take the step.

        The optimizer does not step if the check finds a fault, or if the objective counts nothing in the window: the
        gradient is zero then, and momentum and weight decay alone would move the weights.

        Raises:
            RunStopped: The ranks have agreed to stop before one of the micro-batches.
        """
        fabric = self.fabric
        arguments = self.arguments

        # Random numbers and learning rate are functions of the step, so that a resumed run repeats them.
        seed_step(arguments.data.seed, window.step, data_ranks(fabric).gradient_index, fabric.device)
        learning_rate = self.schedules.rate(window.step)
        set_learning_rate(self.optimizer.optimizer, learning_rate)

        # Forward and backward passes over all micro-batches.
        loss = backpropagate(
            fabric,
            self.model,
            window,
            self.objective,
            heartbeat=self.heartbeat,
            reduces_each_micro_batch=arguments.fsdp.gradient_reduction == "micro_batch",
            num_sources=self.num_sources,
            own_time=self.own_time,
        )

        # Clip the gradient; the norm stays on the device.
        self.heartbeat.enter(StepPhase.OPTIMIZER)
        grad_norm = clip_grad_norm(fabric, self.model, self.optimizer, arguments.training.grad_clip)

        # Exchange losses, counts and flags between the ranks; the host waits for the device here, and only here.
        rank_report = RankReport(
            loss=loss,
            num_tokens=sum(sum(batch.lengths) for batch in window.batches),
            flops=self.flops.count(loss.document_lengths),
            own_seconds=self.own_time.seconds,
            sync=read_flags(self.checkpoints),
        )
        report = exchange_step(fabric, rank_report, grad_norm)
        self.own_time.restart()

        # Check loss and gradient norm.
        if report.count == 0:
            check = StepCheck(loss=None, grad_norm=None, fault=None)
        else:
            gather = partial(gather_losses, fabric, loss)
            check = self.guard.check(window, report.loss, report.grad_norm, report.piece_losses, gather)

        # Update the parameters, after a background save has copied them.
        if check.is_taken:
            started = time.monotonic()
            self.checkpoints.wait_until_copied()
            self.heartbeat.count_as(StepPhase.SAVING, time.monotonic() - started)
            self.optimizer.step()
        else:
            self.guard.leave_out()
        self.optimizer.zero_grad()
        return TakenStep(check, report, learning_rate)


def backpropagate(
    fabric: Fabric,
    model: _FabricModule,
    window: Window,
    objective: Objective,
    *,
    heartbeat: Heartbeat | None = None,
    reduces_each_micro_batch: bool = False,
    num_sources: int = 0,
    own_time: OwnTime | None = None,
) -> LocalLoss:
    """Add the gradient of the window's mean loss to the parameters.

    All ranks call this together, each with its own micro-batches of the window.

    Args:
        fabric: The run's Fabric, whose ranks share the window.
        model: The model that ``setup_model`` returned.
        window: The rows of the step.
        objective: The loss.
        heartbeat: The record of this rank's position, which also says where the ranks stop after a signal.
        reduces_each_micro_batch: Average the gradients over the ranks after every micro-batch, instead of once.
        num_sources: Number of sources whose losses are summed separately; 0 for none.
        own_time: The clock for this rank's own time.

    Raises:
        RunStopped: The ranks have agreed to stop before one of the micro-batches.
    """
    if own_time is None:
        own_time = OwnTime(fabric.device)  # nobody reads it
    if heartbeat:
        heartbeat.enter(StepPhase.COMPUTING)  # before the first wait for the other ranks
        heartbeat.stop_border.enter(window.step, 0)

    # What the objective needs of the whole window before the loss of any batch; most need nothing.
    def is_interrupted(index: int) -> bool:
        if heartbeat and index > 0:
            heartbeat.enter(StepPhase.COMPUTING, index)
        return False

    batches = window.batches
    prepared_batches = prepare_window(objective, fabric, model, batches, is_interrupted)
    assert prepared_batches is not None  # nothing interrupts it
    if prepared_batches is not batches:
        batches = list(prepared_batches)
        if heartbeat:
            heartbeat.enter(StepPhase.COMPUTING)

    # Count before the first backward pass: each micro-batch is then scaled by its share of the window.
    counts = torch.stack([objective.count(batch) for batch in batches])  # int64 [micro-batches]
    own_time.mark()
    window_count = sum_over_data_ranks(fabric, counts.sum())
    own_time.mark()

    # The ranks average their gradients. The factor of their number turns the average into the sum.
    scale = data_ranks(fabric).num_gradients / window_count.clamp(min=1).double()

    # A forward and a backward pass for each micro-batch, and the sums of what they return.
    losses = []
    metrics = torch.zeros(len(objective.metric_names), dtype=torch.float64, device=fabric.device)
    source_losses = SourceLossCollector(objective, num_sources, fabric.device)
    last_index = len(batches) - 1
    first_averaging_index = 0 if reduces_each_micro_batch else last_index
    for index, batch in enumerate(batches):
        if heartbeat and index > 0:
            heartbeat.enter(StepPhase.COMPUTING, index)
            heartbeat.stop_border.enter(window.step, index)
        # Every backward pass is inside the context, because FSDP2's leaves synchronization off for the passes after it.
        skips_averaging = index < first_averaging_index
        with fabric.no_backward_sync(model, enabled=skips_averaging):
            loss = objective.loss(model, place_batch(fabric, batch), scale)
            if index == first_averaging_index:
                own_time.mark()  # from here on the ranks wait for each other
            fabric.backward(loss.total * scale)
        losses.append(loss.total.detach())
        if loss.metrics is not None:
            metrics += loss.metrics
        source_losses.add(loss, batch)
    average_replicated(model)
    document_lengths: list[int] = []
    for batch in batches:
        document_lengths.extend(batch.lengths)
    return LocalLoss(
        summed=torch.stack(losses),
        counts=counts,
        window_count=window_count,
        metrics=metrics,
        sources=source_losses.sum(),
        document_lengths=document_lengths,
    )


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed the random streams (dropout) from seed, step and rank, so that a resumed run draws the same numbers."""
    step_seed = int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
    # not torch.manual_seed, which takes 3 ms: it formats a stack trace for each kind of device that is not in use
    torch.default_generator.manual_seed(step_seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(step_seed)
    if device.type == "xla":
        seed_xla(step_seed)


def read_flags(checkpoints: CheckpointManager) -> StepSync:
    """Return this rank's flags for the per-step all-reduce."""
    return StepSync(stop_signals.received, is_saving=checkpoints.is_writing, save_failed=checkpoints.has_failed)


def accumulate(fabric: Fabric, model: _FabricModule, window: Window, objective: Objective | None = None) -> WindowLoss:
    """Call :func:`backpropagate`, by default with cross entropy, and return the losses of all ranks."""
    if objective is None:
        objective = CrossEntropy()
    local_loss = backpropagate(fabric, model, window, objective)
    return gather_losses(fabric, local_loss)


def gather_losses(fabric: Fabric, loss: LocalLoss) -> WindowLoss:
    """Return the losses of all micro-batches of all ranks.

    Their number grows with the ranks, so a step calls this only if its loss is not finite or a spike.
    """
    summed = gather_over_data_ranks(fabric, loss.summed)
    counts = gather_over_data_ranks(fabric, loss.counts)
    return WindowLoss(summed, counts)
