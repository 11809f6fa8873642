"""Build a model on the meta device, and later read its weights: each rank's part, or all of them.

Hugging Face files are read through ``pretrained_weights``, and checkpoints as they are stored. Models with weights that
must stay in fp32 are loaded in full.
"""

import copy
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from fabric_train.cli.errors import InputError, first_line, note, raise_if_limit_reached
from fabric_train.distributed.sharded_parameters import FlatShard, flat_shards, local_part, original_name
from fabric_train.model import weight_files
from fabric_train.model.hf_model import ModelShape, check_readable
from fabric_train.model.pickled_weights import PickledTensors, find_pickles
from fabric_train.model.pretrained_weights import PretrainedWeights, describe_unused
from fabric_train.model.rope_frequencies import choose_frequencies
from fabric_train.model.weight_files import StoredTensors, Weights

_progress = logging.getLogger("fabric_train.progress")
_FETCH_AGAIN = "download the model again, or give another"


@dataclass(frozen=True)
class MetaModel:
    """A model on the meta device and its weights; ``weights`` is None if it had to be loaded in full, on the CPU."""

    model: PreTrainedModel
    weights: Weights | None

    def read_rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return the rows ``begin`` to ``end`` of the matrix [rows, columns] that the model calls ``name``."""
        parameter = self.model.get_parameter(name)
        if self.weights is None:
            return parameter.detach()[begin:end]
        num_columns = parameter.shape[1]
        return self.weights.read_block(name, (begin, 0), (end - begin, num_columns))


def open_pretrained(shape: ModelShape, dtype: torch.dtype) -> MetaModel:
    """Build the model of a hub name or Hugging Face folder in ``dtype`` and find its weights."""
    meta_model = open_in_parts(shape, dtype)
    if meta_model is not None:
        return meta_model
    return MetaModel(load_model(shape, dtype), weights=None)


def open_in_parts(shape: ModelShape, dtype: torch.dtype) -> MetaModel | None:
    """Build the model and find its weights as :func:`open_pretrained` does; None if it has to be loaded in full.

    It has to be loaded in full if some weights must stay in fp32, if the files have tied weights with different values
    that the model cannot untie, or if transformers computes missing weights from others.
    """
    stored = open_stored(shape.source)
    model = build_on_meta(shape, dtype)
    keeps_fp32 = dtype != torch.float32 and model._keep_in_fp32_modules_strict
    if stored is None or keeps_fp32:
        return None
    weights = PretrainedWeights(model, stored)
    if weights.has_different_duplicates():
        # as transformers does: tied weights that are stored with different values are not tied
        model = build_on_meta(replace(shape, config=_untied(shape.config)), dtype)
        weights = PretrainedWeights(model, stored)
        if weights.has_different_duplicates():
            return None
    missing = weights.find_missing()
    for pattern in model._keys_to_ignore_on_load_missing or ():
        if any(re.search(pattern, name) for name in missing):
            return None
    check_loaded_weights(shape.source, [*missing, *weights.find_mismatched()])
    unused_line = describe_unused(shape.source, weights.find_unused())
    if unused_line:
        note(unused_line)
    return MetaModel(model, weights)


def open_stored(source: str) -> StoredTensors | None:
    """Open the tensors of a hub name or folder as they are stored; None if there are no files of weights."""
    files = find_safetensors(source)
    if files:
        return weight_files.CheckpointTensors(files, "download the model again")
    pickles = find_pickles(source)
    return PickledTensors(pickles) if pickles else None


def _untied(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of a configuration that does not tie the head to the embedding."""
    untied = copy.deepcopy(config)
    untied.tie_word_embeddings = False
    return untied


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
    # transformers initializes what is not marked as initialized: here the buffers, and no parameter
    for module in model.modules():
        module._is_hf_initialized = False
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    model.initialize_weights()
    if shape.longest_row is not None:
        choose_frequencies(model, shape.longest_row)
    return model


@torch.no_grad()
def read_weights(model: nn.Module, weights: Weights) -> None:
    """Read this rank's part of the weights into a model that Fabric has set up. Call it before any forward pass."""
    shards = flat_shards(model)
    parameters = list(model.named_parameters())
    for count, (name, parameter) in enumerate(parameters, 1):
        _progress.info("loading weights %d/%d", count, len(parameters))
        local_tensor = read_local_part(weights, original_name(name), parameter, shards)
        local_part(parameter).copy_(local_tensor)
    read_buffers(model, weights)


@torch.no_grad()
def read_buffers(model: nn.Module, weights: Weights) -> None:
    """Read the buffers that are stored with the weights; transformers computes the non-persistent ones."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set:
                continue
            buffer_name = original_name(f"{prefix}.{name}")
            buffer.copy_(weights.read_block(buffer_name, (0,) * buffer.dim(), buffer.shape))


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
        raise _cannot_load(shape.source, error) from error
    model, loading_info = loaded

    # transformers would initialize missing weights at random
    mismatched = []
    for entry in loading_info.get("mismatched_keys", ()):
        mismatched.append(entry if isinstance(entry, str) else entry[0])  # a name, or a tuple that begins with one
    check_loaded_weights(shape.source, [*loading_info["missing_keys"], *mismatched])
    stored = open_stored(shape.source)
    if stored is not None:
        unused_line = describe_unused(shape.source, PretrainedWeights(model, stored).find_unused())
        if unused_line:
            note(unused_line)

    # If head and embedding are stored with different values, transformers does not tie them. A checkpoint's
    # configuration must say so.
    head = model.get_output_embeddings()
    has_head_apart = head is not None and head.weight is not model.get_input_embeddings().weight
    if model.config.tie_word_embeddings and has_head_apart:
        model.config.tie_word_embeddings = False
    if shape.longest_row is not None:
        choose_frequencies(model, shape.longest_row)
    return model


def _cannot_load(source: str, error: BaseException) -> InputError:
    """Return the error for weights that cannot be loaded; if the machine has reached a limit, raise that error."""
    raise_if_limit_reached(error)
    reason = first_line(error).rstrip(".")
    return InputError(f"--model_name {source}: cannot load its weights: {reason}; {_FETCH_AGAIN}")


def build_model(shape: ModelShape, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of ``shape`` in ``dtype`` from full CPU tensors by name; tied duplicates may be absent."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config, dtype=dtype)
    check_weights_fit(shape.source, model, {name: tensor.shape for name, tensor in weights.items()})
    # a class of text models has built itself from the text part of a configuration that has several parts
    return type(model).from_pretrained(None, config=model.config, state_dict=weights, dtype=dtype)


def check_loaded_weights(source: str, faulty: list[str]) -> None:
    """Check that ``faulty``, the names of a pretrained model's missing or misshapen weights, is empty."""
    if faulty:
        raise InputError(
            f"--model_name {source}: {len(faulty)} weights are missing or do not have the shape in config.json, such "
            f"as {min(faulty)}; {_FETCH_AGAIN}"
        )


def check_weights_fit(source: str, model: PreTrainedModel, shapes: dict[str, torch.Size]) -> None:
    """Check that weights have the names and shapes of the model's weights. Tied duplicates may be absent."""
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    optional = tied_weight_names(model)
    faulty = [name for name, shape in shapes.items() if expected.get(name) != shape]
    faulty += [name for name in expected if name not in shapes and name not in optional]
    if faulty:
        raise InputError(f"{source}: {len(faulty)} weights do not fit its config.json, such as {faulty[0]}")


def tied_weight_names(model: PreTrainedModel) -> dict[str, str]:
    """Return the names in the state dict that are second names of a parameter, such as a tied ``lm_head.weight``.

    Returns:
        The first name of the parameter, by the second name.
    """
    first_names: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name = first_names.setdefault(id(parameter), name)
        if first_name != name:
            tied[name] = first_name
    return tied


def find_safetensors(source: str) -> list[Path]:
    """Return the safetensors files of a hub name or folder; none if its weights are pickles."""
    if Path(source).is_dir():
        return weight_files.safetensors_files(Path(source))
    try:
        index = cached_file(source, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
        names = weight_files.shard_names(Path(index)) if index else [SAFE_WEIGHTS_NAME]
        paths = [cached_file(source, name, _raise_exceptions_for_missing_entries=False) for name in names]
    except OSError as error:
        raise _cannot_load(source, error) from error
    if not all(paths):
        return []
    return [Path(path) for path in paths if path]


def read_local_part(weights: Weights, name: str, parameter: nn.Parameter, shards: dict[int, FlatShard]) -> torch.Tensor:
    """Read this rank's part of a full tensor that is sharded like ``parameter``, a parameter of a set-up model.

    ``shards`` are from :func:`flat_shards`. The CPU tensor has the parameter's shape on this rank, and may be a view of
    a file: do not write into it.
    """
    # FSDP2 and tensor parallelism: a block of the tensor
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        placements = parameter.placements
        shape, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        return weights.read_block(name, offsets, shape)

    # not sharded: the tensor itself
    if id(parameter) not in shards:
        return weights.read_block(name, (0,) * parameter.dim(), parameter.shape)

    # FSDP1: a range of the flattened tensor, which may begin and end within a row; read the rows that it touches
    shard = shards[id(parameter)]
    row_shape = shard.full_shape[1:]
    row_numel = row_shape.numel()
    begin, end = shard.range(shard.rank)
    begin_row = begin // row_numel
    end_row = -(-end // row_numel)
    offsets_in_row = (0,) * len(row_shape)
    rows = weights.read_block(name, (begin_row, *offsets_in_row), (end_row - begin_row, *row_shape))
    rows_begin = begin_row * row_numel
    return rows.flatten()[begin - rows_begin : end - rows_begin].reshape(parameter.shape)
