"""Choose the devices of a model's parts, and read the weights onto them: no device and no host holds a second copy."""

import logging
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fabric_train.cli.errors import InputError
from fabric_train.files.sizes import show_size
from fabric_train.model.load_weights import MetaModel, read_weights

_SHARE_FOR_WEIGHTS = 0.85  # of a GPU's free memory; the rest is for activations and the cache of keys and values
_INSTALL = "pip install 'fabric-train[accelerate]'"


def load_onto_devices(opened: MetaModel, gpu_bytes: int | None = None) -> Any:
    """Read a model's weights onto the first GPU, or onto the CPU without one.

    A model that does not fit into one GPU is spread over all GPUs of this machine, layer by layer. What does not fit
    there stays in host memory, and is copied to a GPU each time it is used. accelerate moves the activations.

    Args:
        opened: from ``load_weights``; its dtype is that of the loaded model.
        gpu_bytes: largest size of the weights on one GPU; default: 85 % of its free memory.

    Raises:
        InputError: the model needs several devices and accelerate is not installed, or it does not fit into all.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    free = (torch.cuda.mem_get_info(index)[0] for index in range(num_gpus))
    room = {index: gpu_bytes or int(num_bytes * _SHARE_FOR_WEIGHTS) for index, num_bytes in enumerate(free)}
    model = opened.model
    places: dict[str, Any] = {"": "cpu"}
    if num_gpus:
        places = {"": "cuda:0"} if _num_bytes(model) <= room[0] else spread(model, room)
    _materialize(model, places)
    if opened.weights is not None:
        read_weights(model, opened.weights)
    return _dispatch(model, places).eval()


def spread(model: Any, room: Mapping[int, int]) -> dict[str, str]:
    """Return the device of each part of a model, by the part's name; layers stay whole.

    Args:
        model: its weights may be on the meta device.
        room: bytes of weights for each GPU by its index. Host memory takes the rest.

    Raises:
        InputError: accelerate is not installed, or the model does not fit.
    """
    try:
        from accelerate import infer_auto_device_map
        from accelerate.utils import get_max_memory
    except ImportError:
        raise InputError(
            f"the model's weights of {show_size(_num_bytes(model))} do not fit into one GPU, and accelerate, which "
            f"uses several devices, is not installed: {_INSTALL}"
        ) from None
    limits: dict[Any, int] = {"cpu": get_max_memory()["cpu"], **room}
    classes = list(model._no_split_modules or ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on the size of buffers, which are small
        found = infer_auto_device_map(model, max_memory=limits, no_split_module_classes=classes)
    if "disk" in found.values():
        needed, there = show_size(_num_bytes(model)), show_size(sum(limits.values()))
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
    """Return the device of the innermost part that has the parameter ``name``."""
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
