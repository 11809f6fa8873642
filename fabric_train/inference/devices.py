"""Put a model's weights on one GPU, on all GPUs and in host memory, or on the CPU."""

import logging
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fabric_train.cli.argument_types import show_size
from fabric_train.cli.errors import InputError
from fabric_train.files.requirements import check_package
from fabric_train.model.load_weights import MetaModel, read_weights

_SHARE_FOR_WEIGHTS = 0.85  # of a GPU's free memory; the rest is for activations and the cache of keys and values


def load_onto_devices(meta_model: MetaModel, gpu_bytes: int | None = None) -> Any:
    """Read a model's weights onto the first GPU, or onto the CPU without one.

    A model that does not fit into one GPU is spread over all GPUs of this machine, layer by layer. Layers that do not
    fit there stay in host memory and are copied to a GPU each time they are used. accelerate moves the activations.
    ``gpu_bytes`` is the largest size of the weights on one GPU; by default 85 % of its free memory.
    """
    model = meta_model.model
    gpu_limits = _gpu_limits(gpu_bytes)
    device_map: dict[str, str] = {"": "cpu"}  # "" is the whole model
    if gpu_limits:
        device_map = {"": "cuda:0"} if fits_one_device(model, gpu_bytes) else spread(model, gpu_limits)
    _materialize(model, device_map)
    if meta_model.weights is not None:
        read_weights(model, meta_model.weights)
    return _dispatch(model, device_map).eval()


def fits_one_device(model: nn.Module, gpu_bytes: int | None = None) -> bool:
    """Return whether a model's weights fit on one device: the first GPU, or without a GPU the CPU."""
    gpu_limits = _gpu_limits(gpu_bytes)
    return not gpu_limits or _num_bytes(model) <= gpu_limits[0]


def _gpu_limits(gpu_bytes: int | None) -> dict[int, int]:
    """Return the most bytes of weights on each GPU, by its index; empty without a GPU."""
    if not torch.cuda.is_available():
        return {}
    limits = {}
    for index in range(torch.cuda.device_count()):
        free_bytes, _ = torch.cuda.mem_get_info(index)
        limits[index] = gpu_bytes or int(free_bytes * _SHARE_FOR_WEIGHTS)
    return limits


def spread(model: Any, gpu_limits: Mapping[int, int]) -> dict[str, str]:
    """Return the device of each module of a model, by the module's name; layers stay whole.

    ``gpu_limits`` are the most bytes of weights on each GPU, by its index; the rest goes to host memory.
    """
    needed = show_size(_num_bytes(model))
    check_package("accelerate", f"the model's weights ({needed}) do not fit in one GPU; to use several devices")
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_max_memory

    # accelerate fills the GPUs in their order, and then host memory; a layer is never split
    limits: dict[Any, int] = {"cpu": get_max_memory()["cpu"], **gpu_limits}
    layer_classes = list(model._no_split_modules or ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on the size of buffers, which are small
        devices = infer_auto_device_map(model, max_memory=limits, no_split_module_classes=layer_classes)
    if "disk" in devices.values():
        available = show_size(sum(limits.values()))
        raise InputError(
            f"the model's weights ({needed}) do not fit in this machine's GPU and host memory ({available} together); "
            "use a larger machine"
        )
    return {module: device if device == "cpu" else f"cuda:{device}" for module, device in devices.items()}


def _num_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _materialize(model: nn.Module, device_map: dict[str, str]) -> None:
    """Replace meta parameters by uninitialized ones on their devices; tied parameters stay tied."""
    materialized: dict[nn.Parameter, nn.Parameter] = {}  # by the meta parameter
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in materialized:
                device = _find_device(f"{prefix}.{name}", device_map)
                empty = torch.empty_like(parameter, device=device)
                materialized[parameter] = nn.Parameter(empty, parameter.requires_grad)
            module._parameters[name] = materialized[parameter]


def _find_device(name: str, device_map: dict[str, str]) -> str:
    """Return the device of a parameter: the device of the innermost module around it in the map."""
    while name not in device_map:
        name = name.rpartition(".")[0]
    return device_map[name]


def _dispatch(model: Any, device_map: dict[str, str]) -> Any:
    """Move the buffers, and let activations follow from device to device."""
    if "" in device_map:  # the whole model is on one device
        return model.to(device_map[""])
    from accelerate import dispatch_model

    logging.getLogger("accelerate").setLevel(logging.ERROR)  # the note says what its warning says
    host_bytes = 0
    for name, parameter in model.named_parameters():
        if _find_device(name, device_map) == "cpu":
            host_bytes += parameter.nbytes
    slow = f"; {show_size(host_bytes)} of the weights stay in host memory, which is slow" if host_bytes else ""
    num_gpus = len(set(device_map.values()) - {"cpu"})
    print(f"note: the model does not fit in one GPU and is spread over {num_gpus}{slow}", file=sys.stderr)
    return dispatch_model(model, device_map)
