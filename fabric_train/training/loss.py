"""The loss: cross entropy of the next token, summed over the supervised tokens of a batch.

It is a sum, so that the caller decides what to average over. ``training/loop.py`` divides by the supervised tokens of
the whole window on all ranks.

Shapes: B rows, T tokens a row, N supervised tokens, V vocabulary.
"""

from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning import Fabric

from fabric_train.data.batch import Batch, Documents, Targets, find_targets
from fabric_train.distributed.collectives import StepSync, data_ranks, gather_over_ranks
from fabric_train.distributed.devices import to_device_async
from fabric_train.model.attention import forward
from fabric_train.model.lm_head_loss import has_loss_in_head


@dataclass(frozen=True)
class SummedLoss:
    """The loss of a batch: its ``total``, fp64 [], and that ``of_tokens``, fp32 [N], which has no gradient."""

    total: torch.Tensor
    of_tokens: torch.Tensor


def summed_loss(
    model: Any,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    documents: Documents | None = None,
    targets: Targets | None = None,
    scale: torch.Tensor | None = None,
) -> SummedLoss:
    """Return the cross entropy of the next token, summed over the supervised tokens.

    ``model.parallelize.setup_model`` replaces the head of a Llama, so the model returns this sum itself and no logits
    exist (``model.lm_head_loss``). A model whose head cannot be replaced returns logits.

    Args:
        model: causal language model set up by Fabric.
        input_ids: [B, T] int64.
        labels: [B, T] int64, aligned with ``input_ids``; -100 is not supervised.
        documents: the document borders; a token sees only earlier tokens of its document. None: of its row.
        targets: ``find_targets(labels)`` on the model's device; None computes them here.
        scale: the factor that the caller multiplies the loss by before the backward pass, 0-dim, on the model's
            device, if it is known; see ``chunked_cross_entropy``.

    Returns:
        The total, 0 if nothing is supervised, and the losses of the targets in their order. The total is fp64, so it
        does not depend on how rows are split into batches.
    """
    targets = targets or find_targets(labels)
    if not has_loss_in_head(model):
        return _loss_of_logits(forward(model, input_ids, documents).logits, targets)
    return SummedLoss(
        *forward(model, input_ids, documents, positions=targets.positions, targets=targets.ids, scale=scale)
    )


def _loss_of_logits(logits: torch.Tensor, targets: Targets) -> SummedLoss:
    """Return the summed loss of logits [B, T, V]."""
    predictions = logits.flatten(0, 1).index_select(0, targets.positions)
    losses = F.cross_entropy(predictions.float(), targets.ids, reduction="none")
    return SummedLoss(losses.sum(dtype=torch.float64), losses.detach())


def sum_by_piece(of_tokens: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Sum the losses of a batch by the pieces of documents that its targets belong to.

    The host does not wait for a GPU, and the sums are the same each time: ``segment_reduce`` adds in a fixed order. A
    loss that is not finite is in its own piece only.

    Args:
        of_tokens: fp32 [N], see :class:`SummedLoss`.
        batch: that they are of, on the CPU, with P pieces.

    Returns:
        fp64 [P] on the device of ``of_tokens``; for XLA, whose shapes must not change, on the CPU.
    """
    assert batch.pieces is not None
    if of_tokens.device.type == "xla":  # there, every position has a target
        of_tokens = of_tokens.cpu().index_select(0, (batch.targets or find_targets(batch.labels)).positions)
    return _sum_segments(of_tokens.double(), batch.pieces.num_targets)


def sum_by_source(of_pieces: torch.Tensor, sources: torch.Tensor, num_sources: int) -> torch.Tensor:
    """Sum the losses of pieces, fp64 [P], by their sources, int64 [P] on the CPU; see :func:`sum_by_piece`.

    Returns:
        fp64 [sources] on the device of ``of_pieces``.
    """
    in_order = to_device_async(sources.argsort(stable=True), of_pieces.device)
    return _sum_segments(of_pieces.index_select(0, in_order), sources.bincount(minlength=num_sources))


def _sum_segments(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the sums of consecutive parts of ``values``, whose lengths are int64 on the CPU."""
    if not len(values):
        return values.new_zeros(len(lengths))
    lengths = to_device_async(lengths, values.device)
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)  # else it reads the lengths, and waits


@dataclass(frozen=True)
class LocalLoss:
    """The losses of this rank's micro-batches of a window.

    ``summed``, fp64, is [micro-batches]; ``num_supervised``, int64, is [data ranks, micro-batches] and the same on all
    ranks. ``of_pieces``, fp64 [P], are the losses of the pieces of all micro-batches, on the CPU with XLA.
    ``of_sources``, fp64 [sources], sums them by source, and ``tokens_of_sources``, fp64 [sources] on the CPU, counts
    their supervised tokens; both are empty if sources are not told apart.
    """

    summed: torch.Tensor
    num_supervised: torch.Tensor
    of_pieces: torch.Tensor
    of_sources: torch.Tensor
    tokens_of_sources: torch.Tensor


@dataclass(frozen=True)
class WindowLoss:
    """The losses of a window's micro-batches, the same on all ranks.

    ``summed``, fp64, and ``num_supervised``, int64, are [data ranks, micro-batches of one rank].
    """

    summed: torch.Tensor
    num_supervised: torch.Tensor

    @property
    def mean(self) -> torch.Tensor:
        """Nats per supervised token of the window, a 0-dim fp64 tensor; 0 if nothing is supervised."""
        return self.summed.sum() / self.num_supervised.sum().clamp(min=1)


@dataclass(frozen=True)
class StepReport:
    """What all ranks know of a step before the optimizer takes it. Tensors are on the CPU.

    Attributes:
        loss: The losses of the window's micro-batches.
        of_pieces: Losses of the pieces in this rank's micro-batches, fp64 [P].
        of_sources: Mean loss of each source in the window; None for one without supervised tokens.
        grad_norm: Norm of the gradient before clipping, fp64 [].
        num_tokens: Number of the window's tokens, without padding.
        flops: Model FLOPs of these tokens.
        sync: The flags that any rank has set.
    """

    loss: WindowLoss
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
    ranks, sizes = data_ranks(fabric), [len(loss.summed), len(loss.of_sources), len(loss.of_sources), 2]
    flags = torch.tensor([num_tokens, flops, *astuple(own)], dtype=torch.float64)
    on_host = torch.cat([loss.tokens_of_sources, flags])
    row = torch.cat([loss.summed, loss.of_sources, to_device_async(on_host, fabric.device)])
    by_rank = gather_over_ranks(fabric, row)
    is_there = loss.of_pieces.device == grad_norm.device
    of_pieces = loss.of_pieces if is_there else grad_norm.new_zeros(0)
    parts = [by_rank.flatten(), loss.num_supervised.flatten().double(), grad_norm.reshape(1), of_pieces]
    numbers = torch.cat(parts).cpu()  # the only place in a step where the host waits for the device
    gathered, num_supervised, norm, of_pieces = numbers.split([part.numel() for part in parts])
    gathered = gathered.view(by_rank.shape)
    of_data_ranks = gathered[:: ranks.tensor_parallel_size, : sum(sizes)].split(sizes, dim=1)
    summed, (nats, tokens, work) = of_data_ranks[0], (part.sum(dim=0) for part in of_data_ranks[1:])
    all_tokens, all_flops = work.tolist()
    stop_signal, is_saving, save_failed = gathered[:, sum(sizes) :].amax(dim=0).tolist()
    by_source = zip(nats.tolist(), tokens.tolist(), strict=True)
    return StepReport(
        loss=WindowLoss(summed.contiguous(), num_supervised.long().view(loss.num_supervised.shape)),
        of_pieces=of_pieces if is_there else loss.of_pieces,
        of_sources=[total / count if count else None for total, count in by_source],
        grad_norm=norm[0],
        num_tokens=int(all_tokens),
        flops=all_flops,
        sync=StepSync(int(stop_signal), bool(is_saving), bool(save_failed)),
    )
