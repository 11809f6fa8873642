"""Find which part of a model's parameters each rank holds, and the parameters' original names.

FSDP1 concatenates the parameters of a unit into one flat vector and gives every rank an equal part of it. FSDP2 and
tensor parallelism give every rank a block of each parameter. DDP and a single device keep full parameters.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

_WRAPPERS = r"_(forward_module|fsdp_wrapped_module|checkpoint_wrapped_module|orig_mod|fpw_module|fsdp_shard)\."
IN_LAYER = re.compile(r"(.*?\.)([0-9]+)\.(.+)")
"""The original name of a parameter in a layer: a prefix, the number of the layer, and the name within the layer."""


@dataclass(frozen=True)
class FlatShard:
    """Position of a parameter in the flat vector of its FSDP1 unit, of which each rank of a group holds a part."""

    full_shape: torch.Size
    """The shape of the full parameter."""
    start: int
    """The index of the parameter's first element in the flat vector."""
    local: torch.Tensor
    """This rank's part of the flat vector, [size]."""
    rank: int
    """This process's rank in ``group``."""
    num_ranks: int
    """The number of ranks in ``group``."""
    group: dist.ProcessGroup | None
    """None with NO_SHARD: this rank alone holds the vector."""

    @property
    def size(self) -> int:
        """The number of elements of the flat vector on each rank, including padding."""
        return self.local.numel()

    def range(self, rank: int) -> tuple[int, int]:
        """Return the first and the last index (exclusive) of the flattened parameter that a rank of the group holds."""
        # the rank's part of the flat vector, counted from the parameter's first element
        begin = rank * self.size - self.start
        end = begin + self.size
        # it may also hold elements of the parameters before and after
        numel = self.full_shape.numel()
        return max(0, min(begin, numel)), max(0, min(end, numel))

    def owner(self, element: int) -> int:
        """Return the rank of the group that holds an element of the flattened parameter."""
        return (self.start + element) // self.size


def flat_shards(module: nn.Module) -> dict[int, FlatShard]:
    """Return FSDP1's shards by the ``id`` of the parameter; an empty dict under the other strategies."""
    shards = {}
    for unit in FullyShardedDataParallel.fsdp_modules(module):
        handle: Any = unit._handle
        if handle is None:  # a unit without parameters of its own
            continue
        flat = handle.flat_param
        group = handle.process_group if handle.uses_sharded_strategy else None
        local = getattr(flat, "_local_shard", flat.data)  # the attribute exists from the first forward pass on

        # where each parameter begins: the flat vector has padding between parameters
        starts = []
        num_elements = 0
        for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
            if not is_padding:
                starts.append(num_elements)
            num_elements += numel

        for parameter, shape, start in zip(flat._params, flat._shapes, starts, strict=True):
            shards[id(parameter)] = FlatShard(
                full_shape=shape,
                start=start,
                local=local,
                rank=group.rank() if group else 0,
                num_ranks=group.size() if group else 1,
                group=group,
            )
    return shards


def release_parameters(model: nn.Module) -> None:
    """Break FSDP1's reference cycles, which garbage collection does not see. Call this before the model is deleted.

    A flat vector refers to its views in Python, and each view refers to the vector in C++.
    """
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        handle: Any = unit._handle
        if handle is not None and handle.flat_param._tensors is not None:
            handle.flat_param._tensors.clear()


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a set-up model as the optimizer sees them: sharded.

    After a forward pass without a backward pass, FSDP2's are the gathered weights, so they are resharded first.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return list(model.named_parameters())


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor; wait for the collective if the tensor is the result of one."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if isinstance(local, AsyncCollectiveTensor):
        return local.wait()
    return local


def original_name(name: str) -> str:
    """Return the name of a parameter before Fabric, DDP, FSDP, compile and checkpointing wrapped the model."""
    name = name.replace("_FSDP_SHARD_SEPARATOR_", ".")  # torch-xla's FSDP registers a layer's parameters at the layer
    return re.sub(_WRAPPERS, "", name).removeprefix("module.")
