"""The forecast of a run: parameters, memory, traffic and FLOPs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabric_train.distributed.precision import compute_dtype, weights_dtype
from fabric_train.distributed.process_memory import process_memory
from fabric_train.preflight.memory.activations import Activations, MicroBatch, trace_activations
from fabric_train.preflight.memory.device_memory import Budget, make_budget
from fabric_train.preflight.memory.model_layout import Layout, Units, make_layout, offloaded_bytes, read_units
from fabric_train.preflight.memory.traffic import Collective, collectives_of_step

if TYPE_CHECKING:
    from arguments import TrainArguments
    from fabric_train.model.hf_model import ModelShape
    from fabric_train.training.prepared_run import StepPlan

CUDA_ALLOWANCE = 2_000_000_000
"""Bytes of a GPU reserved for the CUDA context, NCCL and gaps of the allocator. An allowance, not a measurement."""

LATER_BYTES = 60_000_000
"""Resident bytes that a CPU rank adds to those of this process: threads, connections and later imports."""


@dataclass(frozen=True)
class Forecast:
    """What a run needs.

    ``process`` is the bytes of a process without a model: on the GPU, or resident on CPU. ``offloaded`` is what
    ``--cpu_offload`` keeps in a rank's host memory.
    """

    units: Units
    layout: Layout
    activations: Activations
    budget: Budget
    collectives: tuple[Collective, ...]
    flops_of_step: float
    process: int
    offloaded: int
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
    """The run to forecast.

    ``device_memory`` is the bytes that a rank may use: of its GPU, or its share of host memory on CPU.
    ``is_elsewhere``: the run is planned for other machines than this one. ``validates``: it has validation rows.
    """

    arguments: "TrainArguments"
    shape: "ModelShape"
    plan: "StepPlan"
    parallelism: str
    isolates: bool
    on_gpu: bool
    device_memory: int
    is_elsewhere: bool
    validates: bool = True

    def layout(self) -> Layout:
        """Return how the run shards the model."""
        return make_layout(self.arguments, self.plan, self.parallelism)

    def forecast(self) -> Forecast:
        """Compute the forecast without allocating the model.

        Raises:
            RuntimeError: the model cannot be traced because it reads the content of tensors.
        """
        units, layout, plan = read_units(self.shape), self.layout(), self.plan
        activations = trace_activations(self.shape, self.arguments, self._micro_batch())
        saves_in_background = self.arguments.save.async_save and self._first_save() < plan.num_steps
        return Forecast(
            units=units,
            layout=layout,
            activations=activations,
            budget=make_budget(units, layout, activations, saves_in_background),
            collectives=tuple(collectives_of_step(units.part(plan.world_size // plan.num_data_ranks), layout)),
            flops_of_step=self.shape.flops.of([plan.tokens_per_row]) * plan.rows_per_window / plan.world_size,
            offloaded=offloaded_bytes(self.shape, layout),
            process=CUDA_ALLOWANCE if self.on_gpu else process_memory() + LATER_BYTES,
            on_gpu=self.on_gpu,
        )

    def num_checkpoints(self) -> int:
        """Return the number of checkpoints on the disk at the end of the run."""
        saved, keep = self._saved_steps(), self.arguments.save.keep_checkpoints
        number = len(saved) + bool(self._evaluated_steps() - saved)  # the best by validation loss is kept too
        return number if keep is None else min(number, keep + 1)

    def _saved_steps(self) -> set[int]:
        """Return the steps with a checkpoint, whatever their validation loss."""
        return self._steps_every(self.arguments.save.save_step_interval)

    def _evaluated_steps(self) -> set[int]:
        """Return the steps that ``--save_best`` may save."""
        saves_best = self.arguments.save.save_best and self.validates
        return self._steps_every(self.arguments.evaluation.eval_step_interval) if saves_best else set()

    def _first_save(self) -> int:
        return min(self._saved_steps() | self._evaluated_steps())

    def _steps_every(self, interval: int) -> set[int]:
        last = self.plan.num_steps
        return {*range(interval, last + 1, interval), last} | self.plan.epoch_ends()

    def _micro_batch(self) -> MicroBatch:
        precision = self.arguments.model.precision
        held, computed = weights_dtype(precision), compute_dtype(precision)
        casts_whole_units = self.parallelism in ("fsdp", "fsdp2")
        return MicroBatch(
            num_rows=self.arguments.training.micro_batch_size,
            length=self.plan.tokens_per_row,
            dtype=computed if casts_whole_units else held,
            autocast=computed if computed != held and not casts_whole_units else None,
            has_borders=self.isolates,
            on_gpu=self.on_gpu,
            by_unit=self.layout().is_sharded,
        )
