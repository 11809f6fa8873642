"""One optimizer step: count, accumulate the gradient of a window, clip, check, update the parameters.

The loss of a window is the mean over all that its objective counts (the supervised tokens) on all ranks, counted before
the first backward pass. So loss and gradient do not depend on how the window is split into ranks and micro-batches.
"""

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning import Fabric

from fabric_train.checkpoint import CheckpointManager
from fabric_train.data.step_sampler import Window
from fabric_train.distributed.collectives import StepSync, data_ranks, gather_over_data_ranks, gather_over_ranks
from fabric_train.distributed.devices import to_device_async
from fabric_train.distributed.shards import clip_grad_norm
from fabric_train.distributed.signals import Heartbeat, StepPhase, stop_signals
from fabric_train.distributed.xla import seed_xla
from fabric_train.model.flops import ModelFlops
from fabric_train.optim.lr_schedule import Schedules, set_learning_rate
from fabric_train.training.nonfinite_guard import StepCheck, StepGuard
from fabric_train.training.objective import CrossEntropy, Objective, WindowLoss, sum_by_piece, sum_by_source

if TYPE_CHECKING:
    from arguments import TrainArguments


@dataclass(frozen=True)
class TakenStep:
    """One optimizer step, taken or left out. ``sync`` has the flags that the ranks exchanged before it.

    ``of_sources`` are the mean losses of the sources, None for one without supervised tokens; ``metrics`` are those of
    the objective. ``num_tokens``, without padding, ``num_rows`` and ``flops`` are the work of all ranks.
    """

    check: StepCheck
    of_sources: list[float | None]
    metrics: dict[str, float]
    learning_rate: float
    num_tokens: int
    num_rows: int
    flops: float
    sync: StepSync


@dataclass(frozen=True)
class Stepper:
    """What takes the steps of a run. All ranks call it together.

    ``num_sources`` are told apart by their losses, none if 0. ``flops`` is the cost of tokens.
    """

    fabric: Fabric
    model: Any
    optimizer: Any
    objective: Objective
    arguments: "TrainArguments"
    schedules: Schedules
    guard: StepGuard
    checkpoints: CheckpointManager
    heartbeat: Heartbeat
    flops: ModelFlops
    num_sources: int

    def take_step(self, window: Window) -> TakenStep:
        """Compute the gradient of a window, clip and check it, and take the step unless the check finds a fault.

        Raises:
            RunStopped: the ranks have agreed to stop before one of the micro-batches.
        """
        fabric, given = self.fabric, self.arguments
        seed_step(given.data.seed, window.step, data_ranks(fabric).rank, fabric.device)
        rate = self.schedules.rate(window.step)
        set_learning_rate(self.optimizer, rate)
        reduces_each = given.fsdp.gradient_reduction == "micro_batch"
        loss = backpropagate(fabric, self.model, window, self.objective, self.heartbeat, reduces_each, self.num_sources)
        self.heartbeat.enter(StepPhase.OPTIMIZER)
        grad_norm = clip_grad_norm(fabric, self.model, self.optimizer, given.training.grad_clip)
        lengths = [length for batch in window.batches for length in batch.lengths]
        work = (sum(lengths), self.flops.of(lengths))
        report = exchange_step(fabric, loss, grad_norm, *work, own_flags(self.checkpoints))
        check = self.guard.check(window, report.loss, report.grad_norm, report.of_pieces)
        if check.fault is None:
            self.checkpoints.wait_until_copied()
            self.optimizer.step()
        else:
            self.guard.leave_out()
        self.optimizer.zero_grad()
        return TakenStep(
            check=check,
            of_sources=report.of_sources,
            metrics=dict(zip(self.objective.metric_names, report.metrics, strict=True)),
            learning_rate=rate,
            num_tokens=report.num_tokens,
            num_rows=window.num_rows,
            flops=report.flops,
            sync=report.sync,
        )


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed the random streams (dropout) from seed, step and rank, so that a resumed run draws the same numbers."""
    number = int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
    torch.manual_seed(number)
    seed_xla(number, device)


def own_flags(checkpoints: CheckpointManager) -> StepSync:
    """Return this rank's flags for the per-step all-reduce."""
    return StepSync(stop_signals.received, is_saving=checkpoints.is_writing, save_failed=checkpoints.has_failed)


@dataclass(frozen=True)
class LocalLoss:
    """The losses of this rank's micro-batches of a window.

    ``summed``, fp64, is [micro-batches]; ``counts``, int64, is [data ranks, micro-batches] and the same on all ranks.
    ``metrics``, fp64, sums those of the objective. ``of_pieces``, fp64 [P], are the losses of the pieces of all
    micro-batches, on the CPU with XLA. ``of_sources``, fp64 [sources], sums them by source, and ``tokens_of_sources``,
    fp64 [sources] on the CPU, counts their supervised tokens; both are empty if sources are not told apart.
    """

    summed: torch.Tensor
    counts: torch.Tensor
    metrics: torch.Tensor
    of_pieces: torch.Tensor
    of_sources: torch.Tensor
    tokens_of_sources: torch.Tensor


def accumulate(fabric: Fabric, model: Any, window: Window, objective: Objective | None = None) -> WindowLoss:
    """Add the gradient of the window's mean loss to the parameters, and return the losses of all ranks.

    See :func:`backpropagate`. The objective is cross entropy by default.
    """
    loss = backpropagate(fabric, model, window, objective or CrossEntropy())
    return WindowLoss(gather_over_data_ranks(fabric, loss.summed), loss.counts)


def backpropagate(
    fabric: Fabric,
    model: Any,
    window: Window,
    objective: Objective,
    heartbeat: Heartbeat | None = None,
    reduces_each: bool = False,
    num_sources: int = 0,
) -> LocalLoss:
    """Add the gradient of the window's mean loss to the parameters.

    Ranks average their gradients, hence the factor of their number.

    Args:
        fabric: that the model is set up with; all ranks call this together.
        model: in training mode.
        window: this rank's micro-batches of one optimizer step.
        objective: of the run.
        heartbeat: where this rank marks its position for the watchdog.
        reduces_each: reduce gradients over the ranks after every micro-batch, instead of once a window.
        num_sources: number of the sources to tell apart; 0 tells none apart.

    Raises:
        RunStopped: the ranks have agreed to stop before one of the micro-batches.
    """
    if heartbeat:
        heartbeat.enter(StepPhase.COMPUTING)  # before the first wait for the other ranks
        heartbeat.stop_border.enter(window.step, 0)
    counts = gather_over_data_ranks(fabric, torch.stack([objective.count(batch) for batch in window.batches]))
    scale = data_ranks(fabric).size / counts.sum().clamp(min=1).double()
    losses, by_piece, last = [], [], len(window.batches) - 1
    metrics = torch.zeros(len(objective.metric_names), dtype=torch.float64, device=fabric.device)
    for index, batch in enumerate(window.batches):
        if heartbeat and index:
            heartbeat.enter(StepPhase.COMPUTING, index)
            heartbeat.stop_border.enter(window.step, index)
        # every backward pass is inside the context: FSDP2's leaves synchronization off for those after it
        with fabric.no_backward_sync(model, enabled=index < last and not reduces_each):
            loss = objective.loss(model, batch.to(fabric.device), scale)
            fabric.backward(loss.total * scale)
        losses.append(loss.total.detach())
        if loss.metrics is not None:
            metrics += loss.metrics
        if batch.pieces is not None and loss.of_tokens is not None:
            by_piece.append(sum_by_piece(loss.of_tokens, batch))
    summed = torch.stack(losses)
    of_pieces = torch.cat(by_piece) if by_piece else summed[:0]
    of_sources, tokens_of_sources = summed.new_zeros(num_sources), torch.zeros(num_sources).double()
    if by_piece and num_sources:
        pieces = [batch.pieces for batch in window.batches if batch.pieces is not None]
        sources = torch.cat([part.sources for part in pieces])
        of_sources = sum_by_source(of_pieces, sources, num_sources).to(fabric.device)
        tokens_of_sources = torch.stack([part.count_by_source(num_sources)[0] for part in pieces]).sum(dim=0)
    return LocalLoss(summed, counts, metrics, of_pieces, of_sources, tokens_of_sources)


@dataclass(frozen=True)
class StepReport:
    """What all ranks know of a step before the optimizer takes it. Tensors are on the CPU.

    Attributes:
        loss: The losses of the window's micro-batches.
        metrics: The means of the objective's metrics over the window.
        of_pieces: Losses of the pieces in this rank's micro-batches, fp64 [P].
        of_sources: Mean loss of each source in the window; None for one without supervised tokens.
        grad_norm: Norm of the gradient before clipping, fp64 [].
        num_tokens: Number of the window's tokens, without padding.
        flops: Model FLOPs of these tokens.
        sync: The flags that any rank has set.
    """

    loss: WindowLoss
    metrics: list[float]
    of_pieces: torch.Tensor
    of_sources: list[float | None]
    grad_norm: torch.Tensor
    num_tokens: int
    flops: float
    sync: StepSync


def exchange_step(
    fabric: Fabric, loss: LocalLoss, grad_norm: torch.Tensor, num_tokens: int, flops: float, own: StepSync
) -> StepReport:
    """Exchange this rank's numbers with the other ranks'. The host waits for the device, which it does once a step.

    Args:
        fabric: All ranks call this together.
        loss: Of this rank's micro-batches.
        grad_norm: The same on all ranks, fp64 [] on the device.
        num_tokens: Number of tokens in this rank's micro-batches, without padding.
        flops: Their model FLOPs.
        own: This rank's flags.
    """
    ranks, num_sources = data_ranks(fabric), len(loss.of_sources)
    sizes = [len(loss.summed), num_sources, len(loss.metrics), num_sources, 2]
    flags = torch.tensor([num_tokens, flops, *astuple(own)], dtype=torch.float64)
    on_host = to_device_async(torch.cat([loss.tokens_of_sources, flags]), fabric.device)
    by_rank = gather_over_ranks(fabric, torch.cat([loss.summed, loss.of_sources, loss.metrics, on_host]))
    is_there = loss.of_pieces.device == grad_norm.device
    of_pieces = loss.of_pieces if is_there else grad_norm.new_zeros(0)
    parts = [by_rank.flatten(), loss.counts.flatten().double(), grad_norm.reshape(1), of_pieces]
    numbers = torch.cat(parts).cpu()  # the only place in a step where the host waits for the device
    gathered, counts, norm, of_pieces = numbers.split([part.numel() for part in parts])
    gathered = gathered.view(by_rank.shape)
    of_data_ranks = gathered[:: ranks.tensor_parallel_size, : sum(sizes)].split(sizes, dim=1)
    summed, (nats, metrics, tokens, work) = of_data_ranks[0], (part.sum(dim=0) for part in of_data_ranks[1:])
    all_tokens, all_flops = work.tolist()
    stop_signal, is_saving, save_failed = gathered[:, sum(sizes) :].amax(dim=0).tolist()
    window_loss = WindowLoss(summed.contiguous(), counts.long().view(loss.counts.shape))
    return StepReport(
        loss=window_loss,
        metrics=(metrics / window_loss.counts.sum().clamp(min=1)).tolist(),
        of_pieces=of_pieces if is_there else loss.of_pieces,
        of_sources=[
            total / count if count else None for total, count in zip(nats.tolist(), tokens.tolist(), strict=True)
        ],
        grad_norm=norm[0],
        num_tokens=int(all_tokens),
        flops=all_flops,
        sync=StepSync(int(stop_signal), bool(is_saving), bool(save_failed)),
    )
