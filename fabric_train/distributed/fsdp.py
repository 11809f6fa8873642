"""Fabric strategies for FSDP1 (``FullyShardedDataParallel``) and FSDP2 (``fully_shard``), on CUDA and CPU ranks."""

from datetime import timedelta

import torch
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.fabric.strategies.parallel import ParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel


class FSDP1Strategy(FSDPStrategy):
    """Fabric's ``FSDPStrategy`` with a device mesh, on CUDA and CPU ranks.

    With a mesh, state dicts hold ``DTensor``. Fabric's own class does not accept the CPU, where torch expects a device
    as ``device_id`` instead of an index.
    """

    def setup_environment(self) -> None:
        """Create the mesh: one dimension, or two for a hybrid strategy."""
        super().setup_environment()
        device = self.root_device.type
        if "HYBRID" in self.sharding_strategy.name:
            mesh = init_device_mesh(device, (self.num_nodes, self.num_processes), mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh(device, (self.world_size,), mesh_dim_names=("shard",))
        self._fsdp_kwargs["device_mesh"] = mesh
        self._fsdp_kwargs["param_init_fn"] = ParameterMaterializer(self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap the module in FSDP; here on CPU, by the base class on CUDA.

        FSDP divides whole gradients by one factor before it sums them over the ranks, and shards by another one after
        it, because a sum in fp16 may overflow. Gradients are reduced in fp32 here, so only shards are divided.
        """
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
        for unit in FullyShardedDataParallel.fsdp_modules(wrapped):
            unit._gradient_postdivide_factor *= unit._gradient_predivide_factor
            unit._gradient_predivide_factor = 1
        return wrapped


class FSDP2Strategy(ModelParallelStrategy):
    """Fabric's strategy for FSDP2 and tensor parallelism, over a mesh [replicate, shard, tensor].

    The ranks of a tensor group are consecutive, so they are on the same machine: they communicate the most.

    Args:
        num_replicas: copies of the model, each sharded among its own ranks.
        tensor_parallel_size: ranks that compute the same rows together.
        timeout: of a collective.
    """

    def __init__(self, num_replicas: int, tensor_parallel_size: int, timeout: timedelta) -> None:
        # model/parallelize.py shards the model before Fabric gets it
        super().__init__(parallelize_fn=lambda model, _: model, timeout=timeout)
        self._num_replicas, self.tensor_parallel_size = num_replicas, tensor_parallel_size

    def setup_environment(self) -> None:
        """Create the mesh, without the base class's own: it has two dimensions."""
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()
        num_shards = self.world_size // (self._num_replicas * self.tensor_parallel_size)
        self._device_mesh = init_device_mesh(
            self.root_device.type,
            (self._num_replicas, num_shards, self.tensor_parallel_size),
            mesh_dim_names=("replicate", "shard", "tensor"),
        )


class ParameterMaterializer:
    """Replace meta parameters by uninitialized ones on a device; tied parameters stay tied.

    It serves as FSDP's ``param_init_fn`` and as the function of ``nn.Module.apply``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parameters: dict[nn.Parameter, nn.Parameter] = {}

    def __call__(self, module: nn.Module) -> None:
        """Materialize the module's own parameters, not those of its children."""
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in self._parameters:
                    empty = torch.empty_like(parameter, device=self._device)
                    self._parameters[parameter] = nn.Parameter(empty, parameter.requires_grad)
                module._parameters[name] = self._parameters[parameter]
