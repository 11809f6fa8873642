"""The loss as a sum over tokens, so that the caller alone decides what it is a mean of.

Shapes: B rows, T tokens a row, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from lightning import Fabric

IGNORED_LABEL = -100


def next_token_labels(labels: torch.Tensor) -> torch.Tensor:
    """Shift labels [B, T] so that position t holds the token to predict there; the last position predicts nothing."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)


def count_supervised(labels: torch.Tensor) -> torch.Tensor:
    """Return how many tokens of labels [B, T] are predicted: a 0-dim int64 tensor, on the labels' device."""
    return (labels[:, 1:] != IGNORED_LABEL).sum()


def summed_loss(model: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next token, summed over the supervised tokens.

    Args:
        model: causal language model set up by Fabric; sees every earlier token of its row.
        input_ids: [B, T] int64.
        labels: [B, T] int64, aligned with ``input_ids``; -100 is not supervised.

    Returns:
        A 0-dim fp32 tensor, 0 where nothing is supervised.
    """
    logits = model(input_ids=input_ids, use_cache=False).logits  # [B, T, V]
    targets = next_token_labels(labels)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")


def sum_over_ranks(fabric: Fabric, tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over all ranks, on this rank's device."""
    return fabric.all_reduce(tensor.to(fabric.device), reduce_op="sum")  # type: ignore[return-value]
