"""Load one model after another to score texts, and read a base that several adapters share only once."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fabric_train.checkpoint.adapter_base import open_frozen
from fabric_train.checkpoint.adapter_folder import (
    AdapterTensors,
    can_be_taken_off,
    check_fits,
    is_exported_adapter,
    read_base_name,
)
from fabric_train.inference.devices import fits_one_device, load_onto_devices
from fabric_train.inference.load_model import DescribedModel, describe, find_own_checkpoint, load_for_inference
from fabric_train.inference.peft_adapter import add_adapter
from fabric_train.model import hf_model
from fabric_train.model.adapter import attach, is_adapter_parameter, remove_adapters
from fabric_train.model.lm_head_loss import compute_loss_in_head
from fabric_train.model.nf4 import NF4Linear

_NOT_COMPUTED = (
    *("dtype", "use_cache", "transformers_version", "_name_or_path", "architectures"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
"""Settings of a configuration that do not change what the model computes."""


@dataclass(frozen=True)
class _BaseKey:
    """What decides the weights of a model in memory, without an adapter.

    Models with equal keys have bit-identical weights. The fingerprint of a base is compared when an adapter is
    described.
    """

    location: str
    """A resolved path, or a name on the hub."""
    dtype: torch.dtype
    base_weights: str | None
    """The 4-bit form of the decoder layers, a value of ``--base_weights``; None if they are not in 4 bits."""
    unquantized_modules: tuple[str, ...]
    """With ``base_weights``: the modules that train whole, which are not in 4 bits."""
    config_json: str
    """The settings of the configuration that change what the model computes."""


class ModelsInTurn:
    """Loads one model at a time to score texts. A model must not be used after the next one is loaded.

    The base of an adapter stays in memory, in the form in which :func:`load_for_inference` reads it. An adapter is put
    on it, and removed before the next model, so each model is bit-identical to the model loaded alone.
    """

    def __init__(self) -> None:
        self._base: Any = None
        self._base_key: _BaseKey | None = None
        self._undo: list[Callable[[], object]] = []  # what undoes the changes of the base, in the order of the changes

    def load(self, name: str) -> Any:
        """Load a model with fp32 logits: on a CPU everything is in fp32, on a GPU the layers are in bfloat16.

        The head stays in its dtype if the model is spread over devices, or if ``compute_loss_in_head`` leaves it alone.
        """
        while self._undo:
            undo_last_change = self._undo.pop()
            undo_last_change()
        hf_model.quiet_transformers()
        model = self._load(name)
        is_spread = hasattr(model, "hf_device_map")  # there, accelerate moves the head's input in its forward
        if not is_spread and compute_loss_in_head(model):
            head = model.get_output_embeddings()
            hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
            self._undo.append(hook.remove)
            # the class's own ``forward`` is found again once the attributes of ``compute_loss_in_head`` are gone
            self._undo.append(partial(_delete_attribute, head, "forward"))
            self._undo.append(partial(_delete_attribute, model, "forward"))
            self._undo.append(partial(_delete_attribute, model, "has_loss_in_head"))
        return model

    def _load(self, name: str) -> Any:
        """Return the model ``name``, on the base in memory if it is the same."""
        # find the base; an adapter on an adapter, or one that cannot be taken off, would spoil it for later models
        peft_folder = Path(name) if is_exported_adapter(Path(name)) else None
        base_name = name
        if peft_folder is not None:
            base_name = read_base_name(peft_folder)
            if is_exported_adapter(Path(base_name)) or not can_be_taken_off(peft_folder):
                return self._load_alone(name)
        described = describe(base_name, find_own_checkpoint(base_name))
        if peft_folder is not None and described.adapter:
            return self._load_alone(name)

        # read the base unless it is in memory; it is kept for later models only if it fits one device
        key = _base_key(described)
        if self._base_key != key:
            self._drop_base()
            meta_model = open_frozen(described.shape, described.base, described.dtype)
            if not fits_one_device(meta_model.model):
                return self._load_alone(name)
            self._base = _in_fp32(load_onto_devices(meta_model))
            self._base_key = key

        # put the adapter on, and remember how to take it off
        if described.adapter:
            self._add_checkpoint_adapter(described, described.adapter)
        if peft_folder is None:
            return self._base
        adapted = add_adapter(self._base, peft_folder, base_name)
        self._undo.append(adapted.unload)
        return adapted

    def _load_alone(self, name: str) -> Any:
        self._drop_base()
        return _in_fp32(load_for_inference(name)[0])

    def _drop_base(self) -> None:
        """Free the memory of the base before another model is read."""
        self._base = None
        self._base_key = None

    def _add_checkpoint_adapter(self, described: DescribedModel, checkpoint: Path) -> None:
        """Put the adapter of a checkpoint on the base, in the dtypes in which ``open_adapted`` reads it."""
        shape = described.shape
        stored = AdapterTensors(checkpoint)
        model = self._base
        assert shape.adapter is not None
        check_fits(stored, shape.trained, checkpoint)
        attach(model, shape.adapter, described.base.location, str(model.device))
        self._undo.append(partial(remove_adapters, model))
        for name, parameter in model.named_parameters():
            if name not in shape.trained:
                continue
            tensor = stored.read(name)
            if is_adapter_parameter(name):
                parameter.data.copy_(tensor)
                continue
            # a module of the base that was trained whole; the base's own weight comes back later
            self._undo.append(partial(setattr, parameter, "data", parameter.data))
            parameter.data = tensor.to(described.dtype).to(parameter.data)


def _base_key(described: DescribedModel) -> _BaseKey:
    config = described.shape.config.to_dict()
    computed = {name: value for name, value in config.items() if name not in _NOT_COMPUTED}
    location = described.base.location
    if Path(location).is_dir():
        location = str(Path(location).resolve())
    adapter = described.shape.adapter
    base_weights = None
    unquantized_modules: tuple[str, ...] = ()
    if adapter is not None and adapter.base_weights is not None:
        base_weights = adapter.base_weights
        unquantized_modules = adapter.train_also
    return _BaseKey(
        location=location,
        dtype=described.dtype,
        base_weights=base_weights,
        unquantized_modules=unquantized_modules,
        config_json=json.dumps(computed, sort_keys=True, default=str),
    )


def _in_fp32(model: Any) -> Any:
    """Return a model on the CPU in fp32, except weights in 4 bits; return a model on a GPU unchanged."""
    if model.device.type != "cpu":
        return model
    for module in model.modules():
        if isinstance(module, NF4Linear):
            continue
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point():
                tensor.data = tensor.data.float()
    return model


def _delete_attribute(module: Any, name: str) -> None:
    module.__dict__.pop(name, None)
