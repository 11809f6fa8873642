"""Compute the MLP and the norms of a model in tiles along the row, so that long rows need less memory.

Both work on each token alone. So a tile of tokens is computed at a time, and again in the backward pass. The inner
tensors of an MLP, each about 3.5 times as large as its input, exist for one tile only. It is the tiled MLP of ALST
(arXiv:2506.13996). Results are exact; only the sum of a weight's gradient over the tiles has another order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

TILE_SIZE = 4096
"""The tokens of a tile that ``auto`` takes: enough for fast matrix products, and few beside a row that needs tiles."""


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
