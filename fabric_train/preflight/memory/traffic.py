"""What the ranks send each other in an optimizer step, and how long that takes over given lines.

A ring over W ranks gathers or reduces n bytes by sending each rank's neighbour (W - 1) / W · n. Over several machines
as much goes through the line that joins a machine to the others, which its devices share.
"""

import math
from dataclasses import dataclass

from fabric_train.preflight.memory.model_layout import REDUCED_BYTES, Layout, Units


@dataclass(frozen=True)
class Collective:
    """Of one kind in a step, among ``num_ranks``: bytes that each rank sends, and those of them and of the other ranks
    that leave the machine.
    """

    what: str
    num_ranks: int
    sent: int
    leaving_machine: int

    def seconds(self, interconnect: float | None, network: float | None) -> float:
        """Return how long it takes at the least, over lines of so many bytes a second in one direction: of a device to
        the others of its machine, and of a machine to the others. None for a line that is not to be counted.
        """
        return max(self.sent / (interconnect or math.inf), self.leaving_machine / (network or math.inf))


def collectives_of_step(units: Units, layout: Layout) -> list[Collective]:
    """Return what a step sends, without the few bytes of losses and counts, and what tensor parallelism sends."""
    copies, shards, total = layout.num_copies, layout.num_shards, units.total
    if not layout.is_sharded:
        sent = 2 * _ring(REDUCED_BYTES * total, copies)
        return [Collective("all-reduce of gradients", copies, sent, _leaving(sent, layout))] if sent else []
    again = 0 if layout.gathers_at_once else units.layer * units.num_layers  # the backward pass gathers layers anew
    passes = layout.accumulation
    if layout.gathers_at_once and layout.name == "fsdp" and not layout.reduces_each:
        passes = 1  # FSDP1 keeps weights gathered for as long as gradients are summed on each rank
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
