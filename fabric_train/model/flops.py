"""Model FLOPs and device peaks, for the model FLOPs utilization (MFU).

FLOPs are counted as in PaLM (arXiv:2204.02311, appendix B) and torchtitan: for each token, 6 per parameter that it is
multiplied with (2 forward, 4 backward), and for attention 12 per layer, unit of width and token of context, causal or
not. A frozen parameter takes 2 less; before the first parameter that trains, there is no backward pass. Recomputed
activations count once: MFU measures how fast the model learns.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import Fabric
from torch import nn
from transformers import PreTrainedModel

from fabric_train.distributed.precision import compute_dtype
from fabric_train.model.computed_settings import has_setting

_EXPERT = re.compile(r"\.experts\.")


@dataclass(frozen=True)
class Attention:
    """Attention layers of one kind."""

    num_layers: int
    width: int
    """The number of heads times their size."""
    window: int | None
    """The most tokens that a token sees; None means all of its document."""
    num_below: int = 0
    """The number of these layers that have no backward pass, because nothing trains in them or below them."""

    def count_pairs(self, lengths: Sequence[int]) -> int:
        """Return the number of pairs of tokens in documents of these lengths, of which one may see the other."""
        return sum(length * min(length, self.window or length) for length in lengths)


@dataclass(frozen=True)
class ModelFlops:
    """The FLOPs that a model needs per token."""

    num_used: int
    """The parameters that a token is multiplied with: without embeddings that are only looked up, and with only the
    share of the experts that a token is routed to.
    """
    attention: tuple[Attention, ...]
    num_frozen: int = 0
    """The number of these parameters that do not train."""
    num_below: int = 0
    """The number of frozen parameters before all that train, which have no backward pass."""

    def count(self, lengths: Sequence[int]) -> float:
        """Return the FLOPs of a forward and backward pass over documents with these numbers of tokens."""
        flops_per_token = 6.0 * self.num_used - 2.0 * (self.num_frozen + self.num_below)
        total = flops_per_token * sum(lengths)
        for attention in self.attention:
            factor = 12.0 * attention.num_layers - 8.0 * attention.num_below
            total += factor * attention.width * attention.count_pairs(lengths)
        return total

    def count_forward(self, lengths: Sequence[int]) -> float:
        """Return the FLOPs of a forward pass alone over documents with these numbers of tokens."""
        total = 2.0 * self.num_used * sum(lengths)
        for attention in self.attention:
            total += 4.0 * attention.num_layers * attention.width * attention.count_pairs(lengths)
        return total

    def __str__(self) -> str:
        frozen = f" - 2 × {self.num_frozen + self.num_below:,} of frozen ones" if self.num_frozen else ""
        terms = [f"6 × {self.num_used:,} parameters{frozen}"]
        for attention in self.attention:
            context = "context" if attention.window is None else f"context up to {attention.window:,}"
            layers = f"12 × {attention.num_layers}"
            if attention.num_below:
                layers = f"({layers} - 8 × {attention.num_below})"
            terms.append(f"{layers} layers × {attention.width:,} × {context}")
        return " + ".join(terms)


def model_flops(model: PreTrainedModel, trained: Collection[str] | None = None) -> ModelFlops:
    """Count the FLOPs of a model, which may be on meta; ``trained`` are the parameters that train, None means all."""
    head_weight = getattr(model.get_output_embeddings(), "weight", None)
    # a token only reads a row of an embedding, unless the embedding is tied: then it is multiplied by, as the head
    looked_up: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight is not head_weight:
            looked_up.add(id(module.weight))
    config: Any = model.config.get_text_config()
    expert_share = _share_of_experts(config)
    num_used = 0.0
    num_frozen = 0.0
    num_below = 0.0
    names_below: set[str] = set()  # the parameters before the first one that trains
    has_trained = False
    for name, parameter in model.named_parameters():  # in the order of the forward pass
        is_frozen = trained is not None and name not in trained
        has_trained = has_trained or not is_frozen
        if not has_trained and parameter is not head_weight:  # a tied weight is also the head's, at the end
            names_below.add(name)
        if id(parameter) in looked_up:
            continue
        used_share = expert_share if _EXPERT.search(name) else 1
        numel = parameter.numel() * used_share
        num_used += numel
        if is_frozen:
            num_frozen += numel
        if name in names_below:
            num_below += numel
    attention = _count_attention(config, _num_layers_below(model, names_below))
    return ModelFlops(round(num_used), attention, num_frozen=round(num_frozen), num_below=round(num_below))


def _num_layers_below(model: PreTrainedModel, names_below: set[str]) -> int:
    """Return the number of decoder layers all of whose parameters come before the first one that trains.

    ``names_below`` are all parameters before that one.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    for name, layers in model.named_modules():
        if not isinstance(layers, nn.ModuleList) or len(layers) != num_layers:
            continue
        num_below = 0
        for index, layer in enumerate(layers):
            layer_names = {f"{name}.{index}.{parameter_name}" for parameter_name, _ in layer.named_parameters()}
            if layer_names <= names_below:
                num_below += 1
        return num_below
    return 0


def _share_of_experts(config: Any) -> float:
    """Return the share of the experts that a token is routed to; 1 if there are none."""
    layer_config = layer_configs(config)[-1]  # the first layers may have no experts
    num_routed = getattr(layer_config, "num_experts_per_tok", None)
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):  # by family
        num_experts = getattr(layer_config, name, None)
        if num_experts and num_routed:
            return num_routed / num_experts
    return 1.0


def layer_configs(config: Any) -> list[Any]:
    """Return the text configuration of each decoder layer; they may differ: Gemma 4 has heads of several sizes."""
    if getattr(config, "is_heterogeneous", False):  # such a configuration refuses to answer for all layers
        return list(config.per_layer_config)
    return [config] * config.num_hidden_layers


def _count_attention(config: Any, num_layers_below: int) -> tuple[Attention, ...]:
    """Return the attention layers of a model by kind; the first ``num_layers_below`` layers have no backward pass."""
    configs = layer_configs(config)
    # a family without kinds of layers has one window for all of them, or none
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(configs)
    layers_by_kind: dict[tuple[int, int | None], list[int]] = {}  # indices by width and window
    for index, (layer_config, kind) in enumerate(zip(configs, kinds, strict=False)):
        num_heads = getattr(layer_config, "num_attention_heads", 0)
        if not num_heads:
            continue
        head_size = getattr(layer_config, "head_dim", None) or layer_config.hidden_size // num_heads
        width = num_heads * head_size
        window = None
        # a class without this setting has no sliding layers, whatever its config.json says
        if kind == "sliding_attention" and has_setting(layer_config, "sliding_window"):
            window = layer_config.sliding_window or None  # 0 is no window
        layers_by_kind.setdefault((width, window), []).append(index)
    attention = []
    for (width, window), indices in layers_by_kind.items():
        num_below = sum(index < num_layers_below for index in indices)
        attention.append(Attention(num_layers=len(indices), width=width, window=window, num_below=num_below))
    return tuple(sorted(attention, key=lambda layers: layers.window is not None))  # without a window first


# ------------------------------------------------------------------------------------------------------- devices

# Dense peak TFLOP/s from NVIDIA's data sheets (their larger figures are with sparsity). bf16 and fp16: on tensor cores
# (GeForce: with fp32 accumulation, as torch multiplies). fp32: outside of tensor cores, torch's default. The first
# pattern that matches a name counts. bandwidth: TB/s from the GPU's memory (A100: the one with 80 GB).
_PEAKS = Path(__file__).with_name("gpu_peaks.csv").read_text(encoding="utf-8").splitlines()[1:]
_BANDWIDTH_COLUMN = 3
_OTHER_CHIPS = re.compile(r"Laptop|Max-Q|MIG|RTX (30|40|50)90 (D|Ti)\b")  # slower or faster than their namesakes


def peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Return the dense peak FLOP/s in ``dtype`` of a device by ``torch.cuda.get_device_name``, None if not known."""
    column = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}[dtype]
    return _read_peak(name, column)


def memory_bandwidth(name: str) -> float | None:
    """Return the bytes per second from a device's memory by ``torch.cuda.get_device_name``, None if not known."""
    return _read_peak(name, _BANDWIDTH_COLUMN)


def _read_peak(name: str, column: int) -> float | None:
    """Return a figure of the table, which are in 10¹² per second; the pattern's column does not count."""
    if _OTHER_CHIPS.search(name):
        return None
    for line in _PEAKS:
        pattern, *figures = line.split(",")
        if re.search(rf"(?<![A-Za-z0-9])(?:{pattern})(?![A-Za-z0-9])", name):
            return float(figures[column]) * 1e12 if figures[column] else None
    return None


def peak_flops_of_run(fabric: Fabric, precision: str) -> float | None:
    """Return the peak FLOP/s of all devices, which are assumed to be like this rank's; None if it is not known."""
    if fabric.device.type != "cuda":
        return None
    device_peak = peak_flops(torch.cuda.get_device_name(fabric.device), compute_dtype(precision))
    if device_peak is None:
        return None
    return device_peak * fabric.world_size
