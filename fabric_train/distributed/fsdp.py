"""FSDP2: ``fully_shard`` over a mesh of devices, whole copies of the model over machines and cut matrices included."""

from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

from lightning.fabric.strategies import ModelParallelStrategy
from lightning.fabric.strategies.parallel import ParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard


class MeshStrategy(ModelParallelStrategy):
    """Fabric's strategy for FSDP2, over a mesh of three dimensions: copies of the model ("replicate"), the ranks that
    one is sharded among ("shard"), and those that compute each row together ("tensor"). Ranks of the last follow each
    other, so that those that send each other the most lie on one machine.
    """

    def __init__(
        self,
        shard: Callable[[nn.Module, DeviceMesh], nn.Module],
        num_copies: int,
        tensor_parallel_size: int,
        timeout: timedelta,
    ) -> None:
        super().__init__(parallelize_fn=shard, timeout=timeout)
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
        mesh: of ``MeshStrategy``.
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
