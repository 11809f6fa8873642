"""Count the bytes on a device in each phase of a step, in host memory, and on the disk.

Gradients and gathered weights depend on the strategy, as Fabric and torch implement it:

- *single* and *ddp* hold everything. ddp's gradients are in its buckets from the start.
- *fsdp* and *fsdp2* hold 1 / shards of weights, gradients and optimizer. A pass gathers the unit that it computes, the
  next one, and everything outside of the layers. A backward pass has the unsharded gradients of a unit before they are
  reduced over the ranks in fp32. With accumulation, unsharded gradients stay on each rank until the last micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fabric_train.preflight.memory.activations import Activations
from fabric_train.preflight.memory.model_layout import REDUCED_BYTES, Layout, Units

_UNITS_GATHERED = 2  # the one that is computed, and the next
_DDP_BUCKET = 25 * 1024 * 1024


@dataclass(frozen=True)
class Phase:
    """The bytes in memory in one phase of a step, by kind."""

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """The bytes of all kinds."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Budget:
    """The bytes that a run needs.

    ``phases`` are those of a step on one device, without the process itself. ``staging`` is the copy in host memory
    that a background save of one rank writes. ``checkpoint`` is one checkpoint on the disk.
    """

    phases: tuple[Phase, ...]
    staging: int
    checkpoint: int

    @property
    def most(self) -> Phase:
        """The phase with the peak."""
        return max(self.phases, key=lambda phase: phase.total)


def make_budget(units: Units, layout: Layout, activations: Activations, saves_in_background: bool) -> Budget:
    """Return the bytes that a run needs."""
    saved = (layout.held + layout.states) * units.total
    units = units.part(layout.world_size // layout.num_data_ranks)
    shard = 0 if layout.offloads else units.total // layout.num_shards
    held = {"weights": layout.held * shard, "optimizer": layout.states * shard}
    gradients = layout.held * shard
    at_loss = activations.most + REDUCED_BYTES * units.head  # the head's gradient comes with the loss, in fp32
    at_end = activations.at_end + _extra_vocabulary_gradients(units, layout)
    phases = (
        Phase("loss", {**held, **_at_loss(units, layout, gradients), "activations": at_loss}),
        Phase("backward pass", {**held, **_at_end(units, layout, gradients), "activations": at_end}),
        Phase("optimizer step", {**held, "gradients": gradients}),
    )
    return Budget(phases, saved // layout.world_size if saves_in_background else 0, saved)


def _at_loss(units: Units, layout: Layout, gradients: int) -> dict[str, int]:
    """Return the bytes between forward and backward pass, of the second micro-batch if there is one."""
    is_second = layout.accumulation > 1
    if not layout.is_sharded:
        return {"gradients": gradients if is_second or layout.name == "ddp" else 0, "communication": _buckets(layout)}
    summed = _summed(units, layout) or (gradients if is_second else 0)
    return {"gradients": summed, "gathered weights": _gathered(units, layout)}


def _at_end(units: Units, layout: Layout, gradients: int) -> dict[str, int]:
    """Return the bytes when the backward pass is in the first layer and all other gradients exist."""
    if not layout.is_sharded:
        return {"gradients": gradients, "communication": _buckets(layout)}
    pending = layout.computed * units.rest  # of the head, until those of the embedding exist
    working = max(pending + _gradients_of_unit(units.layer, layout), _gradients_of_unit(units.rest, layout))
    return {
        "gradients": max(gradients, _summed(units, layout)),
        "gathered weights": _gathered(units, layout),
        "communication": working,
    }


def _extra_vocabulary_gradients(units: Units, layout: Layout) -> int:
    """Return the bytes of further gradients of embedding and head at the end of the backward pass.

    For a tied weight autograd keeps the head's gradient until the embedding's exists, and adds them. DDP copies the sum
    into a bucket.
    """
    if layout.is_sharded:
        return 0
    return layout.held * units.head * (units.is_tied + (layout.name == "ddp"))


def _gathered(units: Units, layout: Layout) -> int:
    number = units.num_layers if layout.gathers_at_once else min(_UNITS_GATHERED, units.num_layers)
    return layout.computed * (units.rest + number * units.layer)


def _summed(units: Units, layout: Layout) -> int:
    """Return the bytes of unsharded gradients of earlier micro-batches: FSDP2 adds them in fp32, FSDP1 as computed."""
    if not layout.sums_unsharded:
        return 0
    return (REDUCED_BYTES if layout.name == "fsdp2" else layout.computed) * units.total


def _gradients_of_unit(numel: int, layout: Layout) -> int:
    """Return the bytes of a unit's gradients, of their flat fp32 copy, and of the reduced shard."""
    return numel * (layout.computed + REDUCED_BYTES) + numel * REDUCED_BYTES // layout.num_shards


def _buckets(layout: Layout) -> int:
    """Return the bytes of DDP's fp32 copies of buckets under bf16-true."""
    return 2 * _DDP_BUCKET if layout.name == "ddp" and layout.held < REDUCED_BYTES else 0
