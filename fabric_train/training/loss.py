"""The loss: cross entropy of the next token, summed over the supervised tokens of a batch.

It is a sum, so that the caller decides what to average over. ``training/loop.py`` divides by the supervised tokens of
the whole window on all ranks.

Shapes: B rows, T tokens a row, N supervised tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fabric_train.data.batch import Documents, Targets, find_targets
from fabric_train.model.lm_head_loss import has_loss_in_head
from fabric_train.model.packed_forward import forward


def summed_loss(
    model: Any,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    documents: Documents | None = None,
    targets: Targets | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
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
        A 0-dim fp64 tensor, 0 if nothing is supervised. Token losses are fp32. Their sum is fp64, so it does not depend
        on how rows are split into batches.
    """
    targets = targets or find_targets(labels)
    if not has_loss_in_head(model):
        return _loss_of_logits(forward(model, input_ids, documents).logits, targets)
    return forward(model, input_ids, documents, positions=targets.positions, targets=targets.ids, scale=scale)


def _loss_of_logits(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Return the summed loss of logits [B, T, V]."""
    predictions = logits.flatten(0, 1).index_select(0, targets.positions)
    return F.cross_entropy(predictions.float(), targets.ids, reduction="none").sum(dtype=torch.float64)


@dataclass(frozen=True)
class LocalLoss:
    """The losses of this rank's micro-batches of a window.

    ``summed``, fp64, is [micro-batches]; ``num_supervised``, int64, is [data ranks, micro-batches] and the same on all
    ranks.
    """

    summed: torch.Tensor
    num_supervised: torch.Tensor


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
