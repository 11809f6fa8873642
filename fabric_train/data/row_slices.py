"""Cut the rows of a batch into slices of equal length and similar work, one for each rank that computes a part of them.

The rows follow one another, and padding fills them up to a multiple of the chunks. A slice is some chunks of them:
chunks of a long document are dealt so that each rank has early ones, whose tokens see few others, and late ones, whose
tokens see many. Shapes: L tokens in all rows with the padding, C ranks, S = L / C tokens of a slice.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fabric_train.data.batch import Batch, find_targets
from fabric_train.distributed.ranks import ContextGroup, to_device_async

if TYPE_CHECKING:
    from lightning import Fabric

_CHUNKS_OF_RANK = (1, 2, 4, 8)
_TOLERANCE = 0.02


@dataclass(frozen=True)
class Stretch:
    """Tokens ``begin`` to ``end`` of a slice that follow one another in the rows, and the keys that they see.

    These are the tokens ``first_key`` to ``last_key`` of the rows: from the start of the first token's document to the
    last token. ``borders`` and ``key_borders``, int32 [documents + 1], are of the documents among the tokens and among
    the keys. A document has as many keys as tokens, and the first one those before its tokens too. ``lengths`` and
    ``key_lengths`` are the documents' numbers of them.
    """

    begin: int
    end: int
    first_key: int
    last_key: int
    lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    borders: torch.Tensor
    key_borders: torch.Tensor

    def to(self, device: torch.device) -> "Stretch":
        borders, key_borders = (to_device_async(part, device) for part in (self.borders, self.key_borders))
        return replace(self, borders=borders, key_borders=key_borders)


@dataclass(frozen=True)
class RowSlice:
    """A rank's part of the rows of a batch.

    ``input_ids`` and ``position_ids`` are int64 [1, S]. ``positions``, int64 [N], are where targets are predicted in
    the slice, ``target_ids``, int64 [N], the tokens there, and ``numbers``, int64 [N], which targets of the batch they
    are. ``chunks``, int64, has the place of each chunk of the rows among the chunks of rank 0, rank 1 and so on.
    """

    group: ContextGroup
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    positions: torch.Tensor
    target_ids: torch.Tensor
    numbers: torch.Tensor
    chunks: torch.Tensor
    stretches: tuple[Stretch, ...]

    def to(self, device: torch.device) -> "RowSlice":
        """Return the slice on a device; the host does not wait."""
        return replace(
            self,
            input_ids=to_device_async(self.input_ids, device),
            position_ids=to_device_async(self.position_ids, device),
            positions=to_device_async(self.positions, device),
            target_ids=to_device_async(self.target_ids, device),
            numbers=to_device_async(self.numbers, device),
            chunks=to_device_async(self.chunks, device),
            stretches=tuple(stretch.to(device) for stretch in self.stretches),
        )


def place_batch(fabric: "Fabric", batch: Batch) -> Batch:
    """Return a batch on Fabric's device, with this rank's slice of its rows if several ranks compute them."""
    placed, group = batch.to(fabric.device), getattr(fabric.strategy, "context_group", None)
    return placed if group is None else replace(placed, row_slice=cut_rows(batch, group).to(fabric.device))


def cut_rows(batch: Batch, group: ContextGroup) -> RowSlice:
    """Return this rank's slice of the rows of a batch on the CPU."""
    num_tokens, borders = batch.input_ids.numel(), borders_of(batch)
    ranks, size = deal_chunks(borders, group.size)
    padded = len(ranks) * size
    if padded > num_tokens:  # the padding is a document of its own
        borders = np.append(borders, padded)
    own = np.flatnonzero(ranks == group.rank)
    tokens = (own[:, None] * size + np.arange(size)).ravel()
    position_ids = tokens - borders[np.searchsorted(borders, tokens, side="right") - 1]
    input_ids = np.zeros(padded, dtype=np.int64)
    input_ids[:num_tokens] = batch.input_ids.numpy().ravel()
    targets = batch.targets or find_targets(batch.labels)
    numbers = np.flatnonzero(ranks[targets.positions.numpy() // size] == group.rank)
    positions = np.searchsorted(tokens, targets.positions.numpy()[numbers])
    chunks = np.empty(len(ranks), dtype=np.int64)
    chunks[np.argsort(ranks, kind="stable")] = np.arange(len(ranks))
    return RowSlice(
        group,
        input_ids=torch.from_numpy(input_ids[tokens][None]),
        position_ids=torch.from_numpy(position_ids[None]),
        positions=torch.from_numpy(positions),
        target_ids=targets.ids[torch.from_numpy(numbers)],
        numbers=torch.from_numpy(numbers),
        chunks=torch.from_numpy(chunks),
        stretches=_stretches(own, size, borders),
    )


def borders_of(batch: Batch) -> np.ndarray:
    """Return the borders of the documents in all rows of a batch on the CPU, or of its rows: int64 [documents + 1]."""
    if batch.documents is not None:
        return batch.documents.borders.numpy().astype(np.int64)
    num_rows, length = batch.input_ids.shape
    return np.arange(num_rows + 1) * length


def deal_chunks(borders: np.ndarray, num_ranks: int) -> tuple[np.ndarray, int]:
    """Return the rank of each chunk, int64 [chunks], and the tokens of a chunk.

    ``borders``, int64 [documents + 1], are of the documents in all rows. A token takes as much work as there are tokens
    before it in its document. Each rank gets the same number of chunks: the fewest that balance the work within 2 %, at
    most 8. The chunks with the most work are dealt first, each to the rank that has the least.
    """
    best = _deal(borders, num_ranks, _CHUNKS_OF_RANK[0])
    for number in _CHUNKS_OF_RANK[1:]:
        if best[2] <= 1 + _TOLERANCE:
            break
        best = min(best, _deal(borders, num_ranks, number), key=lambda dealt: dealt[2])
    return best[0], best[1]


def _deal(borders: np.ndarray, num_ranks: int, chunks_of_rank: int) -> tuple[np.ndarray, int, float]:
    """Return what :func:`deal_chunks` does, and the most work of a rank as a multiple of the mean."""
    num_chunks = num_ranks * chunks_of_rank
    of_chunks = count_keys(borders, num_chunks)
    size = -(-int(borders[-1]) // num_chunks)
    ranks, of_ranks, number = np.empty(num_chunks, dtype=np.int64), [0] * num_ranks, [0] * num_ranks
    for chunk in np.argsort(-of_chunks, kind="stable"):
        rank = min((each for each in range(num_ranks) if number[each] < chunks_of_rank), key=of_ranks.__getitem__)
        ranks[chunk] = rank
        of_ranks[rank] += int(of_chunks[chunk])
        number[rank] += 1
    return ranks, size, max(of_ranks) * num_ranks / sum(of_ranks)


def count_keys(borders: np.ndarray, num_chunks: int) -> np.ndarray:
    """Return how many keys the tokens of each chunk see together, int64 [chunks]; padding is a document."""
    size = -(-int(borders[-1]) // num_chunks)
    tokens = np.arange(num_chunks * size)
    keys = tokens + 1 - borders[np.searchsorted(borders, tokens, side="right") - 1]
    return keys.reshape(num_chunks, size).sum(axis=1)


def _stretches(own: np.ndarray, size: int, borders: np.ndarray) -> tuple[Stretch, ...]:
    """Return the stretches of a rank's chunks ``own``, which are ascending."""
    stretches, begin = [], 0
    for run in np.split(own, np.flatnonzero(np.diff(own) > 1) + 1):
        first, last = int(run[0]) * size, int(run[-1] + 1) * size
        first_key = int(borders[np.searchsorted(borders, first, side="right") - 1])
        inside = borders[(borders > first) & (borders < last)]
        of_tokens = np.concatenate([[0], inside - first, [last - first]])
        of_keys = np.concatenate([[0], inside - first_key, [last - first_key]])
        stretches.append(
            Stretch(
                begin=begin,
                end=begin + last - first,
                first_key=first_key,
                last_key=last,
                lengths=tuple(np.diff(of_tokens).tolist()),
                key_lengths=tuple(np.diff(of_keys).tolist()),
                borders=torch.from_numpy(of_tokens.astype(np.int32)),
                key_borders=torch.from_numpy(of_keys.astype(np.int32)),
            )
        )
        begin += last - first
    return tuple(stretches)
