"""Which ranks have rows of their own: all, but for those that tensor parallelism has compute each row together."""

from dataclasses import dataclass

from lightning import Fabric


@dataclass(frozen=True)
class DataRanks:
    """Rows are shared out among ``size`` groups of ranks that follow each other; this rank is in number ``rank``. The
    ranks of a group, ``tensor_parallel_size`` in number, are given the same rows.
    """

    size: int
    rank: int
    tensor_parallel_size: int


def data_ranks(fabric: Fabric) -> DataRanks:
    """Return among whom the rows are shared out."""
    together = getattr(fabric.strategy, "tensor_parallel_size", 1)
    return DataRanks(fabric.world_size // together, fabric.global_rank // together, together)
