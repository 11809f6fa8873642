"""Give tensors the names and shapes in which models of their family are published.

transformers 5 has other names for some weights in memory, and joins the experts of a layer to one tensor (GPT-NeoX,
Mixtral). Other software reads the published form only, and ``save_pretrained`` writes it. So does an export, a tensor
at a time.
"""

import functools
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fabric_train.model.weight_files import StoredTensors


def published(model: PreTrainedModel, tensors: StoredTensors) -> StoredTensors:
    """Return the tensors of a model by their published names, or as they are if one cannot be converted alone.

    Args:
        model: Its parameters may be on the meta device.
        tensors: By the names in memory.
    """
    try:
        return PublishedTensors(model, tensors)
    except (LookupError, RuntimeError, TypeError, ValueError):
        return tensors


class PublishedTensors:
    """Tensors by their published names; each is read on request, and joined ones whole: see :func:`published`."""

    def __init__(self, model: PreTrainedModel, tensors: StoredTensors) -> None:
        self._model, self._tensors = model, tensors
        self._in_memory: dict[str, str] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._renamed: set[str] = set()
        for name in tensors:
            outline = torch.empty(tensors.shape(name), device="meta")
            for published, part in revert_weight_conversion(model, {name: outline}).items():
                self._in_memory[published], self._shapes[published] = name, part.shape
                if part is outline:
                    self._renamed.add(published)
        self._convert = functools.lru_cache(maxsize=1)(self._convert_one)

    def __iter__(self) -> Iterator[str]:
        return iter(self._in_memory)

    def __len__(self) -> int:
        return len(self._in_memory)

    def shape(self, name: str) -> torch.Size:
        """Return the shape of the published tensor."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which the tensor is read."""
        return self._tensors.dtype(self._in_memory[name])

    def read(self, name: str) -> torch.Tensor:
        """Return the published tensor on the CPU. Do not change it."""
        return self.read_block(name, (0,) * len(self._shapes[name]), self._shapes[name])

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return the block of ``shape`` that begins at ``offsets`` of the published tensor."""
        if name in self._renamed:
            return self._tensors.read_block(self._in_memory[name], offsets, shape)
        block = tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))
        return self._convert(self._in_memory[name])[name][block]

    def _convert_one(self, name: str) -> dict[str, torch.Tensor]:
        converted: dict[str, torch.Tensor] = revert_weight_conversion(self._model, {name: self._tensors.read(name)})
        return converted
