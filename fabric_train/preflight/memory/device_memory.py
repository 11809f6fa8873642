"""Count the bytes on a device in each phase of a step, in host memory, and on the disk.

Gradients and gathered weights depend on the strategy, as Fabric and torch implement it:

- *single* and *ddp* hold everything. ddp's gradients are in its buckets from the start.
- *fsdp* and *fsdp2* hold 1 / shards of weights, gradients and optimizer. What is outside of the layers is gathered from
  the forward to the backward pass, in fsdp2 without the input embedding, which is a unit of its own. A backward pass
  gathers a layer while the one before computes. The gradients of a unit are copied into one fp32 tensor, which is
  reduced over the ranks. fsdp2 keeps that tensor, and the buffer of a gathered unit, until the next unit needs one.
  With accumulation, unsharded gradients stay on each rank until the last micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fabric_train.preflight.memory.activations import Activations
from fabric_train.preflight.memory.model_layout import REDUCED_BYTES, Layout, Units

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
    phases = _sharded_phases if layout.is_sharded else _whole_phases
    found = [Phase(phase.name, {**held, **phase.parts}) for phase in phases(units, layout, activations, gradients)]
    step = Phase("optimizer step", {**held, "gradients": gradients})
    return Budget((*found, step), saved // layout.world_size if saves_in_background else 0, saved)


def _whole_phases(units: Units, layout: Layout, activations: Activations, gradients: int) -> list[Phase]:
    """Return the phases of ranks that hold the whole model."""
    is_second = layout.accumulation > 1
    at_loss = {
        "gradients": gradients if is_second or layout.name == "ddp" else 0,
        "communication": _buckets(layout),
        "activations": activations.most
        + REDUCED_BYTES * units.head,  # the head's gradient comes with the loss, in fp32
    }
    at_end = {
        "gradients": gradients,
        "communication": _buckets(layout),
        "activations": activations.at_end + _extra_vocabulary_gradients(units, layout),
    }
    return [Phase("loss", at_loss), Phase("backward pass", at_end)]


def _sharded_phases(units: Units, layout: Layout, activations: Activations, gradients: int) -> list[Phase]:
    """Return the phases of ranks that gather what they compute: of each, the moment with the most.

    The moments of the backward pass are those in the last layer, which comes first, in the one before, in the first
    layer, and those in which the gradients of a unit are reduced.
    """
    is_fsdp2, layer, size = layout.name == "fsdp2", units.layer, layout.computed
    embedding = units.embedding if is_fsdp2 and not units.is_tied else 0  # a unit of its own
    root = units.rest - embedding
    layers = units.num_layers * layer
    summed = _summed(units, layout)  # of earlier micro-batches
    earlier = summed or (gradients if layout.accumulation > 1 else 0)
    later = max(earlier, gradients * (layers - layer) // units.total)
    pending = REDUCED_BYTES * layer if is_fsdp2 and units.num_layers > 1 else 0

    def moment(name: str, gathered: int, gradients: int, communication: int, activations: int) -> Phase:
        if layout.gathers_at_once:
            gathered = max(gathered, layers + root)
        kinds = {"gradients": gradients, "gathered weights": size * gathered, "communication": communication}
        return Phase(name, {**kinds, "activations": activations})

    two = min(2, units.num_layers) * layer
    one_less = two - layer
    loss = [
        moment("loss", root + layer * is_fsdp2, earlier, 0, activations.most),
        moment("loss", root + layer, earlier, 0, activations.at_head),
    ]
    reducing = _reducing(layer, layout)
    before_last = activations.at_last - activations.kept // units.num_layers
    backward = [
        moment("backward pass", root + two, earlier, 0, activations.at_last),
        moment("backward pass", root + one_less, earlier, reducing, activations.after_last),
        moment("backward pass", root + two, earlier, pending, before_last),
        moment("backward pass", root + layer + embedding, later, pending, activations.at_end),
        moment("backward pass", root + embedding, later, reducing, activations.after_end),
    ]
    # at the end there are the gradients of everything outside of the layers; a tied one is added to the head's
    later = max(earlier, gradients * layers // units.total)
    flat = 0 if is_fsdp2 else size * root
    end = [moment("end of backward", root, later, flat, size * (units.rest + units.head * units.is_tied))]
    if is_fsdp2 and embedding:
        end.append(moment("end of backward", root, later, _reducing(embedding, layout), size * units.rest))
    end.append(moment("end of backward", 0, later, _reducing(root, layout), size * root))
    return [max(moments, key=lambda phase: phase.total) for moments in (loss, backward, end)]


def _reducing(numel: int, layout: Layout) -> int:
    """Return the bytes that reducing the gradients of a unit takes, besides the gradients themselves.

    These are a copy in fp32, or fsdp's flat gradient if they are fp32 already, and the part that this rank gets, in
    fp32 and then in the type of the weights.
    """
    return REDUCED_BYTES * numel + (REDUCED_BYTES + layout.held) * numel // layout.num_shards


def _extra_vocabulary_gradients(units: Units, layout: Layout) -> int:
    """Return the bytes of further gradients of embedding and head at the end of the backward pass.

    For a tied weight autograd keeps the head's gradient until the embedding's exists, and adds them. DDP copies the sum
    into a bucket.
    """
    return layout.held * units.head * (units.is_tied + (layout.name == "ddp"))


def _summed(units: Units, layout: Layout) -> int:
    """Return the bytes of unsharded gradients of earlier micro-batches: FSDP2 adds them in fp32, FSDP1 as computed."""
    if not layout.sums_unsharded:
        return 0
    return (REDUCED_BYTES if layout.name == "fsdp2" else layout.computed) * units.total


def _buckets(layout: Layout) -> int:
    """Return the bytes of DDP's fp32 copies of buckets under bf16-true."""
    return 2 * _DDP_BUCKET if layout.name == "ddp" and layout.held < REDUCED_BYTES else 0
