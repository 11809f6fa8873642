"""Name the parameters of a set-up model and locate this rank's part of each, under every strategy.

FSDP1 concatenates the parameters of a unit into one flat vector and gives every rank an equal part of it. FSDP2 and
tensor parallelism give every rank a block of each parameter. DDP and a single device keep whole parameters.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

_WRAPPERS = (
    "_forward_module.",
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
    "_orig_mod.",
    "_fpw_module.",
    "_fsdp_shard.",
)


@dataclass(frozen=True)
class FlatShard:
    """Where a parameter lies in the flat vector of its FSDP1 unit, which ``num_ranks`` ranks share.

    Attributes:
        shape: of the whole parameter.
        start: index of the parameter's first element in the flat vector.
        local: this rank's part of the flat vector, [size].
        rank: of this process in ``group``.
        num_ranks: in ``group``; 1 with NO_SHARD.
        group: the ranks that share the flat vector; None with NO_SHARD.
    """

    shape: torch.Size
    start: int
    local: torch.Tensor
    rank: int
    num_ranks: int
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """Number of elements of the flat vector on each rank, padding included."""
        return self.local.numel()

    def range(self, rank: int) -> tuple[int, int]:
        """Return the first and the last index (exclusive) of the flattened parameter that a rank of the group holds."""
        numel = self.shape.numel()
        begin, end = (max(0, min(edge - self.start, numel)) for edge in (rank * self.size, (rank + 1) * self.size))
        return begin, end

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
        flat, group = handle.flat_param, handle.process_group if handle.uses_sharded_strategy else None
        local = getattr(flat, "_local_shard", flat.data)  # the attribute exists from the first forward pass on
        place = (group.rank(), group.size(), group) if group else (0, 1, None)
        starts, start = [], 0
        for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
            if not is_padding:
                starts.append(start)
            start += numel
        for parameter, shape, start in zip(flat._params, flat._shapes, starts, strict=True):
            shards[id(parameter)] = FlatShard(shape, start, local, *place)
    return shards


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the sharded parameters of a set-up model, which are the optimizer's.

    After a forward pass without a backward pass, FSDP2's would be the gathered weights; so they are resharded first.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return list(model.named_parameters())


def original_name(name: str) -> str:
    """Return the name of a parameter before Fabric, DDP, FSDP, compile and checkpointing wrapped the model."""
    name = name.replace("_FSDP_SHARD_SEPARATOR_", ".")  # torch-xla's FSDP registers a layer's parameters at the layer
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")
