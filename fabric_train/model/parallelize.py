"""What is done to a model before it trains: its head, layers and sharding, in the order in which they must happen."""

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from lightning import Fabric
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from fabric_train.distributed.activation_checkpoint import checkpoint_layers
from fabric_train.distributed.compile import compile_layers
from fabric_train.distributed.float8 import check_gpu_has_float8, convert_to_float8
from fabric_train.distributed.fsdp import FSDP2Strategy, ParameterMaterializer
from fabric_train.distributed.precision import average_in_fp32, compute_dtype
from fabric_train.distributed.strategy import LayerClasses
from fabric_train.distributed.tensor_parallel import parallelize_layers
from fabric_train.model.lm_head_loss import add_rows_of_tokens, let_head_compute_loss
from fabric_train.model.load_weights import read_weights
from fabric_train.model.weight_files import Weights

if TYPE_CHECKING:
    from arguments import FSDPArguments, TrainArguments


def setup_model(
    fabric: Fabric,
    model: nn.Module,
    layer_classes: LayerClasses,
    arguments: "TrainArguments",
    weights: Weights | None = None,
    any_length: bool = False,
) -> Any:
    """Hand the model to Fabric: sharded or replicated, on its device, and before it with what is asked for: 8-bit
    products, cut matrices, compiled layers, activation checkpointing.

    Args:
        fabric: from :func:`build_fabric`.
        model: on the CPU, or with its parameters on the meta device where ``weights`` are given.
        layer_classes: the units that are sharded, checkpointed and compiled.
        arguments: of the run.
        weights: what each rank then reads its part of the model from.
        any_length: see ``compile_layers``.
    """
    if arguments.model.precision != "16-mixed":  # whose small gradients of logits are lost unless they are scaled first
        is_alone = isinstance(fabric.strategy, SingleDeviceStrategy)
        if let_head_compute_loss(model, at_once=is_alone) and is_alone and fabric.device.type == "cpu":
            add_rows_of_tokens(model)
    if arguments.model.float8:
        check_gpu_has_float8(fabric.device)
        convert_to_float8(_layers(model, layer_classes))
    if isinstance(fabric.strategy, FSDP2Strategy) and arguments.fsdp.tensor_parallel_size > 1:
        parallelize_layers(model, fabric.strategy.device_mesh["tensor"])
    _set_up_layers(_layers(model, layer_classes), arguments.fsdp, any_length)
    model.train()
    if weights and not isinstance(fabric.strategy, FSDPStrategy | FSDP2Strategy):
        model.apply(ParameterMaterializer(fabric.device))
    if isinstance(fabric.strategy, FSDP2Strategy):
        _fully_shard(model, fabric.strategy.device_mesh, layer_classes, arguments)
    wrapped: Any = fabric.setup_module(model)
    if weights:
        read_weights(wrapped, weights)
    if isinstance(fabric.strategy, DDPStrategy) and arguments.model.precision == "bf16-true":
        wrapped._forward_module.register_comm_hook(None, average_in_fp32)
    return wrapped


def _fully_shard(model: nn.Module, mesh: DeviceMesh, layer_classes: LayerClasses, arguments: "TrainArguments") -> None:
    shard_model(
        model,
        mesh,
        _layers(model, layer_classes),
        precision=MixedPrecisionPolicy(compute_dtype(arguments.model.precision), torch.float32),
        reshards=arguments.fsdp.sharding_strategy != "SHARD_GRAD_OP",
        offloads=arguments.fsdp.cpu_offload,
    )
    model.apply(ParameterMaterializer(torch.device("cpu" if arguments.fsdp.cpu_offload else mesh.device_type)))
    model._apply(lambda tensor: tensor)  # FSDP2 then looks up the new parameters


def _set_up_layers(layers: list[nn.Module], arguments: "FSDPArguments", any_length: bool) -> None:
    """Compile the layers and let them recompute activations, as is asked for.

    The compiler plans itself what it keeps of a selective budget; full recomputation runs what is compiled again.
    """
    kept = {"none": 1.0, "full": 0.0, "selective": arguments.activation_memory_budget}
    budget = kept[arguments.activation_checkpointing]
    if arguments.compile:
        compile_layers(layers, any_length, budget if arguments.activation_checkpointing == "selective" else 1.0)
    if budget < 1 and not (arguments.compile and arguments.activation_checkpointing == "selective"):
        checkpoint_layers(layers, budget, arguments.activation_offload)


def _layers(model: nn.Module, layer_classes: LayerClasses) -> list[nn.Module]:
    return [module for module in model.modules() if type(module) in layer_classes]


def shard_model(
    model: Any,
    mesh: DeviceMesh,
    units: list[nn.Module],
    *,
    precision: MixedPrecisionPolicy,
    reshards: bool,
    offloads: bool,
) -> None:
    """Shard each of ``units`` by itself, and the rest of the model.

    The rest, and an input embedding that is no head too, are cut among the ranks of the tensor dimension as well:
    these all have the same gradients, so that the mean that FSDP takes over them is theirs.

    Args:
        model: of transformers.
        mesh: of ``FSDP2Strategy``.
        units: decoder layers, in the order in which they are computed.
        precision: of computing and of reducing gradients.
        reshards: whether a unit's weights are dropped between forward and backward pass.
        offloads: whether all is kept in host memory between uses.
    """
    options: dict[str, Any] = {
        "mp_policy": precision,
        "offload_policy": CPUOffloadPolicy() if offloads else OffloadPolicy(),
    }
    num_copies, num_shards, tensor_parallel_size = mesh.shape
    among = ("replicate", "shard") if num_copies > 1 else ("shard",)
    whole = mesh
    if tensor_parallel_size > 1:
        everyone = (num_copies, num_shards * tensor_parallel_size)
        whole = init_device_mesh(mesh.device_type, everyone, mesh_dim_names=("replicate", "shard"))
    for unit in units:
        fully_shard(unit, mesh=mesh[among], reshard_after_forward=reshards, **options)
    embedding = model.get_input_embeddings()
    if embedding.weight is not model.get_output_embeddings().weight:
        fully_shard(embedding, mesh=whole[among], reshard_after_forward=reshards, **options)
    # the backward pass begins with the head
    fully_shard(model, mesh=whole[among], reshard_after_forward=False, **options)
    for unit, following in pairwise(units):
        assert isinstance(unit, FSDPModule)
        assert isinstance(following, FSDPModule)
        unit.set_modules_to_forward_prefetch([following])
