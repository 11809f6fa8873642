"""Sum losses by the pieces of documents to which they belong, and by the sources of these pieces.

Sums are fp64 and always in the same order, so that a resumed run logs the same values.
Shapes: N supervised tokens, P pieces of documents (or preference pairs), S sources.
"""

from dataclasses import dataclass

import torch

from fabric_train.data.batch import Batch, Pieces, find_targets
from fabric_train.distributed.ranks import to_device_async
from fabric_train.training.objective import BatchLoss, Objective, counts_pieces, metrics_by_source


@dataclass(frozen=True)
class SourceLosses:
    """The losses of this rank's micro-batches of a window, by piece and by source.

    ``piece_losses`` is empty if the objective has no losses of pieces; the others are zero then. Without sources to
    distinguish, S is 0.
    """

    piece_losses: torch.Tensor
    """fp64 [P]; on the CPU with XLA."""
    losses: torch.Tensor
    """The summed losses of each source, fp64 [S]."""
    metrics: torch.Tensor
    """The sums of the objective's metrics that are known by source, fp64 [metrics, S]."""
    counts: torch.Tensor
    """The number of supervised tokens of each source, or of pieces if the objective counts those, fp64 [S] on the
    CPU."""


class SourceLossCollector:
    """Collects the losses of a window's pieces, one micro-batch after another."""

    def __init__(self, objective: Objective, num_sources: int, device: torch.device) -> None:
        """Keep separate sums for ``num_sources`` sources, 0 for none; they are computed on ``device``."""
        self._num_sources = num_sources
        self._device = device
        self._counts_pieces = counts_pieces(objective)
        self._num_metrics = len(metrics_by_source(objective))
        self._values: list[torch.Tensor] = []  # fp64 [1 + metrics, pieces] of each micro-batch
        self._pieces: list[Pieces] = []

    def add(self, loss: BatchLoss, batch: Batch) -> None:
        """Add a micro-batch; nothing is added if its loss is not known by piece."""
        values = losses_by_piece(loss, batch)
        if values is not None:
            assert batch.pieces is not None
            self._values.append(values)
            self._pieces.append(batch.pieces)

    def sum(self) -> SourceLosses:
        """Return the losses of all micro-batches that were added."""
        sums = torch.zeros(1 + self._num_metrics, self._num_sources, dtype=torch.float64, device=self._device)
        counts = torch.zeros(self._num_sources, dtype=torch.float64)
        if not self._values:
            nothing = torch.zeros(0, dtype=torch.float64, device=self._device)
            return SourceLosses(piece_losses=nothing, losses=sums[0], metrics=sums[1:], counts=counts)

        # Over the whole window at once: the order of the sums does not depend on the micro-batches.
        values = torch.cat(self._values, dim=1)  # [1 + metrics, P]
        if self._num_sources:
            sources = torch.cat([pieces.sources for pieces in self._pieces])
            sums = sum_by_source(values, sources, self._num_sources).to(self._device)
            for pieces in self._pieces:
                counts += pieces.count_by_source(self._num_sources, counts_pieces=self._counts_pieces)[0]
        return SourceLosses(piece_losses=values[0], losses=sums[0], metrics=sums[1:], counts=counts)


def losses_by_piece(loss: BatchLoss, batch: Batch) -> torch.Tensor | None:
    """Return the losses of a batch's pieces in row 0 and, if they are known by piece, the objective's metrics below.

    The result is fp64 [1 + metrics, P], or None if the losses are not known by piece. See :func:`sum_by_piece`.
    """
    if batch.pieces is None:
        return None
    if loss.piece_losses is not None and loss.piece_metrics is not None:
        return torch.cat([loss.piece_losses[None], loss.piece_metrics])
    if loss.token_losses is None:
        return None
    rows = [sum_by_piece(loss.token_losses, batch)]
    if loss.token_metrics is not None:
        rows += [sum_by_piece(values, batch) for values in loss.token_metrics]
    return torch.stack(rows)


def select_target_losses(token_losses: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the losses of only the supervised tokens, [N].

    Only XLA has other losses: there every position has a target, because shapes must not change. The losses are
    selected on the CPU.
    """
    if token_losses.device.type != "xla":
        return token_losses
    targets = batch.targets
    if targets is None:
        targets = find_targets(batch.labels)
    return token_losses.cpu().index_select(0, targets.positions)


def sum_by_piece(token_losses: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Sum the losses of a batch's targets, [N], by the pieces of documents that the targets belong to: fp64 [P].

    The sums are on the device of ``token_losses``; with XLA, whose shapes must not change, on the CPU, where the batch
    is. The host does not wait for a GPU. A loss that is not finite affects only its own piece.
    """
    assert batch.pieces is not None
    target_losses = select_target_losses(token_losses, batch)
    return sum_segments(target_losses.double(), batch.pieces.num_targets)


def sum_by_source(piece_values: torch.Tensor, sources: torch.Tensor, num_sources: int) -> torch.Tensor:
    """Sum values of pieces, fp64 [..., P], by their sources, int64 [P] on the CPU: fp64 [..., S]."""
    sorted_sources, order = sources.sort(stable=True)
    # The pieces of source i are sorted_sources[borders[i]:borders[i + 1]].
    borders = torch.searchsorted(sorted_sources, torch.arange(num_sources + 1))
    order_on_device = to_device_async(order, piece_values.device)
    sorted_values = piece_values.movedim(-1, 0).index_select(0, order_on_device)  # [P, ...]
    return sum_segments(sorted_values, borders.diff()).movedim(0, -1)


def sum_segments(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the sums of consecutive segments of ``values`` [N, ...]; ``lengths`` is int64 [segments] on any device.

    ``segment_reduce`` adds in a fixed order, unlike ``index_add`` on a GPU.
    """
    if len(values) == 0:
        return values.new_zeros(len(lengths), *values.shape[1:])
    lengths = to_device_async(lengths, values.device)
    # Without ``unsafe`` it would read the lengths to check them, and the host would wait for the device.
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
