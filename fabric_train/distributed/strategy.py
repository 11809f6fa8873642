"""Turn the arguments into a launched Fabric with its strategy.

``model/parallelize.py`` sets the model up with it, ``precision.py`` says what is computed in which type.
"""

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from lightning import Fabric
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import nn
from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision

from fabric_train.cli.errors import InputError
from fabric_train.cli.launcher import clear_launcher_options, under_fabric_run
from fabric_train.distributed.devices import count_devices, first_index, resolve_accelerator
from fabric_train.distributed.fsdp import FSDP1Strategy, FSDP2Strategy
from fabric_train.distributed.precision import compute_dtype, precision_plugin
from fabric_train.distributed.rendezvous import meet
from fabric_train.distributed.watchdog import PATIENCE

if TYPE_CHECKING:
    from arguments import TrainArguments

LayerClasses = frozenset[type[nn.Module]]


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
        plugins=[precision_plugin(name, arguments.model.precision, accelerator)],
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


def _strategy(
    name: str, arguments: "TrainArguments", layer_classes: LayerClasses, accelerator: str, num_processes: int
) -> Strategy:
    fsdp = arguments.fsdp
    timeout = _timeout(arguments)
    dtype = compute_dtype(arguments.model.precision)
    if name == "fsdp":
        return FSDP1Strategy(
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
        return FSDP2Strategy(
            num_copies=arguments.device.num_nodes if hybrid else 1,
            tensor_parallel_size=fsdp.tensor_parallel_size,
            timeout=timeout,
        )
    if name == "ddp":
        return DDPStrategy(gradient_as_bucket_view=True, timeout=timeout)
    return SingleDeviceStrategy(
        device=torch.device("cuda", first_index(arguments.device.devices)) if accelerator == "cuda" else "cpu"
    )
