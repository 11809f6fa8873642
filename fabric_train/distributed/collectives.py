"""What the ranks of a run exchange: flags between steps, sums and stacks over ranks, one rank's text.

All ranks call these functions together.
"""

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from lightning import Fabric

from fabric_train.distributed.host_memory import to_device_async

_MAX_BYTES = 2000  # longer texts are cut


@dataclass(frozen=True)
class DataRanks:
    """The groups of ranks that read different rows.

    There are ``size`` groups of ``tensor_parallel_size`` consecutive ranks each; this rank is in group ``rank``. The
    ranks of one group read the same rows.
    """

    size: int
    rank: int
    tensor_parallel_size: int


def data_ranks(fabric: Fabric) -> DataRanks:
    """Return the groups of ranks that read different rows: every rank, or every tensor-parallel group."""
    together = getattr(fabric.strategy, "tensor_parallel_size", 1)
    return DataRanks(fabric.world_size // together, fabric.global_rank // together, together)


def gather_over_ranks(fabric: Fabric, tensor: torch.Tensor) -> torch.Tensor:
    """Return every rank's tensor, of one shape on all, stacked in rank order: [ranks, ...]."""
    stacked = torch.zeros(fabric.world_size, *tensor.shape, dtype=tensor.dtype, device=fabric.device)
    stacked[fabric.global_rank] = to_device_async(tensor, fabric.device)
    # the other ranks add zeros; Fabric's all_gather calls a deprecated function of torch
    return fabric.all_reduce(stacked, reduce_op="sum")  # type: ignore[return-value]


def gather_over_data_ranks(fabric: Fabric, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of every data rank, stacked: [data ranks, ...]."""
    return gather_over_ranks(fabric, tensor)[:: data_ranks(fabric).tensor_parallel_size]


def sum_over_data_ranks(fabric: Fabric, tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the data ranks' tensors, on this rank's device."""
    return gather_over_data_ranks(fabric, tensor).sum(dim=0)


def first_text(fabric: Fabric, text: str | None) -> str | None:
    """Return the text of the lowest rank that has one, on all ranks; None if no rank has one."""
    encoded = (text or "").encode()[:_MAX_BYTES]
    line = torch.zeros(_MAX_BYTES, dtype=torch.uint8, device=fabric.device)
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
    """Send one message to each of some ranks and receive one from each of others.

    Args:
        outgoing: uint8 message by receiving rank of the group, on ``device``.
        incoming: number of bytes by sending rank of the group.
        group: the ranks that call this together; None for a rank alone, which has nothing to exchange.
        device: that the group communicates on.

    Returns:
        The uint8 message by sending rank.
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
    """Flags that the ranks exchange between two optimizer steps: one rank's own, or those of all together.

    ``stops``: number of the signal that asks the run to save and stop, 0 for none. ``saving``: a background save is
    still writing. ``failed``: a background save has failed.
    """

    stops: int = 0
    saving: bool = False
    failed: bool = False


def sync_step(fabric: Fabric, own: StepSync) -> StepSync:
    """Return the flags that any rank has set: one small all-reduce, which the host waits for."""
    return start_step_sync(fabric, own)()


def start_step_sync(fabric: Fabric, own: StepSync) -> Callable[[], StepSync]:
    """Start the all-reduce of :func:`sync_step` and return a function that waits for its result.

    Started before another wait for the device, the result is there when that wait ends.
    """
    flags = to_device_async(torch.tensor([int(flag) for flag in astuple(own)]), fabric.device)
    if fabric.world_size > 1:
        dist.all_reduce(flags, dist.ReduceOp.MAX)

    def result() -> StepSync:
        stops, saving, failed = flags.tolist()
        return StepSync(stops, bool(saving), bool(failed))

    return result
