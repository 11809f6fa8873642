"""The border between two optimizer steps: what any rank wishes there becomes what all ranks do."""

from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from lightning import Fabric


@dataclass(frozen=True)
class Border:
    """One rank's wishes, or those of all.

    ``stops``: number of the signal that asks the run to save and stop, 0 for none. ``saving``: a save is still being
    written in the background. ``failed``: a background save has failed.
    """

    stops: int = 0
    saving: bool = False
    failed: bool = False


def agree(fabric: Fabric, wishes: Border) -> Border:
    """Return what any rank wishes. All ranks call it together: one small all-reduce, for which the host waits."""
    if fabric.world_size == 1:
        return wishes
    flags = torch.tensor([int(wish) for wish in astuple(wishes)], device=fabric.device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    stops, saving, failed = flags.tolist()
    return Border(stops, bool(saving), bool(failed))
