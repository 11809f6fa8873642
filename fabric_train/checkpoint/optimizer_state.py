"""Restore each rank's part of the optimizer state from a checkpoint."""

from pathlib import Path
from typing import Any

import torch
from lightning import Fabric
from torch import nn
from torch.distributed.tensor import DTensor

from fabric_train.checkpoint.trainer_json import read_trainer_json
from fabric_train.cli.errors import InputError
from fabric_train.distributed.shards import FlatShard, flat_shards, named_parameters, original_name
from fabric_train.model.load_weights import read_local_part
from fabric_train.model.weight_files import CheckpointTensors
from fabric_train.optim.low_precision_adamw import MOMENTS, restore_moments


def restore_optimizer(checkpoint: Path, fabric: Fabric, model: Any, optimizer: Any) -> None:
    """Restore AdamW's state and the gradient scaler's. The number of ranks and the parallelism may have changed.

    Each rank reads only its part, one tensor at a time.

    Raises:
        InputError: A tensor is missing or of another shape.
    """
    tensors = CheckpointTensors(sorted((checkpoint / "optimizer").glob("*.safetensors")))
    cuts = flat_shards(model)
    for name, parameter in named_parameters(model):
        name = original_name(name)
        try:
            moments = {key: _local_part(tensors, f"{name}.{key}", parameter, cuts) for key in MOMENTS}
            count = tensors.read(f"{name}.step")
        except KeyError as error:
            raise InputError(
                f"{checkpoint}: the optimizer's {error.args[0]} is missing; use another checkpoint"
            ) from error
        restore_moments(optimizer.optimizer, parameter, count, moments)
    fabric.strategy.precision.load_state_dict(read_trainer_json(checkpoint).content["grad_scaler"])


def _local_part(
    tensors: CheckpointTensors, name: str, parameter: nn.Parameter, cuts: dict[int, FlatShard]
) -> torch.Tensor:
    """Read this rank's part of a stored tensor that is sharded like ``parameter``."""
    _check_shape(tensors.shape(name), cuts[id(parameter)].shape if id(parameter) in cuts else parameter.shape, name)
    part = read_local_part(tensors, name, parameter, cuts)
    # on the parameter's device, which is not its mesh's with --cpu_offload
    restored: Any = torch.empty_like(parameter, dtype=part.dtype)
    local = restored.to_local() if isinstance(restored, DTensor) else restored
    local.copy_(part)
    return restored


def _check_shape(stored: torch.Size, expected: torch.Size, name: str) -> None:
    if stored != expected:
        raise InputError(
            f"the checkpoint's {name} has shape {tuple(stored)}, the model's {tuple(expected)}; use another checkpoint"
        )
