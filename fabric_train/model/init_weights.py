"""Draw random weights for a new model, as a function of only the seed and the parameter's name.

For ``--from_scratch``, transformers' own initialization runs on a model on the meta device, while this module records
the distribution of each parameter. The numbers are then drawn in chunks. Each chunk has its own random stream, so each
rank draws only its part of a parameter, and gets the same numbers as a single process that draws all of it.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from fabric_train.cli.argument_types import nearest_name
from fabric_train.cli.errors import InputError, first_line
from fabric_train.model.adapter import Adapter
from fabric_train.model.hf_model import ModelShape, shape_from_config
from fabric_train.model.load_weights import MetaModel, build_on_meta, tied_weight_names

if TYPE_CHECKING:
    from fabric_train.arguments import ModelArguments

_CHUNK = 1 << 18  # elements; a different number changes the weights
_SIZE_NAMES = {  # by our argument, the names of a size in the configurations of model families
    "hidden_width": ("hidden_size",),
    "num_layers": ("num_hidden_layers",),
    "num_heads": ("num_attention_heads",),
    "num_key_value_heads": ("num_key_value_heads",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim"),
    "max_context_width": ("max_position_embeddings",),
    "vocab_size": ("vocab_size",),
}


def new_shape(
    arguments: "ModelArguments",
    layer_class: str,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    *,
    adapter: Adapter | None = None,
) -> ModelShape:
    """Return the shape of a model with the family and sizes in ``arguments``, and the given document tokens.

    Args:
        arguments: the family and the sizes.
        layer_class: the name of the decoder layer's class.
        bos_token_id: the token that begins a document; it only counts if there is an ``eos_token_id``.
        eos_token_id: the token that ends a document; None keeps both of the family's defaults.
        adapter: an adapter that is added to the model, for the plan of a model whose weights are not here.

    Raises:
        InputError: the family does not exist, or cannot have these sizes.
    """
    family = str(arguments.family)
    try:
        default = AutoConfig.for_model(family)
    except ValueError:
        raise InputError(
            f"--from_scratch {family}: transformers has no such family; give a family such as llama, gpt2, gpt_neox, "
            "mistral, mixtral, qwen3 or gemma"
        ) from None
    if getattr(default, "is_heterogeneous", False):  # Gemma 4: such a configuration has no size of all layers
        raise InputError(f"--from_scratch {family}: its layers have heads of several sizes; give another family")
    values = _config_sizes(arguments, family, default)
    if eos_token_id is not None:
        values |= {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id}

    # --architecture gives further values of the configuration, and may replace those so far
    config_names = default.to_dict()
    for name in arguments.architecture or {}:
        if name not in config_names:
            hint = nearest_name(name, config_names)
            raise InputError(f"--architecture {name}: the configuration of {family} has no such value{hint}")
    values |= arguments.architecture or {}
    try:
        config = AutoConfig.for_model(family, **values)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"--from_scratch {family}: invalid sizes: {first_line(error)}") from error
    name = f"--from_scratch {family}"
    return shape_from_config(config, name, layer_class, arguments.attention, is_new=True, adapter=adapter)


def _config_sizes(arguments: "ModelArguments", family: str, default: PretrainedConfig) -> dict[str, Any]:
    """Return the sizes in ``arguments`` by their names in the configuration of a family."""
    values: dict[str, Any] = {}
    for argument, config_names in _SIZE_NAMES.items():
        size = getattr(arguments, argument)
        if size is None and argument == "num_key_value_heads" and hasattr(default, "num_key_value_heads"):
            size = arguments.num_heads  # the default is no grouped-query attention
        if size is None:
            continue
        known_names = [name for name in config_names if hasattr(default, name)]
        if not known_names:
            raise InputError(f"--{argument} {size}: {family} models have no such setting; leave it out")
        values[known_names[0]] = size
    # with latent attention (DeepSeek V3), head_dim is that of the rotary part, and other settings have the heads' sizes
    if hasattr(default, "head_dim") and not hasattr(default, "qk_rope_head_dim"):
        assert arguments.hidden_width is not None  # the arguments are checked
        assert arguments.num_heads is not None
        values["head_dim"] = arguments.hidden_width // arguments.num_heads
    return values


def open_new(shape: ModelShape, dtype: torch.dtype, seed: int) -> MetaModel:
    """Build the model of ``shape`` in ``dtype`` on the meta device, with random weights to read."""
    model = build_on_meta(shape, dtype)
    return MetaModel(model, RandomWeights(model, shape.source, seed))


@dataclass(frozen=True)
class _Values:
    """How the elements ``begin`` to ``end`` of a flattened parameter are filled."""

    distribution: str
    """``constant``, ``normal`` or ``uniform``."""
    parameters: tuple[float, ...]
    """The constant, or the mean and standard deviation, or the lower and upper bound."""
    begin: int
    end: int


class RandomWeights:
    """Random weights of a model whose parameters are on the meta device; implements ``weight_files.Weights``."""

    def __init__(self, model: PreTrainedModel, source: str, seed: int) -> None:
        self._seed = seed
        self._values = _record_initialization(model, source)
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return the block of ``shape`` that begins at ``offsets`` of the full parameter, in fp32."""
        block = tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))
        if name in self._buffers:
            return self._buffers[name][block]
        full_shape = self._shapes[name]
        if not full_shape:  # a single number
            return torch.from_numpy(self._draw(name, 0, 1)).reshape(())
        # whole rows are drawn, which are consecutive in the flattened parameter
        row_shape = full_shape[1:]
        row_numel = math.prod(row_shape)
        begin_row = offsets[0]
        num_rows = shape[0]
        numbers = self._draw(name, begin_row * row_numel, (begin_row + num_rows) * row_numel)
        rows = torch.from_numpy(numbers).reshape((num_rows, *row_shape))
        block_of_rows = (slice(None), *block[1:])
        return rows[block_of_rows]

    def _draw(self, name: str, begin: int, end: int) -> np.ndarray:
        """Return the elements ``begin`` to ``end`` of the flattened parameter, fp32."""
        drawn = np.empty(end - begin, np.float32)
        for values in self._values[name]:  # later writes of the initialization replace earlier ones
            values_begin = max(begin, values.begin)
            values_end = min(end, values.end)
            if values_begin >= values_end:
                continue
            if values.distribution == "constant":
                drawn[values_begin - begin : values_end - begin] = values.parameters[0]
                continue
            # Chunks begin at multiples of their size in the parameter, so a rank that draws a block gets the same
            # numbers as one that draws all.
            first_chunk = values_begin // _CHUNK
            end_chunk = -(-values_end // _CHUNK)
            for chunk in range(first_chunk, end_chunk):
                chunk_begin = chunk * _CHUNK
                chunk_end = min(chunk_begin + _CHUNK, values_end)
                wanted_begin = max(chunk_begin, values_begin)
                # the stream begins with the chunk, so its numbers before the wanted ones are drawn and dropped
                numbers = self._draw_chunk(name, chunk, chunk_end - chunk_begin, values)
                wanted_numbers = numbers[wanted_begin - chunk_begin :]
                drawn[wanted_begin - begin : chunk_end - begin] = wanted_numbers
        return drawn

    def _draw_chunk(self, name: str, chunk: int, num_elements: int, values: _Values) -> np.ndarray:
        """Return the first elements of a chunk of a parameter, fp32, from the chunk's own random stream."""
        name_digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
        seeds = np.random.SeedSequence([self._seed, name_digest, chunk])
        stream = np.random.Generator(np.random.SFC64(seeds))
        if values.distribution == "uniform":
            low, high = values.parameters
            numbers = stream.random(num_elements).astype(np.float32)
            return numbers * np.float32(high - low) + np.float32(low)
        mean, std = values.parameters
        numbers = stream.standard_normal(num_elements, np.float32)
        return numbers * np.float32(std) + np.float32(mean)


class _InitRecorder(TorchDispatchMode):
    """A dispatch mode that records all writes to parameters on the meta device."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        # by storage, because views of a parameter, such as the padding token's row, are written to as well
        self._names = {parameter.untyped_storage()._cdata: name for name, parameter in model.named_parameters()}
        self._num_elements = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self.values: dict[str, list[_Values]] = {name: [] for name in self._names.values()}
        self.unknown: list[str] = []  # writes that are no distribution

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args else None
        operation = func.overloadpacket.__name__
        writes_in_place = operation.endswith("_")
        if writes_in_place and isinstance(target, torch.Tensor) and target.is_meta:
            self._record(target, operation, args[1:], kwargs or {})
        return func(*args, **(kwargs or {}))

    def _record(self, target: torch.Tensor, operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record a write to ``target``, which may be a parameter or a view of one."""
        name = self._names.get(target.untyped_storage()._cdata)
        if name is None:
            return
        begin = int(target.storage_offset())
        end = begin + target.numel()
        if operation == "normal_":
            mean, std = _two_arguments(args, kwargs, {"mean": 0.0, "std": 1.0})
            values = _Values("normal", (mean, std), begin, end)
        elif operation == "uniform_":
            low, high = _two_arguments(args, kwargs, {"from": 0.0, "to": 1.0})
            values = _Values("uniform", (low, high), begin, end)
        elif operation in ("fill_", "zero_") and target.is_contiguous():
            constant = float(args[0]) if args else 0.0
            values = _Values("constant", (constant,), begin, end)
        else:
            self.unknown.append(f"{name} ({operation})")
            return
        if begin == 0 and end == self._num_elements[name]:
            self.values[name].clear()  # it replaces all earlier writes
        self.values[name].append(values)


def _two_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], defaults: dict[str, float]) -> list[float]:
    """Return two arguments of an operation in order, each given by position, by keyword, or by ``defaults``."""
    positional = dict(zip(defaults, args, strict=False))
    arguments = defaults | dict(kwargs) | positional
    return [float(arguments[name]) for name in defaults]


def _record_initialization(model: Any, source: str) -> dict[str, list[_Values]]:
    """Run transformers' initialization on the meta device, and return how it fills each parameter."""
    for module in model.modules():
        module._is_hf_initialized = False
    for parameter in model.parameters():
        parameter._is_hf_initialized = False
    for name in tied_weight_names(model):  # the embedding initializes the tied weight, not the head
        module_name = name.rpartition(".")[0]
        model.get_submodule(module_name)._is_hf_initialized = True
    recorder = _InitRecorder(model)
    with recorder:
        model.initialize_weights()
    unknown = recorder.unknown + [name for name, values in recorder.values.items() if not values]
    if unknown:
        raise InputError(
            f"{source}: cannot initialize {len(unknown)} of its weights, such as {unknown[0]}; train another family, "
            "or start from a pretrained model"
        )
    return recorder.values
