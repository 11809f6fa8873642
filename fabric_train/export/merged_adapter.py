"""Open the weights of a checkpoint, with its adapter merged into the weights of its base.

A tensor is computed a block at a time. An adapter's matrix is merged in fp32, and rounded only when it is written:
W + scale · B A, and for DoRA each of its rows scaled to the trained magnitude. W is the original weight, or for an
adapter that was trained on weights in 4 bits also their dequantized values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from fabric_train.checkpoint import read_trainer_json
from fabric_train.checkpoint.adapter_base import find_base, open_adapted
from fabric_train.checkpoint.adapter_folder import AdapterTensors, is_adapter, read_adapter, trained_adapter
from fabric_train.cli.errors import InputError
from fabric_train.export.hub_format import blocks
from fabric_train.model import hf_model
from fabric_train.model.adapter import adapted_layers, is_adapter_parameter, merge_rows
from fabric_train.model.load_weights import MetaModel, tied_weight_names
from fabric_train.model.nf4 import NF4Linear, read_dequantized_rows
from fabric_train.model.weight_files import StoredTensors, Weights, open_weights

MergeInto = Literal["original", "dequantized"]
"""The base's weights that an adapter is merged into: the original ones, or the dequantized values of the 4 bits."""


def open_whole(checkpoint: Path, into: MergeInto | None = None) -> StoredTensors:
    """Open all weights of a checkpoint; an adapter is merged ``into`` the weights of its base."""
    if is_adapter(checkpoint):
        return MergedTensors(checkpoint, into or "original")
    return open_weights(checkpoint)


def is_in_4_bits(checkpoint: Path) -> bool:
    """Return whether the base of a checkpoint's adapter was in 4 bits during training."""
    return read_trainer_json(checkpoint).arguments.get("base_weights") is not None


def open_unmerged(
    checkpoint: Path, dtype: torch.dtype, base_weights: MergeInto = "original"
) -> tuple[MetaModel, hf_model.ModelShape]:
    """Open the base and the adapter of a checkpoint without merging them, on the meta device.

    Raises:
        InputError: the base is gone, its weights cannot be read in parts, or bitsandbytes is missing.
    """
    base = find_base(None, checkpoint)
    shape = hf_model.read_shape(str(checkpoint), adapter=read_adapter(checkpoint))
    opened = open_adapted(shape, base, dtype, 0, checkpoint)
    if opened.weights is None:
        raise InputError(
            f"{base.location}: its weights cannot be read tensor by tensor; save the model again with save_pretrained"
        )
    if base_weights == "dequantized":
        # quantized from the type of the training, as the training did
        training_dtype = getattr(torch, read_trainer_json(checkpoint).content["weights_dtype"])
        shape_in_4_bits = replace(shape, adapter=trained_adapter(checkpoint))
        opened_in_4_bits = open_adapted(shape_in_4_bits, base, training_dtype, 0, checkpoint)
        opened = replace(opened, weights=_Dequantized(opened_in_4_bits))
    return opened, shape


class _Dequantized:
    """A model's weights, with weights in 4 bits dequantized to fp32; see ``Weights``."""

    def __init__(self, in_4_bits: MetaModel) -> None:
        assert in_4_bits.weights is not None
        self._weights: Weights = in_4_bits.weights
        self._layers = {
            f"{name}.weight": module
            for name, module in in_4_bits.model.named_modules()
            if isinstance(module, NF4Linear)
        }

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return the block of ``shape`` that begins at ``offsets`` of the full tensor."""
        if name not in self._layers:
            return self._weights.read_block(name, offsets, shape)
        # whole rows are dequantized: a row has whole blocks of one scale, and its columns are packed in pairs
        layer_name = name.removesuffix(".weight")
        first_row, first_column = offsets
        num_rows, num_columns = shape
        end_row = first_row + num_rows
        rows = read_dequantized_rows(self._weights, layer_name, self._layers[name], first_row, end_row)
        return rows[:, first_column : first_column + num_columns]


class MergedTensors:
    """The tensors of a model with its adapter merged, fp32, by their names in memory; see ``StoredTensors``."""

    def __init__(self, checkpoint: Path, into: MergeInto = "original") -> None:
        """Open a checkpoint with an adapter, and its base; ``into`` says which weights of the base."""
        opened, shape = open_unmerged(checkpoint, torch.float32, into)
        assert opened.weights is not None
        assert shape.adapter is not None
        self._weights = opened.weights
        self._adapter = shape.adapter
        self._adapter_tensors = AdapterTensors(checkpoint)
        self._layers = {f"{name}.weight": name for name, _ in adapted_layers(opened.model)}
        """The adapted layers by the names of their weights."""
        tied_names = tied_weight_names(opened.model)
        self._shapes = {
            name: tensor.shape
            for name, tensor in opened.model.state_dict().items()
            if name not in tied_names and not is_adapter_parameter(name)
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def shape(self, name: str) -> torch.Size:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def read(self, name: str) -> torch.Tensor:
        """Return the full tensor on the CPU, computed in the same blocks: a product's bits depend on its shape."""
        shape = self._shapes[name]
        if not shape:
            return self.read_block(name, (), ())
        return torch.cat(list(blocks(self, name, shape)))

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return the block of ``shape`` that begins at ``offsets`` of the full tensor, on the CPU."""
        if name not in self._layers:
            return self._weights.read_block(name, offsets, shape).float()

        # whole rows are merged, since DoRA needs their norms
        layer = self._layers[name]
        first_row, first_column = offsets
        num_rows, num_columns = shape
        row_length = self._shapes[name][1]
        rank = self._adapter.rank
        base_rows = self._weights.read_block(name, (first_row, 0), (num_rows, row_length)).float()
        lora_a = self._adapter_tensors.read(f"{layer}.lora_A.weight").float()  # [rank, row_length]
        lora_b = self._adapter_tensors.read_block(f"{layer}.lora_B.weight", (first_row, 0), (num_rows, rank)).float()
        magnitudes = None
        if self._adapter.kind == "dora":
            magnitude = self._adapter_tensors.read_block(f"{layer}.lora_magnitude_vector", (first_row,), (num_rows,))
            magnitudes = magnitude.float()
        rows = merge_rows(self._adapter, base_rows, lora_a, lora_b, magnitudes)
        return rows[:, first_column : first_column + num_columns]
