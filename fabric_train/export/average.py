"""Average the tensors of several checkpoints, a block at a time.

The uniform average of a run's last checkpoints often has a lower loss than each of them (LAWA, arXiv:2209.14981).
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fabric_train.cli.errors import InputError
from fabric_train.export.merged_adapter import MergeInto, open_whole
from fabric_train.files.typed_json import read_json
from fabric_train.model.hf_model import load_hf_tokenizer
from fabric_train.model.weight_files import StoredTensors

_BLOCK = 1 << 23  # elements that are averaged at once: 64 MB in fp64
_IRRELEVANT_SETTINGS = ("dtype", "use_cache", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class WeightedCheckpoint:
    """A checkpoint in an average, with a ``weight``. Its share is the weight divided by the sum of all weights."""

    checkpoint: Path
    weight: float = 1.0


class CombinedTensors:
    """Tensors that are computed from the tensors of several models, in fp32 and a block at a time.

    The names and shapes come from one of the models. Its tensors without floating-point numbers are not combined.
    """

    def __init__(self, models: Sequence[StoredTensors], reference: StoredTensors) -> None:
        self._models = models
        self._reference = reference

    def __iter__(self) -> Iterator[str]:
        return iter(self._reference)

    def shape(self, name: str) -> torch.Size:
        return self._reference.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which the tensor is read: float32, unless it has no floating-point numbers."""
        stored_dtype = self._reference.dtype(name)
        return torch.float32 if stored_dtype.is_floating_point else stored_dtype

    def read(self, name: str) -> torch.Tensor:
        """Return the full tensor on the CPU; only blocks of the models are in memory at the same time."""
        shape = self.shape(name)
        if not shape or 0 in shape:
            return self.read_block(name, (0,) * len(shape), shape)
        combined = torch.empty(shape, dtype=self.dtype(name))
        # blocks of whole rows, of about _BLOCK elements
        num_rows = max(1, _BLOCK // shape[1:].numel())
        for begin in range(0, shape[0], num_rows):
            block = combined[begin : begin + num_rows]
            offsets = (begin, *(0,) * (len(shape) - 1))
            block.copy_(self.read_block(name, offsets, block.shape))
        return combined

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return the block of ``shape`` that begins at ``offsets`` of the full tensor, on the CPU."""
        if not self._reference.dtype(name).is_floating_point:
            return self._reference.read_block(name, offsets, shape)
        model_blocks = (model.read_block(name, offsets, shape) for model in self._models)
        return self._combine(name, offsets, model_blocks)

    def _combine(self, name: str, offsets: Sequence[int], blocks: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the combined block in fp32 from the models' ``blocks``, which are read one after the other."""
        raise NotImplementedError


def weighted_mean(blocks: Iterable[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the mean of blocks in fp32, summed in fp64; only one of them is in memory besides the sum."""
    terms = (block.to(torch.float64, copy=True).mul_(weight) for block, weight in zip(blocks, weights, strict=True))
    return functools.reduce(torch.Tensor.add_, terms).div_(sum(weights)).float()


class AveragedTensors(CombinedTensors):
    """The average of the tensors of checkpoints; tensors of integers come from the last one.

    Raises:
        InputError: the checkpoints have different tensors or shapes.
    """

    def __init__(self, checkpoints: Sequence[WeightedCheckpoint], merges: MergeInto | None = None) -> None:
        models = [open_whole(weighted.checkpoint, merges) for weighted in checkpoints]
        super().__init__(models, reference=models[-1])
        self._weights = [weighted.weight for weighted in checkpoints]
        expected_shapes = _shapes_by_name(self._reference)
        for weighted, model in zip(checkpoints, models, strict=True):
            shapes = _shapes_by_name(model)
            for name in sorted({*shapes, *expected_shapes}):
                if shapes.get(name) != expected_shapes.get(name):
                    fault = f"{name} is {shapes.get(name, 'absent')}, not {expected_shapes.get(name, 'absent')}"
                    raise _average_error(weighted.checkpoint, checkpoints[-1].checkpoint, fault)

    def _combine(self, name: str, offsets: Sequence[int], blocks: Iterable[torch.Tensor]) -> torch.Tensor:
        return weighted_mean(blocks, self._weights)


class PlainAverage(AveragedTensors):
    """The same average by one numpy formula, with a block of every checkpoint in memory, for verification."""

    def _combine(self, name: str, offsets: Sequence[int], blocks: Iterable[torch.Tensor]) -> torch.Tensor:
        terms = [weight * np.asarray(block.double()) for block, weight in zip(blocks, self._weights, strict=True)]
        with np.errstate(all="ignore"):  # an overflow ends as infinity, as in torch
            mean = functools.reduce(np.add, terms) / sum(self._weights)
            return torch.from_numpy(np.asarray(mean, dtype=np.float32))


def check_one_model(checkpoints: Sequence[Path]) -> None:
    """Raise an InputError if a checkpoint's configuration, tensors or vocabulary differ from the last one's."""
    reference = checkpoints[-1]
    AveragedTensors([WeightedCheckpoint(checkpoint) for checkpoint in checkpoints])  # compares the tensors
    expected_configuration = _relevant_configuration(reference)
    expected_vocabulary = _read_vocabulary(reference)
    for checkpoint in checkpoints[:-1]:
        configuration = _relevant_configuration(checkpoint)
        for name in {**expected_configuration, **configuration}:
            value = configuration.get(name)
            expected_value = expected_configuration.get(name)
            if value != expected_value:
                fault = f"{name} is {value} in its config.json, not {expected_value}"
                raise _average_error(checkpoint, reference, fault)
        if _read_vocabulary(checkpoint) != expected_vocabulary:
            raise _average_error(checkpoint, reference, "its tokenizer has a different vocabulary")


def _shapes_by_name(tensors: StoredTensors) -> dict[str, list[int]]:
    return {name: list(tensors.shape(name)) for name in tensors}


def _relevant_configuration(checkpoint: Path) -> dict[str, Any]:
    """Return the settings that decide the meaning of the weights."""
    content = read_json(checkpoint / "config.json", dict, "use another checkpoint")
    return {name: value for name, value in content.items() if name not in _IRRELEVANT_SETTINGS}


def _read_vocabulary(checkpoint: Path) -> dict[str, int] | None:
    """Return the ids of the tokens of a checkpoint's tokenizer; None if it has no tokenizer."""
    folder = checkpoint / "tokenizer"
    if not folder.is_dir():
        return None
    vocabulary: dict[str, int] = load_hf_tokenizer(folder).get_vocab()
    return vocabulary


def _average_error(checkpoint: Path, reference: Path, fault: str) -> InputError:
    return InputError(f"{checkpoint} cannot be averaged with {reference}: {fault}; give checkpoints of the same model")
