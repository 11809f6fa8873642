"""Choose the devices and the parallelism of a run, check them against this machine, and build Fabric with them."""

import os
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from lightning import Fabric
from lightning.fabric.accelerators import CUDAAccelerator
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from lightning.fabric.strategies.parallel import ParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision
from torch.distributed.fsdp.wrap import CustomPolicy

from fabric_train.cli.errors import InputError
from fabric_train.cli.launcher import clear_launcher_options, under_fabric_run
from fabric_train.distributed.cluster_environment import find_cluster_environment, init_process_group
from fabric_train.distributed.precision import gathered_dtype, precision_plugin
from fabric_train.distributed.ranks import ContextGroup
from fabric_train.distributed.watchdog import SLOW_PHASE_FACTOR
from fabric_train.distributed.xla import OneDeviceXLAStrategy, OneXLADevice, check_xla_arguments, check_xla_device

if TYPE_CHECKING:
    from fabric_train.arguments import FSDPArguments, TrainArguments

LayerClasses = frozenset[type[nn.Module]]
_MAX_PROCESSES_PER_CORE = 16  # on CPU; each process has a model of its own, so a larger number is a mistake
_MIN_BF16_CAPABILITY = (8, 0)  # Ampere; V100 has 7.0 and T4 has 7.5


class FSDP1Strategy(FSDPStrategy):
    """Fabric's ``FSDPStrategy`` with a device mesh, on CUDA and CPU ranks.

    With a mesh, state dicts hold ``DTensor``. Fabric's own class does not accept the CPU, where torch expects a device
    as ``device_id`` instead of an index.
    """

    replicated: Sequence[nn.Parameter] = ()
    """The parameters of the next module to set up that every rank keeps in full."""
    units: Sequence[nn.Module] = ()
    """The modules within the next module to set up that become FSDP units; if empty, each decoder layer does."""

    def setup_environment(self) -> None:
        """Create the mesh: one dimension, or two for a hybrid strategy."""
        super().setup_environment()
        device = self.root_device.type
        if "HYBRID" in self.sharding_strategy.name:  # sharded within a machine, replicated across machines
            mesh = init_device_mesh(device, (self.num_nodes, self.num_processes), mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh(device, (self.world_size,), mesh_dim_names=("shard",))
        self._fsdp_kwargs["device_mesh"] = mesh

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap the module in FSDP: on CUDA by the base class, on the CPU here.

        FSDP divides full gradients by one factor before it sums them over the ranks, and shards by another one after
        it, because a sum in fp16 may overflow. Gradients are reduced in fp32 here, so only shards are divided.
        """
        # options of this module only; the base class reads them from ``_fsdp_kwargs``
        original_kwargs = dict(self._fsdp_kwargs)
        self._fsdp_kwargs["param_init_fn"] = ParameterMaterializer(self.root_device)
        if self.replicated:
            self._fsdp_kwargs["ignored_states"] = list(self.replicated)
        if self.units:
            units = set(self.units)
            self._fsdp_kwargs["auto_wrap_policy"] = CustomPolicy(lambda submodule: submodule in units)

        if self.root_device.type == "cpu":
            module = FullyShardedDataParallel(
                module,
                cpu_offload=self.cpu_offload,
                mixed_precision=self.mixed_precision_config,
                sharding_strategy=self.sharding_strategy,
                device_id=torch.device("cpu"),
                **self._fsdp_kwargs,
            )
            self._fsdp_kwargs.pop("auto_wrap_policy")  # else the base class warns that it does not apply it again
        wrapped = super().setup_module(module)

        # a run may set up a second model: nothing may refer to the first
        self._fsdp_kwargs = original_kwargs
        self.replicated = ()
        self.units = ()

        for unit in FullyShardedDataParallel.fsdp_modules(wrapped):
            unit._gradient_postdivide_factor *= unit._gradient_predivide_factor
            unit._gradient_predivide_factor = 1
        return wrapped


class FSDP2Strategy(ModelParallelStrategy):
    """Fabric's strategy for FSDP2, tensor and context parallelism, over a mesh [replicate, shard, tensor].

    There are ``num_replicas`` copies of the model, each sharded among its own ranks. The ``tensor_parallel_size`` ranks
    that compute the same tokens communicate the most, so they are consecutive and on the same machine. Next to
    one another are then the ``context_parallel_size`` ranks of one copy that each compute a part of the same rows.
    """

    context_group: ContextGroup | None = None
    """This rank's group of context parallelism; None without it."""

    def __init__(
        self, *, num_replicas: int, tensor_parallel_size: int, context_parallel_size: int, timeout: timedelta
    ) -> None:
        # model/parallelize.py shards the model before Fabric gets it
        super().__init__(parallelize_fn=lambda model, _: model, timeout=timeout)
        self._num_replicas = num_replicas
        self.tensor_parallel_size = tensor_parallel_size
        self.context_parallel_size = context_parallel_size

    def setup_environment(self) -> None:
        """Create the mesh [replicate, shard, tensor], and the group of context parallelism."""
        # not the base class's own method: it creates a mesh of two dimensions
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()
        num_shards = self.world_size // (self._num_replicas * self.tensor_parallel_size)
        self._device_mesh = init_device_mesh(
            self.root_device.type,
            (self._num_replicas, num_shards, self.tensor_parallel_size),
            mesh_dim_names=("replicate", "shard", "tensor"),
        )
        if self.context_parallel_size == 1:
            return
        num_row_groups = self.world_size // (self.context_parallel_size * self.tensor_parallel_size)
        mesh = init_device_mesh(
            self.root_device.type,
            (num_row_groups, self.context_parallel_size, self.tensor_parallel_size),
            mesh_dim_names=("rows", "context", "tensor"),
        )
        context_mesh = mesh["context"]
        self.context_group = ContextGroup(context_mesh.get_group(), context_mesh.get_local_rank(), context_mesh.size())


class ParameterMaterializer:
    """Replace meta parameters by uninitialized ones on a device, and keep them tied; for ``nn.Module.apply``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._materialized: dict[nn.Parameter, nn.Parameter] = {}  # by the meta parameter

    def __call__(self, module: nn.Module) -> None:
        """Materialize the module's own parameters, without its children's."""
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in self._materialized:
                uninitialized = torch.empty_like(parameter, device=self._device)
                self._materialized[parameter] = nn.Parameter(uninitialized, parameter.requires_grad)
            module._parameters[name] = self._materialized[parameter]


def build_fabric(arguments: "TrainArguments", layer_classes: LayerClasses) -> Fabric:
    """Build Fabric and launch it with the other ranks; FSDP shards each decoder layer, one of ``layer_classes``.

    Raises:
        InputError: the number of processes that the launcher has started differs from the arguments.
    """
    device = arguments.device
    accelerator = resolve_accelerator(device.accelerator)
    num_devices = count_devices(device.devices, accelerator)
    num_processes = num_devices * device.num_nodes
    parallelism = resolve_parallelism(arguments, num_processes, accelerator)
    clear_launcher_options()
    plugins: list[Any] = [precision_plugin(arguments, parallelism, accelerator)]
    if parallelism != "xla":  # XLA's strategy brings an environment of its own, and Fabric refuses two
        plugins.append(find_cluster_environment(device.num_nodes, accelerator))
    fabric = Fabric(
        accelerator=OneXLADevice() if accelerator == "tpu" else accelerator,
        devices=device.devices if accelerator == "cuda" else num_devices,
        num_nodes=device.num_nodes,
        strategy=_build_strategy(parallelism, arguments, layer_classes, accelerator),
        plugins=plugins,
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
    """Choose and check the parallelism of the run: "fsdp", "fsdp2", "ddp", "single" or "xla"."""
    parallelism: str = arguments.fsdp.parallelism
    if parallelism == "auto":
        if accelerator == "tpu":
            parallelism = "xla"
        elif num_processes > 1:
            parallelism = "fsdp"
        else:
            parallelism = "single"
    check_parallelism(parallelism, arguments, num_processes, accelerator)
    return parallelism


def why_not_compiled(fsdp: "FSDPArguments", parallelism: str) -> str | None:
    """Return the option with which layers cannot be compiled, or None.

    With FSDP1 and these options, gradients change their shape or device, which compiled layers do not allow.
    """
    if parallelism == "fsdp" and fsdp.gradient_reduction == "micro_batch":
        return "--gradient_reduction micro_batch"
    if parallelism == "fsdp" and fsdp.cpu_offload:
        return "--cpu_offload true"
    return None


def check_parallelism(parallelism: str, arguments: "TrainArguments", num_processes: int, accelerator: str) -> None:
    """Check that a parallelism works with these arguments on ``num_processes`` processes.

    Raises:
        InputError: it does not; the message names the option to change.
    """
    fsdp = arguments.fsdp
    precision = arguments.model.precision

    # the device
    if (parallelism == "xla") != (accelerator == "tpu"):
        raise InputError(
            f"--parallelism {parallelism}: xla only works with --accelerator tpu, and --accelerator tpu only with "
            "xla; change one of them"
        )
    if parallelism == "xla":
        check_xla_arguments(arguments, num_processes)
    if parallelism == "single" and num_processes > 1:
        raise InputError(
            f"--parallelism single only works with one device, not {num_processes}; use fsdp, fsdp2 or ddp"
        )

    # precision and offload
    if precision == "16-mixed" and accelerator == "cpu":
        raise InputError("--precision 16-mixed does not work on CPU; use bf16-mixed")
    if precision == "16-mixed" and parallelism == "fsdp2":
        raise InputError("--precision 16-mixed does not work with --parallelism fsdp2; use bf16-mixed")
    if accelerator == "cpu":
        for name in ("cpu_offload", "activation_offload"):
            if getattr(fsdp, name):
                raise InputError(f"--{name} true has nothing to offload on CPU; leave it out")
    if fsdp.cpu_offload and parallelism == "single":
        raise InputError("--cpu_offload true needs FSDP on several devices; leave out --cpu_offload")
    if fsdp.cpu_offload and precision == "16-mixed":
        # torch's GradScaler copies the scale to the host without waiting for the copy, and uses it at once
        raise InputError("--precision 16-mixed gives wrong gradients with --cpu_offload true; use bf16-mixed")
    if fsdp.cpu_offload and parallelism == "fsdp" and fsdp.gradient_reduction == "micro_batch":
        # torch's FSDP1 keeps the gradient of the last micro-batch only
        raise InputError(
            "--gradient_reduction micro_batch does not work with --cpu_offload true in fsdp, which cannot accumulate "
            "gradients in host memory; use --parallelism fsdp2, or leave one of them out"
        )
    if parallelism == "fsdp" and fsdp.sharding_strategy == "NO_SHARD" and precision.endswith("-mixed"):
        # torch's FSDP1 gives fp32 weights gradients in 16 bits then, which torch refuses in the second micro-batch
        raise InputError(f"--sharding_strategy NO_SHARD does not work in {precision}; use --parallelism ddp")

    # compiled layers
    obstacle = why_not_compiled(fsdp, parallelism)
    needs_compilation = arguments.model.float8 or fsdp.compile is True
    if needs_compilation and obstacle:
        option = "float8" if arguments.model.float8 else "compile"
        raise InputError(
            f"--{option} true does not work with fsdp, which cannot compile layers with {obstacle}; use "
            "--parallelism fsdp2, or leave one of them out"
        )

    # the optimizer
    if arguments.training.orthogonalizes:
        _check_whole_matrices(parallelism, arguments)

    # adapters and 4-bit weights
    if fsdp.tensor_parallel_size > 1 and arguments.adapter.is_given:
        raise InputError("--tensor_parallel_size does not work with an adapter; leave one of them out")
    if arguments.model.float8 and arguments.adapter.base_weights:
        raise InputError(
            f"--float8 does not work with --base_weights {arguments.adapter.base_weights}; leave one of them out"
        )

    _check_group_sizes(arguments, num_processes)


def _check_whole_matrices(parallelism: str, arguments: "TrainArguments") -> None:
    """Check that an optimizer can get full matrices: a rank has them, or the ranks have rows that they can exchange."""
    fsdp = arguments.fsdp
    optimizer = f"--optimizer {arguments.training.optimizer}"
    if parallelism == "fsdp":
        raise InputError(
            f"{optimizer} does not work with --parallelism fsdp, which splits matrix rows; use fsdp2 or ddp"
        )
    if fsdp.tensor_parallel_size > 1:
        raise InputError(
            f"{optimizer} does not work with --tensor_parallel_size {fsdp.tensor_parallel_size}; leave one of them out"
        )
    if fsdp.cpu_offload:
        raise InputError(f"{optimizer} does not work with --cpu_offload true; leave one of them out")
    if arguments.adapter.is_given:
        raise InputError(
            f"{optimizer} does not work with an adapter, since its matrices are low-rank factors; use --optimizer adamw"
        )


def _check_group_sizes(arguments: "TrainArguments", num_processes: int) -> None:
    """Check that the groups of tensor and context parallelism divide the devices.

    A tensor-parallel group is within one machine. A context-parallel group is among the ranks that share one copy of
    the model.
    """
    tensor_parallel_size = arguments.fsdp.tensor_parallel_size
    context_parallel_size = arguments.fsdp.context_parallel_size
    devices_per_node = num_processes // arguments.device.num_nodes
    if devices_per_node % tensor_parallel_size:
        raise InputError(
            f"--tensor_parallel_size {tensor_parallel_size} does not divide the {devices_per_node} devices of a "
            "machine; give a size that does"
        )
    devices_per_copy = devices_per_node if arguments.fsdp.is_hybrid else num_processes
    if (devices_per_copy // tensor_parallel_size) % context_parallel_size:
        devices = f"{devices_per_copy} devices that share the model"
        if tensor_parallel_size > 1:
            devices += f" in groups of {tensor_parallel_size}"
        raise InputError(
            f"--context_parallel_size {context_parallel_size} does not divide the {devices}; give a size that does"
        )


def collective_timeout(arguments: "TrainArguments") -> timedelta:
    """Return how long a collective may last; the watchdog normally ends a hung run before that.

    A rank whose rewards take long is not hung, and ends them itself.
    """
    if not arguments.device.rank_timeout:  # no limit
        return timedelta(days=365)
    seconds = SLOW_PHASE_FACTOR * arguments.device.rank_timeout + arguments.rollouts.most_reward_seconds
    return timedelta(seconds=seconds)


def _build_strategy(
    parallelism: str, arguments: "TrainArguments", layer_classes: LayerClasses, accelerator: str
) -> Strategy:
    """Build Fabric's strategy for a parallelism."""
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
                param_dtype=gathered_dtype(arguments, parallelism),
                reduce_dtype=torch.float32,
                buffer_dtype=torch.float32,  # the rotary frequencies
            ),
        )
    if parallelism == "fsdp2":
        return FSDP2Strategy(
            num_replicas=arguments.device.num_nodes if fsdp.is_hybrid else 1,
            tensor_parallel_size=fsdp.tensor_parallel_size,
            context_parallel_size=fsdp.context_parallel_size,
            timeout=timeout,
        )
    if parallelism == "ddp":
        return DDPStrategy(gradient_as_bucket_view=True, timeout=timeout)
    if accelerator == "cuda":
        return SingleDeviceStrategy(torch.device("cuda", single_gpu_index(arguments.device.devices)))
    return SingleDeviceStrategy("cpu")


def resolve_accelerator(accelerator: str) -> str:
    """Return "cuda", "cpu" or "tpu" for ``--accelerator``."""
    if accelerator == "tpu":
        check_xla_device()
        return accelerator
    if accelerator == "auto":
        return "cuda" if CUDAAccelerator.is_available() else "cpu"
    if accelerator in ("cuda", "gpu") and not CUDAAccelerator.is_available():
        raise InputError(
            f"--accelerator {accelerator}: torch finds no GPU here; use --accelerator cpu, or check the driver"
        )
    return "cpu" if accelerator == "cpu" else "cuda"


def count_devices(devices: int | str, accelerator: str) -> int:
    """Return the number of processes on this machine that ``--devices`` asks for.

    ``devices`` is "auto" or "-1" for all devices, a number, or indices of GPUs such as "2,3".
    """
    num_available = CUDAAccelerator.auto_device_count() if accelerator == "cuda" else 1
    if str(devices) in ("auto", "-1"):
        return num_available

    max_cpu_processes = _MAX_PROCESSES_PER_CORE * (os.cpu_count() or 1)
    if accelerator == "cpu" and str(devices).isdigit() and int(devices) > max_cpu_processes:
        raise InputError(
            f"--devices {devices} is too many for this machine's {os.cpu_count() or 1} CPU cores; "
            f"give {max_cpu_processes} or fewer"
        )

    if "," in str(devices):
        indices = [int(index) for index in str(devices).split(",")]
        num_requested = len(indices)
        num_needed = max(indices) + 1
    else:
        num_requested = int(devices)
        num_needed = num_requested
    if accelerator == "cuda" and num_needed > num_available:
        raise InputError(
            f"--devices {devices}: this machine has only {num_available} GPU{'s' if num_available > 1 else ''}; "
            "give fewer"
        )
    return num_requested


def check_bf16(precision: str, parallelism: str, devices: int | str) -> None:
    """Check that the GPUs of a run compute in bf16 if ``--precision`` asks for it; torch would emulate it, slowly."""
    if not precision.startswith("bf16"):
        return
    if "," in str(devices):
        gpu_indices = [int(index) for index in str(devices).split(",")]
    else:
        gpu_indices = list(range(count_devices(devices, "cuda")))
    for index in gpu_indices:
        major, minor = torch.cuda.get_device_capability(index)
        if (major, minor) >= _MIN_BF16_CAPABILITY:
            continue
        alternatives = "32-true" if parallelism == "fsdp2" else "16-mixed or 32-true"
        raise InputError(
            f"--precision {precision}: {torch.cuda.get_device_name(index)} does not support bf16, which needs "
            f"compute capability 8.0 or higher, not {major}.{minor}; use {alternatives}"
        )


def count_planned_devices(devices: int | str) -> int:
    """Return the number of processes on a machine that ``--devices`` asks for, without checking this machine."""
    if str(devices) in ("auto", "-1"):
        raise InputError(
            f"--devices {devices} counts the devices of this machine, but --device_memory plans for another machine; "
            "give a number"
        )
    if "," in str(devices):  # indices
        return len(str(devices).split(","))
    return int(devices)


def note_on_unused_gpus(devices: int | str, accelerator: str) -> str | None:
    """Return a note for the user if the run leaves GPUs of this machine idle, and otherwise None."""
    num_available = CUDAAccelerator.auto_device_count() if accelerator == "cuda" else 0
    num_used = count_devices(devices, accelerator)
    if num_used >= num_available:
        return None
    return (
        f"only {num_used} of this machine's {num_available} GPUs are used; give fabric run --devices {num_available} "
        "to use all"
    )


def single_gpu_index(devices: int | str) -> int:
    """Return the index of the GPU that a single process uses: the first in a list such as "2,3", or else 0."""
    if "," not in str(devices):
        return 0
    return int(str(devices).split(",")[0])


def device_name(device: torch.device) -> str:
    """Return a GPU's name, or the instruction set and threads of a CPU, which affect the last digits of a result."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"CPU, {torch.backends.cpu.get_cpu_capability()}, threads {torch.get_num_threads()}"
    return device.type


def use_threads_of(name: str | None) -> None:
    """Let this CPU compute with the number of threads in a CPU's :func:`device_name`."""
    cpu = re.fullmatch(r"CPU, .*, threads ([1-9][0-9]{0,4})", name or "")
    if cpu:
        torch.set_num_threads(int(cpu[1]))
