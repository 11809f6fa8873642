"""A model that is built without memory for its weights, and read into each rank's part of them once it is sharded.

Where a Hugging Face folder calls its weights otherwise than transformers does now, or cuts them otherwise (Mixtral's
experts), transformers' own mapping is applied to one weight at a time. What cannot be read in parts is loaded whole, as
transformers does it: pickles, quantized weights, and models that keep some weights in fp32 whatever they are asked for.
"""

import copy
import functools
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from fabric_train.cli.errors import InputError, first_line
from fabric_train.distributed.shards import FlatShard, flat_shards, original_name
from fabric_train.model.hf_model import ModelShape, load_model, refuse_misfit, refuse_wrong_weights
from fabric_train.model.weight_files import CheckpointTensors, Weights, open_weights, safetensors_files, shard_names


@dataclass(frozen=True)
class Unread:
    """A model whose parameters are on the meta device and whose computed buffers are right, and where its weights are.

    ``weights`` is None where the model had to be loaded whole: then it is.
    """

    model: PreTrainedModel
    weights: Weights | None

    def read_rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return rows of the matrix that ``name`` names in the model."""
        parameter = self.model.get_parameter(name)
        if self.weights is None:
            return parameter.detach()[begin:end]
        return self.weights.read_block(name, (begin, 0), (end - begin, parameter.shape[1]))


def open_pretrained(shape: ModelShape, dtype: torch.dtype) -> Unread:
    """Build the model of a hub name or Hugging Face folder in ``dtype`` and find its weights.

    Raises:
        InputError: where weights are missing or are not those of the configuration.
    """
    files = _files(shape.source)
    model = without_memory(shape, dtype)
    keeps_fp32 = dtype != torch.float32 and model._keep_in_fp32_modules_strict
    if not files or getattr(shape.config, "quantization_config", None) or keeps_fp32:
        return Unread(load_model(shape, dtype), None)
    weights = _PretrainedWeights(model, CheckpointTensors(files, "fetch the model again"))
    missing = weights.missing()
    if any(re.search(pattern, name) for name in missing for pattern in model._keys_to_ignore_on_load_missing or ()):
        return Unread(load_model(shape, dtype), None)
    refuse_wrong_weights(shape.source, [*missing, *weights.of_other_shape()])
    if weights.contradict_ties():
        return Unread(load_model(shape, dtype), None)
    return Unread(model, weights)


def open_checkpoint(shape: ModelShape, checkpoint: Path, dtype: torch.dtype) -> Unread:
    """Build the model of a checkpoint in ``dtype`` and open its weights.

    Raises:
        InputError: where a weight is missing, unknown or of another shape.
    """
    model, tensors = without_memory(shape, dtype), open_weights(checkpoint)
    refuse_misfit(shape.source, model, {name: tensors.shape(name) for name in tensors})
    return Unread(model, tensors)


def without_memory(shape: ModelShape, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model in ``dtype`` with its parameters on the meta device and its buffers, as transformers computes
    them, on the CPU.
    """
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(shape.config, dtype=dtype)
    for module in model.modules():
        module._is_hf_initialized = False
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # so that the buffers alone will be
    model.initialize_weights()
    # where there is no such file, what from_config has made of the configuration stays
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(shape.source)
    return model


@torch.no_grad()
def read_weights(model: nn.Module, weights: Weights) -> None:
    """Read into a set-up model what this rank holds of it. No forward pass may have been made."""
    cuts = flat_shards(model)
    for name, parameter in model.named_parameters():
        part = read_local_part(weights, original_name(name), parameter, cuts)
        own: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        own.copy_(part)
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                stored = original_name(f"{prefix}.{name}")
                buffer.copy_(weights.read_block(stored, (0,) * buffer.dim(), buffer.shape))


def _files(source: str) -> list[Path]:
    """The safetensors files of a hub name or folder; none where there are other weights alone."""
    if Path(source).is_dir():
        return safetensors_files(Path(source))
    try:
        index = cached_file(source, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
        names = shard_names(Path(index)) if index else [SAFE_WEIGHTS_NAME]
        files = [cached_file(source, name, _raise_exceptions_for_missing_entries=False) for name in names]
    except OSError as error:
        raise InputError(
            f"--model_name {source}: cannot load its weights: {first_line(error).rstrip('.')}; "
            "fetch the model again, or give another"
        ) from error
    there = [Path(file) for file in files if file]
    return there if len(there) == len(files) else []


@dataclass(frozen=True)
class _Recipe:
    """How one weight, or several that have a stored tensor in common, are made of the files.

    ``stored`` are the tensors' names there, and the converter's patterns for them; without a converter there is one
    tensor, which is the weight ``first``.
    """

    first: str
    converter: WeightConverter | None
    stored: list[tuple[str, str]] = field(default_factory=list)

    def make(self, model: PreTrainedModel, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights by name, of the stored tensors that ``read`` returns."""
        if self.converter is None:
            return {self.first: read(self.stored[0][1])}
        converter: Any = copy.deepcopy(self.converter)  # it collects what it is given
        for pattern, stored in self.stored:
            converter.add_tensor(self.first, stored, pattern, functools.partial(read, stored))
        made = converter.convert(self.first, model=model, config=model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


class _PretrainedWeights:
    """The weights of Hugging Face files by the names that they have in the model, as ``from_pretrained`` maps them.

    Stored tensors that the model does not know are left alone, as they are there. Of a weight with several names the
    files may have any.
    """

    def __init__(self, model: PreTrainedModel, tensors: CheckpointTensors) -> None:
        self._model, self._tensors = model, tensors
        self._names: dict[str, list[str]] = {}  # all of a parameter, by each
        by_parameter: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names[name] = by_parameter.setdefault(id(parameter), [])
            self._names[name].append(name)
        self._recipes: dict[str, _Recipe] = {}
        self._shapes: dict[str, torch.Size] = {}
        for recipe in self._map().values():
            try:
                made = recipe.make(model, lambda name: torch.empty(tensors.shape(name), device="meta"))
            except (LookupError, RuntimeError, TypeError, ValueError):  # these tensors cannot be put together
                made = {recipe.first: torch.empty(0, device="meta")}
            for name, tensor in made.items():
                self._recipes[name], self._shapes[name] = recipe, tensor.shape

    def missing(self) -> list[str]:
        """Return the names of weights that the files do not have under any name."""
        return [name for name in self._model.state_dict() if not self._known(name)]

    def of_other_shape(self) -> list[str]:
        """Return the names of weights that have another shape in the files than in the model."""
        wanted = self._model.state_dict()
        return [name for name, shape in self._shapes.items() if name in wanted and wanted[name].shape != shape]

    def contradict_ties(self) -> bool:
        """Whether the files have a weight under two names: then it has to be seen whether it is one."""
        return any(len(self._known(name)) > 1 for name in self._names)

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return the block of ``shape`` that begins at ``offsets`` of the full weight; see ``Weights``."""
        known = self._known(name)[0]
        recipe = self._recipes[known]
        if recipe.converter is None:
            return self._tensors.read_block(recipe.stored[0][1], offsets, shape)
        whole = recipe.make(self._model, self._tensors.read)[known]
        return whole[tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))]

    def _known(self, name: str) -> list[str]:
        return [other for other in self._names.get(name, [name]) if other in self._recipes]

    def _map(self) -> dict[str, _Recipe]:
        """Say of each weight what it is made of; of several that are made together, of the first."""
        mapping = get_model_conversion_mapping(self._model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix, expected = self._model.base_model_prefix, self._model.state_dict()
        recipes: dict[str, _Recipe] = {}
        for stored in sorted(self._tensors, key=dot_natural_key):
            name, pattern = rename_source_key(stored, renamings, converters, prefix, expected)
            if name not in expected and stored in expected:
                name, pattern = stored, None
            if name in expected:
                recipe = recipes.setdefault(name, _Recipe(name, by_pattern.get(pattern or "")))
                recipe.stored.append((pattern or name, stored))
        return recipes


def read_local_part(weights: Weights, name: str, parameter: nn.Parameter, cuts: dict[int, FlatShard]) -> torch.Tensor:
    """Read of a full tensor what ``parameter`` holds on this rank.

    Args:
        weights: where the tensor is.
        name: of the tensor, which is cut as the parameter is.
        parameter: of a set-up model, between steps.
        cuts: from :func:`flat_shards`.

    Returns:
        A tensor on the CPU in the shape that the parameter has on this rank; not to be written into, for it may be a
        view of what it was read from.
    """
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        shape, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        return weights.read_block(name, offsets, shape)
    if id(parameter) not in cuts:
        return weights.read_block(name, (0,) * parameter.dim(), parameter.shape)
    cut = cuts[id(parameter)]
    begin, end = cut.range(cut.rank)
    row = cut.shape[1:].numel()
    first, last = begin // row, -(-end // row)
    rest = cut.shape[1:]
    rows = weights.read_block(name, (first, *(0 for _ in rest)), (last - first, *rest))
    return rows.flatten()[begin - first * row : end - first * row].reshape(parameter.shape)
