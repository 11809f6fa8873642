"""The border between two optimizer steps: what any rank wishes there becomes what all ranks do."""

from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from lightning import Fabric

from fabric_train.distributed.host_memory import onto


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
    return ask(fabric, wishes)()


def ask(fabric: Fabric, wishes: Border) -> Callable[[], Border]:
    """Ask all ranks what they wish, as ``agree`` does, but return at once what waits for the answer.

    Asked before something else that the host waits for the device for, the answer is there by then.
    """
    flags = onto(torch.tensor([int(wish) for wish in astuple(wishes)]), fabric.device)
    if fabric.world_size > 1:
        dist.all_reduce(flags, dist.ReduceOp.MAX)

    def answer() -> Border:
        stops, saving, failed = flags.tolist()
        return Border(stops, bool(saving), bool(failed))

    return answer
