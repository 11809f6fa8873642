"""Model FLOPs and device peaks, for the model FLOPs utilization (MFU).

FLOPs are counted as in PaLM (arXiv:2204.02311, appendix B) and torchtitan: for each token, 6 per parameter that it is
multiplied with (2 forward, 4 backward), and for attention 12 per layer, unit of width and token of context, causal or
not. A frozen parameter takes 2 less; before the first one that trains there is no backward pass. Recomputed activations
count once: MFU measures how fast the model learns.
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

_EXPERT = re.compile(r"\.experts\.")


@dataclass(frozen=True)
class Attention:
    """Attention layers of one kind; ``num_below`` have no backward pass, ``width`` is heads times their size."""

    num_layers: int
    width: int
    window: int | None
    num_below: int = 0


@dataclass(frozen=True)
class ModelFlops:
    """The FLOPs that a model needs per token.

    ``num_used`` counts the parameters that a token is multiplied with: without embeddings that are only looked up, and
    with the share of the experts that a token is routed to. ``num_frozen`` of them do not train; ``num_below`` of these
    come before all that train, so they have no backward pass.
    """

    num_used: int
    attention: tuple[Attention, ...]
    num_frozen: int = 0
    num_below: int = 0

    def of(self, lengths: Sequence[int]) -> float:
        """Return the FLOPs of a forward and backward pass over documents with these numbers of tokens."""
        total = (6.0 * self.num_used - 2.0 * (self.num_frozen + self.num_below)) * sum(lengths)
        for part in self.attention:
            total += (
                (12.0 * part.num_layers - 8.0 * part.num_below)
                * part.width
                * sum(length * min(length, part.window or length) for length in lengths)
            )
        return total

    def __str__(self) -> str:
        less = f" - 2 × {self.num_frozen + self.num_below:,} of frozen ones" if self.num_frozen else ""
        parts = [f"6 × {self.num_used:,} parameters{less}"]
        for part in self.attention:
            context = "context" if part.window is None else f"context up to {part.window:,}"
            layers = f"12 × {part.num_layers}"
            if part.num_below:
                layers = f"({layers} - 8 × {part.num_below})"
            parts.append(f"{layers} layers × {part.width:,} × {context}")
        return " + ".join(parts)


def model_flops(model: PreTrainedModel, trained: Collection[str] | None = None) -> ModelFlops:
    """Count a model's FLOPs, also on the meta device; ``trained`` are the parameters that train, None: all."""
    head = model.get_output_embeddings()
    looked_up = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.weight is not getattr(head, "weight", None)
    }
    config: Any = model.config.get_text_config()
    share = _share_of_experts(config)
    used = frozen = below = 0.0
    below_names = set()
    trains = False
    for name, parameter in model.named_parameters():  # in the order of the forward pass
        is_frozen = trained is not None and name not in trained
        trains = trains or not is_frozen
        if not trains and parameter is not getattr(head, "weight", None):  # a tied weight is the head's too
            below_names.add(name)
        if id(parameter) not in looked_up:
            numel = parameter.numel() * (share if _EXPERT.search(name) else 1)
            used += numel
            frozen += numel * is_frozen
            below += numel * (name in below_names)
    return ModelFlops(round(used), _attention(config, _num_below(model, below_names)), round(frozen), round(below))


def _num_below(model: PreTrainedModel, below: set[str]) -> int:
    """Return the number of decoder layers all of whose parameters come before the first one that trains."""
    num_layers = model.config.get_text_config().num_hidden_layers
    for name, layers in model.named_modules():
        if isinstance(layers, nn.ModuleList) and len(layers) == num_layers:
            owned = ({f"{name}.{i}.{own}" for own, _ in layer.named_parameters()} for i, layer in enumerate(layers))
            return sum(names <= below for names in owned)
    return 0


def _share_of_experts(config: Any) -> float:
    """Return the share of the experts that a token is routed to; 1 if there are none."""
    config = layer_configs(config)[-1]  # the first layers may have no experts
    num_chosen = getattr(config, "num_experts_per_tok", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    num_experts = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    return num_chosen / num_experts if num_chosen and num_experts else 1.0


def layer_configs(config: Any) -> list[Any]:
    """Return the text configuration of each decoder layer: Gemma 4's have heads of several sizes."""
    if getattr(config, "is_heterogeneous", False):  # such a configuration refuses to answer for all layers
        return list(config.per_layer_config)
    return [config] * config.num_hidden_layers


def _attention(config: Any, num_below: int) -> tuple[Attention, ...]:
    layers = layer_configs(config)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(layers)
    counted: dict[tuple[int, int | None], list[int]] = {}  # the layers of each width and window
    for index, (layer, kind) in enumerate(zip(layers, kinds, strict=False)):
        num_heads = getattr(layer, "num_attention_heads", 0)
        if not num_heads:
            continue
        width = num_heads * (getattr(layer, "head_dim", None) or layer.hidden_size // num_heads)
        window = getattr(layer, "sliding_window", None) if kind == "sliding_attention" else None
        counted.setdefault((width, window or None), []).append(index)
    parts = [
        Attention(len(indices), width, window, sum(index < num_below for index in indices))
        for (width, window), indices in counted.items()
    ]
    return tuple(sorted(parts, key=lambda part: part.window is not None))


# ------------------------------------------------------------------------------------------------------- devices

# Dense peak TFLOP/s from NVIDIA's data sheets (their larger figures are with sparsity). bf16 and fp16: on tensor cores
# (GeForce: with fp32 accumulation, as torch multiplies). fp32: outside of tensor cores, torch's default. The first
# pattern that matches a name counts.
_PEAKS = Path(__file__).with_name("gpu_peaks.csv").read_text(encoding="utf-8").splitlines()[1:]
_OTHER_CHIPS = re.compile(r"Laptop|Max-Q|MIG|RTX (30|40|50)90 (D|Ti)\b")  # slower or faster than their namesakes


def peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Return the dense peak FLOP/s in ``dtype`` of a device by ``torch.cuda.get_device_name``, None if not known."""
    if _OTHER_CHIPS.search(name):
        return None
    for pattern, bf16, fp16, fp32 in (line.split(",") for line in _PEAKS):
        if re.search(rf"(?<![A-Za-z0-9])(?:{pattern})(?![A-Za-z0-9])", name):
            tflops = {torch.bfloat16: bf16, torch.float16: fp16, torch.float32: fp32}[dtype]
            return float(tflops) * 1e12 if tflops else None
    return None


def peak_flops_of_run(fabric: Fabric, precision: str) -> float | None:
    """Return the peak FLOP/s of all devices, taken to be of this rank's kind; None if it is not known."""
    if fabric.device.type != "cuda":
        return None
    per_device = peak_flops(torch.cuda.get_device_name(fabric.device), compute_dtype(precision))
    return per_device * fabric.world_size if per_device else None
