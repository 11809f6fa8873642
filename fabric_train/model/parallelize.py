"""Prepare a model for training: loss in the head, float8, tensor parallelism, compilation, sharding, weights, tiles.

The MLP and the norms work on each token alone. So they can be computed for a tile of tokens at a time, and again in the
backward pass, and long rows need less memory. The inner tensors of an MLP, each about 3.5 times as large as its input,
exist for one tile only. It is the tiled MLP of ALST (arXiv:2506.13996). Results are exact; only the sum of a weight's
gradient over the tiles has another order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from lightning import Fabric
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
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
from fabric_train.model.adapter import materialize, start_magnitudes, without_adapters
from fabric_train.model.init_weights import AdaptedWeights
from fabric_train.model.lm_head_loss import compute_loss_in_head
from fabric_train.model.load_weights import read_weights
from fabric_train.model.weight_files import Weights

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments

_STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_SHARDED_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
TILE_SIZE = 4096
"""The tokens of a tile that ``auto`` takes: enough for fast matrix products, and few beside a row that needs tiles."""


def check_tensor_parallel(config: PretrainedConfig, source: str, size: int) -> None:
    """Check that a model's layers can be sharded among ``size`` ranks; ``source`` names it in the message."""
    if size == 1:
        return
    given = f"--tensor_parallel_size {size}: {source}, a {config.model_type},"
    text = config.get_text_config()
    plan = _plan(config)
    if not plan or set(plan.values()) - _STYLES.keys():
        raise InputError(f"{given} does not support tensor parallelism here; leave it out")
    for name in _SHARDED_SIZES:
        number = getattr(text, name, None) or size
        if number % size:
            raise InputError(f"{given} has {name} {number}, which is not a multiple of {size}; give a divisor of it")


def parallelize_layers(model: Any, mesh: DeviceMesh) -> None:
    """Shard the layers' matrices in place over a mesh of one dimension: each rank keeps its part, nothing is sent."""
    styles = {name: _STYLES[style]() for name, style in _plan(model.config).items()}
    parallelize_module(model.base_model, mesh, styles, src_data_rank=None)


def _plan(config: PretrainedConfig) -> dict[str, str]:
    """Return the style of each sharded module of the layers, by its name in the base model with * for the number."""
    plan: dict[str, str] = config.get_text_config().base_model_tp_plan or {}
    return {name: style for name, style in plan.items() if "*" in name}


def setup_model(
    fabric: Fabric,
    model: nn.Module,
    layer_classes: LayerClasses,
    arguments: "TrainArguments",
    weights: Weights | None = None,
    any_length: bool = False,
) -> Any:
    """Return the model set up by Fabric, sharded or replicated, on its device. The steps depend on their order.

    ``model`` is on the CPU, or has its parameters on the meta device if ``weights`` are given; then each rank reads
    its part of these. The layers of ``layer_classes`` are sharded, checkpointed and compiled, see ``compile_layers``
    for ``any_length``.
    """
    # fp16 gradients of the logits underflow unless the loss is scaled; XLA would compile for each number of targets
    if arguments.model.precision != "16-mixed" and fabric.device.type != "xla":
        is_single = isinstance(fabric.strategy, SingleDeviceStrategy)
        if compute_loss_in_head(model, grad_in_place=is_single) and is_single and fabric.device.type == "cpu":
            use_sparse_embedding_grad(model)
    if arguments.model.float8:
        check_gpu_has_float8(fabric.device)
        with without_adapters(model):
            convert_to_float8(_layers(model, layer_classes))
    if isinstance(fabric.strategy, FSDP2Strategy) and arguments.fsdp.tensor_parallel_size > 1:
        parallelize_layers(model, fabric.strategy.device_mesh["tensor"])
    layers = _layers(model, layer_classes)
    kept, kept_by_compiler = shares_kept(arguments.fsdp)
    if isinstance(arguments.fsdp.mlp_tile_size, int):
        tile_rows(model, layers, arguments.fsdp.mlp_tile_size)
    if kept_by_compiler is not None:
        compile_layers(layers, any_length, kept_by_compiler)
    if kept < 1:
        checkpoint_layers(layers, kept, arguments.fsdp.activation_offload)
    model.train()
    replicated = materialize(model, fabric.device)
    if weights and not isinstance(fabric.strategy, FSDPStrategy | FSDP2Strategy):
        model.apply(ParameterMaterializer(fabric.device))
    if isinstance(fabric.strategy, FSDP2Strategy):
        _fully_shard(model, fabric.strategy.device_mesh, _layers(model, layer_classes), arguments, set(replicated))
    if isinstance(fabric.strategy, FSDP1Strategy):
        fabric.strategy.replicated = replicated
        fabric.strategy.units = _units_of_mixed(model, _layers(model, layer_classes))
    is_sharded = isinstance(fabric.strategy, FSDPStrategy | FSDP2Strategy)  # and puts its parts where they belong
    wrapped: Any = fabric.setup_module(model, move_to_device=not is_sharded)
    if is_sharded:  # DDP averages them itself
        wrapped.replicated = replicated
    set_group_timeouts(collective_timeout(arguments))
    if weights:
        read_weights(wrapped, weights)
    if isinstance(weights, AdaptedWeights) and weights.is_new:
        start_magnitudes(wrapped, weights)
    if isinstance(fabric.strategy, DDPStrategy) and arguments.model.precision == "bf16-true":
        wrapped._forward_module.register_comm_hook(None, average_in_fp32)
    return wrapped


def _units_of_mixed(model: Any, layers: list[nn.Module]) -> list[nn.Module]:
    """Return the units of FSDP1 if only some modules outside of the layers train, else none.

    It has one gradient for each unit, also for frozen weights in it. So each of these modules is a unit, except the
    head: it stays in the unit of the model, which computes the loss with its weight.
    """
    inside = {module for layer in layers for module in layer.modules()}
    outside = [module for module in model.modules() if module not in inside and [*module.parameters(recurse=False)]]
    if len({weight.requires_grad for module in outside for weight in module.parameters(recurse=False)}) < 2:
        return []
    of_head = {*model.get_output_embeddings().parameters()}
    return [*layers, *(module for module in outside if of_head.isdisjoint(module.parameters(recurse=False)))]


def use_sparse_embedding_grad(model: Any) -> None:
    """Add the gradient of a tied fp32 embedding only to the rows of the batch's tokens.

    This avoids a gradient matrix [V, H] in addition to the head's, which ``grad_in_place`` has written. Not for a GPU:
    it adds the rows in any order, so the last bits would differ from run to run.
    """
    embedding = model.get_input_embeddings()
    weight = model.get_output_embeddings().weight
    if type(embedding) is nn.Embedding and embedding.weight is weight and weight.dtype == torch.float32:
        embedding.sparse = True  # autograd adds a sparse gradient to a dense one in place


def _layers(model: nn.Module, layer_classes: LayerClasses) -> list[nn.Module]:
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
    reshard_after_forward = not arguments.fsdp.keeps_gathered
    cpu_offload = arguments.fsdp.cpu_offload
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(gathered_dtype(arguments, "fsdp2"), torch.float32),
        "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
        "ignored_params": replicated,
    }
    num_replicas, num_shards, tensor_parallel_size = mesh.shape
    dims = ("replicate", "shard") if num_replicas > 1 else ("shard",)
    flat_mesh = mesh
    if tensor_parallel_size > 1:
        shape = (num_replicas, num_shards * tensor_parallel_size)
        flat_mesh = init_device_mesh(mesh.device_type, shape, mesh_dim_names=("replicate", "shard"))
    for layer in layers:
        fully_shard(layer, mesh=mesh[dims], reshard_after_forward=reshard_after_forward, **options)
    embedding = model.get_input_embeddings()
    if embedding.weight is not model.get_output_embeddings().weight:
        fully_shard(embedding, mesh=flat_mesh[dims], reshard_after_forward=reshard_after_forward, **options)
    # not resharded, because the backward pass begins with the head
    fully_shard(model, mesh=flat_mesh[dims], reshard_after_forward=False, **options)
    for layer, next_layer in pairwise(layers):
        assert isinstance(layer, FSDPModule)
        assert isinstance(next_layer, FSDPModule)
        layer.set_modules_to_forward_prefetch([next_layer])
    model.apply(ParameterMaterializer(torch.device("cpu" if cpu_offload else mesh.device_type)))
    model._apply(lambda tensor: tensor)  # makes FSDP2 look up the new parameters


def why_not_tiled(layers: Iterable[nn.Module]) -> str | None:
    """Return why the MLPs of layers cannot be computed in tiles, or None.

    An MLP is known by its name and has linear layers and activations only. Dropout would draw other numbers when a tile
    is computed again. Adapters are not looked at.
    """
    for layer in layers:
        mlp = getattr(layer, "mlp", None)
        if mlp is None or not all(_is_plain(child) for child in mlp.children()) or [*mlp.parameters(recurse=False)]:
            return f"the MLP of {type(layer).__name__} is not made of linear layers alone"
    return None


def _is_plain(module: nn.Module) -> bool:
    """Return whether this is a linear layer or computes each number alone, without dropout."""
    if isinstance(module, nn.Dropout):
        return module.p == 0
    return isinstance(module, nn.Linear) or not any(True for _ in (*module.children(), *module.parameters()))


def tile_rows(model: Any, layers: Sequence[nn.Module], size: int) -> None:
    """Replace the ``forward`` of the MLPs, of the layers' norms and of the last norm: it works in tiles of tokens.

    Names in the state dict stay the same. Call it before layers are checkpointed, and nothing is sharded yet.
    """
    for module in _modules(model, layers):
        module.forward = _tiled(module, module.forward, size)


def _modules(model: Any, layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for layer in layers:
        yield from (child for name, child in layer.named_children() if name == "mlp" or _is_norm(child))
    yield from filter(_is_norm, model.base_model.children())


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module normalizes each token's vector."""
    return type(module).__name__.endswith(("RMSNorm", "LayerNorm")) and not list(module.children())


def _tiled(module: nn.Module, forward: Callable[..., Any], size: int) -> Callable[..., Any]:
    owners = [(owner, name) for owner in module.modules() for name, _ in owner.named_parameters(recurse=False)]

    @wraps(forward)
    def tiled(hidden: torch.Tensor) -> torch.Tensor:
        if hidden.numel() <= size * hidden.shape[-1]:
            return forward(hidden)
        # FSDP may have put another tensor in the place of a parameter
        weights = [getattr(owner, name) for owner, name in owners]
        result: torch.Tensor = _Tiles.apply(forward, owners, size, hidden, *weights)
        return result

    return tiled


class _Tiles(torch.autograd.Function):
    """Computes a module tile by tile; keeps its input only."""

    @staticmethod
    def forward(
        ctx: Any,
        forward: Callable[..., Any],
        owners: list[tuple[nn.Module, str]],
        size: int,
        hidden: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        kind = hidden.device.type
        ctx.save_for_backward(hidden, *weights)
        ctx.module = forward, owners, size
        ctx.autocast = {"enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}
        flat = hidden.flatten(0, -2)
        output: torch.Tensor | None = None
        for tile in tiles_of(len(flat), size):
            result = forward(flat[tile])
            if output is None:
                output = result.new_empty(len(flat), result.shape[-1])
            output[tile] = result
        assert output is not None
        return output.view(*hidden.shape[:-1], output.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Compute each tile again and differentiate it. Gradients of weights are summed in fp32."""
        hidden, *weights = ctx.saved_tensors
        forward, owners, size = ctx.module
        _, _, _, needs_hidden, *needed = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden).flatten(0, -2) if needs_hidden else None
        leaves = [weight.detach().requires_grad_(need) for weight, need in zip(weights, needed, strict=True)]
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        sums = [torch.zeros_like(leaf, dtype=torch.float32) for leaf in trained]
        flat = hidden.detach().flatten(0, -2)
        grads_of_tokens = grad_output.flatten(0, -2)
        with _replaced(owners, leaves), torch.enable_grad(), torch.autocast(hidden.device.type, **ctx.autocast):
            for tile in tiles_of(len(flat), size):
                inputs = flat[tile].requires_grad_(needs_hidden)
                wanted = [inputs, *trained] if needs_hidden else trained
                grads = list(torch.autograd.grad(forward(inputs), wanted, grads_of_tokens[tile]))
                if grad_hidden is not None:
                    grad_hidden[tile] = grads.pop(0)
                for total, grad in zip(sums, grads, strict=True):
                    total += grad
        of_weights = [sums.pop(0).to(leaf.dtype) if leaf.requires_grad else None for leaf in leaves]
        return None, None, None, None if grad_hidden is None else grad_hidden.view_as(hidden), *of_weights


def tiles_of(num_tokens: int, size: int) -> Iterable[slice]:
    """Return the tiles of so many tokens."""
    return [slice(begin, min(begin + size, num_tokens)) for begin in range(0, num_tokens, size)]


def two_tiles_of(num_tokens: int, size: int) -> Iterable[slice]:
    """Return the first two tiles: for a trace of memory, since the others take what these have freed."""
    return [slice(begin, min(begin + size, num_tokens)) for begin in (0, size) if begin < num_tokens]


@contextmanager
def _replaced(owners: list[tuple[nn.Module, str]], tensors: list[torch.Tensor]) -> Iterator[None]:
    """Put tensors in the place of parameters meanwhile; an attribute in the module itself is found before these."""
    before = [vars(owner).get(name) for owner, name in owners]
    for (owner, name), tensor in zip(owners, tensors, strict=True):
        vars(owner)[name] = tensor
    try:
        yield
    finally:
        for (owner, name), found in zip(owners, before, strict=True):
            if found is None:
                del vars(owner)[name]
            else:
                vars(owner)[name] = found
