"""The loss as a sum over tokens, so that the caller alone decides what it is a mean of.

Shapes: B rows, T tokens a row, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning import Fabric

from fabric_train.data.pickle_arrays import SentAsArrays
from fabric_train.distributed.data_ranks import data_ranks
from fabric_train.distributed.host_memory import onto
from fabric_train.model.lm_head_loss import returns_loss
from fabric_train.model.packed_forward import Documents, forward

IGNORED_LABEL = -100


@dataclass(frozen=True)
class Targets(SentAsArrays):
    """What is predicted in a batch [B, T]: ``ids`` int64 [N], the supervised tokens, and ``positions`` int64 [N], where
    in the flattened batch each is predicted.
    """

    positions: torch.Tensor
    ids: torch.Tensor

    def pin_memory(self) -> "Targets":
        """Return the same in page-locked memory."""
        return Targets(self.positions.pin_memory(), self.ids.pin_memory())

    def to(self, device: torch.device) -> "Targets":
        """Return the same on a device."""
        return Targets(self.positions.to(device, non_blocking=True), self.ids.to(device, non_blocking=True))


@dataclass(frozen=True)
class WindowLoss:
    """What the micro-batches of a window cost: ``summed`` over their tokens, fp64, and ``num_supervised``, int64, both
    [data ranks, micro-batches of one] and the same on all ranks.
    """

    summed: torch.Tensor
    num_supervised: torch.Tensor

    @property
    def mean(self) -> torch.Tensor:
        """Nats a supervised token of the window, a 0-dim fp64 tensor; 0 where nothing is supervised."""
        return self.summed.sum() / self.num_supervised.sum().clamp(min=1)


def next_token_labels(labels: torch.Tensor) -> torch.Tensor:
    """Shift labels [B, T] so that position t holds the token to predict there; the last position predicts nothing."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)


def find_targets(labels: torch.Tensor) -> Targets:
    """Return what is predicted in a batch with labels [B, T]. On a GPU it would wait for the device: their number
    decides the shapes.
    """
    ids = next_token_labels(labels).flatten()
    positions = (ids != IGNORED_LABEL).nonzero()[:, 0]
    return Targets(positions, ids[positions])


def count_supervised(labels: torch.Tensor) -> torch.Tensor:
    """Return how many tokens of labels [B, T] are predicted: a 0-dim int64 tensor, on the labels' device."""
    return (labels[:, 1:] != IGNORED_LABEL).sum()


def summed_loss(
    model: Any,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    documents: Documents | None = None,
    targets: Targets | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross entropy of the next token, summed over the supervised tokens.

    Args:
        model: causal language model set up by Fabric.
        input_ids: [B, T] int64.
        labels: [B, T] int64, aligned with ``input_ids``; -100 is not supervised.
        documents: what a token sees is its document's earlier tokens; None for all earlier ones of its row.
        targets: from ``find_targets(labels)``, on the model's device; None where it is done here.
        scale: what the caller is going to multiply the loss by before the backward pass, 0-dim, on the model's device,
            if it knows; see ``chunked_loss``.

    Returns:
        A 0-dim fp64 tensor, 0 where nothing is supervised. Each token's is fp32; their sum is not rounded to it, and so
        does not depend on how rows are cut into batches.
    """
    targets = targets or find_targets(labels)
    if returns_loss(model):
        return forward(model, input_ids, documents, positions=targets.positions, targets=targets.ids, scale=scale)
    logits = forward(model, input_ids, documents).logits.flatten(0, 1).index_select(0, targets.positions)
    return F.cross_entropy(logits.float(), targets.ids, reduction="none").sum(dtype=torch.float64)


def next_token_logits(model: Any, input_ids: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
    """Return the model's logits [B, T, V]; see :func:`summed_loss`."""
    return forward(model, input_ids, documents).logits


def sum_over_ranks(fabric: Fabric, tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of what was found on each part of the rows, on this rank's device."""
    return gather_over_data_ranks(fabric, tensor).sum(dim=0)


def gather_over_data_ranks(fabric: Fabric, tensor: torch.Tensor) -> torch.Tensor:
    """Return what was found on each part of the rows, stacked: of every rank, or group of ranks that has its own."""
    return gather_over_ranks(fabric, tensor)[:: data_ranks(fabric).tensor_parallel_size]


def gather_over_ranks(fabric: Fabric, tensor: torch.Tensor) -> torch.Tensor:
    """Return every rank's tensor, of the same shape on all, stacked in the ranks' order: [ranks, ...]."""
    stacked = torch.zeros(fabric.world_size, *tensor.shape, dtype=tensor.dtype, device=fabric.device)
    stacked[fabric.global_rank] = onto(tensor, fabric.device)
    # the others add zeros; Fabric's all_gather is a deprecated one of torch's
    return fabric.all_reduce(stacked, reduce_op="sum")  # type: ignore[return-value]
