"""Compute rows on several ranks, each with a slice of them (context parallelism): slices, attention, losses.

The rows of a batch are joined, and padded to a multiple of the chunks. A slice is some chunks of
them: the chunks of a long document are dealt so that each rank has early ones, whose tokens see few others, and late
    ones,
whose tokens see many.

All layers but attention treat each token alone. For attention the ranks gather the keys and values of all slices, and
each computes its own queries, as in Llama 3 (arXiv:2407.21783, section 3.3.2). The gathered keys are in the order of
the rows, so consecutive queries (a ``RowSegment``) see consecutive keys, and the kernels for documents take both with
their borders. torch's own context parallelism (``torch.distributed.tensor.experimental``) does not support documents,
only causal rows.

Shapes: C ranks, L tokens in all rows with the padding, S = L / C tokens of a slice, H heads of queries, K of keys and
values, D head size, N targets.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fabric_train.data.batch import Batch, RowSegment, RowSlice, find_targets
from fabric_train.distributed.ranks import ContextGroup
from fabric_train.model.varlen_kernel import attention_dtype, causal_varlen

if TYPE_CHECKING:
    from lightning import Fabric

CONTEXT = "sdpa_context"
"""transformers' name for :func:`attend`."""
CONTEXT_VARLEN = "sdpa_context_varlen"
"""transformers' name for :func:`attend` with torch's kernel for documents."""

_CHUNKS_PER_RANK = (1, 2, 4, 8)
_TOLERANCE = 0.02
"""How much a rank's work may exceed the mean before the rows are cut into more chunks."""


def place_batch(fabric: "Fabric", batch: Batch) -> Batch:
    """Return a batch on Fabric's device, with this rank's slice of its rows if several ranks compute them."""
    batch_on_device = batch.to(fabric.device)
    group = getattr(fabric.strategy, "context_group", None)
    if group is None:
        return batch_on_device
    row_slice = cut_rows(batch, group).to(fabric.device)  # from the batch on the CPU
    return replace(batch_on_device, row_slice=row_slice)


def cut_rows(batch: Batch, group: ContextGroup) -> RowSlice:
    """Return this rank's slice of the rows of a batch on the CPU."""
    num_tokens = batch.input_ids.numel()
    borders = borders_of(batch)
    chunk_ranks, chunk_size = deal_chunks(borders, group.size)
    num_chunks = len(chunk_ranks)
    padded_length = num_chunks * chunk_size
    if padded_length > num_tokens:  # the padding is a document of its own
        borders = np.append(borders, padded_length)

    # This rank's tokens, as indices [S] into all rows, their ids and their positions in their documents.
    own_chunks = np.flatnonzero(chunk_ranks == group.rank)
    tokens = (own_chunks[:, None] * chunk_size + np.arange(chunk_size)).ravel()
    documents = np.searchsorted(borders, tokens, side="right") - 1  # the document of each token
    position_ids = tokens - borders[documents]
    input_ids = np.zeros(padded_length, dtype=np.int64)
    input_ids[:num_tokens] = batch.input_ids.numpy().ravel()

    # The targets that its tokens predict: their indices among the targets of the batch, and where in the slice.
    targets = batch.targets or find_targets(batch.labels)
    target_positions = targets.positions.numpy()
    own_targets = np.flatnonzero(chunk_ranks[target_positions // chunk_size] == group.rank)
    positions = np.searchsorted(tokens, target_positions[own_targets])

    # Gathered slices have the chunks of rank 0, then those of rank 1 and so on. Find the index of each chunk there.
    gathered_chunks = np.argsort(chunk_ranks, kind="stable")
    chunk_indices = np.empty(num_chunks, dtype=np.int64)
    chunk_indices[gathered_chunks] = np.arange(num_chunks)
    return RowSlice(
        group,
        input_ids=torch.from_numpy(input_ids[tokens][None]),
        position_ids=torch.from_numpy(position_ids[None]),
        positions=torch.from_numpy(positions),
        target_ids=targets.ids[torch.from_numpy(own_targets)],
        target_indices=torch.from_numpy(own_targets),
        chunk_indices=torch.from_numpy(chunk_indices),
        segments=_find_segments(own_chunks, chunk_size, borders),
    )


def borders_of(batch: Batch) -> np.ndarray:
    """Return the borders of a CPU batch's documents, or of its rows if these are not divided: int64 [documents + 1]."""
    if batch.documents is not None:
        return batch.documents.borders.numpy().astype(np.int64)
    num_rows, length = batch.input_ids.shape
    return np.arange(num_rows + 1) * length


@dataclass(frozen=True)
class _Deal:
    """Chunks of rows that are dealt to ranks."""

    chunk_ranks: np.ndarray
    """The rank of each chunk, int64 [chunks]."""
    chunk_size: int
    """The number of tokens in a chunk."""
    imbalance: float
    """The work of the busiest rank as a multiple of the mean."""


def deal_chunks(borders: np.ndarray, num_ranks: int) -> tuple[np.ndarray, int]:
    """Return the rank of each chunk, int64 [chunks], and the number of tokens in a chunk.

    ``borders``, int64 [documents + 1], are the borders of the documents in all rows. A token takes as much work as
    there are tokens before it in its document. Each rank gets the same number of chunks: as few as balance the work to
    within 2 %, at most 8. The chunks with the most work are dealt first, each to the rank with the least work so far.
    """
    best = _deal_equally(borders, num_ranks, _CHUNKS_PER_RANK[0])
    for chunks_per_rank in _CHUNKS_PER_RANK[1:]:
        if best.imbalance <= 1 + _TOLERANCE:
            break
        deal = _deal_equally(borders, num_ranks, chunks_per_rank)
        if deal.imbalance < best.imbalance:
            best = deal
    return best.chunk_ranks, best.chunk_size


def _deal_equally(borders: np.ndarray, num_ranks: int, chunks_per_rank: int) -> _Deal:
    """Deal ``chunks_per_rank`` chunks to each rank; see :func:`deal_chunks`."""
    num_chunks = num_ranks * chunks_per_rank
    chunk_work = count_keys(borders, num_chunks)
    chunk_ranks = np.empty(num_chunks, dtype=np.int64)
    rank_work = [0] * num_ranks
    num_dealt = [0] * num_ranks
    for chunk in np.argsort(-chunk_work, kind="stable"):  # the most work first
        open_ranks = [rank for rank in range(num_ranks) if num_dealt[rank] < chunks_per_rank]
        rank = min(open_ranks, key=lambda open_rank: rank_work[open_rank])  # the one with the least work
        chunk_ranks[chunk] = rank
        rank_work[rank] += int(chunk_work[chunk])
        num_dealt[rank] += 1
    imbalance = max(rank_work) * num_ranks / sum(rank_work)
    return _Deal(chunk_ranks, _chunk_size(borders, num_chunks), imbalance)


def _chunk_size(borders: np.ndarray, num_chunks: int) -> int:
    """Return the number of tokens in a chunk if all tokens are cut into ``num_chunks``; the last ones may be padded."""
    num_tokens = int(borders[-1])
    return -(-num_tokens // num_chunks)


def count_keys(borders: np.ndarray, num_chunks: int) -> np.ndarray:
    """Return how many keys the tokens of each chunk see in total, int64 [chunks]; padding counts as a document."""
    chunk_size = _chunk_size(borders, num_chunks)
    tokens = np.arange(num_chunks * chunk_size)
    documents = np.searchsorted(borders, tokens, side="right") - 1  # the document of each token
    num_keys = tokens + 1 - borders[documents]  # of each token: from the start of its document to itself
    return num_keys.reshape(num_chunks, chunk_size).sum(axis=1)


def _find_segments(chunks: np.ndarray, chunk_size: int, borders: np.ndarray) -> tuple[RowSegment, ...]:
    """Return the consecutive tokens of a rank, whose ``chunks`` are ascending, with the keys that they see."""
    segments = []
    begin = 0  # in the slice
    ends_of_runs = np.flatnonzero(np.diff(chunks) > 1) + 1
    for run in np.split(chunks, ends_of_runs):
        # Consecutive chunks are the tokens ``begin_token`` to ``end_token`` of the rows. The keys begin with the
        # document that the first of these tokens is in.
        begin_token = int(run[0]) * chunk_size
        end_token = int(run[-1] + 1) * chunk_size
        first_document = np.searchsorted(borders, begin_token, side="right") - 1
        begin_key = int(borders[first_document])
        # Borders of the documents, counted from the first token and from the first key.
        inner_borders = borders[(borders > begin_token) & (borders < end_token)]
        query_borders = np.concatenate([[0], inner_borders - begin_token, [end_token - begin_token]])
        key_borders = np.concatenate([[0], inner_borders - begin_key, [end_token - begin_key]])
        end = begin + end_token - begin_token
        segments.append(
            RowSegment(
                begin=begin,
                end=end,
                begin_key=begin_key,
                end_key=end_token,
                lengths=tuple(np.diff(query_borders).tolist()),
                key_lengths=tuple(np.diff(key_borders).tolist()),
                borders=torch.from_numpy(query_borders.astype(np.int32)),
                key_borders=torch.from_numpy(key_borders.astype(np.int32)),
            )
        )
        begin = end
    return tuple(segments)


@torch.compiler.disable
def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    row_slice: RowSlice | None = None,
    **sdpa_arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within documents for a slice of the rows, as transformers calls it.

    ``query`` is [1, H, S, D] of any float dtype, ``key`` and ``value`` are [1, K, S, D]. All ranks of the slice's group
    call it together. Without a slice, this rank has the full rows. Returns [1, S, H, D] in autocast's dtype, or
    the query's, and None instead of the attention weights.
    """
    if row_slice is None:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, **sdpa_arguments)
    dtype = attention_dtype(query)
    queries, keys, values = (heads[0].transpose(0, 1).to(dtype) for heads in (query, key, value))  # [S, heads, D]

    # Send the keys and values of this rank to the others, in two halves of the heads if possible: the second half
    # travels while the first is computed, and its gradient on the way back as well.
    num_halves = 2 if keys.shape[1] % 2 == 0 else 1
    own_keys_values = torch.stack([keys, values], dim=1).chunk(num_halves, dim=2)  # each [S, 2, K / halves, D]
    exchanges = [_Exchange(half, row_slice) for half in own_keys_values]
    # applied to both halves first, so that the backward pass waits only when the gradients of both are on their way
    sent = [_Received.apply(half, exchange) for half, exchange in zip(own_keys_values, exchanges, strict=True)]

    # Compute this rank's queries, half by half of the heads, and a segment of consecutive tokens at a time.
    uses_kernel = module.config._attn_implementation == CONTEXT_VARLEN
    attend_segment = _attend_by_kernel if uses_kernel else _attend_by_document
    query_halves = queries.chunk(num_halves, dim=1)  # each [S, H / halves, D]
    outputs = []
    for half, exchange, query_half in zip(sent, exchanges, query_halves, strict=True):
        gathered = _Gathered.apply(half, exchange)  # [L, 2, K / halves, D]
        segment_outputs = []
        for segment in row_slice.segments:
            visible: Any = _Range.apply(gathered, exchange, segment.begin_key, segment.end_key)
            visible_keys, visible_values = visible.unbind(1)
            segment_queries = query_half[segment.begin : segment.end]
            segment_outputs.append(attend_segment(segment_queries, visible_keys, visible_values, segment, scaling))
        outputs.append(torch.cat(segment_outputs))
    return torch.cat(outputs, dim=1)[None], None


def _attend_by_kernel(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, segment: RowSegment, scaling: float | None
) -> torch.Tensor:
    """Return attention for the tokens of a segment, [tokens, H, D], by torch's kernel for documents."""
    return causal_varlen(
        queries,
        keys,
        values,
        borders=segment.borders,
        key_borders=segment.key_borders,
        longest=max(segment.lengths),
        longest_keys=max(segment.key_lengths),
        scaling=scaling,
    )


def _attend_by_document(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, segment: RowSegment, scaling: float | None
) -> torch.Tensor:
    """Return attention for the tokens of a segment, [tokens, H, D], one document after the other."""
    outputs = []
    query_documents = queries.split(segment.lengths)
    key_documents = keys.split(segment.key_lengths)
    value_documents = values.split(segment.key_lengths)
    for document in zip(query_documents, key_documents, value_documents, strict=True):
        query, key, value = (heads.transpose(0, 1)[None] for heads in document)  # [1, heads, tokens, D]
        num_queries = query.shape[2]
        num_keys = key.shape[2]
        mask = None
        if num_keys > num_queries:  # keys before the segment; sdpa's own causal mask would begin with the first key
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
            mask = mask.tril(num_keys - num_queries)
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
        outputs.append(output[0].transpose(0, 1))  # [tokens, H, D]
    return torch.cat(outputs)


class _Exchange:
    """Keys and values on their way to the other ranks of a group, and later their gradients on the way back."""

    def __init__(self, keys_values: torch.Tensor, row_slice: RowSlice) -> None:
        """Begin to send ``keys_values`` of this rank, [S, 2, K, D]."""
        self._group = row_slice.group.group
        self._chunk_indices = row_slice.chunk_indices
        self._dtype = keys_values.dtype
        self._gradient: torch.Tensor | None = None  # of the gathered keys and values, fp32 [L, 2, K, D]
        self._summed: torch.Tensor | None = None  # of this rank's, fp32 [S, 2, K, D]
        self._gathered = keys_values.new_empty(len(keys_values) * row_slice.group.size, *keys_values.shape[1:])
        self._work: Any = dist.all_gather_into_tensor(
            self._gathered, keys_values.detach().contiguous(), group=self._group, async_op=True
        )

    def gathered(self) -> torch.Tensor:
        """Wait for the keys and values of all slices, and return them in the order of the rows: [L, 2, K, D]."""
        self._work.wait()
        chunks_by_rank = self._gathered.unflatten(0, (len(self._chunk_indices), -1))
        chunks = chunks_by_rank.index_select(0, self._chunk_indices)
        del self._gathered  # its memory is free now
        return chunks.flatten(0, 1)

    def add_gradient(self, begin: int, end: int, gradient: torch.Tensor, length: int) -> None:
        """Add the gradient of the tokens ``begin`` to ``end`` of the ``length`` gathered ones, in fp32.

        A kernel also sums its gradients in fp32.
        """
        if self._gradient is None:
            self._gradient = gradient.new_zeros(length, *gradient.shape[1:], dtype=torch.float32)
        self._gradient[begin:end] += gradient

    def begin_sum(self, shape: torch.Size) -> None:
        """Begin to send each rank the gradients of its own keys and values; ``shape`` is this rank's [S, 2, K, D]."""
        assert self._gradient is not None  # the backward passes of its ranges come before
        chunks = self._gradient.unflatten(0, (len(self._chunk_indices), -1))
        order = torch.argsort(self._chunk_indices)  # back to the chunks of rank 0, then those of rank 1 and so on
        chunks_by_rank = chunks.index_select(0, order).flatten(0, 1)
        self._gradient = None
        self._summed = chunks_by_rank.new_empty(shape)
        self._work = dist.reduce_scatter_tensor(self._summed, chunks_by_rank, group=self._group, async_op=True)

    def summed(self) -> torch.Tensor:
        """Wait for the gradient of this rank's keys and values, and return it, [S, 2, K, D]."""
        self._work.wait()
        assert self._summed is not None
        summed = self._summed.to(self._dtype)
        self._summed = None
        return summed


class _Received(torch.autograd.Function):
    """An identity that waits for the gradients from the other ranks in its backward pass.

    It is applied before anything waits for keys, so its backward pass comes after all gradients have been sent.
    """

    @staticmethod
    def forward(ctx: Any, keys_values: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        return keys_values.view_as(keys_values)

    @staticmethod
    def backward(ctx: Any, _: None) -> Any:
        return ctx.exchange.summed(), None


class _Gathered(torch.autograd.Function):
    """Waits for the other ranks' keys, and in the backward pass begins to send their gradients."""

    @staticmethod
    def forward(ctx: Any, keys_values: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        ctx.shape = keys_values.shape
        ctx.set_materialize_grads(False)
        return exchange.gathered()

    @staticmethod
    def backward(ctx: Any, _: None) -> Any:
        ctx.exchange.begin_sum(ctx.shape)
        return None, None


class _Range(torch.autograd.Function):
    """Takes the tokens ``begin`` to ``end`` of the gathered keys and values, [L, 2, K, D].

    The gradient goes to the exchange. Autograd's own indexing would fill a gradient of all keys for each range.
    """

    @staticmethod
    def forward(ctx: Any, gathered: torch.Tensor, exchange: _Exchange, begin: int, end: int) -> torch.Tensor:
        ctx.exchange = exchange
        ctx.begin = begin
        ctx.end = end
        ctx.length = len(gathered)
        return gathered[begin:end]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.exchange.add_gradient(ctx.begin, ctx.end, gradient, ctx.length)
        return None, None, None, None


def whole_losses(row_slice: RowSlice, slice_losses: torch.Tensor, num_targets: int) -> torch.Tensor:
    """Return the losses of all targets of a batch in its order, [N, ...], from the losses of this rank's targets.

    All ranks of the group call it together and get the same losses. Each continues with the same function of them, so
    the gradient of a rank's own losses is known on that rank.
    """
    return _WholeLosses.apply(slice_losses, row_slice, num_targets)


class _WholeLosses(torch.autograd.Function):
    """The autograd function of ``whole_losses``."""

    @staticmethod
    def forward(ctx: Any, slice_losses: torch.Tensor, row_slice: RowSlice, num_targets: int) -> torch.Tensor:
        ctx.target_indices = row_slice.target_indices  # of this rank's targets among all of them
        losses = slice_losses.new_zeros(num_targets, *slice_losses.shape[1:])
        losses.index_copy_(0, ctx.target_indices, slice_losses)
        dist.all_reduce(losses, group=row_slice.group.group)  # the others have zeros at these targets
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.index_select(0, ctx.target_indices), None, None
