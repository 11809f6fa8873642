"""Build a model on the meta device, and later read its weights: each rank's part, or all, or a layer at a time.

If a Hugging Face folder uses other names or splits of weights than transformers does now (Mixtral's experts), its own
mapping is applied to one weight at a time. Models with weights that must stay in fp32 are loaded in full.
"""

import copy
import functools
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from fabric_train.cli.argument_types import counted, show_size
from fabric_train.cli.errors import InputError, first_line, note, raise_reached_limit
from fabric_train.distributed.ranks import FlatShard, flat_shards, local_part, original_name
from fabric_train.model import weight_files
from fabric_train.model.hf_model import ModelShape, check_readable
from fabric_train.model.pickled_weights import PickledTensors, find_pickles
from fabric_train.model.rope_frequencies import choose_frequencies
from fabric_train.model.weight_files import StoredTensors, Weights

_progress = logging.getLogger("fabric_train.progress")
_VOCABULARY_BLOCK = 8192  # rows of the output layer
_COMPARED = 1 << 22  # numbers of two weights that are compared at once
_COMPUTED_BUFFER = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias|\.(attn|attention)\.bias)$")
"""Buffers in older files, which transformers computes: rotary frequencies and causal masks."""
_MOST_NAMED = 6
_SHOWN_AS_MB = 100_000


@dataclass(frozen=True)
class MetaModel:
    """A model on the meta device and its weights; None if it had to be loaded in full, on the CPU."""

    model: PreTrainedModel
    weights: Weights | None

    def read_rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return the rows ``begin`` to ``end`` of the matrix that the model calls ``name``."""
        parameter = self.model.get_parameter(name)
        if self.weights is None:
            return parameter.detach()[begin:end]
        return self.weights.read_block(name, (begin, 0), (end - begin, parameter.shape[1]))


def open_pretrained(shape: ModelShape, dtype: torch.dtype) -> MetaModel:
    """Build the model of a hub name or Hugging Face folder in ``dtype`` and find its weights."""
    return open_in_parts(shape, dtype) or MetaModel(load_model(shape, dtype), None)


def open_in_parts(shape: ModelShape, dtype: torch.dtype) -> MetaModel | None:
    """Do as :func:`open_pretrained` does, but return None if the model has to be loaded in full."""
    stored = open_stored(shape.source)
    model = build_on_meta(shape, dtype)
    keeps_fp32 = dtype != torch.float32 and model._keep_in_fp32_modules_strict
    if stored is None or keeps_fp32:
        return None
    weights = _PretrainedWeights(model, stored)
    if weights.has_different_duplicates():
        # as transformers does: tied weights that are stored with different values are not tied
        model = build_on_meta(replace(shape, config=_untied(shape.config)), dtype)
        weights = _PretrainedWeights(model, stored)
        if weights.has_different_duplicates():
            return None
    missing = weights.missing()
    if any(re.search(pattern, name) for name in missing for pattern in model._keys_to_ignore_on_load_missing or ()):
        return None
    check_loaded_weights(shape.source, [*missing, *weights.mismatched()])
    if line := describe_unused(shape.source, weights.unused()):
        note(line)
    return MetaModel(model, weights)


def open_stored(source: str) -> StoredTensors | None:
    """Open the tensors of a hub name or folder as they are stored; None if there are no files of weights."""
    if files := find_safetensors(source):
        return weight_files.CheckpointTensors(files, "fetch the model again")
    pickles = find_pickles(source)
    return PickledTensors(pickles) if pickles else None


def _untied(config: PretrainedConfig) -> PretrainedConfig:
    changed = copy.deepcopy(config)
    changed.tie_word_embeddings = False
    return changed


def open_checkpoint(shape: ModelShape, checkpoint: Path, dtype: torch.dtype) -> MetaModel:
    """Build the model of a checkpoint in ``dtype`` and open its weights."""
    return open_tensors(shape, weight_files.open_weights(checkpoint), dtype)


def open_tensors(shape: ModelShape, tensors: weight_files.StoredTensors, dtype: torch.dtype) -> MetaModel:
    """Build the model of ``shape`` in ``dtype`` whose weights are ``tensors``; see :func:`open_checkpoint`."""
    model = build_on_meta(shape, dtype)
    check_weights_fit(shape.source, model, {name: tensors.shape(name) for name in tensors})
    return MetaModel(model, tensors)


def build_on_meta(shape: ModelShape, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model in ``dtype`` with parameters on the meta device. Its buffers are initialized on the CPU."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(shape.config, dtype=dtype)
    for module in model.modules():
        module._is_hf_initialized = False
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # initialize the buffers only
    model.initialize_weights()
    if shape.longest_row is not None:
        choose_frequencies(model, shape.longest_row)
    return model


@torch.no_grad()
def read_weights(model: nn.Module, weights: Weights) -> None:
    """Read this rank's part of the weights into a model that Fabric has set up. Call it before any forward pass."""
    cuts = flat_shards(model)
    parameters = list(model.named_parameters())
    for number, (name, parameter) in enumerate(parameters, 1):
        _progress.info("loading weights %d/%d", number, len(parameters))
        local_part(parameter).copy_(read_local_part(weights, original_name(name), parameter, cuts))
    read_buffers(model, weights)


@torch.no_grad()
def read_buffers(model: nn.Module, weights: Weights) -> None:
    """Read the buffers that are stored with the weights; the others are computed."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffer.copy_(weights.read_block(original_name(f"{prefix}.{name}"), (0,) * buffer.dim(), buffer.shape))


def load_model(shape: ModelShape, dtype: torch.dtype) -> PreTrainedModel:
    """Load the pretrained model in ``dtype`` on the CPU. Rotary frequencies and other computed buffers stay fp32."""
    check_readable(shape.source)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            shape.source,
            config=copy.deepcopy(shape.config),
            dtype=dtype,
            attn_implementation=shape.config._attn_implementation,
            trust_remote_code=False,
            weights_only=True,  # of a pickle
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # check_loaded_weights reports them in one line
        )
    except (OSError, ValueError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise_reached_limit(error)
        raise InputError(
            f"--model_name {shape.source}: cannot load its weights: {first_line(error).rstrip('.')}; "
            "fetch the model again, or give another"
        ) from error
    model, report = loaded
    mismatched = [key if isinstance(key, str) else key[0] for key in report.get("mismatched_keys", ())]
    check_loaded_weights(shape.source, [*report["missing_keys"], *mismatched])
    stored = open_stored(shape.source)
    if stored is not None and (line := describe_unused(shape.source, _PretrainedWeights(model, stored).unused())):
        note(line)
    head = model.get_output_embeddings()
    if model.config.tie_word_embeddings and head is not None and head.weight is not model.get_input_embeddings().weight:
        # stored with different values, so transformers does not tie them; a checkpoint's configuration must say so
        model.config.tie_word_embeddings = False
    if shape.longest_row is not None:
        choose_frequencies(model, shape.longest_row)
    return model


def build_model(shape: ModelShape, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of ``shape`` in ``dtype`` from full CPU tensors by name; tied duplicates may be absent."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config, dtype=dtype)
    check_weights_fit(shape.source, model, {name: tensor.shape for name, tensor in weights.items()})
    return type(model).from_pretrained(None, config=shape.config, state_dict=weights, dtype=dtype)


def check_loaded_weights(source: str, wrong: list[str]) -> None:
    """Check that no weight of a pretrained model is wrong; ``wrong`` names those that are missing or misshapen."""
    if wrong:
        raise InputError(
            f"--model_name {source}: {len(wrong)} weights are missing or do not have the shape in config.json, "
            f"{min(wrong)} first; fetch the model again, or give another"
        )


def check_weights_fit(source: str, model: PreTrainedModel, shapes: dict[str, torch.Size]) -> None:
    """Check that weights have the names and shapes of the model's. Tied duplicates may be absent."""
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    wrong = [name for name, shape in shapes.items() if expected.get(name) != shape]
    wrong += [name for name in expected if name not in shapes and name not in tied_weight_names(model)]
    if wrong:
        raise InputError(f"{source}: {len(wrong)} weights do not fit its config.json, {wrong[0]} first")


def describe_unused(source: str, unused: dict[str, int]) -> str | None:
    """Return a line on the tensors in a model's files that the model does not take; None if it takes them all.

    Args:
        source: the hub name or folder.
        unused: the bytes of these tensors, by name.
    """
    if not unused:
        return None
    groups: dict[str, list[int]] = {}
    for name, num_bytes in unused.items():
        groups.setdefault(name if len(unused) <= _MOST_NAMED else _module_of(name), []).append(num_bytes)
    by_size = sorted(groups, key=lambda group: -sum(groups[group]))
    shown = [_describe_group(group, groups[group]) for group in by_size[:_MOST_NAMED]]
    more = f", and {len(by_size) - _MOST_NAMED} more" if len(by_size) > _MOST_NAMED else ""
    return (
        f"{source}: the model does not take {counted(len(unused), 'tensor')} of its files, which are left out of what "
        f"is trained, computed and saved: {', '.join(shown)}{more}"
    )


def _describe_group(name: str, sizes: Sequence[int]) -> str:
    total = sum(sizes)
    size = show_size(total) if total >= _SHOWN_AS_MB else f"{total:,} bytes"
    return f"{name} ({counted(len(sizes), 'tensor')}, {size})" if len(sizes) > 1 else f"{name} ({size})"


def _module_of(name: str) -> str:
    """Return the first components of a tensor's name: ``model.vision_tower``, or ``model.layers.61`` for a layer."""
    components = name.split(".")
    length = 2 if components[0] in ("model", "language_model", "transformer") else 1
    if len(components) > length + 1 and components[length].isdecimal():
        length += 1
    return ".".join(components[:length])


def tied_weight_names(model: PreTrainedModel) -> set[str]:
    """Return the names in the state dict that are second names of a parameter, such as a tied ``lm_head.weight``."""
    seen: dict[int, str] = {}
    tied = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if seen.setdefault(id(parameter), name) != name:
            tied.add(name)
    return tied


def find_safetensors(source: str) -> list[Path]:
    """Return the safetensors files of a hub name or folder; none if its weights are pickles."""
    if Path(source).is_dir():
        return weight_files.safetensors_files(Path(source))
    try:
        index = cached_file(source, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
        names = weight_files.shard_names(Path(index)) if index else [SAFE_WEIGHTS_NAME]
        files = [cached_file(source, name, _raise_exceptions_for_missing_entries=False) for name in names]
    except OSError as error:
        raise_reached_limit(error)
        raise InputError(
            f"--model_name {source}: cannot load its weights: {first_line(error).rstrip('.')}; "
            "fetch the model again, or give another"
        ) from error
    found = [Path(file) for file in files if file]
    return found if len(found) == len(files) else []


@dataclass(frozen=True)
class _Recipe:
    """How to compute one weight, or several weights that share stored tensors, from the files.

    ``stored`` are pairs of the converter's pattern and the stored tensor's name. Without a converter, the single stored
    tensor is the weight ``first`` itself.
    """

    first: str
    converter: WeightConverter | None
    stored: list[tuple[str, str]] = field(default_factory=list)

    def convert(self, model: PreTrainedModel, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights by name; ``read`` returns a stored tensor by name."""
        if self.converter is None:
            return {self.first: read(self.stored[0][1])}
        converter: Any = copy.deepcopy(self.converter)  # it keeps the tensors that are added
        for pattern, stored in self.stored:
            converter.add_tensor(self.first, stored, pattern, functools.partial(read, stored))
        converted = converter.convert(self.first, model=model, config=model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in converted.items()}


class _PretrainedWeights:
    """The weights of Hugging Face files under the model's names, mapped as ``from_pretrained`` maps them.

    Unknown tensors are ignored, as there (see ``unused``). The files may store a tied weight under any of its names.
    """

    def __init__(self, model: PreTrainedModel, tensors: StoredTensors) -> None:
        self._model = model
        self._tensors = tensors
        self._names: dict[str, list[str]] = {}  # each name of a parameter → all its names
        by_parameter: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names[name] = by_parameter.setdefault(id(parameter), [])
            self._names[name].append(name)
        self._recipes: dict[str, _Recipe] = {}
        self._shapes: dict[str, torch.Size] = {}
        for recipe in self._map().values():
            try:
                converted = recipe.convert(model, lambda name: torch.empty(tensors.shape(name), device="meta"))
            except (LookupError, RuntimeError, TypeError, ValueError):  # these tensors do not fit together
                converted = {recipe.first: torch.empty(0, device="meta")}
            for name, tensor in converted.items():
                self._recipes[name] = recipe
                self._shapes[name] = tensor.shape

    def missing(self) -> list[str]:
        """Return the names of weights that the files do not have under any name."""
        return [name for name in self._model.state_dict() if not self._stored_names(name)]

    def mismatched(self) -> list[str]:
        """Return the names of weights that have another shape in the files than in the model."""
        expected = self._model.state_dict()
        return [name for name, shape in self._shapes.items() if name in expected and expected[name].shape != shape]

    def unused(self) -> dict[str, int]:
        """Return the stored tensors that the model does not take, and their bytes; without buffers that it computes."""
        taken = {stored for recipe in self._recipes.values() for _, stored in recipe.stored}
        return {
            name: self._tensors.shape(name).numel() * self._tensors.dtype(name).itemsize
            for name in self._tensors
            if name not in taken and not _COMPUTED_BUFFER.search(name)
        }

    def has_different_duplicates(self) -> bool:
        """Return whether a tied weight is stored under two names with different values."""
        for name in self._names:
            first, *others = self._stored_names(name) or [name]
            if any(not self._are_equal(first, other) for other in others):
                return True
        return False

    def _are_equal(self, first: str, other: str) -> bool:
        shape = self._shapes[first]
        if self._shapes[other] != shape:
            return False
        rows = max(1, _COMPARED // max(shape[1:].numel(), 1)) if shape else 1
        for begin in range(0, shape[0] if shape else 1, rows):
            offsets = (begin, *(0 for _ in shape[1:])) if shape else ()
            block = (min(rows, shape[0] - begin), *shape[1:]) if shape else ()
            pair = [self._read_stored(name, offsets, block) for name in (first, other)]
            if not torch.equal(*pair):
                return False
        return True

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        return self._read_stored(self._stored_names(name)[0], offsets, shape)

    def _read_stored(self, stored_name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        recipe = self._recipes[stored_name]
        if recipe.converter is None:
            return self._tensors.read_block(recipe.stored[0][1], offsets, shape)
        full = recipe.convert(self._model, self._tensors.read)[stored_name]
        return full[tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))]

    def _stored_names(self, name: str) -> list[str]:
        return [other for other in self._names.get(name, [name]) if other in self._recipes]

    def _map(self) -> dict[str, _Recipe]:
        """Return the recipe of each weight, by name; of weights that are converted together, by the first's name."""
        mapping = get_model_conversion_mapping(self._model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix = self._model.base_model_prefix
        expected = self._model.state_dict()
        recipes: dict[str, _Recipe] = {}
        for stored in sorted(self._tensors, key=dot_natural_key):
            name, pattern = rename_source_key(stored, renamings, converters, prefix, expected)
            if name not in expected and stored in expected:
                name = stored
                pattern = None
            if name in expected:
                recipe = recipes.setdefault(name, _Recipe(name, by_pattern.get(pattern or "")))
                recipe.stored.append((pattern or name, stored))
        return recipes


def read_local_part(weights: Weights, name: str, parameter: nn.Parameter, cuts: dict[int, FlatShard]) -> torch.Tensor:
    """Read this rank's part of a full tensor that is sharded like ``parameter``, a parameter of a set-up model.

    ``cuts`` are from :func:`flat_shards`. The CPU tensor has the parameter's shape on this rank, and may be a view of a
    file: do not write into it.
    """
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        placements = parameter.placements
        shape, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        return weights.read_block(name, offsets, shape)
    if id(parameter) not in cuts:
        return weights.read_block(name, (0,) * parameter.dim(), parameter.shape)
    cut = cuts[id(parameter)]
    rest = cuts[id(parameter)].shape[1:]
    (begin, end), row = cut.range(cut.rank), rest.numel()
    first = begin // row
    last = -(-end // row)
    rows = weights.read_block(name, (first, *(0 for _ in rest)), (last - first, *rest))
    return rows.flatten()[begin - first * row : end - first * row].reshape(parameter.shape)


@dataclass(frozen=True)
class LayeredOutput:
    """The output [1, T, H] of each decoder layer, in their order, and the logits [1, T, V] in fp32."""

    hidden_states: list[torch.Tensor]
    logits: torch.Tensor


@torch.inference_mode()
def layered_forward(
    meta: MetaModel,
    layer_classes: frozenset[type[nn.Module]],
    input_ids: torch.Tensor,
    advance: Callable[[], object],
) -> LayeredOutput:
    """Return what a model computes for ``input_ids`` [1, T], reading its weights once, a decoder layer at a time.

    ``meta`` is a model on the meta device, to which hooks are added. ``advance`` is called after each decoder layer.
    """
    model: Any = meta.model
    assert meta.weights is not None
    names = {id(parameter): name for name, parameter in model.named_parameters()}  # the first name of a tied weight
    read_buffers(model, meta.weights)
    hidden_states: list[torch.Tensor] = []

    def keep_output(module: nn.Module, arguments: object, output: Any) -> None:
        hidden_states.append(output[0] if isinstance(output, tuple) else output)
        advance()

    head = model.get_output_embeddings()
    layers: list[Any] = [module for module in model.modules() if isinstance(module, tuple(layer_classes))]
    within = {inner for layer in layers for inner in layer.modules()}
    for layer in layers:
        layer.register_forward_hook(keep_output)
        _read_while_running(layer, [*layer.modules()], meta.weights, names)
    for module in model.modules():
        if module is head and type(module) is nn.Linear:
            head.forward = functools.partial(_blockwise_head, meta.weights, names, head.weight, head.bias)
        elif module._parameters and module not in within:
            _read_while_running(module, [module], meta.weights, names)
    return LayeredOutput(hidden_states, model.eval()(input_ids=input_ids, use_cache=False).logits.float())


def _read_while_running(unit: nn.Module, modules: list[nn.Module], weights: Weights, names: dict[int, str]) -> None:
    """Give ``modules`` their own parameters during the forward pass of ``unit``, and only then."""
    on_meta = [(module, dict(module._parameters)) for module in modules]

    def read(unit: nn.Module, arguments: object) -> None:
        for module, parameters in on_meta:
            for name, parameter in parameters.items():
                if parameter is not None:
                    full = weights.read_block(names[id(parameter)], (0,) * parameter.dim(), parameter.shape)
                    module._parameters[name] = nn.Parameter(full.to(parameter.dtype), requires_grad=False)

    def drop(unit: nn.Module, arguments: object, output: object) -> None:
        for module, parameters in on_meta:
            module._parameters.update(parameters)

    unit.register_forward_pre_hook(read)
    unit.register_forward_hook(drop)


def _blockwise_head(
    weights: Weights,
    names: dict[int, str],
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    hidden: torch.Tensor,
) -> torch.Tensor:
    """Return the logits [1, T, V] of ``hidden`` [1, T, H]; matrix [V, H] and bias are read in blocks of rows."""
    (rows, width), logits = matrix.shape, []
    for begin in range(0, rows, _VOCABULARY_BLOCK):
        count = min(_VOCABULARY_BLOCK, rows - begin)
        block = weights.read_block(names[id(matrix)], (begin, 0), (count, width)).to(matrix.dtype)
        added = None if bias is None else weights.read_block(names[id(bias)], (begin,), (count,)).to(matrix.dtype)
        logits.append(F.linear(hidden, block, added))
    return torch.cat(logits, dim=-1)
