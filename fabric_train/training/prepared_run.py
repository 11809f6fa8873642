"""Describe a run that is checked but not started, which preflight hands to training."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from fabric_train.checkpoint import BranchPoint, TrainerJson, TrainerState, run_of
from fabric_train.cli.parser import flatten
from fabric_train.cli.tables import Component
from fabric_train.data.data_order import DataOrder, StreamOrder
from fabric_train.data.streaming import Stream
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.data.token_mixture import TokenMixture
from fabric_train.model.hf_model import ModelShape
from fabric_train.model.origin import AdapterBase, ReferenceModel, TeacherModel, TrainingStage
from fabric_train.optim.learning_rate import Schedules
from fabric_train.rollouts.prompts import Prompts
from fabric_train.teacher_states.stored import StoredStates
from fabric_train.training.early_stopping import EarlyStopping
from fabric_train.training.sampling import SamplePrompts
from fabric_train.training.step_plan import StepPlan

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments

FrozenRole: TypeAlias = Literal["teacher", "reference"]
"""What a frozen model is to the model in training."""
TrainingData: TypeAlias = TokenDataset | TokenMixture | Stream | Prompts


@dataclass(frozen=True)
class DevicePlan:
    """The processes of a run."""

    accelerator: str
    """"cuda", "cpu" or "tpu"."""
    world_size: int
    parallelism: str
    """"fsdp", "fsdp2", "ddp", "single" or "xla"."""


@dataclass(frozen=True)
class FrozenModel:
    """A frozen model that reads the rows of each step beside the model in training."""

    role: FrozenRole
    shape: ModelShape
    base_weights: str | None
    """The 4-bit form of its decoder layers, a value of ``--base_weights``; None if they are not in 4 bits."""


@dataclass(frozen=True)
class StartingPoint:
    """The start of a run."""

    saved: TrainerJson | None
    """The trainer.json of the checkpoint; None for pretrained or random weights."""
    state: TrainerState
    """The state, which is at step 0 unless the run resumes."""
    lineage: tuple[BranchPoint, ...] = ()
    """The branch points so far."""
    branches: bool = False
    """Whether the run branches off now, at the last branch point."""
    stages: tuple[TrainingStage, ...] = ()
    """The runs before this one in the checkpoint, and the checkpoint's run if only its weights are used."""

    @property
    def checkpoint(self) -> Path | None:
        return self.saved.checkpoint if self.saved else None

    @property
    def resumes(self) -> bool:
        """Whether the optimizer state and the data order continue the checkpoint's."""
        return self.saved is not None and self.state.step > 0


@dataclass(frozen=True)
class PhaseModels:
    """The model with the parts that train, for each step at which phases change them."""

    by_first_step: Mapping[int, ModelShape]
    """The model from each of these steps on. The first one is the first step of the data; never empty."""

    def at(self, step: int) -> ModelShape:
        """Return the model with the parts that a step trains."""
        first_steps = [first_step for first_step in self.by_first_step if first_step <= step]
        return self.by_first_step[max(first_steps, default=min(self.by_first_step))]

    @property
    def all(self) -> tuple[ModelShape, ...]:
        return tuple(self.by_first_step.values())

    @property
    def change(self) -> bool:
        """Whether phases change the parts that train."""
        return len(self.by_first_step) > 1

    def last_step_before_change(self, after_step: int, last_step: int) -> int:
        """Return the last step, up to ``last_step``, that trains the same parts as the step after ``after_step``."""
        for first_step in self.by_first_step:
            if first_step > after_step + 1:
                last_step = min(last_step, first_step - 1)
        return last_step

    @property
    def trained_in_any_phase(self) -> set[str]:
        """The names of the parameters that train in any phase."""
        names = set[str]()
        for model in self.all:
            names.update(model.trained)
        return names


@dataclass(frozen=True)
class PreparedRun:
    """A run that is checked but not started."""

    user_arguments: "TrainArguments"
    """The arguments as the user gave them."""
    arguments: "TrainArguments"
    """The arguments with "auto" resolved."""
    folder: Path
    devices: DevicePlan
    start: StartingPoint
    data: TrainingData
    order: DataOrder | StreamOrder
    """The order of the data, as a checkpoint records it."""
    models: PhaseModels
    plan: StepPlan
    schedules: Schedules
    """The learning-rate schedules of the run, which may be longer or shorter than the run, and of its phases."""
    versions: dict[str, str]
    """The versions of packages, of this program, and of its computations."""
    notes: tuple[str, ...]
    """Lines that the user should read before the run starts."""
    early_stopping: EarlyStopping | None = None
    sample_prompts: SamplePrompts | None = None
    adapter_base: AdapterBase | None = None
    """The frozen model of an adapter; None if all weights train."""
    reference: ReferenceModel | None = None
    """The reference model, which is found when the run begins; None if the objective needs none."""
    frozen_model: FrozenModel | None = None
    """The teacher or the reference that reads the rows of each step; None if there is none."""
    teacher_states: StoredStates | None = None
    """The stored values of a teacher, which the rows bring along; None if there are none."""
    teacher: TeacherModel | None = None
    """The teacher, which is found when the run begins; None if the objective does not distil."""
    components: tuple[Component, ...] = ()
    """The parts that the run uses by name."""
    next_run: "PreparedRun | None" = None
    """The run from a phase with other token datasets on, whose start is not known yet; None without such a phase."""

    @property
    def model(self) -> ModelShape:
        """The model with the parts that the next step trains."""
        return self.models.at(self.start.state.step + 1)

    @property
    def successive_runs(self) -> tuple["PreparedRun", ...]:
        """This run up to the end of its data, and the next runs, which have other data."""
        if self.next_run is None:
            return (self,)
        return (self, *self.next_run.successive_runs)

    @property
    def steps_suffix(self) -> str:
        """The steps of this run's data, such as ``, steps 1 to 900``; "" if no phase has other data."""
        has_same_data = self.arguments.data.data_dirs == self.user_arguments.data.data_dirs
        if self.next_run is None and has_same_data:
            return ""
        return f", steps {self.plan.data_starts_after + 1:,} to {self.plan.last_step:,}"

    @property
    def ends_early(self) -> bool:
        """Whether early stopping has ended the run where it would start."""
        return self.early_stopping is not None and self.early_stopping.ends(self.start.state)

    @property
    def last_loop_step(self) -> int:
        """The last step before other parts train or other token datasets are read, or else the last step of the run."""
        return self.models.last_step_before_change(self.start.state.step, self.plan.last_step)

    def continued_from(self, saved: TrainerJson, state: TrainerState) -> "PreparedRun":
        """Return the run after ``last_loop_step``, with the next parts and data, as if it were resumed there.

        At a phase with other token datasets, it continues like a branch of itself.
        """
        # The same data: only the parts that train change.
        start = replace(self.start, saved=saved, state=state, branches=False, stages=saved.stages)
        next_run = self.next_run
        if next_run is None or state.step < self.plan.last_step:
            return replace(self, start=start)

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
        schedules = next_run.schedules.with_length(self.schedules.run_schedule.num_steps)
        return replace(next_run, start=start, schedules=schedules, teacher=self.teacher)

    @property
    def all_logged_sources(self) -> tuple[str, ...]:
        """The sources with logged losses in any of the successive runs."""
        names: dict[str, None] = {}
        for run in self.successive_runs:
            names |= dict.fromkeys(logged_sources(run.data))
        return tuple(names)


def logged_sources(data: TrainingData) -> tuple[str, ...]:
    """Return the sources with logged losses, those of the training rows first; none if there are fewer than two."""
    names = dict.fromkeys(data.source_names)
    if isinstance(data, Prompts):
        # a single source of held-out prompts is called by its file, and needs no columns of its own
        if data.validation_prompts is not None and len(data.validation_prompts.source_names) > 1:
            names |= dict.fromkeys(data.validation_prompts.source_names)
    elif data.validation:
        names |= dict.fromkeys(data.validation.source_names)
    return tuple(names) if len(names) > 1 else ()


def is_evaluated(data: TrainingData) -> bool:
    """Return whether a run evaluates its model, on rows or prompts that it does not train on."""
    if isinstance(data, Prompts):
        return data.validation_prompts is not None
    return data.validation is not None
