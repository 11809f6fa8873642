"""Exchange data between ranks: tensors, bytes, a text, and the flags of each step.

All functions are collective: every rank must call them, in the same order.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from lightning import Fabric

from fabric_train.distributed.devices import to_device_async

_MAX_TEXT_BYTES = 2000  # longer texts are truncated


@dataclass(frozen=True)
class DataRanks:
    """The groups of ranks that read different rows.

    There are ``size`` groups of ``tensor_parallel_size`` consecutive ranks that read the same rows; this process is in
    group ``rank``.
    """

    size: int
    rank: int
    tensor_parallel_size: int


def data_ranks(fabric: Fabric) -> DataRanks:
    """Return the groups of ranks that read different rows: every rank, or every tensor-parallel group."""
    group_size = getattr(fabric.strategy, "tensor_parallel_size", 1)
    return DataRanks(fabric.world_size // group_size, fabric.global_rank // group_size, group_size)


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
    return gather_over_ranks(fabric, tensor)[:: data_ranks(fabric).tensor_parallel_size]


def sum_over_data_ranks(fabric: Fabric, tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the data ranks' tensors, on this rank's device."""
    return gather_over_data_ranks(fabric, tensor).sum(dim=0)


def first_text(fabric: Fabric, text: str | None) -> str | None:
    """Return, on all ranks, the text of the lowest rank that has one; None if no rank has one.

    A text is truncated to 2000 bytes of UTF-8.
    """
    encoded = (text or "").encode()[:_MAX_TEXT_BYTES]
    line = torch.zeros(_MAX_TEXT_BYTES, dtype=torch.uint8, device=fabric.device)
    line[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8) if encoded else 0
    lines = gather_over_ranks(fabric, line).tolist()
    texts = (bytes(line).rstrip(b"\0").decode(errors="ignore") for line in lines)
    return next(filter(None, texts), None)


def exchange_bytes(
    outgoing: Mapping[int, torch.Tensor],
    incoming: Mapping[int, int],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> dict[int, torch.Tensor]:
    """Send messages to ranks of a group and receive messages from others, at most one to and from each.

    Args:
        outgoing: uint8 message on ``device`` by receiving rank of the group.
        incoming: Number of bytes by sending rank of the group.
        group: The ranks that call this together; None for a single rank, which has nothing to exchange.
        device: The group's communication device.

    Returns:
        The uint8 message by sending rank of the group.
    """
    received = {rank: torch.empty(size, dtype=torch.uint8, device=device) for rank, size in sorted(incoming.items())}
    sends = [
        dist.P2POp(dist.isend, message, group=group, group_peer=rank) for rank, message in sorted(outgoing.items())
    ]
    receives = [dist.P2POp(dist.irecv, message, group=group, group_peer=rank) for rank, message in received.items()]
    for work in dist.batch_isend_irecv(sends + receives) if sends or receives else []:
        work.wait()
    return received


@dataclass(frozen=True)
class StepSync:
    """What ranks tell each other once per step: one rank's own, or the maximum over all ranks.

    ``stop_signal`` is the number of the signal that asks the run to save and stop, 0 for none. ``is_saving``: a
    background save is still writing. ``save_failed``: one has failed.
    """

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
