"""What preflight hands to training: a run that is checked and not started."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from fabric_train.checkpoint import BranchPoint, PhaseParts, PhaseSchedule, TrainerState, read_trainer_json, run_of
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
from fabric_train.optim.optimizer import Schedule, Schedules
from fabric_train.training.evaluation import EarlyStopping, SamplePrompts

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments

TrainingData: TypeAlias = TokenDataset | TokenMixture | Stream


@dataclass(frozen=True)
class DevicePlan:
    """The processes of a run: ``accelerator`` is cuda, cpu or tpu, ``parallelism`` fsdp, fsdp2, ddp, single or xla."""

    accelerator: str
    world_size: int
    parallelism: str


@dataclass(frozen=True)
class StartingPoint:
    """What a run starts from.

    ``checkpoint`` is None for pretrained and for random weights. ``state`` is at step 0 unless the run resumes.
    ``schedule_steps`` is the length of the learning-rate schedule that a resumed run keeps, else None. ``lineage`` are
    the branch points so far; ``branches``: it branches off now, at the last of them. ``stages`` are the runs before
    this one that the ``checkpoint`` knows, and itself if the run takes its weights alone.
    """

    checkpoint: Path | None
    state: TrainerState
    schedule_steps: int | None = None
    lineage: tuple[BranchPoint, ...] = ()
    branches: bool = False
    stages: tuple[TrainingStage, ...] = ()

    @property
    def resumes(self) -> bool:
        """Whether optimizer state and data order continue the checkpoint's."""
        return self.checkpoint is not None and self.state.step > 0


@dataclass(frozen=True)
class RunPhase:
    """A phase of ``--phases``, with ``rows_per_epoch`` of each source, and a ``schedule`` and ``parts`` of its own."""

    first_step: int
    last_step: int
    rows_per_epoch: tuple[int, ...]
    schedule: Schedule | None
    parts: TrainedParts | None = None


@dataclass(frozen=True)
class StepPlan:
    """The counts of a run. A window is the rows that one optimizer step consumes over all ranks.

    ``num_rows``, of an epoch, and ``windows_per_epoch`` are None for a stream; with ``phases`` they belong to the
    first. ``mixture`` is None for a stream and for one token dataset without shares. The step after
    ``data_starts_after`` reads the first window of the data; it is 0 except in a branch with other data, or after a
    phase with others. ``data_ends_after`` is the step before a phase with others; None: the last one of the run.
    ``notes`` are lines that the user should read before the run starts. ``order_version`` is as in ``DataOrder``.
    """

    num_rows: int | None
    world_size: int
    num_data_ranks: int
    micro_batch_size: int
    accumulation: int
    rows_per_window: int
    windows_per_epoch: int | None
    num_steps: int
    tokens_per_row: int
    mixture: MixtureOrder | None = None
    phases: tuple[RunPhase, ...] = ()
    notes: tuple[str, ...] = ()
    data_starts_after: int = 0
    data_ends_after: int | None = None
    order_version: int = SHUFFLED

    @property
    def last_step(self) -> int:
        """The last step that reads these data."""
        return self.data_ends_after or self.num_steps

    def epoch_ends(self) -> set[int]:
        """Return the steps that end an epoch or a phase; empty for a stream."""
        last = self.last_step - self.data_starts_after
        if self.mixture:
            return {self.data_starts_after + step for step in self.mixture.epoch_ends(last)}
        per_epoch = self.windows_per_epoch
        return set(range(self.data_starts_after + per_epoch, self.num_steps + 1, per_epoch)) if per_epoch else set()

    def window_order(self, seed: int, rank: int = 0) -> WindowOrder:
        """Return which rows of a token dataset a data rank takes at every step."""
        assert self.num_rows is not None  # a stream has an order of its own
        sizes = (self.num_rows, self.rows_per_window, self.micro_batch_size)
        return WindowOrder(*sizes, self.num_data_ranks, rank, seed, self.mixture, self.order_version)


@dataclass(frozen=True)
class PreparedRun:
    """A run that is checked; ``user_arguments`` are as the user gave them; in ``arguments``, "auto" is resolved.

    ``adapter_base`` is the frozen model of an adapter; None if all weights train. ``reference`` is found when the run
    begins; None if its objective needs none. ``components`` are the parts that it uses by name. If phases train other
    parts of the model, ``models`` has the model with its parts from each step at which they change, step 1 included,
    and ``model`` is the one to begin with. If a phase has other token datasets, ``following`` is the run from there on;
    its start is known when the run comes there.
    """

    user_arguments: "TrainArguments"
    arguments: "TrainArguments"
    folder: Path
    devices: DevicePlan
    start: StartingPoint
    data: TrainingData
    model: ModelShape
    plan: StepPlan
    order: DataOrder | StreamOrder
    versions: dict[str, str]
    notes: tuple[str, ...]
    early_stopping: EarlyStopping | None = None
    sample_prompts: SamplePrompts | None = None
    adapter_base: AdapterBase | None = None
    reference: ReferenceModel | None = None
    components: tuple[Component, ...] = ()
    models: Mapping[int, ModelShape] = field(default_factory=dict)
    following: "PreparedRun | None" = None

    @property
    def stretches(self) -> tuple["PreparedRun", ...]:
        """This run up to the end of its data, and the following ones, which have others."""
        return (self, *(self.following.stretches if self.following else ()))

    @property
    def steps_in_words(self) -> str:
        """The steps of this run's data, such as ``, steps 1 to 900``; empty if a phase with other data is not there."""
        if self.following is None and self.arguments.data.data_dirs == self.user_arguments.data.data_dirs:
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
    def border(self) -> int:
        """The last step before other parts train, or other token datasets are read; else the last step of the run."""
        later = (first - 1 for first in self.models if first > self.start.state.step + 1)
        return min([self.plan.last_step, *later])

    @property
    def ever_trained(self) -> set[str]:
        """The names of the parameters that train in any phase."""
        return {name for model in (self.model, *self.models.values()) for name in model.trained}

    def continued_from(self, checkpoint: Path, state: TrainerState) -> "PreparedRun":
        """Return the rest of this run after a border, with the parts and the data from there on, as if it was resumed.

        At a phase with other token datasets, it goes on like a branch of itself.
        """
        saved = read_trainer_json(checkpoint)
        start = replace(self.start, checkpoint=checkpoint, state=state, branches=False, stages=saved.stages)
        following = self.following
        if following is None or state.step < self.plan.last_step:
            return replace(self, start=start).with_present_parts()
        there = flatten(self.arguments)
        here = flatten(following.arguments)
        changed = {name: [there[name], here[name]] for name in there if there[name] != here[name]}
        branch = BranchPoint(str(run_of(checkpoint)), state.step, False, changed)
        state = replace(state, unlogged=None, progress=None, rows_of_sources=None)
        start = replace(start, state=state, lineage=(*saved.lineage, branch))
        return replace(following, start=start).with_present_parts()

    def model_at(self, step: int) -> ModelShape:
        """Return the model with the parts that a step trains."""
        begun = [first for first in self.models if first <= step]
        return self.models[max(begun)] if begun else self.model

    def with_present_parts(self) -> "PreparedRun":
        """Return this run with the parts that its next step trains."""
        return replace(self, model=self.model_at(self.start.state.step + 1))

    @property
    def schedules(self) -> Schedules:
        of_phases = tuple(phase.schedule for phase in self.plan.phases if phase.schedule)
        return Schedules(Schedule(self.schedule_steps, self.arguments.training), of_phases)

    @property
    def phase_schedules(self) -> tuple[PhaseSchedule, ...]:
        """The schedules of phases as trainer.json has them."""
        own = [(phase, phase.schedule) for phase in self.plan.phases if phase.schedule]
        return tuple(
            PhaseSchedule(phase.first_step, phase.last_step, schedule.num_steps, schedule.decided_by)
            for phase, schedule in own
        )

    @property
    def phase_parts(self) -> tuple[PhaseParts, ...]:
        """The parts of phases as trainer.json has them."""
        return tuple(
            PhaseParts(phase.first_step, phase.last_step, phase.parts.train_only)
            for phase in self.plan.phases
            if phase.parts
        )

    def keeping(self, schedule: Schedule) -> "PreparedRun":
        """Return this run with a schedule that has another number of steps, in place of the one for the same steps."""
        if schedule.last_step is None:
            return replace(self, start=replace(self.start, schedule_steps=schedule.num_steps))
        phases = (
            replace(phase, schedule=schedule) if phase.first_step == schedule.starts_after + 1 else phase
            for phase in self.plan.phases
        )
        return replace(self, plan=replace(self.plan, phases=tuple(phases)))

    @property
    def logged_sources(self) -> tuple[str, ...]:
        """The sources with logged losses, sources of the training rows first; none if there are fewer than two."""
        held_out = self.data.validation.source_names if self.data.validation else ()
        names = tuple(dict.fromkeys((*self.data.source_names, *held_out)))
        return names if len(names) > 1 else ()

    @property
    def sources_ever_logged(self) -> tuple[str, ...]:
        """The sources with logged losses in any of the stretches."""
        return tuple(dict.fromkeys(name for run in self.stretches for name in run.logged_sources))
