"""Adapters: small matrices that train next to the frozen weights of linear layers (LoRA, rsLoRA, DoRA).

A linear layer with the weight W [out, in] gets the children ``lora_A`` [rank, in] and ``lora_B`` [out, rank], and
computes ``x Wᵀ + scale · (x Aᵀ) Bᵀ``. Its own weight keeps its name, so weights are read as without an adapter. The
adapter is fp32 in every precision: in bf16, most of its updates would be rounded away. It is small, so every rank has
all of it, next to a base that may be sharded; ``distributed.gradients.average_replicated`` averages its gradients.

LoRA: arXiv:2106.09685; rsLoRA, whose scale is alpha / √rank: arXiv:2312.03732; DoRA: arXiv:2402.09353. The frozen
weights may be in 4 bits, see ``nf4``.
"""

import functools
import hashlib
import math
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fabric_train.cli.errors import InputError
from fabric_train.distributed.sharded_parameters import original_name
from fabric_train.model.nf4 import DOUBLE, NF4Linear, is_linear, read_dequantized_rows
from fabric_train.model.patterns import NamePattern
from fabric_train.model.weight_files import StoredTensors, Weights

ALL_LINEAR = "all-linear"
"""The target that means every linear layer except the head."""
_MAGNITUDE = "lora_magnitude_vector"
_ADAPTER_NAME = re.compile(r"\.(lora_[AB]\.weight|lora_magnitude_vector)$")
_ROWS_AT_ONCE = 1024  # rows of a weight that are in memory while norms are computed


@dataclass(frozen=True)
class Adapter:
    """The settings of an adapter.

    ``kind`` is lora or dora. ``targets`` name linear layers: by the end of their name in the model (``q_proj``), by a
    regular expression of the whole name, or :data:`ALL_LINEAR`. ``dropout`` is the share of a layer's inputs that the
    adapter does not see in a step. ``train_also`` names modules of the base that train in full (``lm_head``).
    ``base_weights`` is nf4 if the frozen matrices of the layers are held in 4 bits, and nf4_double if the scales of
    these matrices are quantized too.
    """

    kind: str
    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    is_rank_stabilized: bool = False
    train_also: tuple[str, ...] = ()
    base_weights: str | None = None

    @property
    def scale(self) -> float:
        """The factor of the product of both matrices: alpha / rank, or alpha / √rank for rsLoRA."""
        divisor = math.sqrt(self.rank) if self.is_rank_stabilized else self.rank
        return self.alpha / divisor

    @property
    def has_8bit_scales(self) -> bool:
        """Whether the scales of weights in 4 bits are quantized too."""
        return self.base_weights == DOUBLE

    def trains(self, name: str) -> bool:
        """Return whether a parameter of an adapted model trains, by its name in transformers' model."""
        if is_adapter_parameter(name):
            return True
        module_name = name.rpartition(".")[0]
        return any(_ends_with_name(module_name, module) for module in self.train_also)


def is_adapter_parameter(name: str) -> bool:
    """Return whether a name belongs to a parameter of the adapter, and not of the base."""
    return _ADAPTER_NAME.search(name) is not None


class AdaptedLayer(nn.Module):
    """A mixin that turns a class of linear layers into one with an adapter."""

    adapter: Adapter
    weight: nn.Parameter
    bias: nn.Parameter | None
    lora_A: nn.Linear  # noqa: N815 - these are the names in the files of peft
    lora_B: nn.Linear  # noqa: N815
    lora_magnitude_vector: nn.Parameter
    is_off = False
    """Whether the layer computes what its base does, see :func:`adapters_off`."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the output [..., out] for ``inputs`` [..., in], in the dtype of the base layer's own output.

        DoRA: ``m / ‖W + s B A‖ · (x Wᵀ + s (x Aᵀ) Bᵀ)`` with the magnitudes m, one for each row, and s the scale.
        Dropout works as in peft: the magnitudes' change of the base's output is computed from the dropped-out inputs
        too.
        """
        base: torch.Tensor = super().forward(inputs)  # [..., out]
        if self.is_off:
            return base
        dtype = base.dtype
        adapter = self.adapter
        drops = adapter.dropout > 0 and self.training
        adapter_inputs = F.dropout(inputs, adapter.dropout) if drops else inputs
        low = F.linear(adapter_inputs.to(dtype), self.lora_A.weight.to(dtype)) * adapter.scale  # [..., rank]
        up = self.lora_B.weight.to(dtype)  # [out, rank]
        output = _add_product(base, low, up)
        if adapter.kind != "dora":
            return output
        # in 16 bits, a ratio near 1 would lose most of what it differs by
        change = (self.lora_magnitude_vector / self._row_norms() - 1).to(dtype)  # [out]
        direction = output
        if drops:
            direction = _add_product(super().forward(adapter_inputs), low, up)
        if self.bias is not None:  # the magnitudes scale only the weight
            direction = direction - self.bias.to(dtype)
        return torch.addcmul(output, direction, change)

    @torch.no_grad()
    def _row_norms(self) -> torch.Tensor:
        """Return the norm of each row of W + s B A, fp32 [out], without making that matrix.

        With B' = s B, the square of a row's norm is ‖w‖² + 2 w·(b' A) + b' (A Aᵀ) b'ᵀ. It is a constant for the
        gradient, as in section 4.3 of the paper. Like the layer's output, it takes A in the dtype of W: a copy of W in
        fp32 would cost more time than the rest of the adapter.
        """
        with torch.autocast(self.weight.device.type, enabled=False):
            weight = self.dequantized() if isinstance(self, NF4Linear) else self.weight  # [out, in]
            lora_a = self.lora_A.weight  # [rank, in]
            lora_b = self.lora_B.weight * self.adapter.scale  # [out, rank]
            base_squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
            cross_products = ((weight @ lora_a.to(weight.dtype).t()) * lora_b).sum(dim=1)
            adapter_squares = ((lora_b @ (lora_a @ lora_a.t())) * lora_b).sum(dim=1)
            squares = base_squares + 2 * cross_products + adapter_squares
            return squares.clamp(min=0).sqrt()  # rounding may make a square slightly negative


def _add_product(base: torch.Tensor, low: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``base`` [..., out] plus ``low`` [..., rank] times ``up`` [out, rank] transposed, without that product."""
    return torch.addmm(base.flatten(0, -2), low.flatten(0, -2), up.t()).view_as(base)


@functools.cache
def _adapted_class(layer_class: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a class of linear layers that has an adapter."""
    return type(f"Adapted{layer_class.__name__}", (AdaptedLayer, layer_class), {})


def _base_class(layer: AdaptedLayer) -> type[nn.Module]:
    """Return the class that a layer had before it got an adapter."""
    return type(layer).__bases__[1]


def attach(model: nn.Module, adapter: Adapter, source: str, device: str = "meta") -> None:
    """Give each target of a model that is not wrapped yet an adapter on a device, and freeze nothing.

    Raises:
        InputError: a target or a module of ``train_also`` is not in the model, which ``source`` names; a module is in
            both; or a module of ``train_also`` has no weight except another module's.
    """
    targets = find_targets(model, adapter, source)
    _check_train_also(model, adapter, source, targets)
    layer: Any
    for layer in targets.values():
        out_features = layer.out_features
        in_features = layer.in_features
        options: dict[str, Any] = {"bias": False, "dtype": torch.float32, "device": device}
        layer.lora_A = nn.Linear(in_features, adapter.rank, **options)
        layer.lora_B = nn.Linear(adapter.rank, out_features, **options)
        if adapter.kind == "dora":
            layer.lora_magnitude_vector = nn.Parameter(torch.empty(out_features, dtype=torch.float32, device=device))
        layer.adapter = adapter
        layer.__class__ = _adapted_class(layer.__class__)  # its parameters and hooks stay


def remove_adapters(model: nn.Module) -> None:
    """Remove the adapters from a model's layers, which are then as they were before :func:`attach`."""
    layers: list[Any] = [layer for _, layer in adapted_layers(model)]
    for layer in layers:
        for name in ("lora_A", "lora_B", "adapter"):
            delattr(layer, name)
        if hasattr(layer, _MAGNITUDE):
            delattr(layer, _MAGNITUDE)
        layer.__class__ = _base_class(layer)


@dataclass(frozen=True)
class _DetachedAdapter:
    """The adapter that :func:`without_adapters` removed from a layer; ``magnitudes`` are DoRA's."""

    adapter: Adapter
    lora_a: nn.Module | None
    lora_b: nn.Module | None
    magnitudes: nn.Parameter | None


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Remove the adapters from the layers within the block, in which layers of the same names may replace them."""
    detached: dict[str, _DetachedAdapter] = {}
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLayer):
            detached[name] = _DetachedAdapter(
                adapter=module.adapter,
                lora_a=module._modules.pop("lora_A"),
                lora_b=module._modules.pop("lora_B"),
                magnitudes=module._parameters.pop(_MAGNITUDE, None),
            )
            module.__class__ = _base_class(module)  # type: ignore[assignment]
    yield
    for name, removed in detached.items():
        layer: Any = model.get_submodule(name)
        layer.adapter = removed.adapter
        layer.lora_A = removed.lora_a
        layer.lora_B = removed.lora_b
        if removed.magnitudes is not None:
            layer.lora_magnitude_vector = removed.magnitudes
        layer.__class__ = _adapted_class(layer.__class__)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let a model compute what its base does within the block. A strategy may have wrapped the model.

    No parameter is removed, because FSDP and DDP hold them.
    """
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers:
        layer.is_off = True
    try:
        yield
    finally:
        for layer in layers:
            del layer.is_off


def find_targets(model: Any, adapter: Adapter, source: str) -> dict[str, nn.Linear]:
    """Return the linear layers that get an adapter, by name; for errors see :func:`attach`."""
    head = model.get_output_embeddings()
    modules = model.named_modules()
    linear_layers = {name: module for name, module in modules if is_linear(module) and module is not head}
    target_names: set[str] = set()
    for target in adapter.targets:
        if target == ALL_LINEAR:
            names = set(linear_layers)
        else:
            names = {name for name in linear_layers if _ends_with_name(name, target)}
        names |= NamePattern("--lora_targets", target, "q_proj").matching_whole(linear_layers)
        if not names:
            raise InputError(f"--lora_targets {target}: {_why_no_target(model, target, linear_layers, source)}")
        target_names |= names
    return {name: layer for name, layer in linear_layers.items() if name in target_names}


def _why_no_target(model: Any, target: str, linear_names: Collection[str], source: str) -> str:
    """Return why ``target`` names no linear layer, and what to give instead."""
    whole_modules = (model.get_output_embeddings(), model.get_input_embeddings())
    for name, module in model.named_modules():
        if module in whole_modules and _ends_with_name(name, target):
            return f"the embedding and the head can only be trained in full; give --train_also {target}"
    return f"{source} has no linear layer with that name; it has {_leaf_names(linear_names) or 'none'}"


def _leaf_names(names: Collection[str]) -> str:
    """Return the last components of module names, each once: ``q_proj, k_proj``."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _ends_with_name(module_name: str, name: str) -> bool:
    """Return whether a module's full name ends with ``name``: ``layers.0.mlp.up_proj`` with ``mlp.up_proj``."""
    return module_name == name or module_name.endswith(f".{name}")


def _check_train_also(model: nn.Module, adapter: Adapter, source: str, targets: Collection[str]) -> None:
    """Check that the model has each module of ``train_also``, and that none of them gets an adapter."""
    names = [name for name, module in model.named_modules() if [*module.parameters(recurse=False)]]
    for train_also in adapter.train_also:
        matching = [name for name in names if _ends_with_name(name, train_also)]
        if not matching:
            raise InputError(
                f"--train_also {train_also}: {source} has no module with that name; it has {_leaf_names(names)}"
            )
        for name in matching:
            if name in targets:
                fault = f"{name} already has an adapter because of --lora_targets {' '.join(adapter.targets)}"
                raise InputError(f"--train_also {train_also}: {fault}; remove it from one of them")


def materialize(model: nn.Module, device: torch.device) -> list[nn.Parameter]:
    """Replace the adapter's meta parameters by uninitialized ones on a device, and return all of its parameters.

    A strategy that shards the model must leave these parameters alone.
    """
    adapter_parameters = []
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not is_adapter_parameter(f".{prefix}.{name}"):
                continue
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                parameter = nn.Parameter(empty, parameter.requires_grad)
                module._parameters[name] = parameter
            adapter_parameters.append(parameter)
    return adapter_parameters


def merge_rows(
    adapter: Adapter,
    base_rows: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    magnitudes: torch.Tensor | None,
) -> torch.Tensor:
    """Return rows of a layer's weight with its adapter merged: W + scale · B A, for DoRA scaled to the magnitudes.

    Args:
        adapter: The settings of the adapter.
        base_rows: Whole rows of the weight W, fp32 [rows, in].
        lora_a: The whole matrix A, fp32 [rank, in].
        lora_b: The same rows of B, fp32 [rows, rank].
        magnitudes: DoRA's magnitudes of these rows, fp32 [rows]; None for LoRA.

    Returns:
        fp32 [rows, in]; the bits depend on the number of rows.
    """
    rows = base_rows + (lora_b @ lora_a) * adapter.scale
    if magnitudes is not None:
        rows *= (magnitudes / torch.linalg.vector_norm(rows, dim=1))[:, None]
    return rows


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, AdaptedLayer]]:
    """Yield the layers with an adapter, under the names that they had before anything wrapped the model."""
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLayer):
            yield original_name(f"{name}.").removesuffix("."), module


class AdaptedWeights:
    """The weights of a base model and its adapter, which are new or ``stored``.

    New weights are as in peft: ``lora_A`` is drawn uniformly from ±1/√in (He's initialization with a = √5), ``lora_B``
    is zero. They depend only on ``seed`` and their name, not on the number of ranks. ``stored`` may also have weights
    of the base that were trained in full. Implements ``weight_files.Weights``.
    """

    def __init__(self, base: Weights | None, seed: int, stored: StoredTensors | None = None) -> None:
        self._base = base
        self._seed = seed
        self._stored = stored
        self._stored_names = set(stored or ())

    @property
    def is_new(self) -> bool:
        """Whether the adapter has not been trained yet."""
        return self._stored is None

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return a block of a weight; see ``Weights``. New magnitudes of DoRA are zero until ``start_magnitudes``."""
        if self._stored is not None and name in self._stored_names:
            return self._stored.read_block(name, offsets, shape)
        if not is_adapter_parameter(name):
            assert self._base is not None  # a base that is in memory is not read
            return self._base.read_block(name, offsets, shape)
        if not name.endswith("lora_A.weight"):
            return torch.zeros(tuple(shape))
        # every rank has the whole matrix, so the block is all of lora_A [rank, in]
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        bound = 1 / math.sqrt(shape[1])
        return torch.empty(tuple(shape)).uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def start_magnitudes(model: nn.Module, weights: Weights | None) -> None:
    """Set DoRA's magnitudes to the norms of the rows of the base's ``weights``; None if the model has them in full.

    All ranks call this. Each reads a share of the rows, so the norms do not depend on how ranks hold the weights.
    """
    rank = 0
    world_size = 1
    if weights is not None and dist.is_initialized():
        rank = dist.get_rank()
        world_size = dist.get_world_size()
    for name, layer in adapted_layers(model):
        if layer.adapter.kind != "dora":
            continue
        magnitudes = layer.lora_magnitude_vector  # [out]
        num_rows = layer.lora_B.out_features
        # each rank fills its rows of the norms; the sum over the ranks has all of them
        norms = torch.zeros(num_rows, dtype=torch.float64, device=magnitudes.device)
        first_row = num_rows * rank // world_size
        end_row = num_rows * (rank + 1) // world_size
        for begin in range(first_row, end_row, _ROWS_AT_ONCE):
            end = min(begin + _ROWS_AT_ONCE, end_row)
            if weights is None:
                rows = layer.weight[begin:end]
            else:
                rows = _read_rows(weights, name, layer, begin, end)
            norms[begin:end] = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
        if world_size > 1:
            dist.all_reduce(norms)
        magnitudes.copy_(norms)


def _read_rows(weights: Weights, name: str, layer: AdaptedLayer, begin: int, end: int) -> torch.Tensor:
    """Return rows ``begin`` to ``end`` [rows, in] of a layer's weight in the precision that the layer computes in."""
    if isinstance(layer, NF4Linear):
        return read_dequantized_rows(weights, name, layer, begin, end)
    in_features = layer.lora_A.in_features
    rows = weights.read_block(f"{name}.weight", (begin, 0), (end - begin, in_features))
    return rows.to(layer.weight.dtype)
