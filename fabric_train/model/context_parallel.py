"""Compute rows on several ranks, each with a slice of them (context parallelism): the slices, attention, and losses.

The rows of a batch follow one another, and padding fills them up to a multiple of the chunks. A slice is some chunks of
them: chunks of a long document are dealt so that each rank has early ones, whose tokens see few others, and late ones,
whose tokens see many.

All layers but attention treat each token alone. For attention the ranks gather the keys and values of all slices, and
each computes its own queries, as in Llama 3 (arXiv:2407.21783, section 3.3.2). The gathered keys are in the order of
the rows, so a stretch of queries sees a stretch of keys, and the kernels for documents take both with their borders.
torch's own context parallelism (``torch.distributed.tensor.experimental``) has no documents: it takes causal rows.

Shapes: C ranks, L tokens in all rows with the padding, S = L / C tokens of a slice, H heads of queries, K of keys and
values, D head size, N targets.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fabric_train.data.batch import Batch, RowSlice, Stretch, find_targets
from fabric_train.distributed.ranks import ContextGroup

if TYPE_CHECKING:
    from lightning import Fabric

CONTEXT = "sdpa_context"
"""transformers' name of :func:`attend`."""
CONTEXT_VARLEN = "sdpa_context_varlen"
"""transformers' name of :func:`attend` with torch's kernel for documents."""


_CHUNKS_OF_RANK = (1, 2, 4, 8)
_TOLERANCE = 0.02


def place_batch(fabric: "Fabric", batch: Batch) -> Batch:
    """Return a batch on Fabric's device, with this rank's slice of its rows if several ranks compute them."""
    placed = batch.to(fabric.device)
    group = getattr(fabric.strategy, "context_group", None)
    return placed if group is None else replace(placed, row_slice=cut_rows(batch, group).to(fabric.device))


def cut_rows(batch: Batch, group: ContextGroup) -> RowSlice:
    """Return this rank's slice of the rows of a batch on the CPU."""
    num_tokens = batch.input_ids.numel()
    borders = borders_of(batch)
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
    ranks = np.empty(num_chunks, dtype=np.int64)
    of_ranks = [0] * num_ranks
    number = [0] * num_ranks
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
    stretches = []
    begin = 0
    for run in np.split(own, np.flatnonzero(np.diff(own) > 1) + 1):
        first = int(run[0]) * size
        last = int(run[-1] + 1) * size
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


@torch.compiler.disable
def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    row_slice: RowSlice | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within documents for a slice of the rows, as transformers calls it.

    ``query`` is [1, H, S, D] of any float dtype, ``key`` and ``value`` are [1, K, S, D]. All ranks of the slice's group
    call it together. Without a slice, the rows are whole and on this rank. Returns [1, S, H, D] in autocast's dtype, or
    the query's, and None instead of the attention weights.
    """
    if row_slice is None:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, **more)
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    queries, keys, values = (heads[0].transpose(0, 1).to(dtype) for heads in (query, key, value))
    # the second half of the heads travels while the first is computed, and back as well
    num_parts = 2 if keys.shape[1] % 2 == 0 else 1
    own = torch.stack([keys, values], dim=1).chunk(num_parts, dim=2)
    exchanges = [_Exchange(part, row_slice) for part in own]
    sent = [_Received.apply(part, exchange) for part, exchange in zip(own, exchanges, strict=True)]
    kernel = _attend_by_kernel if module.config._attn_implementation == CONTEXT_VARLEN else _attend_by_document
    outputs = []
    for part, exchange, of_part in zip(sent, exchanges, queries.chunk(num_parts, dim=1), strict=True):
        gathered = _Gathered.apply(part, exchange)
        found = []
        for stretch in row_slice.stretches:
            seen: Any = _Range.apply(gathered, exchange, stretch.first_key, stretch.last_key)
            keys, values = seen.unbind(1)
            found.append(kernel(of_part[stretch.begin : stretch.end], keys, values, stretch, scaling))
        outputs.append(torch.cat(found))
    return torch.cat(outputs, dim=1)[None], None


def _attend_by_kernel(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, stretch: Stretch, scaling: float | None
) -> torch.Tensor:
    from fabric_train.model.attention import causal_varlen  # which imports this module

    longest = max(stretch.lengths), max(stretch.key_lengths)
    return causal_varlen(queries, keys, values, (stretch.borders, stretch.key_borders), longest, scaling)


def _attend_by_document(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, stretch: Stretch, scaling: float | None
) -> torch.Tensor:
    """Return [tokens, H, D], one document after the other."""
    found = []
    of_documents = (queries.split(stretch.lengths), *(each.split(stretch.key_lengths) for each in (keys, values)))
    for of_document in zip(*of_documents, strict=True):
        query, key, value = (each.transpose(0, 1)[None] for each in of_document)
        seen = None
        if (num_before := key.shape[2] - query.shape[2]) > 0:
            seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril(num_before)
        given: dict[str, Any] = {"attn_mask": seen, "is_causal": seen is None, "scale": scaling}
        found.append(F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **given)[0].transpose(0, 1))
    return torch.cat(found)


class _Exchange:
    """Keys and values on their way to the other ranks of a group, and later their gradients on the way back."""

    def __init__(self, own: torch.Tensor, row_slice: RowSlice) -> None:
        """Begin to send ``own``, [S, 2, K, D]."""
        self._group = row_slice.group.group
        self._chunks = row_slice.chunks
        self._dtype = own.dtype
        self._gradient: torch.Tensor | None = None
        self._summed: torch.Tensor | None = None
        self._gathered = own.new_empty(len(own) * row_slice.group.size, *own.shape[1:])
        self._work: Any = dist.all_gather_into_tensor(self._gathered, own.detach().contiguous(), self._group, True)

    def gathered(self) -> torch.Tensor:
        """Return the keys and values of all slices in the order of the rows: [L, 2, K, D]."""
        self._work.wait()
        chunks = self._gathered.unflatten(0, (len(self._chunks), -1)).index_select(0, self._chunks)
        del self._gathered
        return chunks.flatten(0, 1)

    def add_gradient(self, first: int, last: int, gradient: torch.Tensor, length: int) -> None:
        """Add the gradient of a range of the gathered ones, in fp32 as a kernel adds up its own."""
        if self._gradient is None:
            self._gradient = gradient.new_zeros(length, *gradient.shape[1:], dtype=torch.float32)
        self._gradient[first:last] += gradient

    def begin_sum(self, shape: torch.Size) -> None:
        """Begin to send each rank the gradients of its own keys and values."""
        assert self._gradient is not None  # of its ranges, whose backward passes come before
        by_chunk = self._gradient.unflatten(0, (len(self._chunks), -1))
        order = torch.argsort(self._chunks)
        chunks = by_chunk.index_select(0, order).flatten(0, 1)
        self._gradient = None
        self._summed = chunks.new_empty(shape)
        self._work = dist.reduce_scatter_tensor(self._summed, chunks, group=self._group, async_op=True)

    def summed(self) -> torch.Tensor:
        """Return the gradient of this rank's keys and values, [S, 2, K, D]."""
        self._work.wait()
        assert self._summed is not None
        summed = self._summed.to(self._dtype)
        self._summed = None
        return summed


class _Received(torch.autograd.Function):
    """Waits for the gradients from the other ranks, in the backward pass. It stands before all that waits for keys."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, _: None) -> Any:
        return ctx.exchange.summed(), None


class _Gathered(torch.autograd.Function):
    """Waits for the keys of the other ranks, and begins to send their gradients in the backward pass."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        ctx.shape = own.shape
        ctx.set_materialize_grads(False)
        return exchange.gathered()

    @staticmethod
    def backward(ctx: Any, _: None) -> Any:
        ctx.exchange.begin_sum(ctx.shape)
        return None, None


class _Range(torch.autograd.Function):
    """Takes a range of the gathered keys. Autograd's own would fill a gradient of all keys for each range."""

    @staticmethod
    def forward(ctx: Any, gathered: torch.Tensor, exchange: _Exchange, first: int, last: int) -> torch.Tensor:
        ctx.exchange = exchange
        ctx.range = (first, last)
        ctx.length = len(gathered)
        return gathered[first:last]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.exchange.add_gradient(*ctx.range, gradient, ctx.length)
        return None, None, None, None


def whole_losses(row_slice: RowSlice, of_slice: torch.Tensor, num_targets: int) -> torch.Tensor:
    """Return the losses of all targets of a batch in its order, [N, ...], from the losses of this rank's targets.

    All ranks of the group call it together, and get the same. Each goes on with the same function of all losses, so the
    gradient of a rank's own losses is known there.
    """
    return _WholeLosses.apply(of_slice, row_slice, num_targets)


class _WholeLosses(torch.autograd.Function):
    """The autograd function of ``whole_losses``."""

    @staticmethod
    def forward(ctx: Any, of_slice: torch.Tensor, row_slice: RowSlice, num_targets: int) -> torch.Tensor:
        ctx.numbers = row_slice.numbers
        whole = of_slice.new_zeros(num_targets, *of_slice.shape[1:]).index_copy_(0, ctx.numbers, of_slice)
        dist.all_reduce(whole, group=row_slice.group.group)  # the others have zeros there
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.index_select(0, ctx.numbers), None, None


ALL_ATTENTION_FUNCTIONS.register(CONTEXT, attend)
ALL_ATTENTION_FUNCTIONS.register(CONTEXT_VARLEN, attend)
