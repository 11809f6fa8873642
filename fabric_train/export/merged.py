"""The weights of a base model with an adapter in them, a block of rows at a time.

A matrix is merged in fp32, and rounded once, by whoever writes it: W + scale · B A, and for DoRA each of its rows
scaled to the trained magnitude.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from fabric_train.checkpoint import find_base, is_adapter, open_adapted, read_trainer_json
from fabric_train.checkpoint.adapter_folder import AdapterTensors, read_adapter
from fabric_train.cli.errors import InputError
from fabric_train.export.hub_format import blocks
from fabric_train.model import hf_model
from fabric_train.model.adapter import adapted_layers, is_of_adapter
from fabric_train.model.load_weights import MetaModel, tied_weight_names
from fabric_train.model.weight_files import StoredTensors, open_weights


def open_whole(checkpoint: Path) -> StoredTensors:
    """Open all weights of a checkpoint; those of one with an adapter are merged."""
    return MergedTensors(checkpoint) if is_adapter(checkpoint) else open_weights(checkpoint)


def open_unmerged(checkpoint: Path, dtype: torch.dtype) -> tuple[MetaModel, hf_model.ModelShape]:
    """Open the base and the adapter of a checkpoint side by side, on the meta device.

    Raises:
        InputError: the base is gone, or its weights are a pickle.
    """
    base = find_base(read_trainer_json(checkpoint).arguments["model_name"], checkpoint)
    shape = hf_model.read_shape(str(checkpoint), adapter=read_adapter(checkpoint))
    opened = open_adapted(shape, base, dtype, 0, checkpoint)
    if opened.weights is None:
        raise InputError(f"{base.place}: its weights cannot be read in parts; save it again with save_pretrained")
    return opened, shape


class MergedTensors:
    """The tensors of a model with its adapter merged, fp32, by their names in memory; see ``StoredTensors``."""

    def __init__(self, checkpoint: Path) -> None:
        opened, shape = open_unmerged(checkpoint, torch.float32)
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
        """Return the full tensor on the CPU, with the bits of its blocks: those of a product depend on its shape."""
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
