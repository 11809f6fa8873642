"""Run steps of an optimizer on several ranks with gradients that do not depend on how the model is sharded.

Start from ``--checkpoint`` where one is given, run ``--max_step`` steps, and save a checkpoint.
"""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer
from torch import nn
from torch.distributed.tensor import DTensor

from fabric_train import checkpoint as checkpoints
from fabric_train.arguments import TrainArguments, parse
from fabric_train.checkpoint.manager import CheckpointManager
from fabric_train.checkpoint.tensors import restore_optimizer
from fabric_train.data.data_order import DataOrder
from fabric_train.distributed.cluster_environment import destroy_process_group
from fabric_train.distributed.precision import weights_dtype
from fabric_train.distributed.sharded_parameters import FlatShard, flat_shards, named_parameters, original_name
from fabric_train.distributed.strategy import build_fabric
from fabric_train.model.hf_model import read_shape
from fabric_train.model.load_weights import open_checkpoint, open_pretrained, read_local_part
from fabric_train.model.parallelize import setup_model
from fabric_train.optim.learning_rate import set_learning_rate
from fabric_train.optim.optimizer import build_optimizer, decayed_names


def main() -> None:
    """Run the steps and save a checkpoint."""
    arguments = parse(TrainArguments, sys.argv[1:])
    model_shape = read_shape(arguments.model.model_name)
    fabric = build_fabric(arguments, model_shape.layer_classes)
    dtype = weights_dtype(arguments.model.precision)

    # the model and its optimizer, as in a run
    checkpoint = None
    if arguments.checkpoint.checkpoint:
        checkpoint = Path(arguments.checkpoint.checkpoint)
        unread = open_checkpoint(model_shape, checkpoint, dtype)
    else:
        unread = open_pretrained(model_shape, dtype)
    full_shapes = {name: parameter.shape for name, parameter in unread.model.named_parameters()}
    decayed = decayed_names(unread.model)
    model: _FabricModule = setup_model(fabric, unread.model, model_shape.layer_classes, arguments, unread.weights)
    shards = flat_shards(model)
    parameters = named_parameters(model)
    optimizer = fabric.setup_optimizers(
        build_optimizer(parameters, decayed, arguments.training, seed=5, flat_shards=shards)
    )
    assert isinstance(optimizer, _FabricOptimizer)
    first_step = 1
    if checkpoint:
        restore_optimizer(checkpoint, fabric, model, optimizer)
        first_step += checkpoints.read_trainer_json(checkpoint).state.step

    # the steps
    set_learning_rate(optimizer.optimizer, arguments.training.lr)
    last_step = first_step + (arguments.training.max_step or 1) - 1
    for step in range(first_step, last_step + 1):
        gradients = Gradients(step, full_shapes, dtype)
        for name, parameter in parameters:
            parameter.grad = _local_gradient(gradients, original_name(name), parameter, shards)
        optimizer.step()

    # the checkpoint
    description = checkpoints.Description(
        state_dict_type=arguments.fsdp.state_dict_type,
        weights_dtype=str(dtype),
        data=DataOrder("", 1, 1, 0),
        arguments={"model_name": ""},
        versions={},
        base_model=None,
        attachments=(),
    )
    manager = CheckpointManager(
        Path(arguments.save.output_dir),
        fabric=fabric,
        model=model,
        optimizer=optimizer,
        description=description,
        keep=None,
        asynchronous=False,
        on_saved=lambda _: None,
    )
    manager.save(checkpoints.TrainerState(step=last_step))
    destroy_process_group(fabric)


def gradient(name: str, step: int, shape: torch.Size) -> torch.Tensor:
    """Return the full gradient of a parameter in fp32, a function of its name and the step."""
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
        full_gradient = gradient(name, self.step, self.shapes[name]).to(self.dtype)
        block = tuple(slice(offset, offset + size) for offset, size in zip(offsets, shape, strict=True))
        return full_gradient[block]


def _local_gradient(
    gradients: Gradients, name: str, parameter: nn.Parameter, shards: dict[int, FlatShard]
) -> torch.Tensor:
    """Return the gradient of this rank's shard of the parameter; a DTensor if the parameter is one."""
    local_gradient = read_local_part(gradients, name, parameter, shards)
    if not isinstance(parameter, DTensor):
        return local_gradient
    return DTensor.from_local(
        local_gradient,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
