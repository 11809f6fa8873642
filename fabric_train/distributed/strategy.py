"""Arguments → Fabric: the strategy that cuts the model among devices, and the precision it computes and reduces in.

Weights are held in the type they are loaded in (``weights_dtype``). What Fabric's own precision names would also
cast, the rotary frequencies and the reduction of gradients, stays in fp32 here: at Llama-3's base of 5e5 bf16
frequencies are wrong by 0.9 rad at position 512.
"""

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning import Fabric
from lightning.fabric.plugins.precision import FSDPPrecision, MixedPrecision, Precision
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy, Strategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
)
from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision

from fabric_train.cli.errors import InputError
from fabric_train.cli.launcher import clear_launcher_options, under_fabric_run
from fabric_train.distributed.activation_checkpoint import checkpoint_layers
from fabric_train.distributed.compile import compile_layers
from fabric_train.distributed.devices import count_devices, first_index, resolve_accelerator
from fabric_train.distributed.float8 import convert_layers, refuse_older_gpu
from fabric_train.distributed.fsdp import MeshStrategy, shard_model
from fabric_train.distributed.rendezvous import meet
from fabric_train.distributed.tensor_parallel import cut_layers
from fabric_train.distributed.watchdog import PATIENCE
from fabric_train.model import flops
from fabric_train.model.lm_head_loss import add_rows_of_tokens, let_head_compute_loss
from fabric_train.model.load_weights import Materialization, read_weights
from fabric_train.model.weight_files import Weights

if TYPE_CHECKING:
    from arguments import FSDPArguments, TrainArguments

LayerClasses = frozenset[type[nn.Module]]


def weights_dtype(precision: str) -> torch.dtype:
    """Type of the weights and the optimizer's moments: bfloat16 for bf16-true, else float32."""
    return torch.bfloat16 if precision == "bf16-true" else torch.float32


def compute_dtype(precision: str) -> torch.dtype:
    """Type that the matrix products run in."""
    return {"32-true": torch.float32, "16-mixed": torch.float16}.get(precision, torch.bfloat16)


def peak_flops(fabric: Fabric, precision: str) -> float | None:
    """Return what all devices together could do in a second, if they are as this rank's; None where it is not known."""
    if fabric.device.type != "cuda":
        return None
    of_one = flops.peak_flops(torch.cuda.get_device_name(fabric.device), compute_dtype(precision))
    return of_one * fabric.world_size if of_one else None


class ShardedStrategy(FSDPStrategy):
    """Fabric's ``FSDPStrategy`` over a device mesh, on CUDA and on CPU ranks.

    The mesh makes state dicts hold ``DTensor``, the form that checkpoints are cut and joined in. On CPU, which
    Fabric's own class refuses, torch wants ``device_id`` to be the CPU device itself instead of an index.
    """

    def setup_environment(self) -> None:
        super().setup_environment()
        device = self.root_device.type
        if self.sharding_strategy.name == "HYBRID_SHARD":
            mesh = init_device_mesh(device, (self.num_nodes, self.num_processes), mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh(device, (self.world_size,), mesh_dim_names=("shard",))
        self._fsdp_kwargs["device_mesh"] = mesh
        self._fsdp_kwargs["param_init_fn"] = Materialization(self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        if self.root_device.type == "cpu":
            module = FullyShardedDataParallel(
                module,
                cpu_offload=self.cpu_offload,
                mixed_precision=self.mixed_precision_config,
                sharding_strategy=self.sharding_strategy,
                device_id=torch.device("cpu"),
                **self._fsdp_kwargs,
            )
            self._fsdp_kwargs.pop("auto_wrap_policy")  # applied: the base class would warn that it is not
        return super().setup_module(module)


class _AsLoaded(FSDPPrecision):
    """FSDP precision that leaves the module in the types it was loaded in, and what it returns in its own; the
    strategy's MixedPrecision does the rest.
    """

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module

    def convert_output(self, data: Any) -> Any:
        return data


class _Autocast(MixedPrecision):
    """Autocast that leaves what the module returns in its type; Fabric's own rounds a summed loss to fp32."""

    def convert_output(self, data: Any) -> Any:
        return data


def build_fabric(arguments: "TrainArguments", layer_classes: LayerClasses) -> Fabric:
    """Build and launch Fabric for these arguments; in the other ranks too, where no launcher has started them.

    Raises:
        InputError: where the devices asked for are not there, or the strategy cannot run on them.
    """
    device = arguments.device
    accelerator = resolve_accelerator(device.accelerator)
    num_processes = count_devices(device.devices, accelerator) * device.num_nodes
    name = resolve_parallelism(arguments, num_processes, accelerator)
    clear_launcher_options()
    fabric = Fabric(
        accelerator=accelerator,
        devices=device.devices if accelerator == "cuda" else count_devices(device.devices, accelerator),
        num_nodes=device.num_nodes,
        strategy=_strategy(name, arguments, layer_classes, accelerator, num_processes),
        plugins=[_precision(name, arguments.model.precision, accelerator)],
    )
    if not under_fabric_run():
        meet(fabric, accelerator, num_processes, _timeout(arguments))
    if fabric.world_size != num_processes:
        raise InputError(
            f"the launcher started {fabric.world_size} processes, --devices and --num_nodes make {num_processes}"
        )
    return fabric


def _timeout(arguments: "TrainArguments") -> timedelta:
    """How long a collective operation may last: the last resort, behind the ranks' own watch."""
    return timedelta(seconds=PATIENCE * arguments.device.rank_timeout) or timedelta(days=365)


def resolve_parallelism(arguments: "TrainArguments", num_processes: int, accelerator: str) -> str:
    """Return what ``auto`` means here.

    Raises:
        InputError: where the strategy cannot run with these processes or this precision.
    """
    wanted = arguments.fsdp.parallelism
    name = ("fsdp" if num_processes > 1 else "single") if wanted == "auto" else wanted
    if name == "single" and num_processes > 1:
        raise InputError(f"--parallelism single takes one device, not {num_processes}: use fsdp, fsdp2 or ddp")
    if arguments.model.precision == "16-mixed" and (accelerator == "cpu" or name == "fsdp2"):
        where = "on CPU" if accelerator == "cpu" else "with --parallelism fsdp2"
        raise InputError(f"--precision 16-mixed does not work {where}: use bf16-mixed")
    if arguments.fsdp.cpu_offload and (accelerator == "cpu" or name == "single"):
        reason = (
            "there is nothing to offload from on CPU" if accelerator == "cpu" else "FSDP does it, with several devices"
        )
        raise InputError(f"--cpu_offload true: {reason}; leave it out")
    if arguments.fsdp.activation_offload and accelerator == "cpu":
        raise InputError("--activation_offload true: there is nothing to offload from on CPU; leave it out")
    together, on_machine = arguments.fsdp.tensor_parallel_size, num_processes // arguments.device.num_nodes
    if on_machine % together:
        raise InputError(
            f"--tensor_parallel_size {together} does not divide the {on_machine} devices of a machine, within which "
            "such ranks lie; give a size that does"
        )
    return name


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
        refuse_older_gpu(fabric.device)
        convert_layers(_layers(model, layer_classes))
    if isinstance(fabric.strategy, MeshStrategy) and arguments.fsdp.tensor_parallel_size > 1:
        cut_layers(model, fabric.strategy.device_mesh["tensor"])
    _set_up_layers(_layers(model, layer_classes), arguments.fsdp, any_length)
    model.train()
    if weights and not isinstance(fabric.strategy, FSDPStrategy | MeshStrategy):
        model.apply(Materialization(fabric.device))
    wrapped: Any = fabric.setup_module(model)
    if weights:
        read_weights(wrapped, weights)
    if isinstance(fabric.strategy, DDPStrategy) and arguments.model.precision == "bf16-true":
        wrapped._forward_module.register_comm_hook(None, _mean_in_fp32)
    return wrapped


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a set-up model as they are between steps, the optimizer's: after a forward pass without
    a backward one, FSDP2's are the gathered weights until the next pass.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return list(model.named_parameters())


def leave_process_group(fabric: Fabric) -> None:
    """Wait until every rank has come to its end and take down what connects them."""
    fabric.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


def _mean_in_fp32(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: average a bucket of bf16 gradients over the ranks in fp32."""
    gradients = bucket.buffer()
    total = gradients.float().div_(dist.get_world_size())
    future = dist.all_reduce(total, async_op=True).get_future()
    return future.then(lambda reduced: gradients.copy_(reduced.value()[0]))


def _precision(name: str, precision: str, accelerator: str) -> Precision:
    if name == "fsdp":
        return _AsLoaded("16-mixed" if precision == "16-mixed" else "32-true")
    if name != "fsdp2" and precision in ("bf16-mixed", "16-mixed"):
        return _Autocast(precision, device=accelerator)  # type: ignore[arg-type]
    return Precision()


def _strategy(
    name: str, arguments: "TrainArguments", layer_classes: LayerClasses, accelerator: str, num_processes: int
) -> Strategy:
    fsdp = arguments.fsdp
    timeout = _timeout(arguments)
    dtype = compute_dtype(arguments.model.precision)
    if name == "fsdp":
        return ShardedStrategy(
            timeout=timeout,
            auto_wrap_policy=set(layer_classes),
            sharding_strategy=fsdp.sharding_strategy,
            state_dict_type=fsdp.state_dict_type,
            limit_all_gathers=fsdp.limit_all_gathers,
            cpu_offload=fsdp.cpu_offload,
            mixed_precision=FSDPMixedPrecision(
                param_dtype=dtype, reduce_dtype=torch.float32, buffer_dtype=torch.float32
            ),
        )
    if name == "fsdp2":
        hybrid = fsdp.sharding_strategy == "HYBRID_SHARD"
        return MeshStrategy(
            lambda model, mesh: _fully_shard(model, mesh, layer_classes, arguments),
            num_copies=arguments.device.num_nodes if hybrid else 1,
            tensor_parallel_size=fsdp.tensor_parallel_size,
            timeout=timeout,
        )
    if name == "ddp":
        return DDPStrategy(gradient_as_bucket_view=True, timeout=timeout)
    return SingleDeviceStrategy(
        device=torch.device("cuda", first_index(arguments.device.devices)) if accelerator == "cuda" else "cpu"
    )


def _fully_shard(
    model: nn.Module, mesh: DeviceMesh, layer_classes: LayerClasses, arguments: "TrainArguments"
) -> nn.Module:
    shard_model(
        model,
        mesh,
        _layers(model, layer_classes),
        precision=MixedPrecisionPolicy(compute_dtype(arguments.model.precision), torch.float32),
        reshards=arguments.fsdp.sharding_strategy != "SHARD_GRAD_OP",
        offloads=arguments.fsdp.cpu_offload,
    )
    model.apply(Materialization(torch.device("cpu" if arguments.fsdp.cpu_offload else mesh.device_type)))
    model._apply(lambda tensor: tensor)  # lets FSDP2 take note of what is new
    return model


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
