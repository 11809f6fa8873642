"""The forecast of a run: parameters, memory, traffic and FLOPs; and the check of it that needs no tracing."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fabric_train.cli.argument_types import parse_size, show_size
from fabric_train.cli.errors import InputError
from fabric_train.distributed.memory import device_memory, machine_memory, process_memory
from fabric_train.distributed.precision import compute_dtype, gathered_dtype, weights_dtype
from fabric_train.files.atomic_folder import nearest_existing
from fabric_train.files.requirements import free_bytes
from fabric_train.model.hf_model import ModelShape
from fabric_train.preflight.memory_activations import Activations, MicroBatch, trace_activations
from fabric_train.preflight.memory_layout import (
    REDUCED_BYTES,
    Collective,
    Layout,
    Units,
    bytes_of_states,
    collectives_of_slices,
    collectives_of_step,
    make_layout,
    offloaded_bytes,
    read_units,
)
from fabric_train.training.prepared_run import PreparedRun, StepPlan

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments

DOES_NOT_FIT = "docs/reference/errors.md#does-not-fit"
"""The page for a run that needs more memory than there is."""
_DDP_BUCKET = 25 * 1024 * 1024
CUDA_ALLOWANCE = 2_000_000_000
"""Bytes of a GPU reserved for the CUDA context, NCCL and gaps of the allocator. An allowance, not a measurement."""
LATER_BYTES = 60_000_000
"""Resident bytes of a CPU rank beyond this process's: threads, connections and later imports."""


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
    is_fsdp2 = layout.name == "fsdp2"
    layer = units.layer
    size = layout.computed
    embedding = units.embedding if is_fsdp2 and not units.is_tied else 0  # a unit of its own
    root = units.rest - embedding
    layers = units.num_layers * layer
    summed = 0  # unsharded gradients of earlier micro-batches: FSDP2 adds them in fp32, FSDP1 as computed
    if layout.accumulation > 1 and not layout.reduces_each:
        summed = (REDUCED_BYTES if is_fsdp2 else size) * units.trained
    earlier = summed or (gradients if layout.accumulation > 1 else 0)
    trained_layers = units.trained - units.trained_rest
    trained = max(units.trained, 1)
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
    rest = units.trained_rest
    apart = units.trained_embedding if embedding else 0
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
        units = read_units(shape, self.arguments)
        layout = self.layout()
        plan = self.plan
        activations = trace_activations(shape, self.arguments, batch := self._micro_batch())
        sent = (*collectives_of_step(units.part(plan.world_size // layout.num_gradients), layout),)
        if batch.context_size > 1:
            sent = (*sent, *collectives_of_slices(shape, self.arguments, layout, batch))
        saves_in_background = self.arguments.save.async_save and min(set.union(*self._saved_steps())) < plan.num_steps
        return Forecast(
            units=units,
            layout=layout,
            activations=activations,
            budget=make_budget(units, layout, activations, saves_in_background),
            collectives=sent,
            flops_of_step=shape.flops.count([plan.tokens_per_row]) * plan.rows_per_window / plan.world_size,
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
        held = weights_dtype(precision)
        computed = compute_dtype(precision)
        gathered = gathered_dtype(self.arguments, self.parallelism)
        num_rows = self.arguments.training.micro_batch_size
        context_size = self.arguments.fsdp.context_parallel_size
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


def make_request(run: PreparedRun) -> RunRequest:
    """Return what the forecast of a run needs to know."""
    arguments = run.arguments
    on_gpu = run.devices.accelerator == "cuda"
    given = parse_size(arguments.planning.device_memory or "")
    share_of_machine = machine_memory() // (run.plan.world_size // arguments.device.num_nodes)
    return RunRequest(
        arguments=arguments,
        shapes=(*run.models.values(),) or (run.model,),
        plan=run.plan,
        parallelism=run.devices.parallelism,
        isolates=run.data.isolates,
        on_gpu=on_gpu,
        device_memory=given or (device_memory() if on_gpu else None) or share_of_machine,
        is_elsewhere=arguments.planning.plans_for_others,
        validates=run.data.validation is not None,
    )


def check_memory(run: PreparedRun) -> None:
    """Check what needs no tracing: weights, gradients and optimizer in memory, one checkpoint on the disk."""
    request = make_request(run)
    layout = request.layout()
    ranks = request.plan.world_size // request.arguments.device.num_nodes
    num_parts = layout.num_shards * layout.world_size // layout.num_gradients
    states, _ = bytes_of_states(request.largest, request.arguments)
    if request.largest.adapter:  # each rank has all of it, in fp32
        base = read_units(request.largest, request.arguments).total
        least = layout.held * base // num_parts + 8 * request.largest.num_trained + states
    else:
        least = (layout.held * (request.largest.num_parameters + request.largest.num_trained) + states) // num_parts
    faults = []
    if not layout.offloads and least > request.device_memory:
        faults.append(
            f"weights, gradients and optimizer are {show_size(least)} a rank, and {ranks} ranks have "
            f"{show_size(request.device_memory)} each: --plan true says what would fit ({DOES_NOT_FIT})"
        )
    if faults := [*faults, *faults_of_disk(request, 1)]:
        raise InputError(*faults)


def faults_of_disk(request: RunRequest, number: int) -> list[str]:
    """Return a line if the disk of --output_dir has no room for ``number`` checkpoints of this run, else nothing."""
    layout = request.layout()
    folder = Path(request.arguments.save.output_dir)
    shape = request.largest
    of_states = bytes_of_states(shape, request.arguments)[1]
    has_adapter = shape.adapter is not None  # whose base is not in a checkpoint
    size = (4 * shape.num_trained if has_adapter else layout.held * shape.num_parameters) + of_states
    free = free_bytes(nearest_existing(folder))
    if size * number <= free:
        return []
    fitting = free // size - 2  # besides the best by validation loss and the one being written
    fix = f"give --keep_checkpoints {fitting}, or make room" if fitting > 0 else "make room there"
    fix += " (docs/reference/errors.md#disk-full)"
    checkpoints = "a checkpoint needs" if number == 1 else f"{number} checkpoints, one being written, need"
    return [f"--output_dir {folder}: {checkpoints} {show_size(size * number)}, {show_size(free)} are free; {fix}"]
