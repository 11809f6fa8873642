"""Validation loss: the mean over the supervised tokens of all ranks, each token with the same weight."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from lightning import Fabric

from fabric_train.data.batch import Batch, count_supervised
from fabric_train.distributed.collectives import sum_over_data_ranks
from fabric_train.distributed.xla import run_pending
from fabric_train.training.loss import summed_loss


@dataclass(frozen=True)
class Evaluation:
    """``loss`` in nats per token over ``num_tokens`` supervised tokens of all ranks."""

    loss: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        """Return :func:`perplexity` of the loss."""
        return perplexity(self.loss)


def perplexity(loss: float) -> float:
    """Return exp of a loss in nats per token; infinite if that does not fit into a float."""
    return math.exp(loss) if loss < 700 else math.inf


@torch.no_grad()
def evaluate(
    fabric: Fabric, model: Any, batches: Iterable[Batch], *, interrupted: Callable[[int], bool] = lambda _: False
) -> Evaluation | None:
    """Evaluate on this rank's batches and sum over the ranks.

    Args:
        fabric: that the model is set up with; all ranks call this together.
        model: is in training mode afterwards.
        batches: of this rank; every rank has the same number.
        interrupted: called with the index of each batch before it; returns the same on all ranks.

    Returns:
        None if ``interrupted`` returned True.
    """
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=fabric.device)  # summed loss, supervised tokens
    for index, batch in enumerate(batches):
        if interrupted(index):
            model.train()
            return None
        batch = batch.to(fabric.device)
        totals[0] += summed_loss(model, batch.input_ids, batch.labels, batch.documents, batch.targets)
        totals[1] += count_supervised(batch.labels)
        run_pending(fabric.device)
    model.train()
    summed, num_tokens = sum_over_data_ranks(fabric, totals).tolist()
    return Evaluation(loss=summed / num_tokens if num_tokens else math.nan, num_tokens=int(num_tokens))
