"""``--float8``: the matrix products of the decoder layers in 8 bits, by torchao; weights and their names stay."""

import importlib.util
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from fabric_train.cli.errors import InputError

if TYPE_CHECKING:
    from arguments import TrainArguments

_NEEDED_CAPABILITY = (8, 9)  # Ada; before it there are no such units
_MULTIPLE = 16  # of both dimensions of a matrix, which torch's scaled product takes


def refuse_unusable_float8(arguments: "TrainArguments", accelerator: str) -> None:
    """Refuse what 8 bits cannot be used for, as far as it is seen without touching a device.

    Raises:
        InputError: saying what to change.
    """
    if accelerator == "cpu":
        raise InputError("--float8 true needs a GPU (H100, L40S, RTX 4090 or newer): leave it out on CPU")
    if not arguments.model.precision.startswith("bf16"):
        raise InputError(f"--float8 true computes beside bf16, not --precision {arguments.model.precision}")
    if not arguments.fsdp.compile:
        raise InputError("--float8 true is slower than bf16 where layers are not compiled: add --compile true")
    if importlib.util.find_spec("torchao") is None:
        raise InputError("--float8 true needs torchao: pip install 'fabric-train[torchao]'")


def refuse_older_gpu(device: torch.device) -> None:
    """Refuse a GPU that cannot multiply 8-bit floats.

    Raises:
        InputError: naming it.
    """
    if torch.cuda.get_device_capability(device) < _NEEDED_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise InputError(f"--float8 true: {name} does not compute in 8 bits; leave it out")


def convert_layers(layers: Iterable[nn.Module], emulate: bool = False) -> None:
    """Have each linear layer compute its three products, the output and the two gradients, in float8 (e4m3).

    Rows and columns are scaled each by its own largest value, by powers of two (torchao's recipe "rowwise"): an outlier
    costs the digits of its own row alone. The head, the embeddings and what is no multiple of 16 stay in bf16.

    Args:
        layers: decoder layers, changed in place.
        emulate: compute in higher precision what float8 would, on any device.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulate)
    for layer in layers:
        convert_to_float8_training(layer, config=config, module_filter_fn=_fits)


def _fits(module: nn.Module, _: str) -> bool:
    return isinstance(module, nn.Linear) and not any(size % _MULTIPLE for size in module.weight.shape)
