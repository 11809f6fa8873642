"""What of the model and the optimizer this rank holds, as it lies in memory: nothing is gathered and nothing copied.

FSDP1 joins the parameters of a unit into one flat vector and gives every rank an equal cut of it, FSDP2 gives every
rank some rows of each parameter, and the others give every rank everything. In all three a rank's part of a tensor is
one contiguous range of the flattened tensor.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fabric_train.distributed.collectives import exchange_bytes
from fabric_train.distributed.shards import FlatShard, flat_shards, named_parameters, original_name
from fabric_train.optim.low_precision_adamw import MOMENTS, local_moments, moments_dtype


@dataclass(frozen=True)
class Held:
    """A tensor of the checkpoint, and what this rank has of it.

    ``parts``, flat, joined are the elements of the flattened tensor from ``begin`` on; there are none where the rank
    has nothing of it. The same part is on ``num_copies`` ranks, of which this is number ``copy``. ``cut`` is set where
    a part may begin or end within a row.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    begin: int
    parts: tuple[torch.Tensor, ...]
    num_copies: int
    copy: int
    cut: FlatShard | None = None

    @property
    def numel(self) -> int:
        """Number of elements in ``parts``."""
        return sum(part.numel() for part in self.parts)


def held_weights(model: Any) -> list[Held]:
    """Return the parameters and the persistent buffers of a set-up model; a weight with two names appears once."""
    cuts = flat_shards(model)
    weights = [_held(original_name(name), parameter, parameter, cuts) for name, parameter in named_parameters(model)]
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                # a forward pass may write into it while it is being saved
                weights.append(_replicated(original_name(f"{prefix}.{name}"), buffer.detach().clone()))
    return weights


def held_optimizer(model: Any, optimizer: torch.optim.Optimizer) -> list[Held]:
    """Return AdamW's moments and counts of steps; a parameter that has had no gradient yet has zeros."""
    cuts = flat_shards(model)
    moments: dict[str, list[Held]] = {key: [] for key in MOMENTS}
    counts = []
    for name, parameter in named_parameters(model):
        state, name = optimizer.state.get(parameter, {}), original_name(name)
        weight, dtype = _held(name, parameter, parameter, cuts), moments_dtype(optimizer, parameter)
        zeros = torch.zeros(0 if state else weight.numel, dtype=dtype, device=parameter.device)
        kept = local_moments(optimizer, parameter)
        for key in MOMENTS:
            moment = _flat_in_rows(kept[key], parameter) if key in kept else zeros
            parts = (moment,) if weight.numel else ()
            moments[key].append(replace(weight, name=f"{name}.{key}", dtype=dtype, parts=parts))
        count = state["step"].reshape(1) if "step" in state else torch.zeros(1)
        has_first = weight.begin == 0 and weight.numel > 0
        counts.append(
            replace(
                weight,
                name=f"{name}.step",
                shape=torch.Size(),
                dtype=torch.float32,
                begin=0,
                parts=(count,) if has_first else (),
                cut=None,
            )
        )
    return [*moments["exp_avg"], *moments["exp_avg_sq"], *counts]


def whole_rows(tensors: list[Held]) -> list[Held]:
    """Let every part begin and end with a row of its tensor: a row belongs to the rank that has its first element, and
    the others send it theirs.

    These are a few rows a unit of FSDP1. All ranks call it together.
    """
    outgoing: dict[int, list[torch.Tensor]] = {}
    incoming: dict[int, list[tuple[int, int]]] = {}  # of each rank: index of the tensor, number of elements
    completed = list(tensors)
    for index, tensor in enumerate(tensors):
        if tensor.cut is None or not tensor.parts:
            continue
        cut, row = tensor.cut, tensor.shape[1:].numel()
        (local,), begin, end = tensor.parts, tensor.begin, tensor.begin + tensor.numel
        given_up = min(-begin % row, end - begin)
        if given_up:
            outgoing.setdefault(cut.owner(begin // row * row), []).append(local[:given_up])
        kept = (local[given_up:],) if given_up < end - begin else ()
        completed[index] = replace(tensor, begin=begin + given_up, parts=kept)
        for rank, count in _rest_of_row(cut, end, -end % row if kept else 0):
            incoming.setdefault(rank, []).append((index, count))
    for rank, message in _exchange(outgoing, incoming, tensors).items():
        for index, count in incoming[rank]:
            num_bytes = count * tensors[index].dtype.itemsize
            part, message = message[:num_bytes].clone().view(tensors[index].dtype), message[num_bytes:]
            completed[index] = replace(completed[index], parts=(*completed[index].parts, part))
    return completed


def _rest_of_row(cut: FlatShard, begin: int, count: int) -> Iterator[tuple[int, int]]:
    """Say which ranks have how many of the ``count`` elements from ``begin`` on."""
    rank = cut.rank
    while count:
        rank += 1
        first, last = cut.range(rank)
        there = min(last - first, count)
        if there:
            yield rank, there
        count -= there


def _exchange(
    outgoing: dict[int, list[torch.Tensor]], incoming: dict[int, list[tuple[int, int]]], tensors: list[Held]
) -> dict[int, torch.Tensor]:
    """Send and receive, between each pair of ranks all elements as one message of bytes; return those received."""
    cut = next((tensor.cut for tensor in tensors if tensor.cut), None)
    if cut is None:
        return {}
    group, device = cut.group, cut.local.device  # one for all units
    messages = {
        rank: torch.cat([part.view(torch.uint8) for part in parts]).to(device) for rank, parts in outgoing.items()
    }
    sizes = {
        rank: sum(count * tensors[index].dtype.itemsize for index, count in places) for rank, places in incoming.items()
    }
    return exchange_bytes(messages, sizes, group, device)


def _held(name: str, parameter: nn.Parameter, tensor: torch.Tensor, cuts: dict[int, FlatShard]) -> Held:
    """Describe ``tensor``, the parameter itself or one that is cut as it is."""
    if id(parameter) in cuts:
        cut = cuts[id(parameter)]
        begin, end = cut.range(cut.rank)
        if tensor is parameter:  # whose views may stand for the gathered weights now
            first = max(cut.start - cut.rank * cut.size, 0)
            tensor = cut.local[first : first + end - begin]
        num_copies = dist.get_world_size() // cut.num_ranks
        parts = (tensor.detach().flatten(),) if end > begin else ()
        copy = dist.get_rank() // cut.num_ranks  # HYBRID_SHARD's groups are ranks that follow each other
        return Held(name, cut.shape, cut.local.dtype, begin, parts, num_copies, copy, cut)
    if isinstance(tensor, DTensor):
        whole: Any = tensor.detach()
        rows = _in_rows(whole)
        _, offsets = compute_local_shape_and_global_offset(rows.shape, rows.device_mesh, rows.placements)
        local = rows.to_local().flatten()
        begin = offsets[0] * rows.shape[1:].numel() if offsets else 0
        return Held(name, rows.shape, rows.dtype, begin, (local,) if local.numel() else (), *_copies(rows))
    return _replicated(name, tensor.detach())


def _in_rows(tensor: DTensor) -> DTensor:
    """Return the tensor cut into rows, which are contiguous, where tensor parallelism has cut it into columns.

    The ranks of the mesh exchange their parts; all call it together.
    """
    if not any(isinstance(placement, Shard) and placement.dim for placement in tensor.placements):
        return tensor
    rows = [Shard(0) if isinstance(placement, Shard) else placement for placement in tensor.placements]
    return tensor.redistribute(placements=rows)


def _flat_in_rows(moment: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return a flat tensor that is cut as a parameter is, cut as the checkpoint has it; see ``_in_rows``."""
    if not isinstance(parameter, DTensor):
        return moment
    local, stride = moment.view(parameter.to_local().shape), parameter.stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    whole = DTensor.from_local(local, mesh, placements, run_check=False, shape=parameter.shape, stride=stride)
    return _in_rows(whole).to_local().flatten()


def _copies(tensor: DTensor) -> tuple[int, int]:
    """Return on how many ranks the same part lies, and which of these this is.

    The ranks among which a tensor is cut stand at equal distances in the order of all ranks: it is 1, or the ranks
    between them compute with their own parts of other tensors.
    """
    cut = [dim for dim, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)]
    ranks, num_parts = tensor.device_mesh.mesh, math.prod(tensor.device_mesh.shape[dim] for dim in cut)
    distances = [int(ranks.select(dim, 1).min() - ranks.min()) for dim in cut if ranks.shape[dim] > 1]
    distance, rank = min(distances, default=1), dist.get_rank()
    return dist.get_world_size() // num_parts, rank // (distance * num_parts) * distance + rank % distance


def _replicated(name: str, tensor: torch.Tensor) -> Held:
    ranks = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return Held(name, tensor.shape, tensor.dtype, 0, (tensor.flatten(),) if tensor.numel() else (), *ranks)
