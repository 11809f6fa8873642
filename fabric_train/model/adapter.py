"""Adapters: small matrices that train beside the frozen weights of linear layers (LoRA, rsLoRA, DoRA, QLoRA).

A linear layer with the weight W [out, in] gets the children ``lora_A`` [rank, in] and ``lora_B`` [out, rank], and
computes ``x Wᵀ + scale · (x Aᵀ) Bᵀ``. Its own weight keeps its name, so weights are read as without an adapter. The
adapter is fp32 in every precision: in bf16, most of its updates would be rounded away. It is small, so every rank has
all of it, beside a base that may be sharded; ``distributed.ranks.average_replicated`` averages its gradients.

LoRA: arXiv:2106.09685; rsLoRA, whose scale is alpha / √rank: arXiv:2312.03732; DoRA: arXiv:2402.09353.

Frozen weights may be in 4 bits: NF4 of bitsandbytes (QLoRA, arXiv:2305.14314). A weight [out, in] is cut into blocks of
64 numbers, which lie within its rows. Each block has an fp32 scale, its largest absolute value, and 4 bits for each
number: 4.5 bits in all. So any rows of a weight can be quantized alone, and each rank reads and quantizes its own. The
bytes are stored as numbers of the dtype of the weights: strategies that shard a model send and copy them, and never
compute with them or cast them (``distributed.precision.gathered_dtype``).
"""

import functools
import math
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fabric_train.cli.errors import InputError
from fabric_train.distributed.ranks import original_name
from fabric_train.files.requirements import load_package
from fabric_train.model.patterns import NamePattern
from fabric_train.model.weight_files import Weights

ALL_LINEAR = "all-linear"
"""The target that means every linear layer except the head."""
_MAGNITUDE = "lora_magnitude_vector"
_ADAPTER_NAME = re.compile(r"\.(lora_[AB]\.weight|lora_magnitude_vector)$")
_ROWS_AT_ONCE = 1024
BLOCK = 64
_SCALES = "weight_scales"


@dataclass(frozen=True)
class Adapter:
    """The settings of an adapter.

    ``kind`` is lora or dora. ``targets`` name linear layers: by the end of their name in the model (``q_proj``), by a
    regular expression of the whole name, or :data:`ALL_LINEAR`. ``dropout`` is the share of a layer's inputs that the
    adapter does not see in a step. ``train_also`` name modules of the base that train as a whole (``lm_head``).
    ``base_weights`` is nf4 if the frozen matrices of the layers are held in 4 bits.
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
        """The factor of the product of both matrices."""
        return self.alpha / (math.sqrt(self.rank) if self.is_rank_stabilized else self.rank)

    def trains(self, name: str) -> bool:
        """Return whether a parameter of an adapted model trains, by its name in transformers' model."""
        return is_of_adapter(name) or any(_is_named(name.rpartition(".")[0], module) for module in self.train_also)


def is_of_adapter(name: str) -> bool:
    """Return whether this is the name of an adapter's parameter, and not of one of the base's."""
    return _ADAPTER_NAME.search(name) is not None


class AdaptedLayer(nn.Module):
    """What turns a class of linear layers into one with an adapter; it is mixed in before that class."""

    adapter: Adapter
    weight: nn.Parameter
    bias: nn.Parameter | None
    lora_A: nn.Linear  # noqa: N815 - these are the names in the files of peft
    lora_B: nn.Linear  # noqa: N815
    lora_magnitude_vector: nn.Parameter

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the layer's output [..., out] in the dtype of the base layer's own.

        DoRA's dropout works as in peft: with it, the adapter's change of the base's direction sees the same inputs.
        """
        base: torch.Tensor = super().forward(inputs)
        dtype = base.dtype
        adapter = self.adapter
        drops = adapter.dropout > 0 and self.training
        seen = F.dropout(inputs, adapter.dropout) if drops else inputs
        low = F.linear(seen.to(dtype), self.lora_A.weight.to(dtype)) * adapter.scale
        up = self.lora_B.weight.to(dtype)
        if adapter.kind != "dora":  # added within the product, so nothing else is as large as the output
            return torch.addmm(base.flatten(0, -2), low.flatten(0, -2), up.t()).view_as(base)
        ratio = (self.lora_magnitude_vector / self._row_norms()).to(dtype)
        direction: torch.Tensor = super().forward(seen) if drops else base
        if self.bias is not None:
            direction = direction - self.bias.to(dtype)
        return base + (ratio - 1) * direction + ratio * F.linear(low, up)

    @torch.no_grad()
    def _row_norms(self) -> torch.Tensor:
        """Return the norm of each row of W + scale · B A, fp32 [out], without making that matrix.

        It is a constant to the gradient, as in section 4.3 of the paper.
        """
        with torch.autocast(self.weight.device.type, enabled=False):
            weight = self.dequantized() if isinstance(self, NF4Linear) else self.weight.float()
            a = self.lora_A.weight
            b = self.lora_B.weight * self.adapter.scale
            crossed = ((weight @ a.t()) * b).sum(dim=1)
            of_adapter = ((b @ (a @ a.t())) * b).sum(dim=1)
            return (weight.square().sum(dim=1) + 2 * crossed + of_adapter).clamp(min=0).sqrt()


@functools.cache
def _adapted_class(kind: Any) -> type[nn.Module]:
    return type(f"Adapted{kind.__name__}", (AdaptedLayer, kind), {})


def attach(model: Any, adapter: Adapter, source: str, device: str = "meta") -> None:
    """Give each target of a model, which nothing wraps yet, an adapter on a device; freeze nothing.

    Raises:
        InputError: a target or a module of ``train_also`` is not in the model, which ``source`` names; a module is
            both; or one of ``train_also`` has only the weight of another.
    """
    modules = find_targets(model, adapter, source)
    _check_train_also(model, adapter, source, modules)
    linear: Any
    for linear in modules.values():
        num_outputs = linear.out_features
        num_inputs = linear.in_features
        options: dict[str, Any] = {"bias": False, "dtype": torch.float32, "device": device}
        linear.lora_A = nn.Linear(num_inputs, adapter.rank, **options)
        linear.lora_B = nn.Linear(adapter.rank, num_outputs, **options)
        if adapter.kind == "dora":
            linear.lora_magnitude_vector = nn.Parameter(torch.empty(num_outputs, dtype=torch.float32, device=device))
        linear.adapter = adapter
        linear.__class__ = _adapted_class(linear.__class__)  # its parameters and hooks stay


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Take the adapters off the layers meanwhile, so that others of the same names may replace them."""
    taken: dict[str, tuple[Any, ...]] = {}
    layer: Any
    for name, layer in model.named_modules():
        if isinstance(layer, AdaptedLayer):
            children = (layer._modules.pop("lora_A"), layer._modules.pop("lora_B"))
            taken[name] = (layer.adapter, *children, layer._parameters.pop(_MAGNITUDE, None))
            layer.__class__ = type(layer).__bases__[1]
    yield
    for name, (adapter, lora_a, lora_b, magnitudes) in taken.items():
        layer = model.get_submodule(name)
        layer.adapter = adapter
        layer.lora_A = lora_a
        layer.lora_B = lora_b
        if magnitudes is not None:
            layer.lora_magnitude_vector = magnitudes
        layer.__class__ = _adapted_class(layer.__class__)


def find_targets(model: Any, adapter: Adapter, source: str) -> dict[str, nn.Linear]:
    """Return the linear layers that an adapter is for, by their names; for errors see :func:`attach`."""
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if is_linear(module) and module is not head}
    found: dict[str, nn.Linear] = {}
    for target in adapter.targets:
        matched = NamePattern("--lora_targets", target, "q_proj").matching_whole(linear)
        named = {
            name: module
            for name, module in linear.items()
            if target == ALL_LINEAR or _is_named(name, target) or name in matched
        }
        if not named:
            raise InputError(f"--lora_targets {target}: {_no_such_layer(model, head, target, linear, source)}")
        found |= named
    return {name: module for name, module in linear.items() if name in found}


def _no_such_layer(model: Any, head: Any, target: str, linear: Collection[str], source: str) -> str:
    leaves = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    whole = [name for name, module in model.named_modules() if module in (head, model.get_input_embeddings())]
    if any(_is_named(name, target) for name in whole):
        return f"the embedding and the head train whole; give --train_also {target}"
    return f"{source} has no linear layer of that name; it has {leaves or 'none'}"


def _is_named(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")


def _check_train_also(model: Any, adapter: Adapter, source: str, adapted: Collection[str]) -> None:
    names = [name for name, module in model.named_modules() if [*module.parameters(recurse=False)]]
    for wanted in adapter.train_also:
        found = [name for name in names if _is_named(name, wanted)]
        if not found:
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
            raise InputError(f"--train_also {wanted}: {source} has no such module; it has {known}")
        if twice := next((name for name in found if name in adapted), None):
            fault = f"{twice} has an adapter by --lora_targets {' '.join(adapter.targets)}"
            raise InputError(f"--train_also {wanted}: {fault}; leave it out of one of them")


def materialize(model: nn.Module, device: torch.device) -> list[nn.Parameter]:
    """Replace the adapter's meta parameters by uninitialized ones on a device, and return all of the adapter's.

    A strategy that shards the model is told to leave these alone.
    """
    found = []
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and is_of_adapter(f".{prefix}.{name}"):
                if parameter.is_meta:
                    empty = torch.empty_like(parameter, device=device)
                    module._parameters[name] = parameter = nn.Parameter(empty, parameter.requires_grad)
                found.append(parameter)
    return found


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, AdaptedLayer]]:
    """Yield the layers with an adapter, under the names that they had before anything wrapped the model."""
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLayer):
            yield original_name(f"{name}.").removesuffix("."), module


@torch.no_grad()
def start_magnitudes(model: nn.Module, weights: Weights | None) -> None:
    """Set DoRA's magnitudes to the norms of the rows of the base's ``weights``; None: the model has them whole.

    All ranks call this. Each reads a share of the rows, so the norms do not depend on how ranks hold the weights.
    """
    is_shared = weights is not None and dist.is_initialized()
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if is_shared else (0, 1)
    for name, layer in adapted_layers(model):
        if layer.adapter.kind != "dora":
            continue
        magnitudes = layer.lora_magnitude_vector
        num_rows = layer.lora_B.out_features
        norms = torch.zeros(num_rows, dtype=torch.float64, device=magnitudes.device)
        first, last = (num_rows * number // num_ranks for number in (rank, rank + 1))
        for begin in range(first, last, _ROWS_AT_ONCE):
            end = min(begin + _ROWS_AT_ONCE, last)
            rows = layer.weight[begin:end] if weights is None else _read_rows(weights, name, layer, begin, end)
            norms[begin:end] = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
        if num_ranks > 1:
            dist.all_reduce(norms)
        magnitudes.copy_(norms)


def _read_rows(weights: Weights, name: str, layer: AdaptedLayer, begin: int, end: int) -> torch.Tensor:
    """Return rows of a layer's weight as the layer computes with them; those in 4 bits are dequantized."""
    row = layer.lora_A.in_features
    dtype = layer.weight.dtype

    def read(of: str, number: int) -> torch.Tensor:
        return weights.read_block(f"{name}.{of}", (begin, 0), (end - begin, number))

    if not isinstance(layer, NF4Linear):
        return read("weight", row).to(dtype)
    return dequantize(*(read(of, number) for of, number in stored_rows(row, dtype).items()), row)


class NF4Linear(nn.Linear):
    """A linear layer that dequantizes its weight to the dtype of its input, in the forward and in the backward pass.

    ``weight`` has the bytes of [out, in / 2], and ``weight_scales`` the bytes of fp32 [out, in / 64], both in rows.
    """

    weight_scales: nn.Parameter

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``inputs`` [..., in] times the weight, [..., out] in their dtype, or in autocast's."""
        from bitsandbytes import matmul_4bit

        kind = inputs.device.type
        if torch.is_autocast_enabled(kind):
            inputs = inputs.to(torch.get_autocast_dtype(kind))
        state = _state(self.weight_scales, (self.out_features, self.in_features), inputs.dtype)
        packed = self.weight.view(torch.uint8).reshape(-1, 1)
        bias = None if self.bias is None else self.bias.to(inputs.dtype)
        result: torch.Tensor = matmul_4bit(inputs, packed.t(), quant_state=state, bias=bias)
        return result

    def dequantized(self) -> torch.Tensor:
        """Return the weight, fp32 [out, in]."""
        return dequantize(self.weight, self.weight_scales, self.in_features)


def _state(scales: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Any:
    from bitsandbytes.functional import QuantState

    return QuantState(
        absmax=scales.view(torch.float32).reshape(-1),
        shape=torch.Size(shape),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
    )


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module computes what a linear layer does. A router of Llama 4 is one too, and does not."""
    return isinstance(module, nn.Linear) and type(module).forward in (nn.Linear.forward, NF4Linear.forward)


def stored_rows(row: int, dtype: torch.dtype) -> dict[str, int]:
    """Return how many numbers of a dtype store a row of ``row`` weights, and its scales, by the parameter's name."""
    return {"weight": row // 2 // dtype.itemsize, _SCALES: row // BLOCK * 4 // dtype.itemsize}


def dequantize(packed: torch.Tensor, scales: torch.Tensor, row: int) -> torch.Tensor:
    """Return rows of a weight, fp32 [rows, ``row``], from both parameters of an ``NF4Linear``."""
    from bitsandbytes.functional import dequantize_4bit

    state = _state(scales, (len(packed), row), torch.float32)
    rows: torch.Tensor = dequantize_4bit(packed.view(torch.uint8).reshape(-1, 1), state)
    return rows


def quantize_layers(layers: Collection[nn.Module], dtype: torch.dtype, but: Collection[str] = ()) -> None:
    """Make the linear layers in decoder layers ``NF4Linear``, with parameters on the meta device.

    ``dtype`` is the type of the numbers that store the bytes. Linear layers whose name ends with one of
    ``but`` stay as they are.

    Raises:
        InputError: the rows of a weight are no whole blocks.
    """
    for layer in layers:
        for name, module in layer.named_modules():
            if not is_linear(module) or any(f".{name}".endswith(f".{one}") for one in but):
                continue
            if module.in_features % BLOCK:
                raise InputError(
                    f"--base_weights nf4: {name} has rows of {module.in_features} numbers, which are no blocks of "
                    f"{BLOCK}; leave it out"
                )
            module.__class__ = NF4Linear
            for of_parameter, number in stored_rows(module.in_features, dtype).items():
                empty = torch.empty(module.out_features, number, dtype=dtype, device="meta")
                setattr(module, of_parameter, nn.Parameter(empty, requires_grad=False))


class QuantizedWeights:
    """The weights of a model with ``NF4Linear`` layers, quantized block by block as they are read."""

    def __init__(self, model: nn.Module, weights: Weights, dtype: torch.dtype) -> None:
        """``weights`` of the model before are cast to ``dtype`` first, as transformers does."""
        self._weights = weights
        self._dtype = dtype
        self._stored: dict[str, tuple[str, int, torch.dtype]] = {}  # parameter → weight, its row length, stored dtype
        for name, module in model.named_modules():
            if isinstance(module, NF4Linear):
                for kind in ("weight", _SCALES):
                    self._stored[f"{name}.{kind}"] = (f"{name}.weight", module.in_features, module.weight.dtype)

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return a block of a weight; see ``Weights``. Of a quantized one it has whole rows."""
        if name not in self._stored:
            return self._weights.read_block(name, offsets, shape)
        weight, row, dtype = self._stored[name]
        rows = self._weights.read_block(weight, (offsets[0], 0), (shape[0], row))
        packed, scales = quantize_rows(rows.to(self._dtype))
        return (packed if name == weight else scales.view(torch.uint8)).view(dtype)


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes [rows, in / 2] uint8, and the scales of the blocks, fp32 [rows, in / 64], of rows [rows, in]."""
    from bitsandbytes.functional import quantize_4bit

    if not len(rows):
        return torch.empty((0, rows.shape[1] // 2), dtype=torch.uint8), torch.empty((0, rows.shape[1] // BLOCK))
    packed, state = quantize_4bit(rows.contiguous(), blocksize=BLOCK, quant_type="nf4")
    return packed.view(len(rows), -1), state.absmax.view(len(rows), -1)


def check_installed() -> None:
    """Check that bitsandbytes is installed.

    Raises:
        InputError: it is not.
    """
    load_package("bitsandbytes", "--base_weights nf4")
