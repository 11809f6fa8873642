"""Train on rows that are too long for one rank: compute them in tiles, or a slice of them on each of several ranks.

All layers but attention treat each token alone. So the MLP and the norms can be computed for a tile of tokens at a
time, and again in the backward pass. The inner tensors of an MLP, each about 3.5 times as large as its input, exist for
one tile only. It is the tiled MLP of ALST (arXiv:2506.13996). Results are exact; only the sum of a weight's gradient
over the tiles has another order.

With slices (context parallelism), the ranks gather the keys and values of all slices for attention, and each computes
its own queries, as in Llama 3 (arXiv:2407.21783, section 3.3.2). The gathered keys are in the order of the rows, so a
stretch of queries sees a stretch of keys, and the kernels for documents take both with their borders. torch's own
context parallelism (``torch.distributed.tensor.experimental``) has no documents: it takes causal rows.

Shapes: S tokens of a slice, L of all slices, H heads of queries, K of keys and values, D head size, N targets.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fabric_train.data.row_slices import RowSlice, Stretch

TILE_SIZE = 4096
"""The tokens of a tile that ``auto`` takes: enough for fast matrix products, and few beside a row that needs tiles."""
CONTEXT = "sdpa_context"
"""transformers' name of :func:`attend`."""
CONTEXT_VARLEN = "sdpa_context_varlen"
"""transformers' name of :func:`attend` with torch's kernel for documents."""


def why_not_tiled(layers: Iterable[nn.Module]) -> str | None:
    """Return why the MLPs of layers cannot be computed in tiles, or None.

    An MLP is known by its name and has linear layers and activations only. Dropout would draw other numbers when a tile
    is computed again. Adapters are not looked at.
    """
    for layer in layers:
        mlp = getattr(layer, "mlp", None)
        if mlp is None or not all(_is_plain(child) for child in mlp.children()) or [*mlp.parameters(recurse=False)]:
            return f"the MLP of {type(layer).__name__} is not made of linear layers alone"
    return None


def _is_plain(module: nn.Module) -> bool:
    """Return whether this is a linear layer or computes each number alone, without dropout."""
    if isinstance(module, nn.Dropout):
        return module.p == 0
    return isinstance(module, nn.Linear) or not any(True for _ in (*module.children(), *module.parameters()))


def tile_rows(model: Any, layers: Sequence[nn.Module], size: int) -> None:
    """Replace the ``forward`` of the MLPs, of the layers' norms and of the last norm: it works in tiles of tokens.

    Names in the state dict stay the same. Call it before layers are checkpointed, and nothing is sharded yet.
    """
    for module in _modules(model, layers):
        module.forward = _tiled(module, module.forward, size)


def _modules(model: Any, layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for layer in layers:
        yield from (child for name, child in layer.named_children() if name == "mlp" or _is_norm(child))
    yield from filter(_is_norm, model.base_model.children())


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module normalizes each token's vector."""
    return type(module).__name__.endswith(("RMSNorm", "LayerNorm")) and not list(module.children())


def _tiled(module: nn.Module, forward: Callable[..., Any], size: int) -> Callable[..., Any]:
    owners = [(owner, name) for owner in module.modules() for name, _ in owner.named_parameters(recurse=False)]

    @wraps(forward)
    def tiled(hidden: torch.Tensor) -> torch.Tensor:
        if hidden.numel() <= size * hidden.shape[-1]:
            return forward(hidden)
        # FSDP may have put another tensor in the place of a parameter
        weights = [getattr(owner, name) for owner, name in owners]
        result: torch.Tensor = _Tiles.apply(forward, owners, size, hidden, *weights)
        return result

    return tiled


class _Tiles(torch.autograd.Function):
    """Computes a module tile by tile; keeps its input only."""

    @staticmethod
    def forward(
        ctx: Any,
        forward: Callable[..., Any],
        owners: list[tuple[nn.Module, str]],
        size: int,
        hidden: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        kind = hidden.device.type
        ctx.save_for_backward(hidden, *weights)
        ctx.module = forward, owners, size
        ctx.autocast = {"enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}
        flat = hidden.flatten(0, -2)
        output: torch.Tensor | None = None
        for tile in tiles_of(len(flat), size):
            result = forward(flat[tile])
            if output is None:
                output = result.new_empty(len(flat), result.shape[-1])
            output[tile] = result
        assert output is not None
        return output.view(*hidden.shape[:-1], output.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Compute each tile again and differentiate it. Gradients of weights are summed in fp32."""
        hidden, *weights = ctx.saved_tensors
        forward, owners, size = ctx.module
        _, _, _, needs_hidden, *needed = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden).flatten(0, -2) if needs_hidden else None
        leaves = [weight.detach().requires_grad_(need) for weight, need in zip(weights, needed, strict=True)]
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        sums = [torch.zeros_like(leaf, dtype=torch.float32) for leaf in trained]
        flat, grads_of_tokens = hidden.detach().flatten(0, -2), grad_output.flatten(0, -2)
        with _replaced(owners, leaves), torch.enable_grad(), torch.autocast(hidden.device.type, **ctx.autocast):
            for tile in tiles_of(len(flat), size):
                inputs = flat[tile].requires_grad_(needs_hidden)
                wanted = [inputs, *trained] if needs_hidden else trained
                grads = list(torch.autograd.grad(forward(inputs), wanted, grads_of_tokens[tile]))
                if grad_hidden is not None:
                    grad_hidden[tile] = grads.pop(0)
                for total, grad in zip(sums, grads, strict=True):
                    total += grad
        of_weights = [sums.pop(0).to(leaf.dtype) if leaf.requires_grad else None for leaf in leaves]
        return None, None, None, None if grad_hidden is None else grad_hidden.view_as(hidden), *of_weights


def tiles_of(num_tokens: int, size: int) -> Iterable[slice]:
    """Return the tiles of so many tokens."""
    return [slice(begin, min(begin + size, num_tokens)) for begin in range(0, num_tokens, size)]


def two_tiles_of(num_tokens: int, size: int) -> Iterable[slice]:
    """Return the first two tiles: for a trace of memory, since the others take what these have freed."""
    return [slice(begin, min(begin + size, num_tokens)) for begin in (0, size) if begin < num_tokens]


@contextmanager
def _replaced(owners: list[tuple[nn.Module, str]], tensors: list[torch.Tensor]) -> Iterator[None]:
    """Put tensors in the place of parameters meanwhile; an attribute in the module itself is found before these."""
    before = [vars(owner).get(name) for owner, name in owners]
    for (owner, name), tensor in zip(owners, tensors, strict=True):
        vars(owner)[name] = tensor
    try:
        yield
    finally:
        for (owner, name), found in zip(owners, before, strict=True):
            if found is None:
                del vars(owner)[name]
            else:
                vars(owner)[name] = found


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
        gathered, found = _Gathered.apply(part, exchange), []
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
        self._group, self._chunks = row_slice.group.group, row_slice.chunks
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
        by_chunk, order = self._gradient.unflatten(0, (len(self._chunks), -1)), torch.argsort(self._chunks)
        chunks = by_chunk.index_select(0, order).flatten(0, 1)
        self._gradient, self._summed = None, chunks.new_empty(shape)
        self._work = dist.reduce_scatter_tensor(self._summed, chunks, group=self._group, async_op=True)

    def summed(self) -> torch.Tensor:
        """Return the gradient of this rank's keys and values, [S, 2, K, D]."""
        self._work.wait()
        assert self._summed is not None
        summed, self._summed = self._summed.to(self._dtype), None
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
        ctx.exchange, ctx.shape = exchange, own.shape
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
        ctx.exchange, ctx.range, ctx.length = exchange, (first, last), len(gathered)
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
