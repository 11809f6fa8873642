"""Fabric's strategies for FSDP (FSDP1) and for ``fully_shard`` (FSDP2), on CUDA and on CPU ranks."""

from datetime import timedelta

import torch
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.fabric.strategies.parallel import ParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel


class FSDP1Strategy(FSDPStrategy):
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


class FSDP2Strategy(ModelParallelStrategy):
    """Fabric's strategy for FSDP2, over a mesh of three dimensions: copies of the model ("replicate"), the ranks that
    one is sharded among ("shard"), and those that compute each row together ("tensor"). Ranks of the last follow each
    other, so that those that send each other the most lie on one machine.
    """

    def __init__(self, num_copies: int, tensor_parallel_size: int, timeout: timedelta) -> None:
        # the model is sharded before Fabric gets it, in model/parallelize.py
        super().__init__(parallelize_fn=lambda model, _: model, timeout=timeout)
        self._num_copies, self.tensor_parallel_size = num_copies, tensor_parallel_size

    def setup_environment(self) -> None:
        """Make the mesh; the base class knows two dimensions."""
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()
        num_shards = self.world_size // (self._num_copies * self.tensor_parallel_size)
        self._device_mesh = init_device_mesh(
            self.root_device.type,
            (self._num_copies, num_shards, self.tensor_parallel_size),
            mesh_dim_names=("replicate", "shard", "tensor"),
        )


class Materialization:
    """Gives the parameters of a module memory, once it is known which part of them this rank holds.

    A parameter with several names stays one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parameters: dict[nn.Parameter, nn.Parameter] = {}

    def __call__(self, module: nn.Module) -> None:
        """Do it for the module's own parameters, not for those of its children."""
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in self._parameters:
                    empty = torch.empty_like(parameter, device=self._device)
                    self._parameters[parameter] = nn.Parameter(empty, parameter.requires_grad)
                module._parameters[name] = self._parameters[parameter]
