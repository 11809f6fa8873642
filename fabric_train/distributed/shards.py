"""Which part of each parameter a rank holds, under every strategy, and reading no more than it.

FSDP1 joins the parameters of a unit into one flat vector and gives every rank an equal cut of it, FSDP2 and tensor
parallelism give every rank a block of each, and the others give every rank everything.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fabric_train.model.weight_files import Weights


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


def read_own_part(weights: Weights, name: str, parameter: nn.Parameter, cuts: dict[int, FlatCut]) -> torch.Tensor:
    """Read of a full tensor what ``parameter`` holds on this rank.

    Args:
        weights: where the tensor is.
        name: of the tensor, which is cut as the parameter is.
        parameter: of a set-up model, between steps.
        cuts: from :func:`flat_cuts`.

    Returns:
        A tensor on the CPU in the shape that the parameter has on this rank; not to be written into, for it may be a
        view of what it was read from.
    """
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        shape, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        return weights.read_block(name, offsets, shape)
    if id(parameter) not in cuts:
        return weights.read_block(name, (0,) * parameter.dim(), parameter.shape)
    cut = cuts[id(parameter)]
    begin, end = cut.range(cut.rank)
    row = cut.shape[1:].numel()
    first, last = begin // row, -(-end // row)
    rest = cut.shape[1:]
    rows = weights.read_block(name, (first, *(0 for _ in rest)), (last - first, *rest))
    return rows.flatten()[begin - first * row : end - first * row].reshape(parameter.shape)
