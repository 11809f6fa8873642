"""Compute the matrix products of decoder layers in float8 with torchao (``--float8``); weights and names stay."""

import importlib.util
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from fabric_train.cli.errors import InputError

if TYPE_CHECKING:
    from arguments import TrainArguments

_MIN_CAPABILITY = (8, 9)  # Ada, the first with float8 units
_MULTIPLE = 16  # torch's scaled product needs both dimensions of a matrix to be multiples of it


def check_float8(arguments: "TrainArguments", accelerator: str) -> None:
    """Check that ``--float8`` can be used, as far as can be seen without touching a device.

    Raises:
        InputError: on CPU, in another precision than bf16, without ``--compile``, or without torchao.
    """
    if accelerator == "cpu":
        raise InputError("--float8 true needs a GPU (H100, L40S, RTX 4090 or newer); leave it out on CPU")
    if not arguments.model.precision.startswith("bf16"):
        raise InputError(f"--float8 true needs bf16-mixed or bf16-true, not --precision {arguments.model.precision}")
    if not arguments.fsdp.compile:
        raise InputError("--float8 true is slower than bf16 in layers that are not compiled; add --compile true")
    if importlib.util.find_spec("torchao") is None:
        raise InputError("--float8 true needs torchao; pip install 'fabric-train[torchao]'")


def check_gpu_has_float8(device: torch.device) -> None:
    """Check that a GPU multiplies float8 matrices.

    Raises:
        InputError: it does not.
    """
    if torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise InputError(f"--float8 true: {name} does not support float8; leave it out")


def convert_to_float8(layers: Iterable[nn.Module], emulate: bool = False) -> None:
    """Make each linear layer compute its three products, the output and the two gradients, in float8 (e4m3).

    Each row and column has its own scale, a power of two (torchao's recipe "rowwise"), so an outlier costs precision
    only in its own row. The head, the embeddings and matrices with a dimension that is not a multiple of 16 stay in
    bf16.

    Args:
        layers: decoder layers, changed in place.
        emulate: compute what float8 would in higher precision, on any device.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulate)
    for layer in layers:
        convert_to_float8_training(layer, config=config, module_filter_fn=_is_convertible)


def _is_convertible(module: nn.Module, _: str) -> bool:
    return isinstance(module, nn.Linear) and not any(size % _MULTIPLE for size in module.weight.shape)
