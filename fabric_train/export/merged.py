"""The weights of a base model with an adapter in them, a block of rows at a time.

A matrix is merged in fp32, and rounded once, by whoever writes it: W + scale · B A, and for DoRA each of its rows
scaled to the trained magnitude. W is the original weight, or for an adapter that was trained on weights in 4 bits also
what these stand for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from fabric_train.checkpoint import find_base, is_adapter, open_adapted, read_trainer_json
from fabric_train.checkpoint.adapter_folder import AdapterTensors, read_adapter, trained_adapter
from fabric_train.cli.errors import InputError
from fabric_train.export.hub_format import blocks
from fabric_train.model import hf_model
from fabric_train.model.adapter import adapted_layers, is_of_adapter
from fabric_train.model.load_weights import MetaModel, tied_weight_names
from fabric_train.model.nf4 import BLOCK, NF4Linear
from fabric_train.model.weight_files import StoredTensors, Weights, open_weights

MergeInto = Literal["original", "dequantized"]
"""The weights of a base that an adapter is merged into: its own, or what its weights in 4 bits stand for."""


def open_whole(checkpoint: Path, into: MergeInto | None = None) -> StoredTensors:
    """Open all weights of a checkpoint; an adapter is merged ``into`` the weights of its base."""
    return MergedTensors(checkpoint, into or "original") if is_adapter(checkpoint) else open_weights(checkpoint)


def is_in_4_bits(checkpoint: Path) -> bool:
    """Return whether the base of a checkpoint's adapter was in 4 bits in its training."""
    return read_trainer_json(checkpoint).arguments.get("base_weights") is not None


def open_unmerged(
    checkpoint: Path, dtype: torch.dtype, base_weights: MergeInto = "original"
) -> tuple[MetaModel, hf_model.ModelShape]:
    """Open the base and the adapter of a checkpoint side by side, on the meta device.

    Raises:
        InputError: the base is gone, its weights are a pickle, or bitsandbytes is missing.
    """
    base = find_base(read_trainer_json(checkpoint).arguments["model_name"], checkpoint)
    shape = hf_model.read_shape(str(checkpoint), adapter=read_adapter(checkpoint))
    opened = open_adapted(shape, base, dtype, 0, checkpoint)
    if opened.weights is None:
        raise InputError(f"{base.place}: its weights cannot be read in parts; save it again with save_pretrained")
    if base_weights == "dequantized":
        of_training = getattr(torch, read_trainer_json(checkpoint).content["weights_dtype"])
        in_4_bits = open_adapted(replace(shape, adapter=trained_adapter(checkpoint)), base, of_training, 0, checkpoint)
        opened = replace(opened, weights=_Dequantized(in_4_bits))
    return opened, shape


class _Dequantized:
    """The weights of a model, in fp32 for those that it has in 4 bits; see ``Weights``."""

    def __init__(self, in_4_bits: MetaModel) -> None:
        assert in_4_bits.weights is not None
        self._weights: Weights = in_4_bits.weights
        modules = in_4_bits.model.named_modules()
        self._layers = {f"{name}.weight": module for name, module in modules if isinstance(module, NF4Linear)}

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        if name not in self._layers:
            return self._weights.read_block(name, offsets, shape)
        from bitsandbytes.functional import QuantState, dequantize_4bit, get_4bit_type

        layer, (first, column) = self._layers[name], offsets
        packed, scales = (
            self._weights.read_block(f"{name}{end}", (first, 0), (shape[0], stored.shape[1])).view(torch.uint8)
            for end, stored in (("", layer.weight), ("_scales", layer.weight_scales))
        )
        if not shape[0]:
            return torch.empty(tuple(shape))
        state = QuantState(
            absmax=scales.view(torch.float32).flatten(),
            shape=torch.Size((shape[0], layer.in_features)),
            code=get_4bit_type("nf4", device="cpu"),
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=torch.float32,
        )
        rows: torch.Tensor = dequantize_4bit(packed.reshape(-1, 1), state)
        return rows[:, column : column + shape[1]]


class MergedTensors:
    """The tensors of a model with its adapter merged, fp32, by their names in memory; see ``StoredTensors``."""

    def __init__(self, checkpoint: Path, into: MergeInto = "original") -> None:
        opened, shape = open_unmerged(checkpoint, torch.float32, into)
        assert opened.weights is not None
        assert shape.adapter is not None
        self._weights, self._adapter, self._stored = opened.weights, shape.adapter, AdapterTensors(checkpoint)
        self._targets = {f"{name}.weight": name for name, _ in adapted_layers(opened.model)}
        tied, state = tied_weight_names(opened.model), opened.model.state_dict()
        own = [name for name in state if name not in tied and not is_of_adapter(name)]
        self._shapes = {name: state[name].shape for name in own}

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def shape(self, name: str) -> torch.Size:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def read(self, name: str) -> torch.Tensor:
        """Return the full tensor on the CPU, with the bits of its blocks: a product's bits depend on its shape."""
        shape = self._shapes[name]
        return torch.cat([*blocks(self, name, shape)]) if shape else self.read_block(name, (), ())

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return a block; a merged one is of whole rows, since DoRA needs their norms."""
        if name not in self._targets:
            return self._weights.read_block(name, offsets, shape).float()
        layer, columns = self._targets[name], self._shapes[name][1]
        rows = self._weights.read_block(name, (offsets[0], 0), (shape[0], columns)).float()
        low = self._stored.read_block(f"{layer}.lora_B.weight", (offsets[0], 0), (shape[0], self._adapter.rank))
        rows = rows + (low.float() @ self._stored.read(f"{layer}.lora_A.weight").float()) * self._adapter.scale
        if self._adapter.kind == "dora":
            magnitude = self._stored.read_block(f"{layer}.lora_magnitude_vector", offsets[:1], shape[:1]).float()
            rows *= (magnitude / torch.linalg.vector_norm(rows, dim=1))[:, None]
        return rows[:, offsets[1] : offsets[1] + shape[1]]
