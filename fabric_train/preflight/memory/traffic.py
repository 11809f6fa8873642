"""Count the bytes that ranks send in an optimizer step, and the time that this takes.

In a ring of W ranks that gathers or reduces n bytes, each rank sends (W - 1) / W · n to its neighbour. With several
machines the same number of bytes leaves each machine, over a link that its devices share.
"""

import math
from dataclasses import dataclass

from fabric_train.preflight.memory.model_layout import REDUCED_BYTES, Layout, Units


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a step, among ``num_ranks``.

    ``sent`` is the bytes that each rank sends, ``leaving_machine`` those that leave a machine from all its ranks.
    """

    what: str
    num_ranks: int
    sent: int
    leaving_machine: int

    def seconds(self, interconnect: float | None, network: float | None) -> float:
        """Return the least time in seconds.

        Args:
            interconnect: bytes per second in one direction from a device to the others of its machine; None: ignore.
            network: the same from a machine to the others; None: ignore.
        """
        return max(self.sent / (interconnect or math.inf), self.leaving_machine / (network or math.inf))


def collectives_of_step(units: Units, layout: Layout) -> list[Collective]:
    """Return the collectives of a step, without losses and counts (a few bytes) and without tensor parallelism."""
    copies, shards, total = layout.num_copies, layout.num_shards, units.total
    if not layout.is_sharded:
        sent = 2 * _ring(REDUCED_BYTES * total, copies)
        return [Collective("all-reduce of gradients", copies, sent, _leaving(sent, layout))] if sent else []
    again = 0 if layout.gathers_at_once else units.layer * units.num_layers  # the backward pass gathers layers again
    passes = layout.accumulation
    if layout.gathers_at_once and layout.name == "fsdp" and not layout.reduces_each:
        passes = 1  # FSDP1 keeps weights gathered while it accumulates unsharded gradients
    gathered = passes * _ring(layout.computed * (total + again), shards)
    reductions = layout.accumulation if layout.reduces_each else 1
    reduced = reductions * _ring(REDUCED_BYTES * total, shards)
    result = [
        Collective("all-gather of weights", shards, gathered, 0 if copies > 1 else _leaving(gathered, layout)),
        Collective("reduce-scatter of gradients", shards, reduced, 0 if copies > 1 else _leaving(reduced, layout)),
    ]
    if copies > 1:
        sent = reductions * 2 * _ring(REDUCED_BYTES * total // shards, copies)
        result.append(Collective("all-reduce of gradients between machines", copies, sent, shards * sent))
    return result


def _leaving(sent: int, layout: Layout) -> int:
    return sent if layout.num_nodes > 1 else 0


def _ring(num_bytes: int, num_ranks: int) -> int:
    return num_bytes * (num_ranks - 1) // num_ranks
