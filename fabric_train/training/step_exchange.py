"""Do the only exchange between the ranks in a step: sum losses and counts, share flags, wait for the device once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from lightning import Fabric

from fabric_train.distributed.packed_tensors import PackedTensors
from fabric_train.distributed.ranks import StepSync, data_ranks, to_device_async
from fabric_train.training.source_losses import SourceLosses


@dataclass(frozen=True)
class LocalLoss:
    """The losses of this rank's micro-batches of a window."""

    summed: torch.Tensor
    """The summed loss of each micro-batch, fp64 [micro-batches]."""
    counts: torch.Tensor
    """The number of things in each of these sums, such as supervised tokens, int64 [micro-batches]."""
    window_count: torch.Tensor
    """The sum of the counts over all ranks, int64 []."""
    metrics: torch.Tensor
    """The sums of the objective's metrics, fp64 [metrics]."""
    sources: SourceLosses
    document_lengths: Sequence[int]
    """The number of tokens of each document in the forward passes of the losses."""


@dataclass(frozen=True)
class RankReport:
    """The contribution of one rank to the exchange."""

    loss: LocalLoss
    num_tokens: int
    """The number of tokens in this rank's rows, without padding."""
    flops: float
    """The model FLOPs for these tokens."""
    own_seconds: float
    """The own time of the previous step, see :class:`~fabric_train.training.own_time.OwnTime`."""
    sync: StepSync
    """This rank's flags."""


@dataclass(frozen=True)
class SourceReport:
    """One source's share of a window, over all ranks."""

    count: int
    """The number of supervised tokens of the source, or of pieces if the objective counts pieces."""
    loss: float | None
    """The mean loss over these; None if the window has none."""
    metrics: list[float]
    """The means of the objective's metrics that are known by source; empty if the window has nothing of it."""


@dataclass(frozen=True)
class StepReport:
    """The facts about a step that all ranks have before the optimizer takes it. Tensors are on the CPU."""

    count: int
    """The number of things that the loss sums over in the window, such as supervised tokens."""
    loss: torch.Tensor
    """The mean loss over these, fp64 []; 0 if there are none."""
    metrics: list[float]
    """The means of the objective's metrics."""
    sources: list[SourceReport]
    piece_losses: torch.Tensor
    """The losses of the pieces of documents on this rank, fp64 [P]."""
    grad_norm: torch.Tensor
    """The norm of the gradient before clipping, fp64 []."""
    num_tokens: int
    """The number of tokens on all ranks, without padding."""
    flops: float
    """The model FLOPs for these tokens."""
    sync: StepSync
    """The flags that any rank has set."""
    own_seconds: list[float]
    """The own time of each rank in the previous step, see :class:`~fabric_train.training.own_time.OwnTime`."""


def exchange_step(fabric: Fabric, report: RankReport, grad_norm: torch.Tensor) -> StepReport:
    """Exchange this rank's numbers with the other ranks'. All ranks call this together.

    ``grad_norm``, fp64 [] on the device, is already the same on all ranks.
    """
    packed = _pack(fabric, report)
    if fabric.world_size > 1:
        dist.all_reduce(packed.vector)

    # Copy what the host needs. With XLA the losses of pieces are on the CPU already.
    piece_losses = report.loss.sources.piece_losses
    is_on_device = piece_losses.device == grad_norm.device
    copied = PackedTensors(
        {
            "summed": packed.vector,
            "window_count": report.loss.window_count,
            "grad_norm": grad_norm,
            "piece_losses": piece_losses if is_on_device else grad_norm.new_zeros(0),
        }
    )
    on_host = copied.unpack(copied.vector.cpu())  # the only place in a step where the host waits for the device

    sums = packed.unpack(on_host["summed"])
    count = on_host["window_count"]
    sync = StepSync(
        stop_signal=int(sums["stop_signals"].max()),
        is_saving=bool(sums["is_saving"] > 0),
        save_failed=bool(sums["save_failed"] > 0),
    )
    return StepReport(
        count=int(count),
        loss=sums["loss"] / count.clamp(min=1),
        metrics=(sums["metrics"] / count.clamp(min=1)).tolist(),
        sources=_report_sources(sums),
        piece_losses=on_host["piece_losses"] if is_on_device else piece_losses,
        grad_norm=on_host["grad_norm"],
        num_tokens=int(sums["num_tokens"]),
        flops=float(sums["flops"]),
        sync=sync,
        own_seconds=sums["own_seconds"].tolist(),
    )


def _pack(fabric: Fabric, report: RankReport) -> PackedTensors:
    """Return this rank's numbers in one vector on the device, to be summed over all ranks."""
    loss = report.loss
    loss_sums = {
        "loss": loss.summed.sum(),
        "source_losses": loss.sources.losses,
        "metrics": loss.metrics,
        "source_metrics": loss.sources.metrics,
    }
    work_sums = PackedTensors(
        {
            "source_counts": loss.sources.counts,
            "num_tokens": torch.tensor(report.num_tokens, dtype=torch.float64),
            "flops": torch.tensor(report.flops, dtype=torch.float64),
        }
    )
    # The ranks of a tensor- or context-parallel group compute the same rows: only the first one of a group counts.
    is_first_of_group = fabric.global_rank % data_ranks(fabric).group_size == 0
    if not is_first_of_group:
        loss_sums = {name: torch.zeros_like(tensor) for name, tensor in loss_sums.items()}
        work_sums.vector.zero_()

    # Every rank has a slot of its own in these; the sum with the other ranks' zeros gathers them.
    own_seconds = torch.zeros(fabric.world_size, dtype=torch.float64)
    own_seconds[fabric.global_rank] = report.own_seconds
    stop_signals = torch.zeros(fabric.world_size, dtype=torch.float64)
    stop_signals[fabric.global_rank] = report.sync.stop_signal

    # Numbers of the host go to the device in one copy, which the host does not wait for.
    host_numbers = PackedTensors(
        {
            **work_sums.unpack(),
            "is_saving": torch.tensor(report.sync.is_saving),
            "save_failed": torch.tensor(report.sync.save_failed),
            "own_seconds": own_seconds,
            "stop_signals": stop_signals,
        }
    )
    copied = host_numbers.unpack(to_device_async(host_numbers.vector, fabric.device))
    return PackedTensors({**loss_sums, **copied})


def _report_sources(sums: Mapping[str, torch.Tensor]) -> list[SourceReport]:
    """Return the means of each source from the sums over all ranks."""
    losses = sums["source_losses"].tolist()
    counts = sums["source_counts"].tolist()
    metrics = sums["source_metrics"].T.tolist()  # a list for each source
    reports = []
    for loss, count, source_metrics in zip(losses, counts, metrics, strict=True):
        if count == 0:
            reports.append(SourceReport(count=0, loss=None, metrics=[]))
        else:
            means = [total / count for total in source_metrics]
            reports.append(SourceReport(count=int(count), loss=loss / count, metrics=means))
    return reports
