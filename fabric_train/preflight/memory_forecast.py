"""Forecast a run's parameters, memory, traffic and FLOPs; and check its memory without tracing."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
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
    ADAPTER_BYTES,
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
from fabric_train.preflight.memory_objective import TracedPolicy, TracedTeacher
from fabric_train.preflight.memory_samplers import PLANNED_SAMPLERS
from fabric_train.preflight.memory_sampling import PromptTokens, SampledRun, SamplingForecast
from fabric_train.preflight.memory_teacher import (
    TeacherForecast,
    TeacherPass,
    forecast_base,
    forecast_base_pass,
    forecast_pass,
    forecast_teacher,
)
from fabric_train.rollouts.prompts import Prompts
from fabric_train.teacher_states.stored import StoredStates
from fabric_train.training.live_reference import find_base_as_reference
from fabric_train.training.prepared_run import FrozenModel, FrozenRole, PreparedRun, is_evaluated
from fabric_train.training.step_plan import StepPlan

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments

DOES_NOT_FIT = "docs/reference/errors.md#does-not-fit"
"""The page for a run that needs more memory than is available."""
_DDP_BUCKET = 25 * 1024 * 1024
_FROZEN_PASSES: dict[FrozenRole, str] = {"teacher": "teacher's pass", "reference": "reference's pass"}
"""The phase of a step in which a frozen model reads the rows, by its role."""
SAMPLING = "sampling"
"""The phase of a step in which completions are sampled."""
CUDA_ALLOWANCE = 2_000_000_000
"""The bytes of a GPU that are set aside for the CUDA context, NCCL and gaps of the allocator. This is not measured."""
LATER_BYTES = 60_000_000
"""The resident bytes of a CPU rank in addition to this process's: threads, connections and later imports."""


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


def make_budget(
    units: Units,
    layout: Layout,
    activations: Activations,
    saves_in_background: bool,
    teacher: TeacherForecast | None = None,
    teacher_pass: TeacherPass | None = None,
    sampling: SamplingForecast | None = None,
) -> Budget:
    """Return the bytes that a run needs, with a ``teacher``, the forward pass of a live one, and ``sampling``."""
    # a checkpoint of an adapter has no copy of its base
    num_saved = units.trained if units.adapter else units.total
    checkpoint = layout.stored_itemsize * num_saved + units.saved_states
    checkpoint += units.adapter_bytes + units.saved_adapter_states
    staging = checkpoint // layout.world_size if saves_in_background else 0

    # what a rank holds throughout the step, on its device
    units = units.reduced_by(layout.name).part(layout.world_size // layout.num_gradients)
    weights = 0
    gradients = 0
    states = 0
    if not layout.offloads:
        weights = layout.stored_itemsize * (units.total // layout.num_shards)
        gradients = layout.stored_itemsize * (units.trained // layout.num_shards)
        states = units.states // layout.num_shards
    constant_parts = {
        "weights": weights + units.adapter_bytes,
        "optimizer": states + units.adapter_states,
    }
    if teacher is not None and teacher.device_bytes > 0:
        constant_parts[teacher.role] = teacher.device_bytes

    # and what each phase adds to it
    step_phases = _sharded_phases if layout.is_sharded else _whole_phases
    phases = step_phases(units, layout, activations, gradients)
    if teacher is not None and teacher_pass is not None:
        phases.insert(0, _phase_of_teacher(_FROZEN_PASSES[teacher.role], teacher_pass, phases[0]))
    if sampling is not None:
        constant_parts |= sampling.constant_bytes
        kept_gradients = 0
        if layout.name == "ddp":  # it keeps its buckets
            kept_gradients = gradients + units.adapter_bytes
        phases.insert(0, _phase_of_sampling(sampling, kept_gradients))
    optimizer = constant_parts["optimizer"] + units.updating
    phases.append(Phase("optimizer step", {"gradients": gradients, "optimizer": optimizer}))
    phases = [Phase(phase.name, {**constant_parts, **phase.parts}) for phase in phases]
    phases = [_with_adapter(phase, units, layout) for phase in phases]
    return Budget(tuple(phases), staging, checkpoint)


def _phase_of_sampling(sampling: SamplingForecast, gradients: int) -> Phase:
    """Return the phase of sampling, which comes first in a step, at its moment with the most bytes."""
    moment = max(sampling.moments, key=lambda moment: sum(moment.values()))
    return Phase(SAMPLING, {"gradients": gradients, **moment})


def _phase_of_teacher(name: str, teacher_pass: TeacherPass, loss_phase: Phase) -> Phase:
    """Return the forward pass of a teacher or a reference, which comes first in a micro-batch.

    There are the gradients of earlier micro-batches.
    """
    parts = {
        **loss_phase.parts,
        "gathered weights": teacher_pass.gathered_bytes,
        "activations": teacher_pass.activation_bytes,
    }
    return Phase(name, parts)


def _with_adapter(phase: Phase, units: Units, layout: Layout) -> Phase:
    """Add an adapter's gradients, all of them on each rank, the vector that averages them, a dequantized weight."""
    if phase.name == SAMPLING:  # ``make_budget`` has counted its adapter
        return phase
    is_frozen_pass = phase.name in _FROZEN_PASSES.values()
    # while a loss is computed, there are only the gradients of earlier micro-batches
    has_gradients = not (is_frozen_pass or phase.name == "loss") or layout.accumulation > 1
    is_averaging = layout.is_sharded and phase.name == "end of backward"
    is_computing = not (is_frozen_pass or phase.name == "optimizer step")
    added = {
        "gradients": units.adapter_bytes if has_gradients else 0,
        "communication": units.adapter_bytes if is_averaging else 0,
        "activations": layout.pass_itemsize * units.dequantized if is_computing else 0,
    }
    parts = dict(phase.parts)
    for kind, size in added.items():
        parts[kind] = parts.get(kind, 0) + size
    return replace(phase, parts=parts)


def _whole_phases(units: Units, layout: Layout, activations: Activations, gradients: int) -> list[Phase]:
    """Return the phases of ranks that hold the full model.

    The head's gradient is computed with the loss, in fp32. For a tied weight, autograd keeps it until the embedding's
    exists, and adds both. DDP copies the sum into a bucket, and has fp32 copies of buckets under bf16-true.
    """
    is_ddp = layout.name == "ddp"
    buckets = 2 * _DDP_BUCKET if is_ddp and layout.stored_itemsize < REDUCED_BYTES else 0
    # gradients of earlier micro-batches; DDP has its buckets from the start
    gradients_at_loss = gradients if layout.accumulation > 1 or is_ddp else 0
    head_gradient = REDUCED_BYTES * units.head
    num_head_gradients = int(units.is_tied) + int(is_ddp)  # autograd's, and the one in DDP's bucket
    head_gradients = layout.stored_itemsize * units.head * num_head_gradients
    return [
        Phase(
            "loss",
            {
                "gradients": gradients_at_loss,
                "communication": buckets,
                "activations": activations.most + head_gradient,
            },
        ),
        Phase(
            "backward pass",
            {
                "gradients": gradients,
                "communication": buckets,
                "activations": activations.at_end + head_gradients,
            },
        ),
    ]


def _sharded_phases(units: Units, layout: Layout, activations: Activations, gradients: int) -> list[Phase]:
    """Return the phases of ranks that gather what they compute, each at its moment with the most bytes."""
    step = _ShardedStep(units, layout, activations, gradients)
    phases = {
        "loss": step.moments_of_loss(),
        "backward pass": step.moments_of_backward(),
        "end of backward": step.moments_of_end(),
    }
    return [Phase(name, max(moments, key=lambda moment: sum(moment.values()))) for name, moments in phases.items()]


@dataclass(frozen=True)
class _ShardedStep:
    """The moments of a step, each with its bytes by kind, of a rank that gathers what it computes."""

    units: Units
    layout: Layout
    activations: Activations
    gradients: int  # bytes of this rank's shards of all gradients

    @property
    def _is_fsdp2(self) -> bool:
        return self.layout.name == "fsdp2"

    @property
    def _separate_embedding(self) -> int:
        """The number of parameters in the embedding, if it is a unit of its own; otherwise 0."""
        return self.units.embedding if self._is_fsdp2 and not self.units.is_tied else 0

    @property
    def _root(self) -> int:
        """The number of parameters in the unit around the others."""
        return self.units.rest - self._separate_embedding

    @property
    def _trained_in_layers(self) -> int:
        return self.units.trained - self.units.trained_rest

    def moments_of_loss(self) -> list[dict[str, int]]:
        """Return the moments up to the head's backward pass."""
        layer = self.units.layer
        last_layer = layer if self._is_fsdp2 else 0  # FSDP2 still has the buffer that it was gathered in
        return [
            # at the loss
            self._moment(self.activations.most, gathered=self._root + last_layer),
            # in the head's backward pass, in which the last layer is gathered
            self._moment(self.activations.at_head, gathered=self._root + layer),
        ]

    def moments_of_backward(self) -> list[dict[str, int]]:
        """Return the moments of the layers' backward pass, in which the last layer comes first.

        While one layer is computed, the layer before it is gathered, and the gradients of the one after it are reduced.
        """
        units = self.units
        activations = self.activations
        two_layers = min(2, units.num_layers) * units.layer
        layer_before = two_layers - units.layer  # 0 for a model of one layer
        activations_per_layer = activations.kept // units.num_layers
        trained_above_first = max(0, self._trained_in_layers - units.trained_layer)
        reducing = self._bytes_to_reduce(units.trained_layer)
        pending = 0
        if self._is_fsdp2 and units.num_layers > 1:
            # it keeps a layer's gradients in fp32 while the layer before it is computed
            pending = REDUCED_BYTES * units.trained_layer
        return [
            # in the last layer
            self._moment(activations.at_last, gathered=self._root + two_layers),
            # when its gradients are reduced
            self._moment(activations.after_last, gathered=self._root + layer_before, communication=reducing),
            # in the layer before it
            self._moment(
                activations.at_last - activations_per_layer, gathered=self._root + two_layers, communication=pending
            ),
            # in the first layer
            self._moment(
                activations.at_end,
                gathered=self._root + units.layer + self._separate_embedding,
                num_reduced=trained_above_first,
                communication=pending,
            ),
            # when its gradients are reduced
            self._moment(
                activations.after_end,
                gathered=self._root + self._separate_embedding,
                num_reduced=trained_above_first,
                communication=reducing,
            ),
        ]

    def moments_of_end(self) -> list[dict[str, int]]:
        """Return the moments with the gradients of the parameters outside of the layers.

        If head and embedding are tied, the embedding's gradient is added to the head's.
        """
        units = self.units
        pass_itemsize = self.layout.pass_itemsize
        # how many of these parameters are reduced with the embedding, if it is a unit of its own, and with the root
        trained_embedding = units.trained_embedding if self._separate_embedding else 0
        trained_root = units.trained_rest - trained_embedding
        # the head's gradients of a tied weight, until the embedding's are added to them
        num_tied = units.head if units.is_tied else 0
        # FSDP1 has one flat gradient for all of them
        flat_gradient_bytes = 0 if self._is_fsdp2 else pass_itemsize * units.trained_rest
        moments = [
            # when all gradients are computed
            self._moment(
                pass_itemsize * (units.trained_rest + num_tied),
                gathered=self._root,
                num_reduced=self._trained_in_layers,
                communication=flat_gradient_bytes,
            )
        ]
        if trained_embedding:
            # when the embedding's gradients are reduced
            moments.append(
                self._moment(
                    pass_itemsize * units.trained_rest,
                    gathered=self._root,
                    num_reduced=self._trained_in_layers,
                    communication=self._bytes_to_reduce(trained_embedding),
                )
            )
        # when the root's gradients are reduced
        moments.append(
            self._moment(
                pass_itemsize * trained_root,
                gathered=0,
                num_reduced=self._trained_in_layers,
                communication=self._bytes_to_reduce(trained_root),
            )
        )
        return moments

    def _moment(
        self, activations: int, *, gathered: int, num_reduced: int = 0, communication: int = 0
    ) -> dict[str, int]:
        """Return the bytes at one moment.

        Args:
            activations: The bytes of activations, including gradients that are not reduced yet.
            gathered: The number of parameters that are gathered.
            num_reduced: The number of parameters whose gradients are reduced.
            communication: The bytes that reducing takes.
        """
        units = self.units
        if self.layout.gathers_at_once:
            gathered = max(gathered, units.num_layers * units.layer + self._root)
        reduced_gradients = self.gradients * num_reduced // max(units.trained, 1)
        return {
            "gradients": max(self._earlier_gradients(), reduced_gradients),
            "gathered weights": self.layout.pass_itemsize * gathered,
            "communication": communication,
            "activations": activations,
        }

    def _earlier_gradients(self) -> int:
        """Return the bytes of the gradients of earlier micro-batches.

        Gradients that are not reduced are not sharded; FSDP2 adds them in fp32, FSDP1 in their dtype.
        """
        if self.layout.accumulation == 1:
            return 0
        if self.layout.reduces_each:
            return self.gradients
        itemsize = REDUCED_BYTES if self._is_fsdp2 else self.layout.pass_itemsize
        return itemsize * self.units.trained

    def _bytes_to_reduce(self, num_parameters: int) -> int:
        """Return the bytes that reducing a unit's gradients takes in addition to the gradients.

        These are a copy in fp32 (with FSDP1, its flat gradient in fp32), and this rank's part of the result, in fp32
        and in the dtype of the weights.
        """
        part = (REDUCED_BYTES + self.layout.stored_itemsize) * num_parameters // self.layout.num_shards
        return REDUCED_BYTES * num_parameters + part


@dataclass(frozen=True)
class Forecast:
    units: Units
    layout: Layout
    activations: Activations
    budget: Budget
    collectives: tuple[Collective, ...]
    flops_of_step: float
    process: int  # bytes of a process without a model: on the GPU, or resident on CPU
    offloaded: int  # bytes that ``--cpu_offload`` and vLLM keep in a rank's host memory
    on_gpu: bool
    sampling: SamplingForecast | None = None

    @property
    def device_bytes(self) -> int:
        """The peak of a rank on its device: GPU memory, or resident memory on a CPU."""
        num_bytes = self.process + self.budget.most.total
        if not self.on_gpu:  # the copy that a background save writes is in the same memory
            num_bytes += self.budget.staging
        return num_bytes

    @property
    def host_bytes(self) -> int:
        """The peak of all ranks on one machine in host memory."""
        bytes_per_rank = self.device_bytes
        if self.on_gpu:
            bytes_per_rank = process_memory() + self.budget.staging + self.offloaded
        ranks_per_machine = self.layout.world_size // self.layout.num_nodes
        return bytes_per_rank * ranks_per_machine


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
    frozen_model: FrozenModel | None = None  # that reads the same rows: a teacher or a reference
    base_as_reference: FrozenModel | None = None  # the model without its adapter, if this is the reference
    teacher_states: StoredStates | None = None  # the stored values of a teacher
    prompts: PromptTokens | None = None  # of a run that samples its rows

    @property
    def largest(self) -> ModelShape:
        """The model of the phase that trains the most."""
        return max(self.shapes, key=lambda shape: shape.num_trained)

    def layout(self) -> Layout:
        return make_layout(self.arguments, self.plan, self.parallelism)

    def forecast(self) -> Forecast:
        """Compute the forecast without allocating the model.

        If phases train different parts, this is the forecast of the phase that needs the most device memory.

        Raises:
            TraceError: the model cannot run on fake tensors.
        """
        forecasts = [self._forecast(shape) for shape in self.shapes]
        return max(forecasts, key=lambda forecast: forecast.device_bytes)

    def _forecast(self, shape: ModelShape) -> Forecast:
        """Compute the forecast for the model of one phase."""
        layout = self.layout()
        plan = self.plan
        units = read_units(shape, self.arguments)
        micro_batch = self._micro_batch()
        activations = trace_activations(shape, self.arguments, micro_batch)

        # tensor parallelism splits every parameter before it is sharded
        collectives = collectives_of_step(units.part(layout.tensor_parallel_size), layout)
        if micro_batch.context_size > 1:
            collectives += collectives_of_slices(shape, self.arguments, layout, micro_batch)

        # a save in the background needs its copy only if steps follow it
        saved, evaluated = self._saved_steps()
        first_save = min(saved | evaluated)
        saves_in_background = self.arguments.save.async_save and first_save < plan.num_steps
        flops_of_step = shape.flops.count([plan.tokens_per_row]) * plan.most_rows_per_step / plan.world_size
        teacher = self.forecast_teacher()
        teacher_pass = None
        if teacher is not None:
            flops_of_step += teacher.flops_of_step
            collectives += teacher.collectives
        if self.frozen_model is not None:
            teacher_pass = forecast_pass(self.frozen_model, self.arguments, layout, micro_batch)
        elif self.base_as_reference is not None:
            teacher_pass = forecast_base_pass(self.base_as_reference, self.arguments, layout, micro_batch)
        sampling = None
        if self.prompts is not None:
            sampler = PLANNED_SAMPLERS[self.arguments.rollouts.sampler]
            sampling = sampler.forecast(self._sampled_run(shape, self.prompts))
        host_bytes = offloaded_bytes(shape, layout, units.states)
        host_bytes += teacher.host_bytes if teacher else 0
        host_bytes += sampling.host_bytes if sampling else 0
        return Forecast(
            units=units,
            layout=layout,
            activations=activations,
            budget=make_budget(units, layout, activations, saves_in_background, teacher, teacher_pass, sampling),
            collectives=tuple(collectives),
            flops_of_step=flops_of_step,
            offloaded=host_bytes,
            process=CUDA_ALLOWANCE if self.on_gpu else process_memory() + LATER_BYTES,
            on_gpu=self.on_gpu,
            sampling=sampling,
        )

    def forecast_teacher(self) -> TeacherForecast | None:
        """Forecast what a teacher or a reference takes throughout a step, without tracing; None without one."""
        if self.frozen_model is not None:
            return forecast_teacher(self.frozen_model, self.arguments, self.layout(), self.plan)
        if self.base_as_reference is not None:
            return forecast_base(self.base_as_reference, self.arguments, self.layout(), self.plan)
        if self.teacher_states is not None:
            return TeacherForecast("teacher", device_bytes=self.teacher_states.head_bytes())
        return None

    def bytes_of_sampling_copy(self) -> int:
        """Return the bytes of the copy of the model that samples on each device, 0 without one."""
        if self.prompts is None:
            return 0
        sampler = PLANNED_SAMPLERS[self.arguments.rollouts.sampler]
        return sampler.copy_bytes(self._sampled_run(self.largest, self.prompts))

    def _sampled_run(self, shape: ModelShape, prompts: PromptTokens) -> SampledRun:
        return SampledRun(
            shape=shape,
            arguments=self.arguments,
            layout=self.layout(),
            units=read_units(shape, self.arguments),
            prompts=prompts,
            on_gpu=self.on_gpu,
            device_memory=self.device_memory,
        )

    def num_checkpoints(self) -> int:
        """Return the number of checkpoints on the disk at the end of the run."""
        saved, evaluated = self._saved_steps()
        num_checkpoints = len(saved)
        if evaluated - saved:  # the best by validation loss is kept too
            num_checkpoints += 1
        keep = self.arguments.save.keep_checkpoints
        if keep is None:
            return num_checkpoints
        return min(num_checkpoints, keep + 1)

    def _saved_steps(self) -> tuple[set[int], set[int]]:
        """Return the steps that are saved at intervals, and those that ``--save_best`` may save."""
        saved = self._steps_every(self.arguments.save.save_step_interval)
        evaluated: set[int] = set()
        if self.arguments.save.save_best and self.validates:
            evaluated = self._steps_every(self.arguments.evaluation.eval_step_interval)
        return saved, evaluated

    def _steps_every(self, interval: int) -> set[int]:
        num_steps = self.plan.num_steps
        return {*range(interval, num_steps + 1, interval), num_steps} | self.plan.epoch_ends()

    def _micro_batch(self) -> MicroBatch:
        """Return the rows that a device computes in one forward pass, with the dtypes."""
        precision = self.arguments.model.precision
        held_dtype = weights_dtype(precision)
        computed_dtype = compute_dtype(precision)
        gathered = gathered_dtype(self.arguments, self.parallelism)
        casts = computed_dtype != held_dtype and gathered is None
        num_rows = self.arguments.training.micro_batch_size
        length = self.plan.tokens_per_row
        context_size = self.arguments.fsdp.context_parallel_size
        if context_size > 1:  # a rank has a slice of all rows together
            length = math.ceil(num_rows * length / context_size)
            num_rows = 1
        return MicroBatch(
            num_rows=num_rows,
            length=length,
            context_size=context_size,
            dtype=gathered or held_dtype,
            autocast=computed_dtype if casts else None,
            has_borders=self.isolates,
            on_gpu=self.on_gpu,
            by_unit=self.layout().is_sharded,
            teacher=self._traced_teacher(),
            policy=self._traced_policy(),
        )

    def _traced_teacher(self) -> TracedTeacher | None:
        """Return what the memory of the loss depends on in a teacher or a reference; None without one."""
        if self.frozen_model is not None:
            shape = self.frozen_model.shape
            return TracedTeacher(shape.vocab_size, shape.config.get_text_config().hidden_size)
        if self.teacher_states is not None:
            content = self.teacher_states.record.content
            return TracedTeacher(content.named_ids.end, content.hidden_size, content.top_k)
        return None

    def _traced_policy(self) -> TracedPolicy | None:
        """Return what the memory of the loss depends on in completions and their rewards; None without rewards."""
        if not self.arguments.preference.learns_from_rewards:
            return None
        return TracedPolicy(
            num_rewards=len(self.arguments.rollouts.rewards or ()),
            compares_with_base=self.base_as_reference is not None,
        )


def make_request(run: PreparedRun) -> RunRequest:
    """Return the request for the forecast of a run."""
    arguments = run.arguments
    on_gpu = run.devices.accelerator == "cuda"
    # the memory that --device_memory states, or the GPU's, or a rank's share of the machine's
    available = parse_size(arguments.planning.device_memory or "")
    if not available and on_gpu:
        available = device_memory()
    if not available:
        ranks_per_machine = run.plan.world_size // arguments.device.num_nodes
        available = machine_memory() // ranks_per_machine
    return RunRequest(
        arguments=arguments,
        shapes=run.models.all,
        plan=run.plan,
        parallelism=run.devices.parallelism,
        isolates=run.data.isolates,
        on_gpu=on_gpu,
        device_memory=available,
        is_elsewhere=arguments.planning.plans_for_others,
        validates=is_evaluated(run.data),
        frozen_model=run.frozen_model,
        base_as_reference=find_base_as_reference(run),
        teacher_states=run.teacher_states,
        prompts=_count_prompt_tokens(run),
    )


def _count_prompt_tokens(run: PreparedRun) -> PromptTokens | None:
    """Return the numbers of tokens of a run's prompts; None if it has no prompts."""
    if not isinstance(run.data, Prompts):
        return None
    lengths = [len(prompt.token_ids) for prompt in run.data.train.prompts]
    return PromptTokens(longest=len(run.data.longest_prompt.token_ids), mean=round(mean(lengths)))


def check_memory(run: PreparedRun) -> None:
    """Check without tracing that weights, gradients and optimizer fit in memory, and one checkpoint on the disk."""
    request = make_request(run)
    layout = request.layout()
    model = request.largest
    states, _ = bytes_of_states(model, request.arguments)
    if model.adapter:  # each rank has all of it, in fp32: weights and gradients
        num_base = read_units(model, request.arguments).total
        base_bytes = layout.stored_itemsize * num_base // layout.num_parts
        adapter_bytes = 2 * ADAPTER_BYTES * model.num_trained
        least = base_bytes + adapter_bytes + states
    else:
        weights_and_gradients = layout.stored_itemsize * (model.num_parameters + model.num_trained)
        least = (weights_and_gradients + states) // layout.num_parts
    subject = "weights, gradients and optimizer"
    teacher = request.forecast_teacher()
    if teacher is not None and teacher.device_bytes > 0:
        least += teacher.device_bytes
        subject = f"weights, gradients, optimizer and {teacher.role}"
    copy_bytes = request.bytes_of_sampling_copy()
    if copy_bytes:
        least += copy_bytes
        subject += " and the copy that samples"
    faults = []
    if not layout.offloads and least > request.device_memory:
        ranks_per_machine = layout.world_size // layout.num_nodes
        faults.append(
            f"{subject} need {show_size(least)} per rank, but {ranks_per_machine} ranks have "
            f"only {show_size(request.device_memory)} each; run with --plan true to see what would fit "
            f"({DOES_NOT_FIT})"
        )
    faults += faults_of_disk(request, num_checkpoints=1)
    if faults:
        raise InputError(*faults)


def faults_of_disk(request: RunRequest, num_checkpoints: int) -> list[str]:
    """Return a message if the disk of --output_dir has no room for ``num_checkpoints`` of the run, or nothing."""
    folder = Path(request.arguments.save.output_dir)
    model = request.largest
    _, states = bytes_of_states(model, request.arguments)
    if model.adapter is not None:  # in fp32, without its base
        weights = ADAPTER_BYTES * model.num_trained
    else:
        weights = request.layout().stored_itemsize * model.num_parameters
    size = weights + states
    free = free_bytes(nearest_existing(folder))
    if size * num_checkpoints <= free:
        return []
    num_fitting = free // size - 2  # besides the best by validation loss and the one being written
    fix = f"give --keep_checkpoints {num_fitting}, or free some space" if num_fitting > 0 else "free some space there"
    fix += " (docs/reference/errors.md#disk-full)"
    subject = "a checkpoint needs"
    if num_checkpoints > 1:
        subject = f"{num_checkpoints} checkpoints, including the one being written, need"
    needed = show_size(size * num_checkpoints)
    return [f"--output_dir {folder}: {subject} {needed}, but only {show_size(free)} are free; {fix}"]
