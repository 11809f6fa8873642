"""Prepare a model for training: loss in the head, float8, tensor parallelism, tiles, compilation, sharding, weights.

:func:`setup_model` does these steps in order.
"""

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from lightning import Fabric
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from lightning.fabric.wrappers import _FabricModule
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import PretrainedConfig

from fabric_train.cli.errors import InputError
from fabric_train.distributed.cluster_environment import set_group_timeouts
from fabric_train.distributed.decoder_layers import checkpoint_layers, compile_layers, shares_kept
from fabric_train.distributed.precision import average_in_fp32, check_gpu_has_float8, convert_to_float8, gathered_dtype
from fabric_train.distributed.strategy import (
    FSDP1Strategy,
    FSDP2Strategy,
    LayerClasses,
    ParameterMaterializer,
    collective_timeout,
)
from fabric_train.model.adapter import AdaptedWeights, materialize, start_magnitudes, without_adapters
from fabric_train.model.lm_head_loss import compute_loss_in_head
from fabric_train.model.load_weights import read_weights
from fabric_train.model.row_tiles import tile_rows
from fabric_train.model.weight_files import Weights

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments

_STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_SHARDED_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def check_tensor_parallel(config: PretrainedConfig, source: str, size: int) -> None:
    """Check that a model's layers can be sharded among ``size`` ranks; ``source`` names it in the message."""
    if size == 1:
        return
    subject = f"--tensor_parallel_size {size}: {source}, a {config.model_type},"
    text_config = config.get_text_config()
    styles = _tensor_parallel_styles(config)
    if not styles or set(styles.values()) - _STYLES.keys():
        raise InputError(f"{subject} does not support tensor parallelism here; leave out --tensor_parallel_size")
    for name in _SHARDED_SIZES:
        value = getattr(text_config, name, None)  # not every family has each of them
        if value and value % size:
            raise InputError(
                f"{subject} has {name} {value}, which is not a multiple of {size}; give a divisor of {value}"
            )


def parallelize_layers(model: Any, mesh: DeviceMesh) -> None:
    """Shard the layers' matrices in place over a mesh of one dimension; each rank keeps its part, nothing is sent."""
    plan = {name: _STYLES[style]() for name, style in _tensor_parallel_styles(model.config).items()}
    parallelize_module(model.base_model, mesh, plan, src_data_rank=None)


def _tensor_parallel_styles(config: PretrainedConfig) -> dict[str, str]:
    """Return the style (``colwise``, ``rowwise``) of each sharded module of the layers.

    The names are the base model's, with * for the layer: ``layers.*.mlp.up_proj``. Modules outside of the
    layers are not sharded, although transformers' plan may have them.
    """
    styles: dict[str, str] = config.get_text_config().base_model_tp_plan or {}
    return {name: style for name, style in styles.items() if "*" in name}


def setup_model(
    fabric: Fabric,
    model: nn.Module,
    layer_classes: LayerClasses,
    arguments: "TrainArguments",
    weights: Weights | None = None,
    *,
    any_length: bool = False,
) -> Any:
    """Set up the model with Fabric, sharded or replicated, on its device. The order of the steps matters.

    ``model`` is on the CPU, or has its parameters on the meta device if ``weights`` are given; then each rank reads
    its part of these. The layers of ``layer_classes`` are sharded, checkpointed and compiled, see ``compile_layers``
    for ``any_length``.
    """
    strategy = fabric.strategy
    is_single = isinstance(strategy, SingleDeviceStrategy)
    is_sharded = isinstance(strategy, FSDPStrategy | FSDP2Strategy)

    # Loss in the head. fp16 gradients of the logits underflow unless the loss is scaled; XLA would compile for each
    # number of targets.
    if arguments.model.precision != "16-mixed" and fabric.device.type != "xla":
        is_changed = compute_loss_in_head(model, grad_in_place=is_single)
        if is_changed and is_single and fabric.device.type == "cpu":
            use_sparse_embedding_grad(model)

    # float8 replaces linear layers, so adapters are taken off before and put on again after it.
    if arguments.model.float8:
        check_gpu_has_float8(fabric.device)
        with without_adapters(model):
            convert_to_float8(_find_layers(model, layer_classes))

    # Tensor parallelism shards the matrices of the layers, before FSDP shards what is left of them.
    if isinstance(strategy, FSDP2Strategy) and arguments.fsdp.tensor_parallel_size > 1:
        parallelize_layers(model, strategy.device_mesh["tensor"])

    # Each of these replaces ``forward``: tiles are cut within the compiled layer, which is checkpointed.
    layers = _find_layers(model, layer_classes)
    kept, kept_by_compiler = shares_kept(arguments.fsdp)
    if isinstance(arguments.fsdp.mlp_tile_size, int):
        tile_rows(model, layers, arguments.fsdp.mlp_tile_size)
    if kept_by_compiler is not None:
        compile_layers(layers, any_length=any_length, budget=kept_by_compiler)
    if kept < 1:
        checkpoint_layers(layers, kept, offloads=arguments.fsdp.activation_offload)
    model.train()

    # Real parameters instead of meta ones. Every rank has all of an adapter; FSDP makes its shards of the rest.
    replicated = materialize(model, fabric.device)
    if weights and not is_sharded:
        model.apply(ParameterMaterializer(fabric.device))
    if isinstance(strategy, FSDP2Strategy):
        _fully_shard(model, strategy.device_mesh, layers, arguments, set(replicated))
    if isinstance(strategy, FSDP1Strategy):
        strategy.replicated = replicated
        strategy.units = _fsdp1_units(model, layers)
        strategy.sharding_strategy = ShardingStrategy[arguments.fsdp.sharding_strategy]
    if isinstance(strategy, DDPStrategy) and not any(parameter.requires_grad for parameter in model.parameters()):
        # DDP refuses a model without gradients to average
        wrapped: Any = _FabricModule(model.to(fabric.device), strategy)
    else:
        wrapped = fabric.setup_module(model, move_to_device=not is_sharded)  # FSDP puts its shards where they belong
    if is_sharded:  # DDP averages the gradients of replicated parameters itself
        wrapped.replicated = replicated
    set_group_timeouts(collective_timeout(arguments))

    # Weights, into the final parameters of this rank.
    if weights:
        read_weights(wrapped, weights)
    if isinstance(weights, AdaptedWeights) and weights.is_new:
        start_magnitudes(wrapped, weights)
    # DDP would average bf16 gradients in bf16.
    if isinstance(wrapped._forward_module, DistributedDataParallel) and arguments.model.precision == "bf16-true":
        wrapped._forward_module.register_comm_hook(None, average_in_fp32)
    return wrapped


def _fsdp1_units(model: Any, layers: list[nn.Module]) -> list[nn.Module]:
    """Return FSDP1's units if there are others than the layers; otherwise an empty list.

    FSDP1 has one gradient for each unit, also for frozen weights in it. So if some modules outside of the layers train
    and others do not, each of them is a separate unit, except the head, which stays in the model's unit, because that
    computes the loss with its weight.

    FSDP1 keeps the weights outside of the units gathered after a forward pass. So the embedding of a teacher, which has
    no backward pass and no head, is a unit.
    """
    if isinstance(model.get_output_embeddings(), nn.Identity):  # a teacher
        return [*layers, model.get_input_embeddings()]
    modules_in_layers: set[nn.Module] = set()
    for layer in layers:
        modules_in_layers.update(layer.modules())
    outer_modules: list[nn.Module] = []
    trains: set[bool] = set()
    for module in model.modules():
        parameters = list(module.parameters(recurse=False))
        if parameters and module not in modules_in_layers:
            outer_modules.append(module)
            trains.update(parameter.requires_grad for parameter in parameters)
    if len(trains) < 2:  # all of them train, or none
        return []
    head_parameters = set(model.get_output_embeddings().parameters())
    outer_units = [module for module in outer_modules if head_parameters.isdisjoint(module.parameters(recurse=False))]
    return [*layers, *outer_units]


def use_sparse_embedding_grad(model: Any) -> None:
    """Add the gradient of a tied fp32 embedding only to the rows of the batch's tokens.

    This avoids a gradient matrix [V, H] in addition to the head's, which ``grad_in_place`` has written. It is not for a
    GPU: a GPU adds the rows in any order, so the last bits would differ from run to run.
    """
    embedding = model.get_input_embeddings()
    weight = model.get_output_embeddings().weight
    if type(embedding) is nn.Embedding and embedding.weight is weight and weight.dtype == torch.float32:
        embedding.sparse = True  # autograd adds a sparse gradient to a dense one in place


def _find_layers(model: nn.Module, layer_classes: LayerClasses) -> list[nn.Module]:
    """Return the decoder layers of a model, in the order of the forward pass."""
    return [module for module in model.modules() if type(module) in layer_classes]


def _fully_shard(
    model: Any,
    mesh: DeviceMesh,
    layers: list[nn.Module],
    arguments: "TrainArguments",
    replicated: set[nn.Parameter],
) -> None:
    """Apply ``fully_shard`` to each layer, to an untied input embedding, and to the rest, and make the parameters.

    With tensor parallelism, the embedding and the rest are sharded over the ranks of the tensor dimension too. These
    ranks have equal gradients, so FSDP's mean over them is correct. ``mesh`` is from ``FSDP2Strategy``. Each rank
    keeps all of the ``replicated`` parameters.
    """
    cpu_offload = arguments.fsdp.cpu_offload
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(gathered_dtype(arguments, "fsdp2"), torch.float32),
        "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
        "ignored_params": replicated,
    }

    # The mesh [replicas, shards, tensor parallel]. Outside of the layers, the last two dimensions are one.
    num_replicas, num_shards, tensor_parallel_size = mesh.shape
    dims = ("replicate", "shard") if num_replicas > 1 else ("shard",)
    outer_mesh = mesh
    if tensor_parallel_size > 1:
        shape = (num_replicas, num_shards * tensor_parallel_size)
        outer_mesh = init_device_mesh(mesh.device_type, shape, mesh_dim_names=("replicate", "shard"))

    # The units, from the inside to the outside: ``fully_shard`` takes what is not in a unit yet.
    reshard_after_forward = not arguments.fsdp.keeps_gathered
    for layer in layers:
        fully_shard(layer, mesh=mesh[dims], reshard_after_forward=reshard_after_forward, **options)
    embedding = model.get_input_embeddings()
    head_weight = getattr(model.get_output_embeddings(), "weight", None)  # a teacher's head is not in its model
    if embedding.weight is not head_weight:
        fully_shard(embedding, mesh=outer_mesh[dims], reshard_after_forward=reshard_after_forward, **options)
    # not resharded, because the backward pass begins with the head
    fully_shard(model, mesh=outer_mesh[dims], reshard_after_forward=False, **options)

    # While a layer computes, the weights of the next one are gathered.
    for layer, next_layer in pairwise(layers):
        assert isinstance(layer, FSDPModule)
        assert isinstance(next_layer, FSDPModule)
        layer.set_modules_to_forward_prefetch([next_layer])

    model.apply(ParameterMaterializer(torch.device("cpu" if cpu_offload else mesh.device_type)))
    model._apply(lambda tensor: tensor)  # makes FSDP2 look up the new parameters
