"""Validation loss: the mean over the supervised tokens of all ranks, each token with the same weight."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning import Fabric

from fabric_train.checkpoint import Evaluation, TokenLoss
from fabric_train.data.batch import Batch, count_supervised
from fabric_train.data.row_hash import SUM_OF_HASHES, hash_supervised
from fabric_train.distributed.collectives import sum_over_data_ranks
from fabric_train.distributed.xla import run_pending
from fabric_train.training.loss import sum_by_piece, sum_by_source, summed_loss


@torch.no_grad()
def evaluate(
    fabric: Fabric,
    model: Any,
    batches: Iterable[Batch],
    source_names: Sequence[str] = (),
    *,
    interrupted: Callable[[int], bool] = lambda _: False,
) -> Evaluation | None:
    """Evaluate on this rank's batches and sum over the ranks.

    Args:
        fabric: that the model is set up with; all ranks call this together.
        model: is in training mode afterwards.
        batches: of this rank; every rank has the same number.
        source_names: the sources that the pieces of the batches count.
        interrupted: called with the index of each batch before it; returns the same on all ranks.

    Returns:
        None if ``interrupted`` returned True.
    """
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=fabric.device)  # summed loss, supervised tokens
    nats = torch.zeros(len(source_names), dtype=torch.float64, device=fabric.device)
    counts = torch.zeros(2, len(source_names), dtype=torch.float64)  # supervised tokens, bytes
    hashed = 0
    for index, batch in enumerate(batches):
        if interrupted(index):
            model.train()
            return None
        hashed += hash_supervised(batch.input_ids, batch.labels)
        there = batch.to(fabric.device)
        loss = summed_loss(model, there.input_ids, there.labels, there.documents, there.targets)
        totals[0] += loss.total
        totals[1] += count_supervised(there.labels)
        if batch.pieces is not None and len(source_names):
            of_pieces = sum_by_piece(loss.of_tokens, batch)
            nats += sum_by_source(of_pieces, batch.pieces.sources, len(source_names)).to(fabric.device)
            counts += batch.pieces.count_by_source(len(source_names))
        run_pending(fabric.device)
    model.train()
    of_rows = torch.tensor([hashed % SUM_OF_HASHES], dtype=torch.float64, device=fabric.device)
    row = torch.cat([totals, of_rows, nats, counts.flatten().to(fabric.device)])
    summed, num_tokens, hashed, *of_sources = sum_over_data_ranks(fabric, row).tolist()
    by_source = zip(source_names, *torch.tensor(of_sources, dtype=torch.float64).view(3, -1).tolist(), strict=True)
    return replace(_evaluation(summed, int(num_tokens), by_source), rows=f"{int(hashed) % SUM_OF_HASHES:010x}")


def _evaluation(nats: float, num_tokens: int, by_source: Iterable[tuple[str, float, float, float]]) -> Evaluation:
    """Return the evaluation; ``by_source`` has name, nats, tokens and bytes, which are NaN if they are not known."""
    sources = {
        name: TokenLoss(summed, int(tokens), None if math.isnan(num_bytes) else num_bytes)
        for name, summed, tokens, num_bytes in by_source
        if tokens
    }
    known = [source.num_bytes for source in sources.values() if source.num_bytes is not None]
    num_bytes = math.fsum(known) if sources and len(known) == len(sources) else None
    return Evaluation(TokenLoss(nats, num_tokens, num_bytes), sources)
