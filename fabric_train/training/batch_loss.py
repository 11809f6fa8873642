"""The loss of a batch, as objectives return it, and sums over consecutive parts of its losses."""

from dataclasses import dataclass

import torch

from fabric_train.distributed.ranks import to_device_async


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a batch.

    ``total``, fp64 [], can be differentiated. ``of_tokens``, fp32 [N] without a gradient, are the losses of the targets
    in their order; None if the loss is none of single tokens. ``metrics``, fp64 [metrics] without a gradient, are sums
    like the total; None without metrics. A loss of whole pieces, such as pairs, has their losses in ``of_pieces``, fp64
    [P], and their metrics in ``metrics_of_pieces``, fp64 [metrics, P], both without a gradient. With neither tokens nor
    pieces, the loss is not told apart by source and document.
    """

    total: torch.Tensor
    of_tokens: torch.Tensor | None = None
    metrics: torch.Tensor | None = None
    of_pieces: torch.Tensor | None = None
    metrics_of_pieces: torch.Tensor | None = None


def sum_segments(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the sums of consecutive parts of ``values`` [N, ...]. Their ``lengths`` are int64, also on the CPU."""
    if not len(values):
        return values.new_zeros(len(lengths), *values.shape[1:])
    lengths = to_device_async(lengths, values.device)
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)  # else it reads the lengths, and waits
