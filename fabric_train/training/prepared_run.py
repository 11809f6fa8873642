"""What preflight hands to training: a run that is checked and not started."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from fabric_train.checkpoint import BranchPoint, PhaseParts, PhaseSchedule, TrainerJson, TrainerState, run_of
from fabric_train.cli.parser import flatten
from fabric_train.cli.tables import Component
from fabric_train.data.data_order import SHUFFLED, DataOrder, StreamOrder
from fabric_train.data.mixture_order import MixtureOrder
from fabric_train.data.step_sampler import WindowOrder
from fabric_train.data.streaming import Stream
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.data.token_mixture import TokenMixture
from fabric_train.model.hf_model import ModelShape
from fabric_train.model.origin import AdapterBase, ReferenceModel, TrainingStage
from fabric_train.model.trained_parts import TrainedParts
from fabric_train.optim.learning_rate import Schedule, Schedules
from fabric_train.training.early_stopping import EarlyStopping
from fabric_train.training.sampling import SamplePrompts

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments

TrainingData: TypeAlias = TokenDataset | TokenMixture | Stream


@dataclass(frozen=True)
class DevicePlan:
    """The processes of a run."""

    accelerator: str
    """cuda, cpu or tpu."""
    world_size: int
    parallelism: str
    """fsdp, fsdp2, ddp, single or xla."""


@dataclass(frozen=True)
class StartingPoint:
    """What a run starts from."""

    saved: TrainerJson | None
    """The trainer.json of the checkpoint; None for pretrained and for random weights."""
    state: TrainerState
    """At step 0 unless the run resumes."""
    schedule_steps: int | None = None
    """Length of the learning-rate schedule that a resumed run keeps; None for a new schedule."""
    lineage: tuple[BranchPoint, ...] = ()
    """The branch points so far."""
    branches: bool = False
    """Whether the run branches off now, at the last branch point."""
    stages: tuple[TrainingStage, ...] = ()
    """The runs before this one that the checkpoint knows, and its own run if only its weights are used."""

    @property
    def checkpoint(self) -> Path | None:
        return self.saved.checkpoint if self.saved else None

    @property
    def resumes(self) -> bool:
        """Whether optimizer state and data order continue the checkpoint's."""
        return self.saved is not None and self.state.step > 0


@dataclass(frozen=True)
class RunPhase:
    """A phase of ``--phases``."""

    first_step: int
    last_step: int
    rows_per_epoch: tuple[int, ...]
    """Rows of each source."""
    schedule: Schedule | None
    """The phase's own schedule; None if the run's continues."""
    parts: TrainedParts | None = None
    """The parts of the model that train; None if they stay the same."""


@dataclass(frozen=True)
class StepPlan:
    """The counts of a run. A window is the rows that one optimizer step consumes over all ranks."""

    num_rows: int | None
    """Rows of an epoch, with phases of one of the first phase; None for a stream."""
    world_size: int
    num_data_ranks: int
    micro_batch_size: int
    accumulation: int
    rows_per_window: int
    windows_per_epoch: int | None
    """As ``num_rows``."""
    num_steps: int
    tokens_per_row: int
    mixture: MixtureOrder | None = None
    """None for a stream, and for one token dataset without shares."""
    phases: tuple[RunPhase, ...] = ()
    notes: tuple[str, ...] = ()
    """Lines that the user should read before the run starts."""
    data_starts_after: int = 0
    """The step before the first window of the data: 0, except in a branch or a phase with other data."""
    data_ends_after: int | None = None
    """The step before a phase with other data; None if there is none."""
    order_version: int = SHUFFLED
    """As in ``DataOrder``."""

    @property
    def last_step(self) -> int:
        """The last step that reads these data."""
        if self.data_ends_after is None:
            return self.num_steps
        return self.data_ends_after

    def epoch_ends(self) -> set[int]:
        """Return the steps that end an epoch or a phase; empty for a stream."""
        if self.mixture:
            num_windows = self.last_step - self.data_starts_after
            return {self.data_starts_after + window for window in self.mixture.epoch_ends(num_windows)}
        if not self.windows_per_epoch:
            return set()
        first_end = self.data_starts_after + self.windows_per_epoch
        return set(range(first_end, self.num_steps + 1, self.windows_per_epoch))

    def window_order(self, seed: int, rank: int = 0) -> WindowOrder:
        """Return which rows of a token dataset a data rank takes at every step."""
        assert self.num_rows is not None  # a stream has an order of its own
        return WindowOrder(
            num_rows=self.num_rows,
            rows_per_window=self.rows_per_window,
            micro_batch_size=self.micro_batch_size,
            world_size=self.num_data_ranks,
            rank=rank,
            seed=seed,
            mixture=self.mixture,
            version=self.order_version,
        )


@dataclass(frozen=True)
class PreparedRun:
    """A run that is checked and not started."""

    user_arguments: "TrainArguments"
    """The arguments as the user gave them."""
    arguments: "TrainArguments"
    """The same, where "auto" is resolved."""
    folder: Path
    devices: DevicePlan
    start: StartingPoint
    data: TrainingData
    model: ModelShape
    """The model with the parts that train at the start."""
    plan: StepPlan
    order: DataOrder | StreamOrder
    versions: dict[str, str]
    notes: tuple[str, ...]
    early_stopping: EarlyStopping | None = None
    sample_prompts: SamplePrompts | None = None
    adapter_base: AdapterBase | None = None
    """The frozen model of an adapter; None if all weights train."""
    reference: ReferenceModel | None = None
    """Found when the run begins; None if its objective needs none."""
    components: tuple[Component, ...] = ()
    """The parts that the run uses by name."""
    models: Mapping[int, ModelShape] = field(default_factory=dict)
    """If phases train different parts of the model: the model from each step at which they change, step 1 included."""
    next_run: "PreparedRun | None" = None
    """If a phase has other token datasets: the run from there on, whose start is not known before it gets there."""

    @property
    def successive_runs(self) -> tuple["PreparedRun", ...]:
        """This run up to the end of its data, and the next ones, which have others."""
        if self.next_run is None:
            return (self,)
        return (self, *self.next_run.successive_runs)

    @property
    def steps_suffix(self) -> str:
        """The steps of this run's data, such as ``, steps 1 to 900``; empty if no phase has other data."""
        has_same_data = self.arguments.data.data_dirs == self.user_arguments.data.data_dirs
        if self.next_run is None and has_same_data:
            return ""
        return f", steps {self.plan.data_starts_after + 1:,} to {self.plan.last_step:,}"

    @property
    def ends_early(self) -> bool:
        """Whether early stopping has ended the run where it would start."""
        return self.early_stopping is not None and self.early_stopping.ends(self.start.state)

    @property
    def schedule_steps(self) -> int:
        """Number of steps of the learning-rate schedule; after them the rate stays."""
        return self.start.schedule_steps or self.plan.num_steps

    @property
    def last_loop_step(self) -> int:
        """The last step before other parts train or other token datasets are read; else the last step of the run."""
        last_step = self.plan.last_step
        for first_step in self.models:
            if first_step > self.start.state.step + 1:
                last_step = min(last_step, first_step - 1)
        return last_step

    @property
    def trained_in_any_phase(self) -> set[str]:
        """The names of the parameters that train in any phase."""
        names = set(self.model.trained)
        for model in self.models.values():
            names.update(model.trained)
        return names

    def continued_from(self, saved: TrainerJson, state: TrainerState) -> "PreparedRun":
        """Return the run after ``last_loop_step``, with the next parts and data, as if it was resumed there.

        At a phase with other token datasets, it continues like a branch of itself.
        """
        # The same data: only the parts that train change.
        start = replace(self.start, saved=saved, state=state, branches=False, stages=saved.stages)
        next_run = self.next_run
        if next_run is None or state.step < self.plan.last_step:
            return replace(self, start=start).with_current_parts()

        # Other data: a branch point in the run's own folder, with what has changed.
        old_arguments = flatten(self.arguments)
        new_arguments = flatten(next_run.arguments)
        changed = {}
        for name, old_value in old_arguments.items():
            if old_value != new_arguments[name]:
                changed[name] = [old_value, new_arguments[name]]
        branch = BranchPoint(str(run_of(saved.checkpoint)), state.step, continues_data=False, changed=changed)
        state = replace(state, unlogged=None, progress=None, rows_of_sources=None)
        start = replace(start, state=state, lineage=(*saved.lineage, branch))
        return replace(next_run, start=start).with_current_parts()

    def model_at(self, step: int) -> ModelShape:
        """Return the model with the parts that a step trains."""
        first_steps = [first_step for first_step in self.models if first_step <= step]
        if not first_steps:
            return self.model
        return self.models[max(first_steps)]

    def with_current_parts(self) -> "PreparedRun":
        """Return this run with the parts that its next step trains."""
        return replace(self, model=self.model_at(self.start.state.step + 1))

    @property
    def schedules(self) -> Schedules:
        """The run's learning-rate schedule, and those of phases."""
        phase_schedules = tuple(phase.schedule for phase in self.plan.phases if phase.schedule)
        return Schedules(Schedule(self.schedule_steps, self.arguments.training), phase_schedules)

    @property
    def phase_schedules(self) -> tuple[PhaseSchedule, ...]:
        """The schedules of phases as trainer.json has them."""
        schedules = []
        for phase in self.plan.phases:
            schedule = phase.schedule
            if schedule:
                schedules.append(
                    PhaseSchedule(phase.first_step, phase.last_step, schedule.num_steps, schedule.decided_by)
                )
        return tuple(schedules)

    @property
    def phase_parts(self) -> tuple[PhaseParts, ...]:
        """The parts of phases as trainer.json has them."""
        phase_parts = []
        for phase in self.plan.phases:
            if phase.parts:
                phase_parts.append(PhaseParts(phase.first_step, phase.last_step, phase.parts.train_only))
        return tuple(phase_parts)

    def with_schedule(self, schedule: Schedule) -> "PreparedRun":
        """Return this run with a schedule of another length, in place of the one for the same steps."""
        if schedule.last_step is None:  # the run's own
            return replace(self, start=replace(self.start, schedule_steps=schedule.num_steps))
        phases = []
        for phase in self.plan.phases:
            if phase.first_step == schedule.after_step + 1:
                phases.append(replace(phase, schedule=schedule))
            else:
                phases.append(phase)
        return replace(self, plan=replace(self.plan, phases=tuple(phases)))

    @property
    def logged_sources(self) -> tuple[str, ...]:
        """The sources with logged losses, sources of the training rows first; none if there are fewer than two."""
        names = dict.fromkeys(self.data.source_names)
        if self.data.validation:
            names |= dict.fromkeys(self.data.validation.source_names)
        return tuple(names) if len(names) > 1 else ()

    @property
    def all_logged_sources(self) -> tuple[str, ...]:
        """The sources with logged losses in any of the successive runs."""
        names: dict[str, None] = {}
        for run in self.successive_runs:
            names |= dict.fromkeys(run.logged_sources)
        return tuple(names)
