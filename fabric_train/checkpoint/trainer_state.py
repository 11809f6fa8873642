"""Read trainer.json and stream.json: a run's counters, its data order and its description."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_type_hints

from pydantic import BaseModel, Field, create_model

from fabric_train.checkpoint.validation_loss import Count, Evaluation, LossProgress
from fabric_train.cli.errors import InputError
from fabric_train.data.lanes import LaneCursor
from fabric_train.files.typed_json import read_json
from fabric_train.model.origin import ModelOrigin

FORMAT = 2
_ADVICE = "use another checkpoint"

PositiveCount: TypeAlias = Annotated[int, Field(gt=0)]
Seconds: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class PhaseRows:
    """From ``first_step`` on, an epoch has ``rows_per_epoch`` of each source of a mixture."""

    first_step: PositiveCount
    rows_per_epoch: tuple[Count, ...]


@dataclass(frozen=True)
class DataOrder:
    """The values that determine which rows a step consumes. They must be equal to resume a run.

    ``num_rows`` are those of an epoch. ``version`` is that of the order: 2 for a mixture, else 1, as in checkpoints
    that do not have it. ``rows_per_epoch`` are the rows of each source of a mixture. ``phases`` have others,
    from their first step to that of the next one; those that have not begun may change.
    """

    fingerprint: str
    num_rows: PositiveCount
    rows_per_window: PositiveCount
    seed: int
    version: PositiveCount = 1
    rows_per_epoch: list[Count] | None = None
    phases: tuple[PhaseRows, ...] = ()

    def begun(self, step: int) -> "DataOrder":
        """Return this order with the phases that have taken a step by ``step``: all that these rows depend on."""
        return replace(self, phases=tuple(phase for phase in self.phases if phase.first_step <= step))


@dataclass(frozen=True)
class StreamOrder:
    """The values that determine, with the cursors, which rows of a stream a step consumes.

    They must be equal to resume a run. ``shares`` is how much of each place a pass reads, None if it reads one place
    after the other; then ``files_of_places``, the files or splits of each place, is None too. ``seed`` is None if the
    order does not depend on it. ``chat_template`` is the SHA-256 of the template, None without chats.
    """

    sources: list[str]
    text_column: str
    max_length: int
    tokenizer: str
    special_text_is_plain: bool
    rows_per_window: PositiveCount
    shares: list[float] | None = None
    files_of_places: list[PositiveCount] | None = None
    shuffle_buffer: Count = 0
    seed: int | None = None
    chat_template: str | None = None


@dataclass(frozen=True)
class TrainerState:
    """The counters of a run after ``step`` optimizer steps.

    ``epoch`` and the losses are those of the last step. ``skipped_steps`` were skipped because their loss or gradient
    was not finite. ``rows_hash`` is the hash of consumed rows of token datasets, see ``WindowOrder.rows_hash``; None
    for a stream. ``rows_of_sources`` counts the consumed rows of each token dataset of a mixture; None without one.
    ``val_loss`` and ``evaluation`` are None if the step had no evaluation. ``first_evaluation`` is the run's first one,
    for a branch that of the run that it comes from. ``progress`` is that of ``--early_stopping``. ``unlogged`` are the
    step's metrics by column of metrics.csv, if a signal came before its evaluation was complete.
    """

    step: Count = 0
    epoch: Count = 0
    num_tokens: Count = 0
    num_samples: Count = 0
    skipped_steps: Count = 0
    rows_hash: str | None = None
    rows_of_sources: list[Count] | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    evaluation: Evaluation | None = None
    first_evaluation: Evaluation | None = None
    progress: LossProgress | None = None
    unlogged: dict[str, Any] | None = None

    def loss_of(self, source: str) -> float | None:
        """Return the last step's validation loss of a source, of the whole for "all"; None if it has none."""
        if source == "all":
            return self.val_loss
        return self.evaluation.loss_of(source) if self.evaluation else None


@dataclass(frozen=True)
class BranchPoint:
    """Where a run branched off another.

    ``run`` is the folder of that run, whose steps up to ``step`` are the common ones. ``continues_data``: the rows
    after ``step`` are the next ones of the same data order; otherwise those of another order, from its beginning.
    ``changed`` has the old and the new value of each argument that differs.
    """

    run: str
    step: PositiveCount
    continues_data: bool
    changed: dict[str, Annotated[list[Any], Field(min_length=2, max_length=2)]]


@dataclass(frozen=True)
class PhaseSchedule:
    """A learning-rate schedule of the steps from ``first_step`` to ``last_step``, in place of that of the run.

    It has ``num_steps``, which are more if it is cut short, and fewer if the rate stays at its last one.
    ``arguments`` are those that decide it, see ``lr_schedule.ARGUMENTS``.
    """

    first_step: PositiveCount
    last_step: PositiveCount
    num_steps: PositiveCount
    arguments: dict[str, Any]


@dataclass(frozen=True)
class TrainingSession:
    """The steps of a run after ``after_step`` that the same processes took, and the devices and the time for them.

    ``device`` is the name of a device, see ``device_name``. ``seconds`` are wall-clock time from the first step to the
    save of the checkpoint, evaluations included. No step and no figure of a run depends on it.
    """

    after_step: Count
    device: str
    num_devices: PositiveCount
    seconds: Seconds = 0.0

    @property
    def device_hours(self) -> float:
        """The hours of all devices together."""
        return self.num_devices * self.seconds / 3600


@dataclass(frozen=True)
class Description:
    """The description of a run in each of its checkpoints, sufficient to export, generate or resume.

    ``attachments`` are files and folders that are copied into each checkpoint: the tokenizer, the token dataset's
    manifest and the base model's licence. ``base_model`` is None for a model that began with random weights.
    ``schedule_steps`` is the length of the learning-rate schedule, see ``StartingPoint``. ``lineage`` are the branch
    points from the first run to this one. ``phase_schedules`` are those of the phases that have their own. ``device``
    is the name of a device of the run, see ``device_name``. ``mixture_sources`` names the sources of a mixture as
    ``--shares`` does, in the order of their rows. ``sessions`` are those from the first step to the present one, which
    is the last; a branch has those of the run that it comes from too.
    """

    state_dict_type: str
    weights_dtype: str
    data: DataOrder | StreamOrder
    arguments: dict[str, Any]
    versions: dict[str, str]
    base_model: ModelOrigin | None
    attachments: tuple[Path, ...]
    schedule_steps: int | None = None
    lineage: tuple[BranchPoint, ...] = ()
    phase_schedules: tuple[PhaseSchedule, ...] = ()
    device: str | None = None
    mixture_sources: tuple[str, ...] = ()
    sessions: tuple[TrainingSession, ...] = ()

    def after(self, seconds: float) -> "Description":
        """Return the description after ``seconds`` of the present session."""
        now = tuple(replace(session, seconds=seconds) for session in self.sessions[-1:])
        return replace(self, sessions=(*self.sessions[:-1], *now))


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
    "interim": (bool, False),
    "sessions": (list[TrainingSession], []),
}
_TrainerJson: Any = create_model("TrainerJson", **(_REQUIRED | _OTHERWISE))


@dataclass(frozen=True)
class _StreamJson:
    cursors: list[Annotated[list[int], Field(min_length=8)]]


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
        _read(checkpoint)
    except InputError as error:
        return str(error).removeprefix(f"{checkpoint}/").removesuffix(f"; {_ADVICE}")
    return None


def read_trainer_json(checkpoint: Path) -> dict[str, Any]:
    """Return the content of trainer.json.

    Raises:
        InputError: The file is damaged or has a format that this version does not read.
    """
    content, _ = _read(checkpoint)
    return content


def read_trainer_state(checkpoint: Path) -> TrainerState:
    """Return the counters of the checkpoint's run.

    Raises:
        InputError: trainer.json is damaged.
    """
    _, parsed = _read(checkpoint)
    return TrainerState(**{field.name: getattr(parsed, field.name) for field in fields(TrainerState)})


def read_base_model(checkpoint: Path) -> ModelOrigin | None:
    """Return the base model of a checkpoint; None if it began with random weights, or an earlier version saved it.

    Raises:
        InputError: trainer.json is damaged.
    """
    _, parsed = _read(checkpoint)
    origin: ModelOrigin | None = parsed.base_model
    return origin


def read_best_by(checkpoint: Path) -> str:
    """Return the source whose validation loss says which checkpoint of its run is the best; "all" for the whole.

    Raises:
        InputError: trainer.json is damaged.
    """
    _, parsed = _read(checkpoint)
    best_by: str = parsed.arguments.best_by
    return best_by


def read_interim(checkpoint: Path) -> bool:
    """Return whether a checkpoint stays only while its validation loss is the lowest one, see ``pruning.prune``.

    Raises:
        InputError: trainer.json is damaged.
    """
    _, parsed = _read(checkpoint)
    interim: bool = parsed.interim
    return interim


def read_lengths(checkpoint: Path) -> tuple[float, float]:
    """Return the number of steps of the checkpoint's run and of its learning-rate schedule; infinite if not known.

    Raises:
        InputError: trainer.json is damaged.
    """
    _, parsed = _read(checkpoint)
    num_steps = _num_steps(parsed)
    return num_steps, parsed.schedule_steps or num_steps


def read_lineage(checkpoint: Path) -> tuple[BranchPoint, ...]:
    """Return the branch points from the first run to the checkpoint's run.

    Raises:
        InputError: trainer.json is damaged.
    """
    _, parsed = _read(checkpoint)
    return tuple(parsed.lineage)


def read_sessions(checkpoint: Path) -> tuple[TrainingSession, ...]:
    """Return the sessions that led to a checkpoint, the first one first; none if an earlier version saved it.

    Raises:
        InputError: trainer.json is damaged.
    """
    _, parsed = _read(checkpoint)
    return tuple(parsed.sessions)


def read_phase_schedules(checkpoint: Path) -> tuple[PhaseSchedule, ...]:
    """Return the learning-rate schedules of the phases of the checkpoint's run.

    Raises:
        InputError: trainer.json is damaged.
    """
    _, parsed = _read(checkpoint)
    return tuple(parsed.phase_schedules)


def read_phase_rows(checkpoint: Path) -> tuple[PhaseRows, ...]:
    """Return the phases of the checkpoint's run; empty if it has none.

    Raises:
        InputError: trainer.json is damaged.
    """
    _, parsed = _read(checkpoint)
    return parsed.data.phases if isinstance(parsed.data, DataOrder) else ()


def data_starts_after(lineage: Iterable[BranchPoint]) -> int:
    """Return the step after which a run's data order begins: that of the last branch to other data, or 0."""
    return max((branch.step for branch in lineage if not branch.continues_data), default=0)


def read_data_order(checkpoint: Path) -> DataOrder | StreamOrder:
    """Return the data order of the checkpoint's run.

    Raises:
        InputError: trainer.json is damaged.
    """
    _, parsed = _read(checkpoint)
    order: DataOrder | StreamOrder = parsed.data
    return order


def read_stream_order(checkpoint: Path) -> StreamOrder | None:
    """Return the data order of the checkpoint's stream, or None if its run read a token dataset.

    Raises:
        InputError: trainer.json is damaged.
    """
    order = read_data_order(checkpoint)
    return order if isinstance(order, StreamOrder) else None


def read_cursors(checkpoint: Path) -> list[LaneCursor]:
    """Return the cursors of all lanes of the checkpoint's stream.

    Raises:
        InputError: where stream.json is damaged.
    """
    file = checkpoint / "stream.json"
    order, cursors = read_stream_order(checkpoint), read_json(file, _StreamJson, _ADVICE).cursors
    if order is None or len(cursors) != order.rows_per_window:
        raise InputError(f"{file}: damaged ({len(cursors)} cursors are not one for each row of a step); {_ADVICE}")
    if any(number < 0 for cursor in cursors for number in (*cursor[:6], *cursor[8:])):
        raise InputError(f"{file}: damaged (a number below 0); {_ADVICE}")
    return [LaneCursor.from_numbers(numbers) for numbers in cursors]


def find_data_changes(checkpoint: Path, data: DataOrder | StreamOrder) -> list[str]:
    """Return a line for each difference in the data order that would make a resumed run consume other rows.

    Raises:
        InputError: trainer.json is damaged.
    """
    advice = "resume with the same, or take only its weights with --weights_only true"
    return [f"{checkpoint}: {change}; {advice}" for change in describe_data_changes(checkpoint, data)]


def describe_data_changes(checkpoint: Path, data: DataOrder | StreamOrder) -> list[str]:
    """Return each difference between the data order of a checkpoint and another one, up to the checkpoint's step.

    Raises:
        InputError: trainer.json is damaged.
    """
    _, parsed = _read(checkpoint)
    orders = [order.begun(parsed.step) if isinstance(order, DataOrder) else order for order in (parsed.data, data)]
    saved, current = map(asdict, orders)
    if saved.keys() != current.keys():
        options = ("--streaming_dataset", "--train_data_dir")
        saved_option, current_option = options if "sources" in saved else reversed(options)
        return [f"its run read {saved_option}, not {current_option}"]
    causes = {
        "sources": "--streaming_dataset reads other files, or they have changed",
        "text_column": "--text_column differs",
        "shares": "--shares differ",
        "shuffle_buffer": "--shuffle_buffer differs",
        "files_of_places": "--streaming_dataset has other numbers of files in its places",
        "max_length": "--max_length differs",
        "tokenizer": "the tokenizer differs",
        "chat_template": "the chat template differs, or there were no chats",
        "special_text_is_plain": "the kind of the tokenizer differs",
        "fingerprint": "--train_data_dir is another token dataset",
        "num_rows": "--train_data_dir has another number of rows",
        "rows_per_window": "the rows of one optimizer step differ (--total_batch_size keeps them)",
        "seed": "--seed differs",
        "version": "the version of the order differs (2 is that of --shares and of several --train_data_dir)",
        "rows_per_epoch": "an epoch has other numbers of rows of each source (--shares, --token_shares)",
        "phases": "--phases differs in a phase that has begun",
    }
    return [
        f"{causes[name]}: {_difference(saved[name], value)}" for name, value in current.items() if saved[name] != value
    ]


def _difference(saved: Any, current: Any) -> str:
    """Return both values as text; for lists, the first elements that differ."""
    if isinstance(saved, list | tuple) and isinstance(current, list | tuple):
        saved, current = next(pair for pair in zip_longest(saved, current, fillvalue="nothing") if pair[0] != pair[1])
    if isinstance(saved, dict) or isinstance(current, dict):
        saved, current = (
            f"{each['rows_per_epoch']} from step {each['first_step']} on" if isinstance(each, dict) else each
            for each in (saved, current)
        )
    return f"{saved} there, {current} here"


def _read(checkpoint: Path) -> tuple[dict[str, Any], Any]:
    """Return the content of trainer.json, and the values that this program uses, with the types of its dataclasses.

    Checkpoints of earlier versions have no ``base_model``, ``schedule_steps``, ``lineage``, ``device``, phases,
    evaluations and ``sessions``.
    """
    file = checkpoint / "trainer.json"
    content = read_json(file, dict, _ADVICE)
    if (found := content.get("format")) != FORMAT:
        raise InputError(f"{checkpoint}: format {found!r} is not format {FORMAT}, which this version reads; {_ADVICE}")
    parsed = read_json(file, _TrainerJson, _ADVICE)
    num_steps = _num_steps(parsed)
    if parsed.step > num_steps:
        raise InputError(f"{file}: damaged (step {parsed.step}, but its run had {num_steps} steps); {_ADVICE}")
    return content, parsed


def _num_steps(parsed: Any) -> float:
    """Return the number of steps of the run that saved a checkpoint; infinite if its arguments do not say it."""
    data, arguments = parsed.data, parsed.arguments
    steps = [math.inf if arguments.max_step is None else arguments.max_step]
    if isinstance(data, DataOrder) and arguments.number_epochs is not None and not data.phases:
        in_epochs = math.ceil(data.num_rows / data.rows_per_window) * arguments.number_epochs
        steps.append(data_starts_after(parsed.lineage) + in_epochs)
    return min(steps)
