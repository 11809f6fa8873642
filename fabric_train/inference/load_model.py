"""Load a model from a checkpoint, an exported folder, the hub or a folder with an adapter; or one after another."""

import json
import logging
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from fabric_train.checkpoint import find_whole_checkpoint, is_short_name, read_trainer_json
from fabric_train.checkpoint.adapter_folder import (
    CONFIG,
    AdapterTensors,
    can_be_taken_off,
    check_files,
    check_fits,
    find_base,
    is_adapter,
    is_exported_adapter,
    open_adapted,
    open_base,
    open_frozen,
    read_base_name,
    trained_adapter,
)
from fabric_train.cli.argument_types import show_size
from fabric_train.cli.errors import InputError, first_line, raise_reached_limit
from fabric_train.files.regular_file import check_no_pipes
from fabric_train.files.requirements import check_package
from fabric_train.model import hf_model
from fabric_train.model.adapter import ALL_LINEAR, attach, is_adapter_parameter, remove_adapters
from fabric_train.model.lm_head_loss import compute_loss_in_head
from fabric_train.model.load_weights import MetaModel, read_weights
from fabric_train.model.nf4 import NF4Linear
from fabric_train.model.origin import AdapterBase
from fabric_train.model.patterns import NamePattern
from fabric_train.model.weight_files import open_weights

_SHARE_FOR_WEIGHTS = 0.85  # of a GPU's free memory; the rest is for activations and the cache of keys and values
_NOT_COMPUTED = (
    *("dtype", "use_cache", "transformers_version", "_name_or_path", "architectures"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


def check_adapter(folder: Path) -> None:
    """Raise an InputError if an exported adapter cannot be read, or peft, which opens it, is missing."""
    check_no_pipes(folder)
    check_files(folder)
    check_package("peft", f"{folder} has an adapter, which")


def add_adapter(model: Any, folder: Path, base: str) -> Any:
    """Return the model with the adapter in ``folder``; the model is changed.

    The adapter's matrices are not merged into the weights, whose dtype could round them away.
    """
    check_adapter(folder)
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses a name that transformers is about to remove
            config = _peft_config(folder, [name for name, _ in model.named_modules()])
            return PeftModel.from_pretrained(model, str(folder), config=config).eval()
    except InputError:
        raise
    except (KeyError, OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        raise_reached_limit(error)
        reason = first_line(error).rstrip(".:")
        raise InputError(
            f"{folder}: this adapter cannot be put on {base}: {reason}; give its base model by --base_model"
        ) from error


def _peft_config(folder: Path, names: Sequence[str]) -> Any:
    """Return peft's configuration of an adapter, with the modules that its regular expressions match in their place.

    ``names`` are those of the base's modules. peft matches them by ``re``, which a stranger's expression can keep busy
    for years.
    """
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(str(folder))
    file = folder / CONFIG

    def matching(setting: str, pattern: str) -> set[str]:
        return NamePattern(f"{file}: {setting}", pattern, "q_proj").matching_whole(names)

    for setting in ("target_modules", "exclude_modules"):
        value = getattr(config, setting, None)
        if isinstance(value, str) and value != ALL_LINEAR:
            setattr(config, setting, matching(setting, value))
    for setting in ("rank_pattern", "alpha_pattern"):
        by_pattern = getattr(config, setting, None)
        by_module: dict[str, Any] = {}
        for pattern, value in (by_pattern or {}).items():
            for name in sorted(matching(setting, rf"(?:.*\.)?(?:{pattern})")):
                by_module.setdefault(re.escape(name), value)  # of several patterns, the first one counts
        if by_pattern:
            setattr(config, setting, by_module)
    layers = getattr(config, "layers_pattern", None) or []
    for name in [layers] if isinstance(layers, str) else layers:
        if not re.fullmatch(r"[\w.]+", str(name)):
            raise InputError(f"{file}: layers_pattern {name}: no plain name; give names such as layers")
    return config


def load_onto_devices(opened: MetaModel, gpu_bytes: int | None = None) -> Any:
    """Read a model's weights onto the first GPU, or onto the CPU without one.

    A model that does not fit into one GPU is spread over all GPUs of this machine, layer by layer. What does not fit
    there stays in host memory, and is copied to a GPU each time it is used. accelerate moves the activations.
    ``gpu_bytes`` is the largest size of the weights on one GPU; by default 85 % of its free memory.
    """
    model = opened.model
    room = _gpu_room(gpu_bytes)
    places: dict[str, Any] = {"": "cpu"}
    if room:
        places = {"": "cuda:0"} if fits_one_device(model, gpu_bytes) else spread(model, room)
    _materialize(model, places)
    if opened.weights is not None:
        read_weights(model, opened.weights)
    return _dispatch(model, places).eval()


def fits_one_device(model: nn.Module, gpu_bytes: int | None = None) -> bool:
    """Return whether a model's weights fit into the first GPU; without one, they stay on the CPU."""
    room = _gpu_room(gpu_bytes)
    return not room or _num_bytes(model) <= room[0]


def _gpu_room(gpu_bytes: int | None) -> dict[int, int]:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    free = (torch.cuda.mem_get_info(index)[0] for index in range(num_gpus))
    return {index: gpu_bytes or int(num_bytes * _SHARE_FOR_WEIGHTS) for index, num_bytes in enumerate(free)}


def spread(model: Any, room: Mapping[int, int]) -> dict[str, str]:
    """Return the device of each part of a model, by the part's name; layers stay whole.

    ``room`` has the bytes of weights for each GPU by its index; host memory takes the rest.
    """
    needed_by = f"the model's weights of {show_size(_num_bytes(model))} do not fit into one GPU; to use several devices"
    check_package("accelerate", needed_by)
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_max_memory

    limits: dict[Any, int] = {"cpu": get_max_memory()["cpu"], **room}
    classes = list(model._no_split_modules or ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on the size of buffers, which are small
        found = infer_auto_device_map(model, max_memory=limits, no_split_module_classes=classes)
    if "disk" in found.values():
        needed = show_size(_num_bytes(model))
        there = show_size(sum(limits.values()))
        raise InputError(
            f"the model's weights of {needed} do not fit into the {there} of the GPUs and the memory of this machine; "
            "use a larger one"
        )
    return {part: device if device == "cpu" else f"cuda:{device}" for part, device in found.items()}


def _num_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _materialize(model: nn.Module, places: dict[str, Any]) -> None:
    """Replace meta parameters by uninitialized ones on their devices; tied parameters stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    empty = torch.empty_like(parameter, device=_place_of(f"{prefix}.{name}", places))
                    made[parameter] = nn.Parameter(empty, parameter.requires_grad)
                module._parameters[name] = made[parameter]


def _place_of(name: str, places: dict[str, Any]) -> Any:
    while name not in places:
        name = name.rpartition(".")[0]
    return places[name]


def _dispatch(model: Any, places: dict[str, Any]) -> Any:
    """Move the buffers, and let activations follow from device to device."""
    if "" in places:
        return model.to(places[""])
    from accelerate import dispatch_model

    logging.getLogger("accelerate").setLevel(logging.ERROR)  # the note says what its warning says
    on_host = sum(parameter.nbytes for name, parameter in model.named_parameters() if _place_of(name, places) == "cpu")
    slow = f"; {show_size(on_host)} of the weights stay in host memory, which is slow" if on_host else ""
    num_gpus = len(set(places.values()) - {"cpu"})
    print(f"note: the model does not fit into one GPU; it is spread over {num_gpus}{slow}", file=sys.stderr)
    return dispatch_model(model, places)


def load_for_inference(
    name: str, *, base_model: str | None = None, gpu_bytes: int | None = None, tokenizer_dir: Path | None = None
) -> tuple[Any, Any]:
    """Load model and tokenizer from a checkpoint (see ``find_checkpoint``), a Hugging Face folder or the hub.

    A folder with an adapter of peft is put on its base model, which is ``base_model`` or the one that its configuration
    names. The weights are bfloat16 on a GPU; on CPU they keep the dtype in which they are stored.
    ``model.name_or_path`` is where they come from. ``gpu_bytes``: see ``load_onto_devices``. ``tokenizer_dir`` has the
    tokenizer of an adapter on this model, which need not have one itself.
    """
    hf_model.quiet_transformers()
    folder = Path(name)
    if is_exported_adapter(folder):
        base = base_model or read_base_name(folder)
        check_adapter(folder)
        if tokenizer_dir is None and (folder / "tokenizer_config.json").is_file():
            tokenizer_dir = folder
        model, tokenizer = load_for_inference(base, gpu_bytes=gpu_bytes, tokenizer_dir=tokenizer_dir)
        adapted = add_adapter(model, folder, base)
        if (folder / hf_model.GENERATION_CONFIG).is_file():
            adapted.generation_config = hf_model.read_generation_config(str(folder), model.config)
        return adapted, tokenizer
    checkpoint = find_own_checkpoint(name)
    if base_model is not None and not (checkpoint and is_adapter(checkpoint)):
        raise InputError(f"--base_model {base_model}: {name} is not a folder with an adapter; leave it out")
    described = describe(name, checkpoint, base_model, "--base_model")
    # what is missing is found before the weights are read
    if checkpoint is None:
        tokenizer = hf_model.load_hf_tokenizer(tokenizer_dir or name)
        generation_config = hf_model.read_generation_config(name, described.shape.config)
    else:
        tokenizer = hf_model.load_hf_tokenizer(tokenizer_dir or checkpoint / "tokenizer")
        generation_config = hf_model.checkpoint_generation_config(checkpoint, described.shape.config)
    model = load_onto_devices(described.open(), gpu_bytes)
    model.generation_config = generation_config
    return model, tokenizer


def find_own_checkpoint(name: str) -> Path | None:
    """Return the checkpoint that a name means (see ``find_checkpoint``); None for a hub name or Hugging Face folder."""
    folder = Path(name)
    is_export = (folder / "config.json").is_file() and not (folder / "trainer.json").is_file()
    is_ours = is_short_name(folder) or (folder.is_dir() and not is_export)
    return find_whole_checkpoint(folder) if is_ours else None


@dataclass(frozen=True)
class Described:
    """A model, before its weights are read.

    ``base`` is where they come from, ``dtype`` the one in which they are read, and ``adapter`` the checkpoint whose
    adapter is put on them, if any.
    """

    shape: hf_model.ModelShape
    base: AdapterBase
    dtype: torch.dtype
    adapter: Path | None = None

    def open(self) -> MetaModel:
        if self.adapter is not None:
            return open_adapted(self.shape, self.base, self.dtype, 0, self.adapter)
        return open_base(self.shape, self.base, self.dtype)


def describe(name: str, checkpoint: Path | None, base_model: str | None = None, option: str | None = None) -> Described:
    """Describe the model of a ``checkpoint``, or else of a Hugging Face folder or the hub.

    The base of an adapter may have moved to ``base_model``, which ``option`` gives, if the program has it. An adapter
    that was trained on weights in 4 bits gets them.
    """
    on_gpu = torch.cuda.is_available()
    if checkpoint is not None and is_adapter(checkpoint):
        saved = read_trainer_json(checkpoint)
        base = find_base(base_model, checkpoint, option)
        shape = hf_model.read_shape(str(checkpoint), adapter=trained_adapter(checkpoint))
        of_training = getattr(torch, saved.content["weights_dtype"])
        in_4_bits = shape.adapter is not None and shape.adapter.base_weights  # of weights in the dtype of training
        dtype = torch.bfloat16 if on_gpu and not in_4_bits else of_training
        return Described(shape, base, dtype, checkpoint)
    shape = hf_model.read_shape(str(checkpoint or name))
    stored: Any = shape.config.dtype or torch.float32
    if checkpoint is not None:
        weights = open_weights(checkpoint)
        stored = weights.dtype(next(iter(weights)))
    return Described(shape, AdapterBase(str(checkpoint or name)), torch.bfloat16 if on_gpu else stored)


class ModelsInTurn:
    """One model at a time, to score texts with. A model must not be used after the next one is loaded.

    The base of an adapter stays in memory, in the form in which :func:`load_for_inference` reads it. An adapter is put
    on it, and taken off before the next model, so each model has the bits that it has when it is loaded alone.
    """

    def __init__(self) -> None:
        self._base: Any = None
        self._key: object = None
        self._undo: list[Callable[[], object]] = []  # changes of the base, the first first

    def load(self, name: str, *, loss_in_head: bool = True) -> Any:
        """Load a model so that its logits are fp32: all in fp32 on a CPU; on a GPU the layers are in bfloat16.

        The head of a model that is spread over devices, or that ``compute_loss_in_head`` leaves alone, stays as it is;
        so does every head without ``loss_in_head``, for a model that generates.
        """
        while self._undo:
            self._undo.pop()()
        hf_model.quiet_transformers()
        model = self._load(name)
        is_spread = hasattr(model, "hf_device_map")  # there, accelerate moves the head's input in its forward
        if loss_in_head and not is_spread and compute_loss_in_head(model):
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
            self._base = _in_fp32(load_onto_devices(opened))
            self._key = key
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
        shape = described.shape
        stored = AdapterTensors(checkpoint)
        model = self._base
        assert shape.adapter is not None
        check_fits(stored, shape.trained, checkpoint)
        attach(model, shape.adapter, described.base.place, str(model.device))
        self._undo.append(lambda: remove_adapters(model))
        for name, parameter in model.named_parameters():
            if name in shape.trained:
                tensor = stored.read(name)
                if is_adapter_parameter(name):
                    parameter.data.copy_(tensor)
                    continue
                self._undo.append(partial(setattr, parameter, "data", parameter.data))
                parameter.data = tensor.to(described.dtype).to(parameter.data)


def _key(described: Described) -> object:
    """Return what two models have in common if their weights without adapters are the same bits in memory.

    The fingerprint of the base is compared when an adapter is described.
    """
    shape = described.shape
    base = Path(described.base.place)
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


def _forget(module: Any, name: str) -> None:
    module.__dict__.pop(name, None)
