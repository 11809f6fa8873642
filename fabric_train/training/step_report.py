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
        grad_norm: Norm of the gradient before clipping, fp64 [].
        num_tokens: Number of the window's tokens, without padding.
        flops: Model FLOPs of these tokens.
        sync: The flags that any rank has set.
    """

    loss: WindowLoss
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
    ranks, batches = data_ranks(fabric), len(loss.summed)
    on_host = torch.tensor([num_tokens, flops, *astuple(own)], dtype=torch.float64)
    row = torch.cat([loss.summed, to_device_async(on_host, fabric.device)])
    by_rank = gather_over_ranks(fabric, row)
    parts = [by_rank.flatten(), loss.num_supervised.flatten().double(), grad_norm.reshape(1)]
    numbers = torch.cat(parts).cpu()  # the only place in a step where the host waits for the device
    gathered, num_supervised, norm = numbers.split([part.numel() for part in parts])
    gathered = gathered.view(by_rank.shape)
    of_data_ranks = gathered[:: ranks.tensor_parallel_size]
    all_tokens, all_flops = of_data_ranks[:, batches : batches + 2].sum(dim=0).tolist()
    stop_signal, is_saving, save_failed = gathered[:, batches + 2 :].amax(dim=0).tolist()
    return StepReport(
        loss=WindowLoss(of_data_ranks[:, :batches].contiguous(), num_supervised.long().view(loss.num_supervised.shape)),
        grad_norm=norm[0],
        num_tokens=int(all_tokens),
        flops=all_flops,
        sync=StepSync(int(stop_signal), bool(is_saving), bool(save_failed)),
    )
