"""Held-out loss: every row of the validation split once, its tokens weighing the same whatever rank and batch they
fall in.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from lightning import Fabric

from fabric_train.data.batch import Batch, count_supervised
from fabric_train.distributed.collectives import sum_over_data_ranks
from fabric_train.training.loss import summed_loss


@dataclass(frozen=True)
class Evaluation:
    """``loss`` in nats a token over ``num_tokens`` supervised tokens of all ranks."""

    loss: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        """See :func:`perplexity`."""
        return perplexity(self.loss)


def perplexity(loss: float) -> float:
    """exp of a loss in nats a token; infinite where that is beyond a float."""
    return math.exp(loss) if loss < 700 else math.inf


@torch.no_grad()
def evaluate(
    fabric: Fabric, model: Any, batches: Iterable[Batch], *, is_left: Callable[[int], bool] = lambda _: False
) -> Evaluation | None:
    """Evaluate on this rank's batches and sum over the ranks; every rank must have as many. Leaves the model in
    training mode.

    ``is_left`` is asked before each batch, by its number, whether to leave the evaluation unfinished, and answers all
    ranks alike.

    Returns:
        None where the evaluation was left.
    """
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=fabric.device)  # summed loss, supervised tokens
    for index, batch in enumerate(batches):
        if is_left(index):
            model.train()
            return None
        batch = batch.to(fabric.device)
        totals[0] += summed_loss(model, batch.input_ids, batch.labels, batch.documents, batch.targets)
        totals[1] += count_supervised(batch.labels)
    model.train()
    summed, num_tokens = sum_over_data_ranks(fabric, totals).tolist()
    return Evaluation(loss=summed / num_tokens if num_tokens else math.nan, num_tokens=int(num_tokens))
