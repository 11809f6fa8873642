"""Which ranks of a run share a machine."""

from dataclasses import dataclass

import torch
from lightning import Fabric

from fabric_train.distributed.ranks import gather_over_ranks


@dataclass(frozen=True)
class Machines:
    """The machines of a run, in the order of their first ranks."""

    first_ranks: tuple[int, ...]
    """The lowest global rank on each machine."""
    index: int
    """The machine of this process."""
    num_local_ranks: int
    """The number of ranks on the machine of this process."""
    is_first_local_rank: bool
    """Whether this process has the lowest rank on its machine."""

    @property
    def count(self) -> int:
        """The number of machines."""
        return len(self.first_ranks)


def find_machines(fabric: Fabric) -> Machines:
    """Return the machines of the run, as its launcher numbers them. All ranks call this together."""
    node_ranks = gather_over_ranks(fabric, torch.tensor(fabric.node_rank)).tolist()
    first_rank_of_node: dict[int, int] = {}
    for rank, node_rank in enumerate(node_ranks):
        first_rank_of_node.setdefault(node_rank, rank)
    first_ranks = tuple(first_rank_of_node.values())
    own_first_rank = first_rank_of_node[fabric.node_rank]
    return Machines(
        first_ranks=first_ranks,
        index=first_ranks.index(own_first_rank),
        num_local_ranks=node_ranks.count(fabric.node_rank),
        is_first_local_rank=fabric.global_rank == own_first_rank,
    )
