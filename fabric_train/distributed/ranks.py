"""Exchange data between the ranks of a run, and find out which ranks read the same rows.

Functions that exchange data are collective: every rank must call them, in the same order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from lightning import Fabric

from fabric_train.cli.errors import InputError, RunError, describe_os_error

_MAX_TEXT_BYTES = 2000  # longer texts are truncated


def to_device_async(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a small tensor on a device; the host does not wait for the device's pending work."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # the host would wait for a copy from unpinned memory
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class DataRanks:
    """The groups of ranks that read different rows. A group consists of consecutive ranks that read the same rows."""

    size: int
    """The number of groups."""
    rank: int
    """The group of this process."""
    group_size: int
    """The number of ranks in each group."""
    num_gradients: int
    """The number of different gradients: each rank of a context-parallel group has that of its part of the rows,
    all ranks of a tensor-parallel group have the same."""
    gradient_index: int
    """The index of this process's gradient among the different ones."""


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
        gradient_index=fabric.global_rank // tensor_parallel_size,
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
    """Return every data rank's tensor, stacked: [data ranks, ...]; the first rank of each group provides it."""
    return gather_over_ranks(fabric, tensor)[:: data_ranks(fabric).group_size]


def sum_over_data_ranks(fabric: Fabric, tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the data ranks' tensors on this rank's device; the first rank of each group adds its tensor."""
    is_first_of_group = fabric.global_rank % data_ranks(fabric).group_size == 0
    addend = tensor if is_first_of_group else torch.zeros_like(tensor)
    total = to_device_async(addend, fabric.device).clone()  # all_reduce works in place
    if fabric.world_size > 1:
        dist.all_reduce(total)
    return total


def first_text(fabric: Fabric, text: str | None) -> str | None:
    """Return on all ranks the text of the lowest rank that has one, cut to 2000 bytes; None if no rank has a text."""
    lowest_rank = _find_lowest_rank(fabric, is_candidate=bool(text))
    if lowest_rank is None:
        return None

    # the bytes of that rank are summed with the zeros of the others
    text_bytes = torch.zeros(_MAX_TEXT_BYTES, dtype=torch.uint8, device=fabric.device)
    if text and lowest_rank == fabric.global_rank:
        encoded = text.encode()[:_MAX_TEXT_BYTES]
        text_bytes[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    if fabric.world_size > 1:
        dist.all_reduce(text_bytes)
    return bytes(text_bytes.tolist()).rstrip(b"\0").decode(errors="ignore")


def run_together(
    fabric: Fabric,
    action: Callable[[], object],
    *,
    runs: bool = True,
    describe: Callable[[OSError], str] = describe_os_error,
) -> None:
    """Run an action on some ranks; if it fails, raise on all ranks the error of the lowest rank on which it failed.

    If only the rank on which it failed raised the error, the others would wait for that rank in the next collective.

    Args:
        fabric: The run's Fabric.
        action: Raises an InputError, a RunError or an OSError if it fails. It must not exchange data between ranks.
        runs: Whether this rank runs the action; the other ranks wait until it is done.
        describe: Returns the message of the RunError that stands for an OSError.

    Raises:
        InputError: The action raised it on some rank.
        RunError: The action raised it, or an OSError, on some rank.
    """
    failure: InputError | RunError | None = None
    if runs:
        try:
            action()
        except OSError as error:
            failure = RunError(describe(error))
        except (InputError, RunError) as error:
            failure = error
    lowest_rank = _find_lowest_rank(fabric, is_candidate=failure is not None)
    if lowest_rank is None:
        return
    failure = fabric.broadcast(failure, src=lowest_rank)
    assert failure is not None
    raise failure


def _find_lowest_rank(fabric: Fabric, *, is_candidate: bool) -> int | None:
    """Return on all ranks the lowest rank with ``is_candidate``; None if there is none. The host waits for it."""
    candidate = fabric.global_rank if is_candidate else fabric.world_size  # the world size stands for none
    lowest_rank = torch.tensor(candidate, device=fabric.device)
    if fabric.world_size > 1:
        dist.all_reduce(lowest_rank, dist.ReduceOp.MIN)
    return None if lowest_rank == fabric.world_size else int(lowest_rank)


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
    """The flags that ranks exchange once per step: this rank's, or after the exchange the maximum over all ranks."""

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
