"""What the ranks of a run share: data that they exchange, and parameters that are divided among them.

Functions that exchange data are collective: every rank must call them, in the same order.

FSDP1 concatenates the parameters of a unit into one flat vector and gives every rank an equal part of it. FSDP2 and
tensor parallelism give every rank a block of each parameter. DDP and a single device keep whole parameters.
"""

import re
from collections.abc import Hashable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning import Fabric
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor

_MAX_TEXT_BYTES = 2000  # longer texts are truncated
_WRAPPERS = r"_(forward_module|fsdp_wrapped_module|checkpoint_wrapped_module|orig_mod|fpw_module|fsdp_shard)\."
_ROW = 1024
"""Squares added in fp32 on CPU; the sums of these rows are added in fp64."""


def to_device_async(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a small tensor on a device; the host does not wait for the device's pending work."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # the host would wait for a copy from unpinned memory
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class DataRanks:
    """There are ``size`` groups of ``group_size`` consecutive ranks that read the same rows; this process is in group
    ``rank``. There are ``num_gradients`` different gradients, and this process has number ``gradient`` of them: each
    rank of a context-parallel group has the gradient of its part of the rows.
    """

    size: int
    rank: int
    group_size: int
    num_gradients: int
    gradient: int


def data_ranks(fabric: Fabric) -> DataRanks:
    """Return the groups of ranks that read different rows: every rank, or every tensor- and context-parallel group."""
    tensor_parallel_size = getattr(fabric.strategy, "tensor_parallel_size", 1)
    group_size = tensor_parallel_size * getattr(fabric.strategy, "context_parallel_size", 1)
    size = fabric.world_size // group_size
    rank = fabric.global_rank // group_size
    gradients = fabric.world_size // tensor_parallel_size, fabric.global_rank // tensor_parallel_size
    return DataRanks(size, rank, group_size, *gradients)


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that each compute a part of the same rows; this process is number ``rank`` of them."""

    group: dist.ProcessGroup | None
    rank: int
    size: int


def gather_over_ranks(fabric: Fabric, tensor: torch.Tensor) -> torch.Tensor:
    """Return every rank's tensor, stacked in rank order: [ranks, ...]; all ranks give the same shape and dtype.

    With NCCL the host does not wait. Fabric's ``all_reduce`` would: it begins with a barrier.
    """
    stacked = torch.zeros(fabric.world_size, *tensor.shape, dtype=tensor.dtype, device=fabric.device)
    stacked[fabric.global_rank] = to_device_async(tensor, fabric.device)
    if fabric.world_size > 1:
        dist.all_reduce(stacked)  # sum with the other ranks' zeros
    return stacked


def gather_over_data_ranks(fabric: Fabric, tensor: torch.Tensor) -> torch.Tensor:
    """Return every data rank's tensor, stacked: [data ranks, ...]."""
    return gather_over_ranks(fabric, tensor)[:: data_ranks(fabric).group_size]


def sum_over_data_ranks(fabric: Fabric, tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the data ranks' tensors, on this rank's device; each rank sends only as much as it has."""
    ranks = data_ranks(fabric)
    counts = fabric.global_rank % ranks.group_size == 0
    summed = to_device_async(tensor if counts else torch.zeros_like(tensor), fabric.device).clone()
    if fabric.world_size > 1:
        dist.all_reduce(summed)
    return summed


def first_text(fabric: Fabric, text: str | None) -> str | None:
    """Return, on all ranks, the text of the lowest rank that has one, cut to 2000 bytes; None if no rank has one."""
    lowest = torch.tensor(fabric.global_rank if text else fabric.world_size, device=fabric.device)
    if fabric.world_size > 1:
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
    if lowest == fabric.world_size:
        return None
    line = torch.zeros(_MAX_TEXT_BYTES, dtype=torch.uint8, device=fabric.device)
    if text and lowest == fabric.global_rank:
        encoded = text.encode()[:_MAX_TEXT_BYTES]
        line[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    if fabric.world_size > 1:
        dist.all_reduce(line)  # sum with the other ranks' zeros
    return bytes(line.tolist()).rstrip(b"\0").decode(errors="ignore")


def exchange_bytes(
    outgoing: dict[int, torch.Tensor], incoming: dict[int, int], group: dist.ProcessGroup | None, device: torch.device
) -> dict[int, torch.Tensor]:
    """Send uint8 messages to ranks of a group and receive others, at most one to and from each.

    ``outgoing`` are on ``device``, by receiving rank, ``incoming`` the number of bytes by sending rank. ``group`` is
    None for a single rank, which has nothing to exchange. Received messages are returned by sending rank.
    """
    received = {rank: torch.empty(size, dtype=torch.uint8, device=device) for rank, size in sorted(incoming.items())}
    pairs = [(dist.isend, sorted(outgoing.items())), (dist.irecv, received.items())]
    works = [dist.P2POp(do, each, group=group, group_peer=rank) for do, of in pairs for rank, each in of]
    for work in dist.batch_isend_irecv(works) if works else []:
        work.wait()
    return received


@dataclass(frozen=True)
class StepSync:
    """What ranks tell each other once per step: one rank's own, or the maximum over all ranks; 0 is no signal."""

    stop_signal: int = 0
    is_saving: bool = False
    save_failed: bool = False


def sync_step(fabric: Fabric, own: StepSync) -> StepSync:
    """Return what any rank has set; the host waits for one small all-reduce."""
    flags = to_device_async(torch.tensor([int(flag) for flag in astuple(own)]), fabric.device)
    if fabric.world_size > 1:
        dist.all_reduce(flags, dist.ReduceOp.MAX)
    stop_signal, is_saving, save_failed = flags.tolist()
    return StepSync(stop_signal, bool(is_saving), bool(save_failed))


@dataclass(frozen=True)
class FlatShard:
    """Where a parameter lies in the flat vector of its FSDP1 unit, which ``num_ranks`` ranks share.

    ``shape`` is the whole parameter's, ``start`` the index of its first element in the flat vector. ``local`` is
    this rank's part of the vector, [size]. ``rank`` is this process's in ``group``, which is None with NO_SHARD.
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
        flat = handle.flat_param
        group = handle.process_group if handle.uses_sharded_strategy else None
        local = getattr(flat, "_local_shard", flat.data)  # the attribute exists from the first forward pass on
        place = (group.rank(), group.size(), group) if group else (0, 1, None)
        starts = []
        start = 0
        for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
            if not is_padding:
                starts.append(start)
            start += numel
        for parameter, shape, start in zip(flat._params, flat._shapes, starts, strict=True):
            shards[id(parameter)] = FlatShard(shape, start, local, *place)
    return shards


def release_parameters(model: nn.Module) -> None:
    """Break the cycles of FSDP1 that garbage collection does not see; call it before the last reference goes.

    A flat vector holds its views in Python, and each view holds the vector in C++.
    """
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        handle: Any = unit._handle
        if handle is not None and handle.flat_param._tensors is not None:
            handle.flat_param._tensors.clear()


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the sharded parameters of a set-up model, which are the optimizer's.

    After a forward pass without a backward pass, FSDP2's would be the gathered weights; so they are resharded first.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return list(model.named_parameters())


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor, after the collective that it may be the result of."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def original_name(name: str) -> str:
    """Return the name of a parameter before Fabric, DDP, FSDP, compile and checkpointing wrapped the model."""
    name = name.replace("_FSDP_SHARD_SEPARATOR_", ".")  # torch-xla's FSDP registers a layer's parameters at the layer
    return re.sub(_WRAPPERS, "", name).removeprefix("module.")


@torch.no_grad()
def average_replicated(model: Any) -> None:
    """Average, over all ranks, the gradients of parameters that every rank has whole beside a sharded model.

    A strategy that shards the model ignores them (``model.replicated``, set by ``setup_model``). All ranks call this
    once a step, after the backward passes. The gradients travel as one fp32 vector.
    """
    replicated = getattr(model, "replicated", ())
    if not replicated or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for parameter in replicated:
        if parameter.grad is None:  # no token of this rank came to its layer
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in replicated]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(gradients, [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)])


@torch.no_grad()
def clip_grad_norm(fabric: Fabric, model: Any, optimizer: Any, max_norm: float) -> torch.Tensor:
    """Scale the gradient in place to a 2-norm of at most ``max_norm`` over all parameters; 0 leaves it unchanged.

    All ranks must call it, after the backward passes of a step, with the model and the optimizer that Fabric has set
    up. It returns the norm before clipping, fp64 [], the same on all ranks.
    """
    fabric.strategy.precision.unscale_gradients(getattr(optimizer, "optimizer", optimizer))  # undo fp16's loss scaling
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = _squared_norm(fabric, model, parameters).sqrt()
    if max_norm:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).float()  # as torch.nn.utils.clip_grad_norm_
        _scale([local_part(parameter.grad) for parameter in parameters], factor)
    return norm


def _squared_norm(fabric: Fabric, model: Any, parameters: list[nn.Parameter]) -> torch.Tensor:
    """Return the sum of squares over all ranks, fp64 []; a gradient that several ranks hold counts once."""
    root = getattr(model, "_forward_module", model)
    is_flat = isinstance(root, FullyShardedDataParallel) and root.sharding_strategy is not ShardingStrategy.NO_SHARD
    flat_groups = [root.process_group] if is_flat else []  # among which FSDP1 shards the parameters
    # all ranks take part in the sum over FSDP1's shards, also one whose part has only padding or frozen weights
    by_sharding: dict[Hashable, list[torch.Tensor]] = {None: []}
    groups: dict[Hashable, list[dist.ProcessGroup | None]] = {None: flat_groups}
    replicated = {id(parameter) for parameter in getattr(model, "replicated", ())}
    for parameter in parameters:
        gradient: Any = parameter.grad
        sharding: Hashable = None
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            placements = gradient.placements
            sharding = (mesh, placements)
            groups[sharding] = [mesh.get_group(i) for i, one in enumerate(placements) if not one.is_replicate()]
        elif id(parameter) in replicated:
            sharding = "replicated"
            groups["replicated"] = []
        by_sharding.setdefault(sharding, []).append(local_part(gradient))
    total = torch.zeros((), dtype=torch.float64, device=fabric.device)
    for sharding, tensors in by_sharding.items():
        squared = to_device_async(_squared_norms(tensors).sum(), fabric.device)
        for group in groups[sharding]:
            dist.all_reduce(squared, group=group)
        total = total + squared
    return total


def _squared_norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of each local tensor, after a zero: fp64 [1 + tensors], on their device."""
    zero = torch.zeros((), dtype=torch.float64, device=tensors[0].device if tensors else None)
    if zero.device.type == "cpu":  # where torch would make an fp64 copy of each tensor
        return torch.stack([zero, *(_squared_norm_in_rows(tensor) for tensor in tensors)])
    return torch.stack([zero, *_norms_in_fp64(tensors)]).square()


def _norms_in_fp64(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the norms of the tensors that are not empty, each fp64 [], in a few kernels for all."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    return torch._foreach_norm(filled, dtype=torch.float64) if filled else ()


def _squared_norm_in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of a tensor, fp64 []."""
    flat = tensor.flatten()
    whole = flat.numel() // _ROW * _ROW
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float32)
    return norms.double().square().sum() + rest.double().square()


def _scale(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply local tensors in place by a 0-dim fp32 tensor. On a GPU it is rounded to their dtype first.

    torch rounds it there also if it multiplies one tensor, and takes a kernel per tensor if the dtypes differ.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for dtype, of_dtype in by_dtype.items():
        local = factor.to(of_dtype[0].device)
        torch._foreach_mul_(of_dtype, local if local.device.type == "cpu" else local.to(dtype))
