"""Build Fabric, with its strategy and precision, from the arguments."""

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from lightning import Fabric
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import nn
from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision
from torch.distributed.fsdp import ShardingStrategy

from fabric_train.cli.errors import InputError
from fabric_train.cli.launcher import clear_launcher_options, under_fabric_run
from fabric_train.distributed.cluster_environment import find_cluster_environment
from fabric_train.distributed.devices import count_devices, resolve_accelerator, single_gpu_index
from fabric_train.distributed.fsdp import FSDP1Strategy, FSDP2Strategy
from fabric_train.distributed.precision import compute_dtype, precision_plugin
from fabric_train.distributed.rendezvous import init_process_group
from fabric_train.distributed.watchdog import SLOW_PHASE_FACTOR
from fabric_train.distributed.xla import OneDeviceXLAStrategy, OneXLADevice, check_xla_arguments

if TYPE_CHECKING:
    from arguments import FSDPArguments, TrainArguments

LayerClasses = frozenset[type[nn.Module]]


def build_fabric(arguments: "TrainArguments", layer_classes: LayerClasses) -> Fabric:
    """Build Fabric and launch it; without a launcher, this process starts the other ranks.

    Args:
        arguments: of the run.
        layer_classes: classes of the decoder layers; FSDP shards each such module as one unit.

    Raises:
        InputError: the devices do not exist, the strategy cannot run on them, or the launcher started another number of
            processes.
    """
    device = arguments.device
    accelerator = resolve_accelerator(device.accelerator)
    num_devices = count_devices(device.devices, accelerator)
    num_processes = num_devices * device.num_nodes
    parallelism = resolve_parallelism(arguments, num_processes, accelerator)
    clear_launcher_options()
    # XLA's strategy brings an environment of its own, and Fabric refuses two
    environments = [] if parallelism == "xla" else [find_cluster_environment(device.num_nodes, accelerator)]
    fabric = Fabric(
        accelerator=OneXLADevice() if accelerator == "tpu" else accelerator,
        devices=device.devices if accelerator == "cuda" else num_devices,
        num_nodes=device.num_nodes,
        strategy=_strategy(parallelism, arguments, layer_classes, accelerator),
        plugins=[precision_plugin(parallelism, arguments.model.precision, accelerator), *environments],
    )
    if not under_fabric_run():
        init_process_group(fabric, accelerator, num_processes, collective_timeout(arguments))
    if fabric.world_size != num_processes:
        raise InputError(
            f"the launcher started {fabric.world_size} processes, but --devices and --num_nodes ask for "
            f"{num_processes}; make them agree"
        )
    return fabric


def resolve_parallelism(arguments: "TrainArguments", num_processes: int, accelerator: str) -> str:
    """Return the parallelism of the run, "fsdp", "fsdp2", "ddp", "single" or "xla", after checking it.

    Raises:
        InputError: see :func:`check_parallelism`.
    """
    parallelism: str = arguments.fsdp.parallelism
    if parallelism == "auto":
        parallelism = "xla" if accelerator == "tpu" else "fsdp" if num_processes > 1 else "single"
    check_parallelism(parallelism, arguments, num_processes, accelerator)
    return parallelism


def why_not_compiled(fsdp: "FSDPArguments", parallelism: str) -> str | None:
    """Return the option with which layers cannot be compiled, None if they can.

    FSDP1's weights then have gradients of another shape or device when the next micro-batch begins.
    """
    if parallelism == "fsdp" and fsdp.gradient_reduction == "micro_batch":
        return "--gradient_reduction micro_batch"
    if parallelism == "fsdp" and fsdp.cpu_offload:
        return "--cpu_offload true"
    return None


def check_parallelism(parallelism: str, arguments: "TrainArguments", num_processes: int, accelerator: str) -> None:
    """Check that a parallelism can run with these arguments on so many processes.

    Raises:
        InputError: it does not take several processes, or not this precision, offloading or tensor parallel size.
    """
    fsdp = arguments.fsdp
    if (parallelism == "xla") != (accelerator == "tpu"):
        raise InputError(f"--parallelism {parallelism}: xla and --accelerator tpu need each other; change one of them")
    if parallelism == "xla":
        check_xla_arguments(arguments, num_processes)
    if parallelism == "single" and num_processes > 1:
        raise InputError(f"--parallelism single takes one device, not {num_processes}; use fsdp, fsdp2 or ddp")
    if arguments.model.precision == "16-mixed" and (accelerator == "cpu" or parallelism == "fsdp2"):
        where = "on CPU" if accelerator == "cpu" else "with --parallelism fsdp2"
        raise InputError(f"--precision 16-mixed does not work {where}; use bf16-mixed")
    if accelerator == "cpu":
        for name in ("cpu_offload", "activation_offload"):
            if getattr(fsdp, name):
                raise InputError(f"--{name} true: there is nothing to offload from on CPU; leave it out")
    if fsdp.cpu_offload and parallelism == "single":
        raise InputError("--cpu_offload true needs FSDP on several devices; leave it out")
    if fsdp.cpu_offload and arguments.model.precision == "16-mixed":
        # torch's GradScaler copies the scale to the host without waiting for the copy, and uses it at once
        raise InputError("--precision 16-mixed: --cpu_offload true gives wrong gradients with it; use bf16-mixed")
    if fsdp.cpu_offload and parallelism == "fsdp" and fsdp.gradient_reduction == "micro_batch":
        # torch's FSDP1 keeps the gradient of the last micro-batch only
        raise InputError(
            "--gradient_reduction micro_batch: fsdp cannot add gradients that --cpu_offload true keeps in host memory; "
            "use --parallelism fsdp2, or leave one of them out"
        )
    precision = arguments.model.precision
    if parallelism == "fsdp" and fsdp.sharding_strategy == "NO_SHARD" and precision.endswith("-mixed"):
        # torch's FSDP1 gives fp32 weights gradients in 16 bits then, which torch refuses in the second micro-batch
        raise InputError(f"--sharding_strategy NO_SHARD does not work in {precision}; use --parallelism ddp")
    compiled = "float8" if arguments.model.float8 else "compile" if fsdp.compile is True else None
    obstacle = why_not_compiled(fsdp, parallelism)
    if compiled and obstacle:
        raise InputError(
            f"--{compiled} true: fsdp cannot compile layers with {obstacle}; use --parallelism fsdp2, or leave one of "
            "them out"
        )
    devices_per_node = num_processes // arguments.device.num_nodes
    if devices_per_node % fsdp.tensor_parallel_size:
        raise InputError(
            f"--tensor_parallel_size {fsdp.tensor_parallel_size} does not divide the {devices_per_node} devices of a "
            "machine; give a size that does"
        )


def collective_timeout(arguments: "TrainArguments") -> timedelta:
    """Return how long a collective may last; the watchdog normally ends a hung run before that."""
    return timedelta(seconds=SLOW_PHASE_FACTOR * arguments.device.rank_timeout) or timedelta(days=365)


def _strategy(parallelism: str, arguments: "TrainArguments", layer_classes: LayerClasses, accelerator: str) -> Strategy:
    fsdp = arguments.fsdp
    timeout = collective_timeout(arguments)
    if parallelism == "xla":
        return OneDeviceXLAStrategy(set(layer_classes), arguments.model.precision)
    if parallelism == "fsdp":
        return FSDP1Strategy(
            timeout=timeout,
            auto_wrap_policy=set(layer_classes),
            sharding_strategy=ShardingStrategy[fsdp.sharding_strategy],
            state_dict_type=fsdp.state_dict_type,
            limit_all_gathers=fsdp.limit_all_gathers,
            cpu_offload=fsdp.cpu_offload,
            mixed_precision=FSDPMixedPrecision(
                param_dtype=compute_dtype(arguments.model.precision),
                reduce_dtype=torch.float32,
                buffer_dtype=torch.float32,
            ),
        )
    if parallelism == "fsdp2":
        return FSDP2Strategy(
            num_replicas=arguments.device.num_nodes if fsdp.is_hybrid else 1,
            tensor_parallel_size=fsdp.tensor_parallel_size,
            timeout=timeout,
        )
    if parallelism == "ddp":
        return DDPStrategy(gradient_as_bucket_view=True, timeout=timeout)
    return SingleDeviceStrategy(
        device=torch.device("cuda", single_gpu_index(arguments.device.devices)) if accelerator == "cuda" else "cpu"
    )
