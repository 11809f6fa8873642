"""Compute a model's MLPs and norms one tile of tokens at a time (``--mlp_tile_size``).

The MLP and the norms work on each token alone. So they can be computed tile by tile, and again in the backward pass,
and long rows need less memory: the inner tensors of an MLP, each about 3.5 times as large as its input, exist for one
tile only. It is the tiled MLP of ALST (arXiv:2506.13996). Results are exact; only the sum of a weight's gradient over
the tiles has another order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn

TILE_SIZE = 4096
"""The tokens of a tile with ``auto``: enough for fast matrix products, and few compared with a row that needs tiles."""
CutTiles = Callable[[int, int], Iterable[slice]]
"""A function like :func:`cut_tiles`, of the number of tokens and the size of a tile, that returns the tiles."""


def why_not_tiled(layers: Iterable[nn.Module]) -> str | None:
    """Return why the MLPs of layers cannot be computed in tiles, or None.

    A layer's MLP is its child ``mlp``, which may only have linear layers and activations. Dropout would draw other
    numbers when a tile is computed again. Adapters are not checked here.
    """
    for layer in layers:
        mlp = getattr(layer, "mlp", None)
        if mlp is None or not _can_be_tiled(mlp):
            return f"the MLP of {type(layer).__name__} does not consist of linear layers only"
    return None


def _can_be_tiled(mlp: nn.Module) -> bool:
    """Return whether an MLP has only linear layers and activations, and no other parameters."""
    has_parameters_beside = any(True for _ in mlp.parameters(recurse=False))
    return not has_parameters_beside and all(_is_plain(child) for child in mlp.children())


def _is_plain(module: nn.Module) -> bool:
    """Return whether this is a linear layer or an elementwise function, without dropout."""
    if isinstance(module, nn.Dropout):
        return module.p == 0
    if isinstance(module, nn.Linear):
        return True
    has_content = any(True for _ in module.children()) or any(True for _ in module.parameters())
    return not has_content


def cut_tiles(num_tokens: int, tile_size: int) -> Iterable[slice]:
    """Return slices of ``tile_size`` tokens that cover all tokens; the last one may be shorter."""
    return [slice(begin, min(begin + tile_size, num_tokens)) for begin in range(0, num_tokens, tile_size)]


def cut_two_tiles(num_tokens: int, tile_size: int) -> Iterable[slice]:
    """Return only the first two tiles, for a trace of memory: later tiles reuse the memory that these have freed."""
    return [slice(begin, min(begin + tile_size, num_tokens)) for begin in (0, tile_size) if begin < num_tokens]


def tile_rows(model: Any, layers: Sequence[nn.Module], tile_size: int, cut: CutTiles = cut_tiles) -> None:
    """Make the MLPs and norms of layers, and the model's last norm, work in tiles of ``tile_size`` tokens.

    This replaces the ``forward`` of these modules. Names in the state dict stay the same. Call it before layers are
    checkpointed, and before anything is sharded. ``cut`` chooses the tiles; a trace of memory cuts only two.
    """
    for module in _find_tiled_modules(model, layers):
        module.forward = _tiled_forward(module, module.forward, tile_size, cut)


def _find_tiled_modules(model: Any, layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for layer in layers:
        for name, child in layer.named_children():
            if name == "mlp" or _is_norm(child):
                yield child
    for child in model.base_model.children():
        if _is_norm(child):
            yield child


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module normalizes each token's vector."""
    return type(module).__name__.endswith(("RMSNorm", "LayerNorm")) and not list(module.children())


@dataclass(frozen=True)
class _ParameterSlot:
    """The attribute ``name`` of ``module``, which is a parameter."""

    module: nn.Module
    name: str


@dataclass(frozen=True)
class _TiledModule:
    """A module that works in tiles: its original ``forward``, and the attributes with its parameters."""

    forward: Callable[..., Any]
    slots: list[_ParameterSlot]
    tile_size: int
    cut: CutTiles


def _tiled_forward(
    module: nn.Module, forward: Callable[..., Any], tile_size: int, cut: CutTiles
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that computes ``forward`` of a module tile by tile if there is more than one tile."""
    slots: list[_ParameterSlot] = []
    for owner in module.modules():
        slots += [_ParameterSlot(owner, name) for name, _ in owner.named_parameters(recurse=False)]
    tiled = _TiledModule(forward, slots, tile_size, cut)

    @wraps(forward)
    def tiled_forward(hidden: torch.Tensor) -> torch.Tensor:  # [..., width]
        if hidden.numel() <= tile_size * hidden.shape[-1]:
            return forward(hidden)
        # looked up in each pass, since FSDP may have replaced a parameter by another tensor
        weights = [getattr(slot.module, slot.name) for slot in slots]
        output: torch.Tensor = _ComputeInTiles.apply(tiled, hidden, *weights)
        return output

    return tiled_forward


class _ComputeInTiles(torch.autograd.Function):
    """Computes a module tile by tile and keeps only its input. The weights are arguments, so they get gradients."""

    @staticmethod
    def forward(ctx: Any, tiled: _TiledModule, hidden: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        """Return the output [..., output width] of the module for ``hidden`` [..., width]."""
        ctx.save_for_backward(hidden, *weights)
        ctx.tiled = tiled
        device_type = hidden.device.type
        ctx.autocast = {  # the backward pass computes the tiles again in the same precision
            "enabled": torch.is_autocast_enabled(device_type),
            "dtype": torch.get_autocast_dtype(device_type),
        }
        tokens = hidden.flatten(0, -2)  # [tokens, width]
        output: torch.Tensor | None = None
        for tile in tiled.cut(len(tokens), tiled.tile_size):
            tile_output = tiled.forward(tokens[tile])
            if output is None:
                output = tile_output.new_empty(len(tokens), tile_output.shape[-1])
            output[tile] = tile_output
        assert output is not None
        return output.view(*hidden.shape[:-1], output.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Compute each tile again and differentiate it. Gradients of weights are summed in fp32."""
        tiled: _TiledModule = ctx.tiled
        hidden, *weights = ctx.saved_tensors
        _, needs_hidden, *weights_needed = ctx.needs_input_grad
        tokens = hidden.detach().flatten(0, -2)  # [tokens, width]
        grad_tokens = torch.empty_like(hidden).flatten(0, -2) if needs_hidden else None
        grad_outputs = grad_output.flatten(0, -2)  # [tokens, output width]

        # Leaves stand in for the weights, so that autograd differentiates one tile and goes no further back.
        leaves: list[torch.Tensor] = []
        for weight, is_needed in zip(weights, weights_needed, strict=True):
            leaves.append(weight.detach().requires_grad_(is_needed))
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        sums = [torch.zeros_like(leaf, dtype=torch.float32) for leaf in trained]

        autocast = torch.autocast(hidden.device.type, **ctx.autocast)
        with _replaced_parameters(tiled.slots, leaves), torch.enable_grad(), autocast:
            for tile in tiled.cut(len(tokens), tiled.tile_size):
                inputs = tokens[tile].requires_grad_(needs_hidden)
                sources = [inputs, *trained] if needs_hidden else trained
                gradients = list(torch.autograd.grad(tiled.forward(inputs), sources, grad_outputs[tile]))
                if grad_tokens is not None:
                    grad_tokens[tile] = gradients.pop(0)
                for total, gradient in zip(sums, gradients, strict=True):
                    total += gradient

        grad_weights: list[torch.Tensor | None] = []
        for leaf in leaves:
            if not leaf.requires_grad:
                grad_weights.append(None)
                continue
            weight_sum = sums.pop(0)  # removed from the list, so that its memory is free after the cast
            grad_weights.append(weight_sum.to(leaf.dtype))
        grad_hidden = None if grad_tokens is None else grad_tokens.view_as(hidden)
        return None, grad_hidden, *grad_weights


@contextmanager
def _replaced_parameters(slots: list[_ParameterSlot], tensors: list[torch.Tensor]) -> Iterator[None]:
    """Make modules compute with ``tensors`` instead of their parameters within the block.

    An attribute in the module's ``__dict__`` is found before a registered parameter.
    """
    shadowed = [vars(slot.module).get(slot.name) for slot in slots]
    for slot, tensor in zip(slots, tensors, strict=True):
        vars(slot.module)[slot.name] = tensor
    try:
        yield
    finally:
        for slot, attribute in zip(slots, shadowed, strict=True):
            if attribute is None:
                del vars(slot.module)[slot.name]
            else:
                vars(slot.module)[slot.name] = attribute
