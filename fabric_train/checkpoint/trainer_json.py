"""Read trainer.json and stream.json of a checkpoint."""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, Field, create_model

from fabric_train.checkpoint.trainer_state import (
    BranchPoint,
    Count,
    DataOrder,
    Description,
    Evaluation,
    LossProgress,
    PhaseRows,
    PhaseSchedule,
    PositiveCount,
    StreamOrder,
    TrainerState,
    TrainingSession,
    TrainingStage,
    data_starts_after,
    describe_changes,
)
from fabric_train.cli.errors import InputError
from fabric_train.data.stream_batches import LaneCursor
from fabric_train.files.regular_file import read_json
from fabric_train.model.origin import ModelOrigin, find_stages_file

FORMAT = 2
_ADVICE = "use another checkpoint"


@dataclass(frozen=True)
class TrainerJson:
    """The content of a trainer.json.

    ``base_model`` is None if the model began with random weights. ``lineage`` are the branch points from the first run
    to this one, ``phase_schedules`` the learning-rate schedules of its phases. ``sessions`` led to the checkpoint, the
    first one first. ``stages`` are the runs before this one, in order: each began with the weights of the one before.
    ``best_by`` is the source whose validation loss says which checkpoint is the best; "all" for the whole. ``interim``:
    it stays only while its validation loss is the lowest, see ``discovery.prune``. ``scheduled``: an interval, or the
    end of an epoch or of the run, is the reason for the checkpoint, not a signal. ``num_steps`` is that of the run,
    ``schedule_steps`` the length of its learning-rate schedule; infinite if not known.
    """

    content: dict[str, Any]
    state: TrainerState
    data: DataOrder | StreamOrder
    base_model: ModelOrigin | None
    lineage: tuple[BranchPoint, ...]
    phase_schedules: tuple[PhaseSchedule, ...]
    sessions: tuple[TrainingSession, ...]
    stages: tuple[TrainingStage, ...]
    best_by: str
    interim: bool
    scheduled: bool
    num_steps: float
    schedule_steps: float

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the run by name."""
        arguments: dict[str, Any] = self.content["arguments"]
        return arguments

    @property
    def versions(self) -> dict[str, str]:
        """Return the versions of the packages that the run used."""
        versions: dict[str, str] = self.content["versions"]
        return versions

    def session_of(self, step: int) -> TrainingSession | None:
        """Return the session that took a step; None if an earlier version saved the checkpoint."""
        return next((session for session in reversed(self.sessions) if session.after_step < step), None)

    @property
    def stream(self) -> StreamOrder | None:
        """The order of the stream that the run read, None if it read token datasets."""
        return self.data if isinstance(self.data, StreamOrder) else None

    @property
    def phase_rows(self) -> tuple[PhaseRows, ...]:
        """The phases of the run's data order; empty if it has none."""
        return self.data.phases if isinstance(self.data, DataOrder) else ()

    def data_changes(self, data: DataOrder | StreamOrder) -> list[str]:
        """Return each difference between the run's data order and another one, up to the checkpoint's step."""
        return describe_changes(self.data, data, self.state.step)


class _SavedArguments(BaseModel):
    """The arguments that are read from trainer.json for more than a comparison."""

    model_name: str
    streaming_dataset: list[str] | None = None
    number_epochs: PositiveCount | None = None
    max_step: PositiveCount | None = None
    best_by: str = "all"


_TYPES = get_type_hints(TrainerState, include_extras=True) | get_type_hints(Description, include_extras=True)
_REQUIRED: dict[str, Any] = {name: (kind, ...) for name, kind in _TYPES.items() if name != "attachments"}
_OTHERWISE: dict[str, Any] = {
    "arguments": (_SavedArguments, ...),
    "base_model": (ModelOrigin | None, None),
    "rows_of_sources": (list[Count] | None, None),
    "evaluation": (Evaluation | None, None),
    "first_evaluation": (Evaluation | None, None),
    "progress": (LossProgress | None, None),
    "unlogged": (dict[str, int | float | str | None] | None, ...),
    "schedule_steps": (PositiveCount | None, None),
    "lineage": (list[BranchPoint], []),
    "phase_schedules": (list[PhaseSchedule], []),
    "device": (str | None, None),
    "mixture_sources": (list[str], []),
    "mixture_tokens": (list[dict[str, Count]], []),
    "interim": (bool, False),
    "scheduled": (bool, True),
    "sessions": (list[TrainingSession], []),
    "stages": (list[TrainingStage], []),
}
_Parsed: Any = create_model("Parsed", **(_REQUIRED | _OTHERWISE))


@dataclass(frozen=True)
class _StreamJson:
    cursors: list[Annotated[list[int], Field(min_length=8)]]


def read_trainer_json(checkpoint: Path) -> TrainerJson:
    """Read a checkpoint's trainer.json. Those of earlier versions lack the fields that ``_OTHERWISE`` gives a value.

    Raises:
        InputError: The file is damaged or has a format that this version does not read.
    """
    file = checkpoint / "trainer.json"
    content = read_json(file, dict, _ADVICE)
    if (found := content.get("format")) != FORMAT:
        raise InputError(f"{checkpoint}: format {found!r} is not format {FORMAT}, which this version reads; {_ADVICE}")
    parsed = read_json(file, _Parsed, _ADVICE)
    num_steps = _num_steps(parsed)
    if parsed.step > num_steps:
        raise InputError(f"{file}: damaged (step {parsed.step}, but its run had {num_steps} steps); {_ADVICE}")
    return TrainerJson(
        content=content,
        state=TrainerState(**{field.name: getattr(parsed, field.name) for field in fields(TrainerState)}),
        data=parsed.data,
        base_model=parsed.base_model,
        lineage=tuple(parsed.lineage),
        phase_schedules=tuple(parsed.phase_schedules),
        sessions=tuple(parsed.sessions),
        stages=tuple(parsed.stages),
        best_by=parsed.arguments.best_by,
        interim=parsed.interim,
        scheduled=parsed.scheduled,
        num_steps=num_steps,
        schedule_steps=parsed.schedule_steps or num_steps,
    )


def read_stages(model_name: str) -> tuple[TrainingStage, ...]:
    """Return the stages of training that an export of this program records, the first one first; none of other models.

    ``model_name`` is a folder, or a hub name that is in the cache.

    Raises:
        InputError: The record is damaged.
    """
    file = find_stages_file(model_name)
    return tuple(read_json(file, list[TrainingStage], "export the model again, or remove this file")) if file else ()


def read_format(checkpoint: Path) -> int | None:
    """Return the format number in trainer.json, or None if there is none or the file cannot be read."""
    try:
        found = read_json(checkpoint / "trainer.json", dict, _ADVICE).get("format")
    except InputError:
        return None
    return found if isinstance(found, int) else None


def find_unreadable(checkpoint: Path) -> str | None:
    """Return what is wrong with the content of trainer.json, or None."""
    try:
        read_trainer_json(checkpoint)
    except InputError as error:
        return str(error).removeprefix(f"{checkpoint}/").removesuffix(f"; {_ADVICE}")
    return None


def read_cursors(checkpoint: Path) -> list[LaneCursor]:
    """Return the cursors of all lanes of the checkpoint's stream.

    Raises:
        InputError: where stream.json is damaged.
    """
    file = checkpoint / "stream.json"
    order, cursors = read_trainer_json(checkpoint).stream, read_json(file, _StreamJson, _ADVICE).cursors
    if order is None or len(cursors) != order.rows_per_window:
        raise InputError(f"{file}: damaged ({len(cursors)} cursors are not one for each row of a step); {_ADVICE}")
    if any(number < 0 for cursor in cursors for number in (*cursor[:6], *cursor[8:])):
        raise InputError(f"{file}: damaged (a number below 0); {_ADVICE}")
    return [LaneCursor.from_numbers(numbers) for numbers in cursors]


def _num_steps(parsed: Any) -> float:
    data, arguments = parsed.data, parsed.arguments
    steps = [math.inf if arguments.max_step is None else arguments.max_step]
    if isinstance(data, DataOrder) and arguments.number_epochs is not None and not data.phases:
        in_epochs = math.ceil(data.num_rows / data.rows_per_window) * arguments.number_epochs
        steps.append(data_starts_after(parsed.lineage) + in_epochs)
    return min(steps)
