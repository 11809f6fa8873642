"""Exchange what the ranks know of a step in one all-reduce, and read it in one place, before the optimizer's step."""

from dataclasses import astuple, dataclass

import torch
from lightning import Fabric

from fabric_train.distributed.collectives import StepSync, data_ranks, gather_over_ranks
from fabric_train.distributed.host_memory import to_device_async
from fabric_train.training.loss import LocalLoss, WindowLoss


@dataclass(frozen=True)
class StepReport:
    """What all ranks know of a step before the optimizer takes it. Tensors are on the CPU.

    Attributes:
        loss: The losses of the window's micro-batches.
        of_pieces: Losses of the pieces in this rank's micro-batches, fp64 [P].
        of_sources: Mean loss of each source in the window; None for one without supervised tokens.
        grad_norm: Norm of the gradient before clipping, fp64 [].
        num_tokens: Number of the window's tokens, without padding.
        flops: Model FLOPs of these tokens.
        sync: The flags that any rank has set.
    """

    loss: WindowLoss
    of_pieces: torch.Tensor
    of_sources: list[float | None]
    grad_norm: torch.Tensor
    num_tokens: int
    flops: float
    sync: StepSync


def exchange_step(
    fabric: Fabric, loss: LocalLoss, grad_norm: torch.Tensor, num_tokens: int, flops: float, own: StepSync
) -> StepReport:
    """Exchange this rank's numbers with the other ranks'. The host waits for the device, which it does once a step.

    Args:
        fabric: All ranks call this together.
        loss: Of this rank's micro-batches.
        grad_norm: The same on all ranks, fp64 [] on the device.
        num_tokens: Number of tokens in this rank's micro-batches, without padding.
        flops: Their model FLOPs.
        own: This rank's flags.
    """
    ranks, sizes = data_ranks(fabric), [len(loss.summed), len(loss.of_sources), len(loss.of_sources), 2]
    flags = torch.tensor([num_tokens, flops, *astuple(own)], dtype=torch.float64)
    on_host = torch.cat([loss.tokens_of_sources, flags])
    row = torch.cat([loss.summed, loss.of_sources, to_device_async(on_host, fabric.device)])
    by_rank = gather_over_ranks(fabric, row)
    is_there = loss.of_pieces.device == grad_norm.device
    of_pieces = loss.of_pieces if is_there else grad_norm.new_zeros(0)
    parts = [by_rank.flatten(), loss.num_supervised.flatten().double(), grad_norm.reshape(1), of_pieces]
    numbers = torch.cat(parts).cpu()  # the only place in a step where the host waits for the device
    gathered, num_supervised, norm, of_pieces = numbers.split([part.numel() for part in parts])
    gathered = gathered.view(by_rank.shape)
    of_data_ranks = gathered[:: ranks.tensor_parallel_size, : sum(sizes)].split(sizes, dim=1)
    summed, (nats, tokens, work) = of_data_ranks[0], (part.sum(dim=0) for part in of_data_ranks[1:])
    all_tokens, all_flops = work.tolist()
    stop_signal, is_saving, save_failed = gathered[:, sum(sizes) :].amax(dim=0).tolist()
    by_source = zip(nats.tolist(), tokens.tolist(), strict=True)
    return StepReport(
        loss=WindowLoss(summed.contiguous(), num_supervised.long().view(loss.num_supervised.shape)),
        of_pieces=of_pieces if is_there else loss.of_pieces,
        of_sources=[total / count if count else None for total, count in by_source],
        grad_norm=norm[0],
        num_tokens=int(all_tokens),
        flops=all_flops,
        sync=StepSync(int(stop_signal), bool(is_saving), bool(save_failed)),
    )
