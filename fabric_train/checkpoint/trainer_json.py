"""Read trainer.json, which has the state and the description of a run in each checkpoint."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, create_model

from fabric_train.checkpoint.losses import Evaluation, LossProgress
from fabric_train.cli.argument_types import planned_steps
from fabric_train.cli.errors import InputError
from fabric_train.cli.tables import PROJECT, Component
from fabric_train.data.data_order import DataOrder, PhaseRows, StreamOrder, describe_changes
from fabric_train.files.typed_json import parse_json, read_json
from fabric_train.model.origin import (
    AdapterBase,
    ModelOrigin,
    ReferenceModel,
    TeacherModel,
    TrainingSession,
    TrainingStage,
)

T = TypeVar("T")

FORMAT = 2
OWN_RUN = "."
PROGRAM = "fabric-train"
"""The key in ``versions`` for this program's version and commit, which earlier versions did not record."""
ADVICE = "use another checkpoint"
_LEFT_OUT = ("further", "of_pairs", "of_answers", "has_own_unit", "of_completions")
"""The fields of ``TokenLoss`` that are written only if they are set."""


def to_content(record: Any) -> dict[str, Any]:
    """Return a dataclass as it is written to trainer.json, where empty fields in ``_LEFT_OUT`` are left out."""

    def drop_empty(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in pairs if value or name not in _LEFT_OUT}

    return asdict(record, dict_factory=drop_empty)


@dataclass(frozen=True)
class TrainerState:
    """The counters of a run after ``step`` optimizer steps, and the losses of the last step."""

    step: NonNegativeInt = 0
    epoch: NonNegativeInt = 0
    """The epoch of the last step."""
    num_tokens: NonNegativeInt = 0
    num_samples: NonNegativeInt = 0
    skipped_steps: NonNegativeInt = 0
    """The number of steps that were skipped because the loss or the gradient was not finite."""
    steps_without_targets: NonNegativeInt = 0
    """The number of steps without an update, because the objective counted nothing, such as no supervised token."""
    rows_hash: str | None = None
    """The hash of the consumed rows, see ``WindowOrder.rows_hash``; None for a stream."""
    rows_of_sources: list[NonNegativeInt] | None = None
    """The number of consumed rows of each token dataset in a mixture."""
    counted_of_sources: dict[str, NonNegativeInt] | None = None
    """The supervised tokens (or pairs, or unpaired answers) that the steps have consumed of each source, also of other
    data before a phase or branch; None if there are no losses by source."""
    train_loss: float | None = None
    val_loss: float | None = None
    """None, like ``evaluation``, if the step was not evaluated; also None if completions were, which have a reward."""
    evaluation: Evaluation | None = None
    first_evaluation: Evaluation | None = None
    """The first evaluation of the rows that the run evaluates now; for a branch, it may be one of its trunk."""
    progress: LossProgress | None = None
    """The progress of the loss that ``--early_stopping`` watches."""
    unlogged: dict[str, int | float | str | None] | None = None
    """The step's metrics by column of metrics.csv, if a signal interrupted its evaluation."""

    def loss_of(self, source: str) -> float | None:
        """Return the last step's validation loss or reward for a source, or for "all"; None if there is none."""
        if source == "all" and self.val_loss is not None:  # earlier versions saved it without an evaluation
            return self.val_loss
        return self.evaluation.loss_of(source) if self.evaluation else None

    def cost_of(self, source: str) -> float | None:
        """Return :meth:`loss_of`, negated if a higher value is better, so that the lowest cost is the best."""
        loss = self.loss_of(source)
        if loss is None or self.evaluation is None:
            return loss
        return loss * self.evaluation.sign_of(source)


@dataclass(frozen=True)
class BranchPoint:
    """The step after which a run branched off another run, or continued with other data."""

    run: str
    """Absolute path of the other run's folder. In trainer.json it is ``OWN_RUN`` if the run continued in its own folder
    with other data, so that the folder can be moved."""
    step: PositiveInt
    continues_data: bool
    """Whether the rows after ``step`` are the next ones of the same data order, or the first ones of a new order."""
    changed: dict[str, Annotated[list[Any], Field(min_length=2, max_length=2)]]
    """The old and the new value of each changed argument."""

    def is_border_of(self, run: Path) -> bool:
        """Return whether the run in a folder continued here with other data, instead of branching off another run."""
        return self.run == os.path.abspath(run)


@dataclass(frozen=True)
class PhaseSchedule:
    """A learning-rate schedule that replaces the run's from ``first_step`` to ``last_step``."""

    first_step: PositiveInt
    last_step: PositiveInt
    num_steps: PositiveInt
    """The length of the schedule. It may be longer than the steps and be cut short, or shorter and stay at its last
    rate."""
    arguments: dict[str, Any]
    """The values of ``optim.learning_rate.RATE_ARGUMENTS``."""


@dataclass(frozen=True)
class PhaseParts:
    """The patterns that replace ``--train_only`` from ``first_step`` to ``last_step``."""

    first_step: PositiveInt
    last_step: PositiveInt
    train_only: tuple[str, ...]


@dataclass(frozen=True)
class Description:
    """The description of a run in each of its checkpoints, which is enough to export, generate or resume."""

    state_dict_type: str
    weights_dtype: str
    data: DataOrder | StreamOrder
    arguments: dict[str, Any]
    versions: dict[str, str]
    base_model: ModelOrigin | None
    """None for random weights."""
    attachments: tuple[Path, ...]
    """The files and folders that are copied to each checkpoint: the tokenizer, the token dataset's manifest, the base
    model's licence."""
    schedule_steps: PositiveInt | None = None
    """The length of the learning-rate schedule, in steps."""
    lineage: tuple[BranchPoint, ...] = ()
    """The branch points from the first run to this one."""
    phase_schedules: tuple[PhaseSchedule, ...] = ()
    phase_parts: tuple[PhaseParts, ...] = ()
    trained_modules: str | None = None
    """The modules that the step trained, with their numbers of parameters; None if nothing was frozen, or if an adapter
    trains."""
    device: str | None = None
    mixture_sources: tuple[str, ...] = ()
    """The sources of a mixture by their names in ``--shares``, in the order of their rows."""
    mixture_tokens: tuple[dict[str, NonNegativeInt], ...] = ()
    """The tokens of each mixture source, by the source of the documents in it."""
    sessions: tuple[TrainingSession, ...] = ()
    """The sessions from the first step to now, including those of the runs that this run branched off."""
    stages: tuple[TrainingStage, ...] = ()
    """The runs before this one, in order; each began with the weights of the previous one."""
    adapter_base: AdapterBase | None = None
    """None without an adapter."""
    reference: ReferenceModel | None = None
    """None if the objective needs no reference model."""
    teacher: TeacherModel | None = None
    """None if the objective does not distil."""
    components: tuple[Component, ...] = ()
    """The objective, the optimizer, and the registered metrics and loggers with which a run continues; checkpoints of
    earlier versions have none."""

    def with_session_seconds(self, seconds: float) -> "Description":
        """Return the description with the duration of the current session, which is the last one."""
        if not self.sessions:
            return self
        *earlier_sessions, session = self.sessions  # frozen: a new one takes the last one's place
        return replace(self, sessions=(*earlier_sessions, replace(session, seconds=seconds)))


def data_starts_after(lineage: Iterable[BranchPoint]) -> int:
    """Return the step after which a run's data order begins: the last branch to other data, or 0."""
    return max((branch.step for branch in lineage if not branch.continues_data), default=0)


@dataclass(frozen=True)
class TrainerJson:
    """The content of a trainer.json; for most fields see :class:`Description`."""

    checkpoint: Path
    """The checkpoint folder that the file was read from."""
    content: dict[str, Any]
    state: TrainerState
    data: DataOrder | StreamOrder
    base_model: ModelOrigin | None
    lineage: tuple[BranchPoint, ...]
    phase_schedules: tuple[PhaseSchedule, ...]
    phase_parts: tuple[PhaseParts, ...]
    trained_modules: str | None
    sessions: tuple[TrainingSession, ...]
    stages: tuple[TrainingStage, ...]
    adapter_base: AdapterBase | None
    reference: ReferenceModel | None
    teacher: TeacherModel | None
    components: tuple[Component, ...]
    best_by: str
    """The source whose validation loss decides which checkpoint is the best; "all" for all tokens."""
    interim: bool
    """Whether the checkpoint is kept only as long as its validation loss is the lowest, see ``discovery.prune``."""
    scheduled: bool
    """Whether the checkpoint was saved at an interval or at the end of an epoch or run, rather than for a signal."""
    num_steps: float
    """The length of the run in steps; like ``schedule_steps``, it may be infinite."""
    schedule_steps: float

    @property
    def arguments(self) -> dict[str, Any]:
        return self.content["arguments"]

    @property
    def versions(self) -> dict[str, str]:
        return self.content["versions"]

    def parse_content(self, kind: type[T]) -> T:
        """Return the content as a type with fields that this class does not have, see ``typed_json.read_json``.

        Raises:
            InputError: A value is missing or has another type.
        """
        try:
            return parse_json(json.dumps(self.content), kind)
        except ValueError as error:
            raise InputError(f"{self.checkpoint / 'trainer.json'}: damaged ({error}); {ADVICE}") from None

    @property
    def parts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The patterns of the parts that the checkpoint's step trained, and of those that were frozen."""
        train_only = tuple(self.arguments.get("train_only") or ())
        freeze = tuple(self.arguments.get("freeze") or ())
        for phase in self.phase_parts:
            if phase.first_step <= self.state.step <= phase.last_step:
                return phase.train_only, freeze
        return train_only, freeze

    def component(self, kind: str) -> Component:
        """Return the run's "objective" or "optimizer"; without a record of it, it is this project's own."""
        for component in self.components:
            if component.kind == kind:
                return component
        default = {"objective": "sft", "optimizer": "adamw"}[kind]
        return Component(kind, self.arguments.get(kind, default), PROJECT)

    def session_of(self, step: int) -> TrainingSession | None:
        """Return the session that took a step; None if the checkpoint has no sessions, as in earlier versions."""
        return next((session for session in reversed(self.sessions) if session.after_step < step), None)

    @property
    def samples_rows(self) -> bool:
        """Whether the run trained on completions of --prompts, and so read no token dataset."""
        return self.arguments.get("prompts") is not None

    @property
    def stream(self) -> StreamOrder | None:
        """The order of the stream that the run read; None if it read token datasets."""
        return self.data if isinstance(self.data, StreamOrder) else None

    @property
    def phase_rows(self) -> tuple[PhaseRows, ...]:
        return self.data.phases if isinstance(self.data, DataOrder) else ()

    def data_changes(self, data: DataOrder | StreamOrder) -> list[str]:
        """Return each difference between the run's data order and another one, up to the checkpoint's step."""
        return describe_changes(self.data, data, self.state.step)


class _SavedArguments(BaseModel):
    """The arguments in trainer.json whose values are used, and not only compared."""

    model_name: str
    streaming_dataset: list[str] | None = None
    number_epochs: PositiveInt | None = None
    max_step: PositiveInt | None = None
    best_by: str = "all"


_ADDED_LATER = {
    "base_model",
    "rows_of_sources",
    "evaluation",
    "first_evaluation",
    "progress",
    "schedule_steps",
    "lineage",
    "phase_schedules",
    "phase_parts",
    "trained_modules",
    "device",
    "mixture_sources",
    "mixture_tokens",
    "sessions",
    "stages",
    "adapter_base",
    "reference",
    "teacher",
    "steps_without_targets",
    "counted_of_sources",
    "components",
}
"""Fields that checkpoints of earlier versions lack; they get the default of their class, or None."""


def _create_parsed_model() -> Any:
    """Create the pydantic model that checks trainer.json: the fields of ``TrainerState`` and ``Description``."""
    required: Any = ...
    parsed_fields: dict[str, Any] = {}
    for record_class in (TrainerState, Description):
        for name, field_type in get_type_hints(record_class, include_extras=True).items():
            default = getattr(record_class, name, None) if name in _ADDED_LATER else required
            parsed_fields[name] = (field_type, default)
    del parsed_fields["attachments"]  # files next to trainer.json
    parsed_fields["arguments"] = (_SavedArguments, required)
    parsed_fields["interim"] = (bool, False)
    parsed_fields["scheduled"] = (bool, True)
    return create_model("Parsed", **parsed_fields)


_Parsed: Any = _create_parsed_model()


def run_of(checkpoint: Path) -> Path:
    """Return the absolute path of a checkpoint's run folder."""
    folder = Path(os.path.abspath(checkpoint)).parent
    return folder.parent if folder.name == "checkpoints" else folder


def read_trainer_json(checkpoint: Path) -> TrainerJson:
    """Read and check a checkpoint's trainer.json.

    Raises:
        InputError: it is damaged, or has another format.
    """
    # the format first: another version may have other fields
    file = checkpoint / "trainer.json"
    content = read_json(file, dict, ADVICE)
    file_format = content.get("format")
    if file_format != FORMAT:
        raise InputError(
            f"{checkpoint}: it has format {file_format!r}, but this version reads format {FORMAT}; {ADVICE}"
        )

    # the fields, each with its type
    parsed = read_json(file, _Parsed, ADVICE)
    num_steps = _planned_steps(parsed)
    if parsed.step > num_steps:
        raise InputError(f"{file}: damaged (step {parsed.step}, but its run had {num_steps} steps); {ADVICE}")

    # fields that are not in the file as they are in TrainerJson
    run = str(run_of(checkpoint))
    lineage = []
    for branch in parsed.lineage:
        lineage.append(replace(branch, run=run) if branch.run == OWN_RUN else branch)
    state = TrainerState(**{field.name: getattr(parsed, field.name) for field in fields(TrainerState)})
    derived_fields = {
        "checkpoint": checkpoint,
        "content": content,
        "state": state,
        "lineage": tuple(lineage),
        "best_by": parsed.arguments.best_by,
        "num_steps": num_steps,
        "schedule_steps": parsed.schedule_steps or num_steps,
    }
    names = [field.name for field in fields(TrainerJson) if field.name not in derived_fields]
    return TrainerJson(**derived_fields, **{name: getattr(parsed, name) for name in names})


def read_format(checkpoint: Path) -> int | None:
    """Return the format number in trainer.json, or None if there is none or the file cannot be read."""
    try:
        file_format = read_json(checkpoint / "trainer.json", dict, ADVICE).get("format")
    except InputError:
        return None
    return file_format if isinstance(file_format, int) else None


def find_unreadable(checkpoint: Path) -> str | None:
    """Return what is wrong with the content of trainer.json, or None."""
    try:
        read_trainer_json(checkpoint)
    except InputError as error:
        return describe_unreadable(checkpoint, error)
    return None


def describe_unreadable(checkpoint: Path, error: InputError) -> str:
    """Return the message of an error of :func:`read_trainer_json`, without the checkpoint's path and the advice."""
    return str(error).removeprefix(f"{checkpoint}/").removesuffix(f"; {ADVICE}")


def _planned_steps(parsed: Any) -> float:
    """Return the length of the run in steps; infinite if neither steps nor epochs limit it."""
    data = parsed.data
    rows_of_epoch_and_step = None
    if isinstance(data, DataOrder) and not data.phases:
        rows_of_epoch_and_step = (data.num_rows, data.rows_per_window)
    return planned_steps(
        max_step=parsed.arguments.max_step,
        number_epochs=parsed.arguments.number_epochs,
        rows=rows_of_epoch_and_step,
        after_step=data_starts_after(parsed.lineage),
    )
