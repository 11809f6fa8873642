"""Load models to evaluate, one after the other; adapters and their base read the weights of the base once.

The base stays in memory, in the form in which ``load_for_inference`` reads it. An adapter is put on it, and taken off
before the next model, so each model has the bits that it has when it is loaded alone.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fabric_train.checkpoint import is_exported_adapter, open_frozen, read_base_name
from fabric_train.checkpoint.adapter_folder import AdapterTensors, can_be_taken_off, check_fits
from fabric_train.inference.load_model import (
    Described,
    add_adapter,
    describe,
    find_own_checkpoint,
    fits_one_device,
    load_for_inference,
    load_onto_devices,
)
from fabric_train.model.adapter import adapted_layers, attach, is_of_adapter
from fabric_train.model.hf_model import quiet_transformers
from fabric_train.model.lm_head_loss import compute_loss_in_head
from fabric_train.model.nf4 import NF4Linear

_NOT_COMPUTED = (
    *("dtype", "use_cache", "transformers_version", "_name_or_path", "architectures"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


class ModelsInTurn:
    """One model at a time, to score texts with. A model must not be used after the next one is loaded."""

    def __init__(self) -> None:
        self._base: Any = None
        self._key: object = None
        self._undo: list[Callable[[], object]] = []  # what is done to the base, the first first

    def load(self, name: str) -> Any:
        """Load a model so that its logits are fp32: all in fp32 on a CPU; on a GPU the layers are in bfloat16.

        The head of a model that is spread over devices, or that ``compute_loss_in_head`` leaves alone, stays as it is.
        """
        while self._undo:
            self._undo.pop()()
        quiet_transformers()
        model = self._load(name)
        is_spread = hasattr(model, "hf_device_map")  # there, accelerate moves the head's input in its forward
        if not is_spread and compute_loss_in_head(model):
            head = model.get_output_embeddings()
            hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
            self._undo += [hook.remove, lambda: _forget(head, "forward"), lambda: _forget(model, "forward")]
            self._undo.append(lambda: _forget(model, "has_loss_in_head"))
        return model

    def _load(self, name: str) -> Any:
        of_peft = Path(name) if is_exported_adapter(Path(name)) else None
        base = read_base_name(of_peft) if of_peft else name
        if of_peft and (is_exported_adapter(Path(base)) or not can_be_taken_off(of_peft)):
            return self._load_alone(name)
        described = describe(base, find_own_checkpoint(base))
        if of_peft and described.adapter:
            return self._load_alone(name)
        key = _key(described)
        if self._key != key:
            self._base = self._key = None  # its memory is free before the next one is read
            opened = open_frozen(described.shape, described.base, described.dtype)
            if not fits_one_device(opened.model):
                return self._load_alone(name)
            self._base, self._key = _in_fp32(load_onto_devices(opened)), key
        if described.adapter:
            self._put_on(described, described.adapter)
        if of_peft is None:
            return self._base
        adapted = add_adapter(self._base, of_peft, base)
        self._undo.append(adapted.unload)
        return adapted

    def _load_alone(self, name: str) -> Any:
        self._base = self._key = None
        return _in_fp32(load_for_inference(name)[0])

    def _put_on(self, described: Described, checkpoint: Path) -> None:
        """Put the adapter of a checkpoint on the base, in the dtypes in which ``open_adapted`` reads it."""
        shape, stored, model = described.shape, AdapterTensors(checkpoint), self._base
        assert shape.adapter is not None
        check_fits(stored, shape.trained, checkpoint)
        attach(model, shape.adapter, described.base.place, str(model.device))
        self._undo.append(lambda: _take_off(model))
        for name, parameter in model.named_parameters():
            if name in shape.trained:
                tensor = stored.read(name)
                if is_of_adapter(name):
                    parameter.data.copy_(tensor)
                    continue
                self._undo.append(partial(setattr, parameter, "data", parameter.data))
                parameter.data = tensor.to(described.dtype).to(parameter.data)


def _key(described: Described) -> object:
    """Return what two models have in common if their weights without adapters are the same bits in memory.

    The fingerprint of the base is compared when an adapter is described.
    """
    shape, base = described.shape, Path(described.base.place)
    config = {name: value for name, value in shape.config.to_dict().items() if name not in _NOT_COMPUTED}
    place = str(base.resolve()) if base.is_dir() else described.base.place
    in_4_bits = shape.adapter and shape.adapter.base_weights and (shape.adapter.base_weights, shape.adapter.train_also)
    return place, described.dtype, in_4_bits, json.dumps(config, sort_keys=True, default=str)


def _in_fp32(model: Any) -> Any:
    """Return a model on the CPU in fp32, but for weights in 4 bits; one on a GPU as it is."""
    if model.device.type != "cpu":
        return model
    for module in model.modules():
        if not isinstance(module, NF4Linear):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point():
                    tensor.data = tensor.data.float()
    return model


def _take_off(model: Any) -> None:
    for _, layer in [*adapted_layers(model)]:
        for name in ("lora_A", "lora_B", "adapter"):
            delattr(layer, name)
        if hasattr(layer, "lora_magnitude_vector"):
            del layer.lora_magnitude_vector
        layer.__class__ = type(layer).__mro__[2]  # after the adapted class and what is mixed in


def _forget(module: Any, name: str) -> None:
    module.__dict__.pop(name, None)
