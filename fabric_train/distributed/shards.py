"""The parameters of a set-up model: their names, and which part of each this rank holds under every strategy.

FSDP1 joins the parameters of a unit into one flat vector and gives every rank an equal cut of it, FSDP2 and tensor
parallelism give every rank a block of each, and the others give every rank everything.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel


@dataclass(frozen=True)
class FlatCut:
    """Where FSDP1 keeps a parameter: in the flat vector of its unit, cut among ``num_ranks`` of a group.

    ``start`` is the parameter's first element in that vector, ``shard`` the cut of this rank, number ``rank`` of the
    group. Where nothing is sharded (NO_SHARD), the rank is alone and there is no group.
    """

    shape: torch.Size
    start: int
    shard: torch.Tensor
    rank: int
    num_ranks: int
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """Number of elements of the vector, padding included, on every rank."""
        return self.shard.numel()

    def range(self, rank: int) -> tuple[int, int]:
        """Return from which element to which of the flattened parameter lies on a rank of the group."""
        numel = self.shape.numel()
        begin, end = (max(0, min(edge - self.start, numel)) for edge in (rank * self.size, (rank + 1) * self.size))
        return begin, end

    def owner(self, element: int) -> int:
        """Return the rank of the group that has an element of the flattened parameter."""
        return (self.start + element) // self.size


def flat_cuts(module: nn.Module) -> dict[int, FlatCut]:
    """Return FSDP1's cuts by the ``id`` of the parameter; there are none under the other strategies."""
    cuts = {}
    for unit in FullyShardedDataParallel.fsdp_modules(module):
        handle: Any = unit._handle
        if handle is None:  # a unit without parameters of its own
            continue
        flat, group = handle.flat_param, handle.process_group if handle.uses_sharded_strategy else None
        shard = getattr(flat, "_local_shard", flat.data)  # an attribute from the first forward pass on
        place = (group.rank(), group.size(), group) if group else (0, 1, None)
        starts, start = [], 0
        for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
            if not is_padding:
                starts.append(start)
            start += numel
        for parameter, shape, start in zip(flat._params, flat._shapes, starts, strict=True):
            cuts[id(parameter)] = FlatCut(shape, start, shard, *place)
    return cuts


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a set-up model as they are between steps, the optimizer's: after a forward pass without
    a backward one, FSDP2's are the gathered weights until the next pass.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return list(model.named_parameters())


def original_name(name: str) -> str:
    """Name of a parameter before Fabric, DDP, FSDP and activation checkpointing wrapped the model."""
    wrappers = ("_forward_module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module.")
    for wrapper in wrappers:
        name = name.replace(wrapper, "") if wrapper != "module." else name.removeprefix(wrapper)
    return name
