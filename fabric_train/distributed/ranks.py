"""What the ranks of a run share: data that they exchange, and parameters that are divided among them.

Functions that exchange data are collective: every rank must call them, in the same order.

FSDP1 concatenates the parameters of a unit into one flat vector and gives every rank an equal part of it. FSDP2 and
tensor parallelism give every rank a block of each parameter. DDP and a single device keep whole parameters.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning import Fabric
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

_MAX_TEXT_BYTES = 2000  # longer texts are truncated
_WRAPPERS = r"_(forward_module|fsdp_wrapped_module|checkpoint_wrapped_module|orig_mod|fpw_module|fsdp_shard)\."


def to_device_async(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a small tensor on a device; the host does not wait for the device's pending work."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # the host would wait for a copy from unpinned memory
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class DataRanks:
    """The groups of ranks that read different rows. A group consists of consecutive ranks that read the same rows."""

    size: int
    """Number of groups."""
    rank: int
    """The group of this process."""
    group_size: int
    """Number of ranks in each group."""
    num_gradients: int
    """Number of ranks with different gradients: each rank of a context-parallel group has that of its part of the rows,
    all ranks of a tensor-parallel group have the same."""
    gradient: int
    """Index of this process's gradient among the different ones."""


def data_ranks(fabric: Fabric) -> DataRanks:
    """Return the groups of ranks that read different rows: every rank, or every tensor- and context-parallel group."""
    tensor_parallel_size = getattr(fabric.strategy, "tensor_parallel_size", 1)
    context_parallel_size = getattr(fabric.strategy, "context_parallel_size", 1)
    group_size = tensor_parallel_size * context_parallel_size
    return DataRanks(
        size=fabric.world_size // group_size,
        rank=fabric.global_rank // group_size,
        group_size=group_size,
        num_gradients=fabric.world_size // tensor_parallel_size,
        gradient=fabric.global_rank // tensor_parallel_size,
    )


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that each compute a part of the same rows; this process is rank ``rank`` of ``size``."""

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
    """Return every data rank's tensor, stacked: [data ranks, ...]; a data rank's first rank stands for it."""
    return gather_over_ranks(fabric, tensor)[:: data_ranks(fabric).group_size]


def sum_over_data_ranks(fabric: Fabric, tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the data ranks' tensors, on this rank's device; a data rank's first rank adds its tensor."""
    is_first_of_group = fabric.global_rank % data_ranks(fabric).group_size == 0
    addend = tensor if is_first_of_group else torch.zeros_like(tensor)
    total = to_device_async(addend, fabric.device).clone()  # all_reduce works in place
    if fabric.world_size > 1:
        dist.all_reduce(total)
    return total


def first_text(fabric: Fabric, text: str | None) -> str | None:
    """Return, on all ranks, the text of the lowest rank that has one, cut to 2000 bytes; None if no rank has one."""
    # find the lowest rank with a text; the world size stands for none
    lowest_rank = torch.tensor(fabric.global_rank if text else fabric.world_size, device=fabric.device)
    if fabric.world_size > 1:
        dist.all_reduce(lowest_rank, dist.ReduceOp.MIN)
    if lowest_rank == fabric.world_size:
        return None

    # this rank's bytes are summed with the other ranks' zeros
    text_bytes = torch.zeros(_MAX_TEXT_BYTES, dtype=torch.uint8, device=fabric.device)
    if text and lowest_rank == fabric.global_rank:
        encoded = text.encode()[:_MAX_TEXT_BYTES]
        text_bytes[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    if fabric.world_size > 1:
        dist.all_reduce(text_bytes)
    return bytes(text_bytes.tolist()).rstrip(b"\0").decode(errors="ignore")


def exchange_bytes(
    outgoing: dict[int, torch.Tensor], incoming: dict[int, int], group: dist.ProcessGroup | None, device: torch.device
) -> dict[int, torch.Tensor]:
    """Send messages to ranks of a group and receive others, at most one to and from each rank.

    Args:
        outgoing: Messages by receiving rank: uint8 [bytes], on ``device``.
        incoming: Number of bytes of each message to receive, by sending rank.
        group: The process group; None for a single rank, which has nothing to exchange.
        device: Where received messages are stored.

    Returns:
        The received messages by sending rank: uint8 [bytes].
    """
    operations = []
    for rank, message in sorted(outgoing.items()):
        operations.append(dist.P2POp(dist.isend, message, group=group, group_peer=rank))
    received = {}
    for rank, num_bytes in sorted(incoming.items()):
        received[rank] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        operations.append(dist.P2POp(dist.irecv, received[rank], group=group, group_peer=rank))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return received


@dataclass(frozen=True)
class StepSync:
    """The flags that ranks exchange once per step: this rank's, or the maximum over all ranks."""

    stop_signal: int = 0
    """Number of the signal to stop for; 0 if there is none."""
    is_saving: bool = False
    save_failed: bool = False


def sync_step(fabric: Fabric, flags: StepSync) -> StepSync:
    """Return the flags that any rank has set; the host waits for one small all-reduce."""
    packed = torch.tensor([flags.stop_signal, int(flags.is_saving), int(flags.save_failed)])
    packed = to_device_async(packed, fabric.device)
    if fabric.world_size > 1:
        dist.all_reduce(packed, dist.ReduceOp.MAX)
    stop_signal, is_saving, save_failed = packed.tolist()
    return StepSync(stop_signal, is_saving=bool(is_saving), save_failed=bool(save_failed))


@dataclass(frozen=True)
class FlatShard:
    """Position of a parameter in the flat vector of its FSDP1 unit, of which each rank of a group holds a part."""

    shape: torch.Size
    """Shape of the whole parameter."""
    start: int
    """Index of the parameter's first element in the flat vector."""
    local: torch.Tensor
    """This rank's part of the flat vector, [size]."""
    rank: int
    """This process's rank in ``group``."""
    num_ranks: int
    """Number of ranks in ``group``."""
    group: dist.ProcessGroup | None
    """None with NO_SHARD: this rank alone holds the vector."""

    @property
    def size(self) -> int:
        """Number of elements of the flat vector on each rank, padding included."""
        return self.local.numel()

    def range(self, rank: int) -> tuple[int, int]:
        """Return the first and the last index (exclusive) of the flattened parameter that a rank of the group holds."""
        numel = self.shape.numel()
        begin = rank * self.size - self.start
        end = begin + self.size
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

        # the flat vector has padding between parameters
        starts = []
        start = 0
        for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
            if not is_padding:
                starts.append(start)
            start += numel

        for parameter, shape, start in zip(flat._params, flat._shapes, starts, strict=True):
            shards[id(parameter)] = FlatShard(
                shape=shape,
                start=start,
                local=local,
                rank=group.rank() if group else 0,
                num_ranks=group.size() if group else 1,
                group=group,
            )
    return shards


def release_parameters(model: nn.Module) -> None:
    """Break reference cycles of FSDP1 that garbage collection does not see; call it before the model is deleted.

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
