"""Describe a model with only some of its decoder layers: cut each setting that has a value for each layer.

transformers has no list of these settings. :func:`keep_layers` finds them by their form, and then compares each layer
of the result with the layer that it was.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from fabric_train.cli.errors import InputError
from fabric_train.model.computed_settings import has_setting
from fabric_train.model.hf_model import DEFAULT_LAYER_CLASS, ModelShape, shape_from_config

_LAYER_NUMBERS = (
    *("mlp_only_layers", "moe_layers", "attn_layer_indices", "full_attn_idxs", "local_layer_ids", "ple_layer_ids"),
    *("rope_scaling_layers", "cross_attention_layers"),
)
"""Settings that list layers by their numbers."""
_OVERRIDES = "per_layer_config"
"""transformers' settings of single layers, by the layer's number."""
_SHARED = "num_kv_shared_layers"
"""The number of the last layers that use the keys and values of other layers: Gemma 3n and 4."""
_PERIODS = (
    *("first_k_dense_replace", "num_dense_layers", "decoder_sparse_step", "interleave_moe_layer_step"),
    *("moe_layer_interval", "moe_layer_start_index", "moe_layer_end_index", "moe_layer_freq", "max_window_layers"),
    *("attn_layer_period", "attn_layer_offset", "expert_layer_period", "expert_layer_offset", "block_types"),
    *("attention_types", "sliding_window_pattern", "scale_attn_by_inverse_layer_idx"),
)
"""Settings from which transformers computes what a layer is, given its number. They are named in messages."""
_NOT_BY_LAYER = ("architectures",)
_NOT_BY_LAYER_ENDING = "_token_id"
_PLAIN = (bool, int, float, str, torch.dtype, type(None))


@dataclass(frozen=True)
class KeptLayers:
    """A model with some of the decoder layers of another one."""

    layers: list[int]
    """The numbers that the layers have in the other model, from 0, in the order of the result."""
    num_layers: int
    """The number of layers of the other model."""
    prefix: str
    """What precedes a layer's number in the names of its weights, such as ``model.layers.``."""
    config: PretrainedConfig
    shape: ModelShape


def keep_layers(shape: ModelShape, layers: Sequence[int]) -> KeptLayers:
    """Return the model of ``shape`` with only these decoder layers, in this order.

    Args:
        shape: A model.
        layers: Numbers of its layers, from 0.

    Raises:
        InputError: the family's configuration cannot describe such a model.
    """
    config = cut_config(shape.config, layers, shape.source)
    kept_shape = shape_from_config(config, shape.source, DEFAULT_LAYER_CLASS, attention=None)
    model = _build(shape.config)
    kept_model = _build(config)
    prefix = _find_layers(model, shape)
    if _find_layers(kept_model, kept_shape) != prefix:
        raise _cannot_keep(shape, "its layers are not in one list")
    _check_layers(model.get_submodule(prefix), kept_model.get_submodule(prefix), layers, shape)
    _check_other_weights(model, kept_model, prefix, shape)
    num_layers = shape.config.get_text_config().num_hidden_layers
    return KeptLayers(list(layers), num_layers, f"{prefix}.", config, kept_shape)


def cut_config(config: PretrainedConfig, layers: Sequence[int], source: str) -> PretrainedConfig:
    """Return a configuration with only these decoder layers; ``source`` is the model's name in messages.

    A list with a value for each layer gets the values of these layers, and numbers of layers become the new ones.

    Raises:
        InputError: a setting cannot be cut, or the configuration's class refuses the result.
    """
    text_config: Any = config.get_text_config()
    settings = config.to_dict()
    text_settings = settings
    for name in config.sub_configs:
        if getattr(config, name, None) is text_config:
            text_settings = settings[name]
    num_layers = text_config.num_hidden_layers
    for name, value in text_settings.items():
        text_settings[name] = _cut_setting(name, value, layers, num_layers, source)
    count_name = text_config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    text_settings[count_name] = len(layers)
    try:
        cut = type(config).from_dict(settings)
    except (ArithmeticError, AttributeError, LookupError, StrictDataclassError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"--layers: {source} with these layers: {reason}; choose other layers") from error
    if cut.get_text_config().num_hidden_layers != len(layers):
        raise InputError(f"--layers: the number of layers of a {config.model_type} cannot be set; give another model")
    return cut


def _cut_setting(name: str, value: Any, layers: Sequence[int], num_layers: int, source: str) -> Any:
    """Return the value of a setting for these layers out of ``num_layers``."""
    if name == _SHARED and value:
        fault = f"layers of {source} use the keys and values of other layers ({name})"
        raise InputError(f"--layers: {fault}, so none can be left out; give another model")
    if name in _LAYER_NUMBERS and value is not None:
        return [new for new, old in enumerate(layers) if old in value]
    if name == _OVERRIDES and value is not None:
        overrides = {int(layer): settings for layer, settings in value.items()}
        return {new: overrides[old] for new, old in enumerate(layers) if old in overrides}
    is_by_layer = isinstance(value, list | tuple) and len(value) == num_layers
    if is_by_layer and name not in _NOT_BY_LAYER and not name.endswith(_NOT_BY_LAYER_ENDING):
        return [value[layer] for layer in layers]
    return value


def _build(config: PretrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _find_layers(model: Any, shape: ModelShape) -> str:
    """Return the name of the list of a model's decoder layers."""
    num_layers = shape.config.get_text_config().num_hidden_layers
    decoder_modules = set(model.get_decoder().modules())
    layer_classes = tuple(shape.layer_classes)
    names = []
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList) and module in decoder_modules and len(module) == num_layers
        if is_list and all(isinstance(layer, layer_classes) for layer in module):
            names.append(name)
    if len(names) != 1:
        raise _cannot_keep(shape, "its layers are not in one list")
    return names[0]


def _check_layers(old_layers: Any, new_layers: Any, layers: Sequence[int], shape: ModelShape) -> None:
    """Check that each layer of the result is the layer that it was, apart from its number."""
    for new, old in enumerate(layers):
        difference = _find_difference(old_layers[old], new_layers[new], old, new)
        if difference is None:
            continue
        config = shape.config.get_text_config()
        periods = [name for name in _PERIODS if has_setting(config, name) and getattr(config, name, None)]
        rule = ""
        if periods:
            verb = "decides" if len(periods) == 1 else "decide"
            rule = f"; {', '.join(periods)} {verb} by its number what a layer is"
        raise InputError(
            f"--layers: layer {old} of {shape.source} would not stay the same as layer {new} ({difference}){rule}; "
            "choose other layers"
        )


def _find_difference(old_layer: nn.Module, new_layer: nn.Module, old: int, new: int) -> str | None:
    """Return what differs between two layers that have the numbers ``old`` and ``new``; None if nothing does."""
    old_modules = dict(old_layer.named_modules())
    new_modules = dict(new_layer.named_modules())
    for name in sorted({*old_modules, *new_modules}):
        if type(old_modules.get(name)) is not type(new_modules.get(name)):
            return name or "its class"
    if _shapes(old_layer) != _shapes(new_layer):
        return "shapes of weights"
    for module_name, old_module in old_modules.items():
        new_attributes = dict(_plain_attributes(new_modules[module_name]))
        for name, value in _plain_attributes(old_module):
            new_value = new_attributes.get(name)
            is_number = type(value) is int and (value, new_value) == (old, new)  # of the layer, for the cache
            if value != new_value and not is_number:
                return f"{name} {new_value} instead of {value}"
    return None


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module that are numbers, texts, or lists of these."""
    for name, value in vars(module).items():
        members = value if isinstance(value, list | tuple) else [value]
        if not name.startswith("_") and all(isinstance(member, _PLAIN) for member in members):
            yield name, value


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in module.state_dict().items()}


def _check_other_weights(model: nn.Module, kept_model: nn.Module, prefix: str, shape: ModelShape) -> None:
    """Check that the weights outside of the layers have the same shapes with fewer layers."""
    shapes = _shapes(model)
    kept_shapes = _shapes(kept_model)
    for name in sorted({*shapes, *kept_shapes}):
        if not name.startswith(f"{prefix}.") and shapes.get(name) != kept_shapes.get(name):
            raise _cannot_keep(shape, f"{name} has values for each layer")


def _cannot_keep(shape: ModelShape, fault: str) -> InputError:
    model_type = shape.config.model_type
    return InputError(f"--layers: layers of a {model_type} cannot be left out: {fault}; give another model")
