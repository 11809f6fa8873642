"""Read the weights of Hugging Face files under the model's own names, converted as ``from_pretrained`` converts them.

Some files use other names or splits of weights than transformers does now (Mixtral's experts). transformers'
mapping is applied to one weight at a time, so only the stored tensors of that weight are in memory.
"""

import copy
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from fabric_train.cli.argument_types import counted, show_size
from fabric_train.model.weight_files import StoredTensors

_COMPARED_ELEMENTS = 1 << 22  # elements of two weights that are in memory for a comparison
_COMPUTED_BUFFER = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias|\.(attn|attention)\.bias)$")
"""Buffers in older files that transformers computes itself: rotary frequencies and causal masks."""
_MAX_SHOWN_GROUPS = 6
_SHOWN_AS_MB = 100_000  # bytes from which a size is shown in a larger unit


@dataclass(frozen=True)
class _StoredName:
    """The name of a stored tensor, and the pattern of the converter (or the weight's name) that it matched."""

    pattern: str
    name: str


@dataclass(frozen=True)
class _Recipe:
    """How to compute one weight, or several weights that share stored tensors, from the files.

    ``weight_name`` is the model's name for the weight, or for the first one of several weights. Without a
    ``converter``, the single stored tensor is the weight itself.
    """

    weight_name: str
    converter: WeightConverter | None
    stored: list[_StoredName] = field(default_factory=list)

    def convert(self, model: PreTrainedModel, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights by name; ``read`` returns a stored tensor by name."""
        if self.converter is None:
            return {self.weight_name: read(self.stored[0].name)}
        converter: Any = copy.deepcopy(self.converter)  # a converter keeps the tensors that were added to it
        for stored in self.stored:
            read_tensor = functools.partial(read, stored.name)
            converter.add_tensor(self.weight_name, stored.name, stored.pattern, read_tensor)
        converted = converter.convert(self.weight_name, model=model, config=model.config)
        weights: dict[str, torch.Tensor] = {}
        for name, tensor in converted.items():
            weights[name] = tensor[0] if isinstance(tensor, list) else tensor
        return weights


class PretrainedWeights:
    """The weights of Hugging Face files, by the names of a model's parameters; implements ``weight_files.Weights``.

    A parameter with several names (a head that is tied to the embedding) may be stored under any of them. Tensors that
    the model does not know are ignored, as ``from_pretrained`` does; ``find_unused`` lists them.
    """

    def __init__(self, model: PreTrainedModel, tensors: StoredTensors) -> None:
        """Find how each weight of ``model`` is computed from the stored ``tensors``, without reading them."""
        self._model = model
        self._tensors = tensors
        # each name of a parameter → all names of that parameter
        self._synonyms: dict[str, list[str]] = {}
        names_by_parameter: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names = names_by_parameter.setdefault(id(parameter), [])
            names.append(name)
            self._synonyms[name] = names
        # Converting on the meta device tells which weights the files have and their shapes, without reading anything.
        self._recipes: dict[str, _Recipe] = {}
        self._shapes: dict[str, torch.Size] = {}
        for recipe in self._build_recipes():
            try:
                weights = recipe.convert(model, lambda name: torch.empty(tensors.shape(name), device="meta"))
            except (LookupError, RuntimeError, TypeError, ValueError):  # these tensors do not fit together
                weights = {recipe.weight_name: torch.empty(0, device="meta")}
            for name, tensor in weights.items():
                self._recipes[name] = recipe
                self._shapes[name] = tensor.shape

    def _build_recipes(self) -> list[_Recipe]:
        """Return the recipes of all weights of the model that the files have."""
        mapping = get_model_conversion_mapping(self._model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        converter_by_pattern: dict[str, WeightConverter] = {}
        for converter in converters:
            for pattern in converter.source_patterns:
                converter_by_pattern[pattern] = converter
        prefix = self._model.base_model_prefix
        expected = self._model.state_dict()
        recipes: dict[str, _Recipe] = {}
        # the order of transformers: a converter that stacks tensors stacks layer 10 after layer 9
        for stored_name in sorted(self._tensors, key=dot_natural_key):
            name, matched_pattern = rename_source_key(stored_name, renamings, converters, prefix, expected)
            if name not in expected and stored_name in expected:
                name = stored_name
                matched_pattern = None
            if name in expected:
                recipe = recipes.setdefault(name, _Recipe(name, converter_by_pattern.get(matched_pattern or "")))
                recipe.stored.append(_StoredName(matched_pattern or name, stored_name))
        return list(recipes.values())

    def find_missing(self) -> list[str]:
        """Return the names of weights that the files do not have under any name."""
        return [name for name in self._model.state_dict() if not self._names_in_files(name)]

    def find_mismatched(self) -> list[str]:
        """Return the names of weights whose shape in the files differs from the model's."""
        expected = self._model.state_dict()
        return [name for name, shape in self._shapes.items() if name in expected and expected[name].shape != shape]

    def find_unused(self) -> dict[str, int]:
        """Return the bytes of each stored tensor that the model does not use, except buffers that it computes."""
        used_names: set[str] = set()
        for recipe in self._recipes.values():
            used_names.update(stored.name for stored in recipe.stored)
        num_bytes: dict[str, int] = {}
        for name in self._tensors:
            if name not in used_names and not _COMPUTED_BUFFER.search(name):
                num_bytes[name] = self._tensors.shape(name).numel() * self._tensors.dtype(name).itemsize
        return num_bytes

    def has_different_duplicates(self) -> bool:
        """Return whether a tied weight is stored under two names with different values."""
        for name in self._synonyms:
            names_in_files = self._names_in_files(name)
            for duplicate in names_in_files[1:]:
                if not self._are_equal(names_in_files[0], duplicate):
                    return True
        return False

    def _are_equal(self, name: str, duplicate: str) -> bool:
        """Compare two stored weights, a block of rows at a time."""
        shape = self._shapes[name]
        if self._shapes[duplicate] != shape:
            return False
        if not shape:
            return torch.equal(self._read_converted(name, (), ()), self._read_converted(duplicate, (), ()))
        row_shape = shape[1:]
        block_rows = max(1, _COMPARED_ELEMENTS // max(row_shape.numel(), 1))
        offsets_in_row = (0,) * len(row_shape)
        for begin in range(0, shape[0], block_rows):
            offsets = (begin, *offsets_in_row)
            block_shape = (min(block_rows, shape[0] - begin), *row_shape)
            block = self._read_converted(name, offsets, block_shape)
            duplicate_block = self._read_converted(duplicate, offsets, block_shape)
            if not torch.equal(block, duplicate_block):
                return False
        return True

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return a block of a weight; see ``weight_files.Weights``."""
        return self._read_converted(self._names_in_files(name)[0], offsets, shape)

    def _read_converted(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return a block of a weight that the files have under exactly this name."""
        recipe = self._recipes[name]
        if recipe.converter is None:
            return self._tensors.read_block(recipe.stored[0].name, offsets, shape)
        weight = recipe.convert(self._model, self._tensors.read)[name]
        block = tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))
        return weight[block]

    def _names_in_files(self, name: str) -> list[str]:
        """Return the names of a parameter under which the files have it."""
        return [synonym for synonym in self._synonyms.get(name, [name]) if synonym in self._recipes]


def describe_unused(source: str, unused: dict[str, int]) -> str | None:
    """Return a line about the tensors in a model's files that the model does not use; None if it uses all of them.

    Args:
        source: the hub name or folder.
        unused: the bytes of these tensors, by name.
    """
    if not unused:
        return None
    # few tensors are named one by one, many by the module that they belong to
    sizes_by_group: dict[str, list[int]] = {}
    for name, num_bytes in unused.items():
        group = name if len(unused) <= _MAX_SHOWN_GROUPS else _module_of(name)
        sizes_by_group.setdefault(group, []).append(num_bytes)
    groups = sorted(sizes_by_group, key=lambda group: sum(sizes_by_group[group]), reverse=True)
    shown = [_describe_group(group, sizes_by_group[group]) for group in groups[:_MAX_SHOWN_GROUPS]]
    num_hidden = len(groups) - len(shown)
    if num_hidden:
        shown[-1] += f", and {num_hidden} more"
    return (
        f"{source}: the model does not use {counted(len(unused), 'tensor')} in its files; they are not trained, "
        f"computed or saved: {', '.join(shown)}"
    )


def _describe_group(name: str, sizes: Sequence[int]) -> str:
    """Return a group of tensors with their number and bytes: ``model.vision_tower (391 tensors, 1.2 GB)``."""
    num_bytes = sum(sizes)
    size = show_size(num_bytes) if num_bytes >= _SHOWN_AS_MB else f"{num_bytes:,} bytes"
    if len(sizes) == 1:
        return f"{name} ({size})"
    return f"{name} ({counted(len(sizes), 'tensor')}, {size})"


def _module_of(name: str) -> str:
    """Return the first components of a tensor's name: ``model.vision_tower``, or ``model.layers.61`` for a layer."""
    components = name.split(".")
    length = 2 if components[0] in ("model", "language_model", "transformer") else 1
    if len(components) > length + 1 and components[length].isdecimal():
        length += 1
    return ".".join(components[:length])
