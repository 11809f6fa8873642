"""The forecast of a run: parameters, memory, traffic and FLOPs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fabric_train.distributed.memory import process_memory
from fabric_train.distributed.precision import compute_dtype, gathered_dtype, weights_dtype
from fabric_train.model.hf_model import ModelShape
from fabric_train.preflight.memory_activations import Activations, MicroBatch, trace_activations
from fabric_train.preflight.memory_layout import REDUCED_BYTES, Layout, Units, make_layout, offloaded_bytes, read_units
from fabric_train.training.prepared_run import StepPlan

if TYPE_CHECKING:
    from arguments import TrainArguments

_DDP_BUCKET = 25 * 1024 * 1024
CUDA_ALLOWANCE = 2_000_000_000
"""Bytes of a GPU reserved for the CUDA context, NCCL and gaps of the allocator. An allowance, not a measurement."""
LATER_BYTES = 60_000_000
"""Resident bytes of a CPU rank beyond this process's: threads, connections and later imports."""


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a step."""

    what: str
    num_ranks: int
    sent: int  # bytes of each rank
    leaving_machine: int  # bytes from all ranks of a machine

    def seconds(self, interconnect: float | None, network: float | None) -> float:
        """Return the least time in seconds, from bytes per second in one direction; None does not count.

        ``interconnect`` is from a device to the others of its machine, ``network`` from a machine to the others.
        """
        return max(self.sent / (interconnect or math.inf), self.leaving_machine / (network or math.inf))


def collectives_of_step(units: Units, layout: Layout) -> list[Collective]:
    """Return the collectives of a step, without losses and counts (a few bytes) and without tensor parallelism."""
    units = units.reduced_by(layout.name)
    copies, shards, total = layout.num_copies, layout.num_shards, units.total
    if not layout.is_sharded:
        sent = 2 * _ring(REDUCED_BYTES * (units.trained + units.adapter), copies)
        return [Collective("all-reduce of gradients", copies, sent, _leaving(sent, layout))] if sent else []
    again = 0 if layout.gathers_at_once else units.layer * units.num_layers  # the backward pass gathers layers again
    passes = layout.accumulation
    if layout.gathers_at_once and layout.name == "fsdp" and not layout.reduces_each:
        passes = 1  # FSDP1 keeps weights gathered while it accumulates unsharded gradients
    gathered = passes * _ring(layout.computed * (total + again), shards)
    reductions = layout.accumulation if layout.reduces_each else 1
    reduced = reductions * _ring(REDUCED_BYTES * units.trained, shards)
    result = [
        Collective("all-gather of weights", shards, gathered, 0 if copies > 1 else _leaving(gathered, layout)),
        Collective("reduce-scatter of gradients", shards, reduced, 0 if copies > 1 else _leaving(reduced, layout)),
    ]
    if units.adapter:
        result = [each for each in result if each.sent]  # a frozen base has no gradients
        ranks, sent = layout.num_gradients, 2 * _ring(units.adapter_bytes, layout.num_gradients)
        result.append(Collective("all-reduce of the adapter's gradients", ranks, sent, _leaving(sent, layout)))
    if copies > 1 and units.trained:
        sent = reductions * 2 * _ring(REDUCED_BYTES * units.trained // shards, copies)
        result.append(Collective("all-reduce of gradients between machines", copies, sent, shards * sent))
    return result


def _collectives_of_slices(
    shape: ModelShape, arguments: "TrainArguments", layout: Layout, batch: MicroBatch
) -> list[Collective]:
    """Return the exchange of keys and values, and of their gradients in fp32, in a step.

    Layers that are recomputed gather them again. Tensor parallelism divides the heads among the ranks.
    """
    config: Any = shape.config.get_text_config()
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    of_layer = 2 * num_heads // arguments.fsdp.tensor_parallel_size * head_size * batch.length
    numel = of_layer * config.num_hidden_layers * layout.accumulation * (batch.context_size - 1)
    passes = 1 if arguments.fsdp.activation_checkpointing == "none" else 2
    itemsize = (batch.autocast or batch.dtype).itemsize
    is_inside = layout.world_size // layout.num_nodes % arguments.fsdp.ranks_of_rows == 0
    found = (("all-gather of keys and values", passes * itemsize), ("reduce-scatter of their gradients", REDUCED_BYTES))
    return [
        Collective(what, batch.context_size, num_bytes * numel, 0 if is_inside else _leaving(num_bytes * numel, layout))
        for what, num_bytes in found
    ]


def _leaving(sent: int, layout: Layout) -> int:
    return sent if layout.num_nodes > 1 else 0


def _ring(num_bytes: int, num_ranks: int) -> int:
    return num_bytes * (num_ranks - 1) // num_ranks


@dataclass(frozen=True)
class Phase:
    """The bytes in memory in one phase of a step, by kind."""

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Budget:
    phases: tuple[Phase, ...]  # of a step on one device, without the process itself
    staging: int  # the copy in host memory that a background save of one rank writes
    checkpoint: int  # one, on the disk

    @property
    def most(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)


def make_budget(units: Units, layout: Layout, activations: Activations, saves_in_background: bool) -> Budget:
    """Return the bytes that a run needs."""
    # a checkpoint of an adapter has no copy of its base
    saved = layout.held * (units.trained if units.adapter else units.total) + units.saved_states
    saved += units.adapter_bytes + units.saved_adapter_states
    units = units.reduced_by(layout.name).part(layout.world_size // layout.num_gradients)
    whole, trained, states = (
        0 if layout.offloads else number // layout.num_shards for number in (units.total, units.trained, units.states)
    )
    held = {"weights": layout.held * whole + units.adapter_bytes, "optimizer": states + units.adapter_states}
    gradients = layout.held * trained
    phases = _sharded_phases if layout.is_sharded else _whole_phases
    found = [Phase(phase.name, {**held, **phase.parts}) for phase in phases(units, layout, activations, gradients)]
    found.append(Phase("optimizer step", {**held, "gradients": gradients}))
    found = [_with_adapter(phase, units, layout) for phase in found]
    return Budget(tuple(found), saved // layout.world_size if saves_in_background else 0, saved)


def _with_adapter(phase: Phase, units: Units, layout: Layout) -> Phase:
    """Add an adapter's gradients, all of them on each rank, the vector that averages them, a dequantized weight."""
    gradients = 0 if phase.name == "loss" and layout.accumulation == 1 else units.adapter_bytes
    averaged = units.adapter_bytes if layout.is_sharded and phase.name == "end of backward" else 0
    dequantized = 0 if phase.name == "optimizer step" else layout.computed * units.dequantized
    added = {"gradients": gradients, "communication": averaged, "activations": dequantized}
    return replace(
        phase, parts={**phase.parts} | {kind: phase.parts.get(kind, 0) + size for kind, size in added.items()}
    )


def _whole_phases(units: Units, layout: Layout, activations: Activations, gradients: int) -> list[Phase]:
    """Return the phases of ranks that hold the whole model.

    The head's gradient comes with the loss, in fp32. For a tied weight autograd keeps it until the embedding's exists,
    and adds them. DDP copies the sum into a bucket, and has fp32 copies of buckets under bf16-true.
    """
    is_ddp = layout.name == "ddp"
    buckets = 2 * _DDP_BUCKET if is_ddp and layout.held < REDUCED_BYTES else 0
    at_loss = gradients if layout.accumulation > 1 or is_ddp else 0
    found = (
        ("loss", at_loss, activations.most + REDUCED_BYTES * units.head),
        ("backward pass", gradients, activations.at_end + layout.held * units.head * (units.is_tied + is_ddp)),
    )
    return [
        Phase(name, {"gradients": held, "communication": buckets, "activations": others})
        for name, held, others in found
    ]


def _sharded_phases(units: Units, layout: Layout, activations: Activations, gradients: int) -> list[Phase]:
    """Return the phases of ranks that gather what they compute: of each, the moment with the most.

    The moments of the backward pass are those in the last layer, which comes first, in the one before, in the first
    layer, and those in which the gradients of a unit are reduced.
    """
    is_fsdp2, layer, size = layout.name == "fsdp2", units.layer, layout.computed
    embedding = units.embedding if is_fsdp2 and not units.is_tied else 0  # a unit of its own
    root = units.rest - embedding
    layers = units.num_layers * layer
    summed = 0  # unsharded gradients of earlier micro-batches: FSDP2 adds them in fp32, FSDP1 as computed
    if layout.accumulation > 1 and not layout.reduces_each:
        summed = (REDUCED_BYTES if is_fsdp2 else size) * units.trained
    earlier = summed or (gradients if layout.accumulation > 1 else 0)
    trained_layers, trained = units.trained - units.trained_rest, max(units.trained, 1)
    later = max(earlier, gradients * max(0, trained_layers - units.trained_layer) // trained)
    pending = REDUCED_BYTES * units.trained_layer if is_fsdp2 and units.num_layers > 1 else 0

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
    reducing = _reducing(units.trained_layer, layout)
    before_last = activations.at_last - activations.kept // units.num_layers
    backward = [
        moment("backward pass", root + two, earlier, 0, activations.at_last),
        moment("backward pass", root + one_less, earlier, reducing, activations.after_last),
        moment("backward pass", root + two, earlier, pending, before_last),
        moment("backward pass", root + layer + embedding, later, pending, activations.at_end),
        moment("backward pass", root + embedding, later, reducing, activations.after_end),
    ]
    # at the end there are the gradients of everything outside of the layers; a tied one is added to the head's
    later = max(earlier, gradients * trained_layers // trained)
    if not units.trained_rest:
        end = [moment("end of backward", root, later, 0, 0)]
        return [max(moments, key=lambda phase: phase.total) for moments in (loss, backward, end)]
    rest, apart = units.trained_rest, units.trained_embedding if embedding else 0
    flat = 0 if is_fsdp2 else size * rest
    end = [moment("end of backward", root, later, flat, size * (rest + units.head * units.is_tied))]
    if apart:
        end.append(moment("end of backward", root, later, _reducing(apart, layout), size * rest))
    end.append(moment("end of backward", 0, later, _reducing(rest - apart, layout), size * (rest - apart)))
    return [max(moments, key=lambda phase: phase.total) for moments in (loss, backward, end)]


def _reducing(numel: int, layout: Layout) -> int:
    """Return the bytes that reducing the gradients of a unit takes, besides the gradients themselves.

    A copy in fp32, or fsdp's flat gradient in fp32, and this rank's part, in fp32 and in the type of the weights.
    """
    return REDUCED_BYTES * numel + (REDUCED_BYTES + layout.held) * numel // layout.num_shards


@dataclass(frozen=True)
class Forecast:
    units: Units
    layout: Layout
    activations: Activations
    budget: Budget
    collectives: tuple[Collective, ...]
    flops_of_step: float
    process: int  # bytes of a process without a model: on the GPU, or resident on CPU
    offloaded: int  # bytes that ``--cpu_offload`` keeps in a rank's host memory
    on_gpu: bool

    @property
    def device_bytes(self) -> int:
        """The peak of a rank on its device: GPU memory, or resident memory on CPU."""
        return self.process + self.budget.most.total + (0 if self.on_gpu else self.budget.staging)

    @property
    def host_bytes(self) -> int:
        """The peak of all ranks of one machine in host memory."""
        of_rank = self.device_bytes
        if self.on_gpu:
            of_rank = process_memory() + self.budget.staging + self.offloaded
        return of_rank * (self.layout.world_size // self.layout.num_nodes)


@dataclass(frozen=True)
class RunRequest:
    arguments: "TrainArguments"
    shapes: tuple[ModelShape, ...]  # the model with the parts that train, in each phase that has other ones
    plan: StepPlan
    parallelism: str
    isolates: bool
    on_gpu: bool
    device_memory: int  # bytes that a rank may use: of its GPU, or its share of host memory on CPU
    is_elsewhere: bool  # planned for other machines than this one
    validates: bool = True  # has validation rows

    @property
    def largest(self) -> ModelShape:
        """The model of the phase that trains the most."""
        return max(self.shapes, key=lambda shape: shape.num_trained)

    def layout(self) -> Layout:
        return make_layout(self.arguments, self.plan, self.parallelism)

    def forecast(self) -> Forecast:
        """Compute the forecast without allocating the model; a RuntimeError if it reads the content of tensors.

        If phases train other parts, it is of the phase that needs the most memory of a device.
        """
        return max((self._forecast(shape) for shape in self.shapes), key=lambda each: each.device_bytes)

    def _forecast(self, shape: ModelShape) -> Forecast:
        units, layout, plan = read_units(shape, self.arguments), self.layout(), self.plan
        activations = trace_activations(shape, self.arguments, batch := self._micro_batch())
        sent = (*collectives_of_step(units.part(plan.world_size // layout.num_gradients), layout),)
        if batch.context_size > 1:
            sent = (*sent, *_collectives_of_slices(shape, self.arguments, layout, batch))
        saves_in_background = self.arguments.save.async_save and min(set.union(*self._saved_steps())) < plan.num_steps
        return Forecast(
            units=units,
            layout=layout,
            activations=activations,
            budget=make_budget(units, layout, activations, saves_in_background),
            collectives=sent,
            flops_of_step=shape.flops.of([plan.tokens_per_row]) * plan.rows_per_window / plan.world_size,
            offloaded=offloaded_bytes(shape, layout, units.states),
            process=CUDA_ALLOWANCE if self.on_gpu else process_memory() + LATER_BYTES,
            on_gpu=self.on_gpu,
        )

    def num_checkpoints(self) -> int:
        """Return the number of checkpoints on the disk at the end of the run."""
        (saved, evaluated), keep = self._saved_steps(), self.arguments.save.keep_checkpoints
        number = len(saved) + bool(evaluated - saved)  # the best by validation loss is kept too
        return number if keep is None else min(number, keep + 1)

    def _saved_steps(self) -> tuple[set[int], set[int]]:
        """Return the steps that are saved at intervals, and those that ``--save_best`` may save."""
        saves_best = self.arguments.save.save_best and self.validates
        evaluated = self._steps_every(self.arguments.evaluation.eval_step_interval) if saves_best else set()
        return self._steps_every(self.arguments.save.save_step_interval), evaluated

    def _steps_every(self, interval: int) -> set[int]:
        last = self.plan.num_steps
        return {*range(interval, last + 1, interval), last} | self.plan.epoch_ends()

    def _micro_batch(self) -> MicroBatch:
        precision = self.arguments.model.precision
        held, computed = weights_dtype(precision), compute_dtype(precision)
        gathered = gathered_dtype(self.arguments, self.parallelism)
        num_rows, context_size = self.arguments.training.micro_batch_size, self.arguments.fsdp.context_parallel_size
        length = self.plan.tokens_per_row
        if context_size > 1:  # a slice of all rows together
            num_rows, length = 1, math.ceil(num_rows * length / context_size)
        return MicroBatch(
            num_rows=num_rows,
            length=length,
            context_size=context_size,
            dtype=gathered or held,
            autocast=computed if computed != held and gathered is None else None,
            has_borders=self.isolates,
            on_gpu=self.on_gpu,
            by_unit=self.layout().is_sharded,
        )
