"""Run AdamW steps on several ranks with gradients that do not depend on how the model is sharded.

Start from ``--checkpoint`` where one is given, run ``--max_step`` steps, and save a checkpoint.
"""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fabric_train import checkpoint as checkpoints
from fabric_train.arguments import TrainArguments, parse
from fabric_train.checkpoint.manager import CheckpointManager
from fabric_train.checkpoint.tensors import restore_optimizer
from fabric_train.data.data_order import DataOrder
from fabric_train.distributed.cluster_environment import destroy_process_group
from fabric_train.distributed.precision import weights_dtype
from fabric_train.distributed.sharded_parameters import flat_shards, named_parameters, original_name
from fabric_train.distributed.strategy import build_fabric
from fabric_train.model.hf_model import read_shape
from fabric_train.model.load_weights import open_checkpoint, open_pretrained, read_local_part
from fabric_train.model.parallelize import setup_model
from fabric_train.optim.learning_rate import set_learning_rate
from fabric_train.optim.optimizer import build_optimizer, decayed_names


def main() -> None:
    """Run the steps and save a checkpoint."""
    arguments = parse(TrainArguments, sys.argv[1:])
    checkpoint = Path(arguments.checkpoint.checkpoint) if arguments.checkpoint.checkpoint else None
    shape = read_shape(arguments.model.model_name)
    fabric = build_fabric(arguments, shape.layer_classes)
    dtype = weights_dtype(arguments.model.precision)
    unread = open_checkpoint(shape, checkpoint, dtype) if checkpoint else open_pretrained(shape, dtype)
    shapes = {name: parameter.shape for name, parameter in unread.model.named_parameters()}
    decayed = decayed_names(unread.model)
    model: Any = setup_model(fabric, unread.model, shape.layer_classes, arguments, unread.weights)
    cuts = flat_shards(model)
    named = named_parameters(model)
    optimizer: Any = fabric.setup_optimizers(
        build_optimizer(named, decayed, arguments.training, seed=5, flat_shards=cuts)
    )
    first = 1
    if checkpoint:
        restore_optimizer(checkpoint, fabric, model, optimizer)
        first += checkpoints.read_trainer_json(checkpoint).state.step
    set_learning_rate(optimizer, arguments.training.lr)
    last = first + (arguments.training.max_step or 1) - 1
    for step in range(first, last + 1):
        for name, parameter in named:
            parameter.grad = _part(Gradients(step, shapes, dtype), original_name(name), parameter, cuts)
        optimizer.step()
    described = checkpoints.Description(
        arguments.fsdp.state_dict_type, str(dtype), DataOrder("", 1, 1, 0), {"model_name": ""}, {}, None, ()
    )
    folder = Path(arguments.save.output_dir)
    saves = CheckpointManager(folder, fabric, model, optimizer, described, None, False, lambda _: None)
    saves.save(checkpoints.TrainerState(step=last))
    destroy_process_group(fabric)


def gradient(name: str, step: int, shape: torch.Size) -> torch.Tensor:
    """Return the full gradient of a parameter, a function of its name and the step."""
    seed = int.from_bytes(hashlib.sha256(f"{name} {step}".encode()).digest()[:4], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Gradients:
    """The full gradients of a step, readable like a checkpoint."""

    step: int
    shapes: dict[str, torch.Size]
    dtype: torch.dtype

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return a block of the gradient of the parameter ``name``."""
        full = gradient(name, self.step, self.shapes[name]).to(self.dtype)
        return full[tuple(slice(offset, offset + size) for offset, size in zip(offsets, shape, strict=True))]


def _part(gradients: Any, name: str, parameter: Any, cuts: Any) -> torch.Tensor:
    """Return the gradient of this rank's shard of the parameter."""
    part = read_local_part(gradients, name, parameter, cuts)
    if not isinstance(parameter, DTensor):
        return part
    place = parameter.device_mesh, parameter.placements
    return DTensor.from_local(part, *place, run_check=False, shape=parameter.shape, stride=parameter.stride())
