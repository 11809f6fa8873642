"""Memory of a device in each phase of a step, of a machine, and of the disk, in bytes.

Gradients and what is gathered follow from the strategy, by what Fabric and torch do there:

- *single* and *ddp* hold everything; ddp's gradients lie in its buckets from the start.
- *fsdp* and *fsdp2* hold 1 / shards of weights, gradients and optimizer. A pass gathers the unit it computes, the next
  one and what is outside of the layers; a backward pass makes the unit's gradients whole before they are summed over
  the ranks in fp32. With accumulation the whole gradients stay on each rank until the last micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fabric_train.preflight.memory.activations import Activations
from fabric_train.preflight.memory.model_layout import REDUCED_BYTES, Layout, Units

_UNITS_GATHERED = 2  # that which is computed, and the next
_DDP_BUCKET = 25 * 1024 * 1024


@dataclass(frozen=True)
class Phase:
    """What is in memory at one time, by kind."""

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Budget:
    """Bytes. ``phases`` are those of a step on one device, without what the process needs by itself; ``staging`` the
    copy in host memory that a save in the background writes, of one rank; ``checkpoint`` one on the disk.
    """

    phases: tuple[Phase, ...]
    staging: int
    checkpoint: int

    @property
    def most(self) -> Phase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.total)


def make_budget(units: Units, layout: Layout, activations: Activations, saves_in_background: bool) -> Budget:
    """Work out the memory of a run."""
    saved = (layout.held + layout.states) * units.total
    units = units.part(layout.world_size // layout.num_data_ranks)
    shard = 0 if layout.offloads else units.total // layout.num_shards
    held = {"weights": layout.held * shard, "optimizer": layout.states * shard}
    gradients = layout.held * shard
    at_loss = activations.most + REDUCED_BYTES * units.head  # whose gradient comes with the loss, summed in fp32
    at_end = activations.at_end + _beside_gradients(units, layout)
    phases = (
        Phase("loss", {**held, **_at_loss(units, layout, gradients), "activations": at_loss}),
        Phase("backward pass", {**held, **_at_end(units, layout, gradients), "activations": at_end}),
        Phase("optimizer step", {**held, "gradients": gradients}),
    )
    return Budget(phases, saved // layout.world_size if saves_in_background else 0, saved)


def _at_loss(units: Units, layout: Layout, gradients: int) -> dict[str, int]:
    """Between forward and backward pass: of the second micro-batch, if there is one."""
    is_second = layout.accumulation > 1
    if not layout.is_sharded:
        return {"gradients": gradients if is_second or layout.name == "ddp" else 0, "communication": _buckets(layout)}
    summed = _summed(units, layout) or (gradients if is_second else 0)
    return {"gradients": summed, "gathered weights": _gathered(units, layout)}


def _at_end(units: Units, layout: Layout, gradients: int) -> dict[str, int]:
    """While the backward pass is in the first layer, and all other gradients are there."""
    if not layout.is_sharded:
        return {"gradients": gradients, "communication": _buckets(layout)}
    pending = layout.computed * units.rest  # of the head, until the embeddings' come
    working = max(pending + _gradients_of_unit(units.layer, layout), _gradients_of_unit(units.rest, layout))
    return {
        "gradients": max(gradients, _summed(units, layout)),
        "gathered weights": _gathered(units, layout),
        "communication": working,
    }


def _beside_gradients(units: Units, layout: Layout) -> int:
    """What there is of embedding's and head's gradients at the end beside those that are held, or sent.

    Of a tied weight autograd holds back the head's until the embedding's is there, and adds them. DDP copies the sum
    into a bucket.
    """
    if layout.is_sharded:
        return 0
    return layout.held * units.head * (units.is_tied + (layout.name == "ddp"))


def _gathered(units: Units, layout: Layout) -> int:
    number = units.num_layers if layout.gathers_at_once else min(_UNITS_GATHERED, units.num_layers)
    return layout.computed * (units.rest + number * units.layer)


def _summed(units: Units, layout: Layout) -> int:
    """Whole gradients of earlier micro-batches: FSDP1 sums them in the type of the pass, FSDP2 in that of the sum."""
    if not layout.sums_unsharded:
        return 0
    return (REDUCED_BYTES if layout.name == "fsdp2" else layout.computed) * units.total


def _gradients_of_unit(numel: int, layout: Layout) -> int:
    """A unit's gradients, their copy in one piece to be summed, and what comes of it."""
    return numel * (layout.computed + REDUCED_BYTES) + numel * REDUCED_BYTES // layout.num_shards


def _buckets(layout: Layout) -> int:
    """DDP under bf16-true sums a bucket in fp32."""
    return 2 * _DDP_BUCKET if layout.name == "ddp" and layout.held < REDUCED_BYTES else 0
