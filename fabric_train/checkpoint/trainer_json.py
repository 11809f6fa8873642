"""The state and the description of a run, with its losses, as trainer.json has them; and how it is read."""

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, create_model

from fabric_train.cli.argument_types import HIGHER_IS_BETTER, planned_steps
from fabric_train.cli.errors import InputError
from fabric_train.cli.tables import PROJECT, Component
from fabric_train.data.data_order import DataOrder, PhaseRows, StreamOrder, describe_changes
from fabric_train.files.regular_file import read_json
from fabric_train.model.origin import AdapterBase, ModelOrigin, ReferenceModel, TrainingSession, TrainingStage

FORMAT = 2
OWN_RUN = "."
PROGRAM = "fabric-train"
"""The name in ``versions`` of the code that trained, with its commit; earlier versions did not record it."""
ADVICE = "use another checkpoint"


@dataclass(frozen=True)
class TokenLoss:
    """The loss of ``num_tokens`` supervised tokens: ``nats`` is its sum. ``of_pairs``: it is of so many pairs instead.

    ``num_bytes`` are the UTF-8 bytes of text that the tokens stand for (``token_dataset.place_pieces``); None without a
    document index. ``further`` are other figures by name, of ``training.evaluation.METRICS`` and of the objective.
    ``has_own_unit``: the loss is that of a registered objective, which need not be in nats.
    """

    nats: float
    num_tokens: NonNegativeInt
    num_bytes: float | None = None
    further: dict[str, float | None] = field(default_factory=dict)
    of_pairs: bool = False
    has_own_unit: bool = False

    @property
    def is_likelihood(self) -> bool:
        """Whether the loss is in nats per token, so that perplexity and bits per byte follow from it."""
        return not (self.of_pairs or self.has_own_unit)

    @property
    def unit(self) -> str:
        """What the loss is a mean of."""
        return "pair" if self.of_pairs else "token"

    @property
    def loss(self) -> float:
        """Nats per token; NaN without tokens."""
        return self.nats / self.num_tokens if self.num_tokens else math.nan

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text, which can be compared between tokenizers; None if not in nats, or without bytes."""
        if not (self.num_bytes and self.is_likelihood):
            return None
        return self.nats / (math.log(2) * self.num_bytes)

    def figures(self) -> dict[str, float | None]:
        """Return loss, perplexity, bits_per_byte and the further figures by name; if not in nats, without the two."""
        if not self.is_likelihood:
            return {"loss": self.loss, **self.further}
        return {"loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte} | self.further


@dataclass(frozen=True)
class Evaluation:
    """The losses of a validation after ``step``: of all tokens, and of each source that has some.

    ``rows`` is ``batch.hash_supervised`` of the rows; None if an earlier version evaluated them.
    ``follows_other_rows``: the run evaluated other rows before, whose losses cannot be compared with these.
    """

    whole: TokenLoss
    sources: dict[str, TokenLoss] = field(default_factory=dict)
    step: NonNegativeInt = 0
    rows: str | None = None
    follows_other_rows: bool = False

    @property
    def parts(self) -> dict[str, TokenLoss]:
        """The loss of each source by its name, if there are several, and of the whole as ``all``."""
        return {**(self.sources if len(self.sources) > 1 else {}), "all": self.whole}

    def is_comparable(self, other: "Evaluation") -> bool:
        """Whether another evaluation is of the same rows, as far as that is known."""
        return self.rows is None or other.rows is None or self.rows == other.rows

    def loss_of(self, source: str) -> float | None:
        """Return the loss of a source or "all", or the figure FIGURE or FIGURE/SOURCE; None if there is none."""
        losses = {**self.sources, "all": self.whole}
        if source in losses:
            return losses[source].loss
        figure, _, of_source = source.partition("/")
        found = losses.get(of_source or "all")
        return found.further.get(figure) if found else None

    def sign_of(self, source: str) -> int:
        """Return -1 if a higher value of what ``loss_of`` returns is the better one, else 1."""
        is_figure = source not in self.sources and self.whole.of_pairs
        return -1 if is_figure and source.partition("/")[0] in HIGHER_IS_BETTER else 1


@dataclass(frozen=True)
class LossProgress:
    """The validation loss of a source, or "all", or a figure: ``best`` after ``best_step``, ``num_since`` evaluations
    ago.
    """

    source: str
    best: float | None = None
    best_step: NonNegativeInt = 0
    num_since: NonNegativeInt = 0

    def after(self, evaluation: Evaluation) -> "LossProgress":
        loss = evaluation.loss_of(self.source)
        sign = evaluation.sign_of(self.source)
        if loss is not None and math.isfinite(loss) and (self.best is None or sign * loss < sign * self.best):
            return LossProgress(self.source, loss, evaluation.step)
        return replace(self, num_since=self.num_since + 1)


def perplexity(loss: float) -> float:
    """Return exp of a loss in nats per token; infinite if that does not fit into a float."""
    return math.exp(loss) if loss < 700 else math.inf


def compare_evaluations(first: Evaluation, now: Evaluation) -> Iterator[tuple[str, TokenLoss | None, TokenLoss]]:
    """Yield the name of each source, or "all", and its loss in both evaluations; None if the first had none."""
    for name, loss in now.parts.items():
        yield name, first.whole if name == "all" else first.sources.get(name), loss


def to_content(record: Any) -> dict[str, Any]:
    """Return one of these dataclasses as trainer.json has it: without those of ``left_out`` that are empty."""
    left_out = ("further", "of_pairs", "has_own_unit")
    return asdict(
        record, dict_factory=lambda pairs: {name: value for name, value in pairs if value or name not in left_out}
    )


@dataclass(frozen=True)
class TrainerState:
    """The counters of a run after ``step`` optimizer steps.

    ``epoch`` and the losses are the last step's. ``skipped_steps`` had a loss or gradient that was not finite. In
    ``steps_without_targets`` the objective counted nothing, such as no supervised token, so the optimizer took no step.
    ``rows_hash`` is the hash of consumed rows, see ``WindowOrder.rows_hash``; None for a stream. ``rows_of_sources``
    counts the consumed rows of each token dataset of a mixture. ``counted_of_sources`` has the supervised tokens (of
    preference pairs, the pairs) that all steps so far consumed of each source, also of other data before a phase or a
    branch; None if sources were not told apart. ``val_loss`` and ``evaluation`` are None if the step
    had no evaluation. ``first_evaluation`` is the first one of the rows that the run evaluates now, for a branch the
    first one of its trunk. ``progress`` is of ``--early_stopping``. ``unlogged`` are the step's metrics by
    column of metrics.csv, if a signal came before its evaluation was complete.
    """

    step: NonNegativeInt = 0
    epoch: NonNegativeInt = 0
    num_tokens: NonNegativeInt = 0
    num_samples: NonNegativeInt = 0
    skipped_steps: NonNegativeInt = 0
    steps_without_targets: NonNegativeInt = 0
    rows_hash: str | None = None
    rows_of_sources: list[NonNegativeInt] | None = None
    counted_of_sources: dict[str, NonNegativeInt] | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    evaluation: Evaluation | None = None
    first_evaluation: Evaluation | None = None
    progress: LossProgress | None = None
    unlogged: dict[str, int | float | str | None] | None = None

    def loss_of(self, source: str) -> float | None:
        """Return the last step's validation loss of a source, or of the whole for "all"; None if it has none."""
        if source == "all":
            return self.val_loss
        return self.evaluation.loss_of(source) if self.evaluation else None

    def cost_of(self, source: str) -> float | None:
        """Return what ``loss_of`` returns, or its negative if a higher value is better: the lowest is the best."""
        loss = self.loss_of(source)
        return loss * self.evaluation.sign_of(source) if loss is not None and self.evaluation else loss


@dataclass(frozen=True)
class BranchPoint:
    """Where a run branched off the one in ``run``; ``changed`` has the old and the new value of each argument.

    ``continues_data``: the rows after ``step`` are the next ones of the same data order, else the first of another. A
    run that goes on with other data in its own folder has ``OWN_RUN`` there in trainer.json, so that it can be moved.
    """

    run: str
    step: PositiveInt
    continues_data: bool
    changed: dict[str, Annotated[list[Any], Field(min_length=2, max_length=2)]]

    def is_border_of(self, run: Path) -> bool:
        """Whether the run in a folder went on with other data itself."""
        return self.run == os.path.abspath(run)


@dataclass(frozen=True)
class PhaseSchedule:
    """A learning-rate schedule of the steps from ``first_step`` to ``last_step``, in place of the run's.

    It has ``num_steps``, which are more if it is cut short, and fewer if the rate stays at its last one. ``arguments``
    are ``optim.optimizer.RATE_ARGUMENTS``.
    """

    first_step: PositiveInt
    last_step: PositiveInt
    num_steps: PositiveInt
    arguments: dict[str, Any]


@dataclass(frozen=True)
class PhaseParts:
    """The patterns of what trains in the steps from ``first_step`` to ``last_step``, in place of ``--train_only``."""

    first_step: PositiveInt
    last_step: PositiveInt
    train_only: tuple[str, ...]


@dataclass(frozen=True)
class Description:
    """The description of a run in each of its checkpoints, sufficient to export, generate or resume.

    ``attachments`` are files and folders that are copied into each checkpoint: the tokenizer, the token dataset's
    manifest, the base model's licence. ``base_model`` is None for random weights. ``schedule_steps`` is the length of
    the learning-rate schedule. ``lineage`` are the branch points from the first run to this one. ``mixture_sources``
    names the sources of a mixture as ``--shares`` does, in the order of their rows; ``mixture_tokens`` are the tokens
    of each by the source of documents. ``sessions`` are those from the first step to the present one, also of the run
    that a branch comes from. ``stages`` are the runs before this one, in their order: each began with the weights of
    the one before. ``trained_modules`` names the modules that the step trained, with their numbers of parameters; None
    if nothing was frozen, or beside an adapter. ``adapter_base`` is None without an adapter, ``reference`` if the
    objective needs no reference model. ``components`` are the objective, the optimizer, and the registered metrics and
    loggers, with which a run goes on; checkpoints of earlier versions have none.
    """

    state_dict_type: str
    weights_dtype: str
    data: DataOrder | StreamOrder
    arguments: dict[str, Any]
    versions: dict[str, str]
    base_model: ModelOrigin | None
    attachments: tuple[Path, ...]
    schedule_steps: PositiveInt | None = None
    lineage: tuple[BranchPoint, ...] = ()
    phase_schedules: tuple[PhaseSchedule, ...] = ()
    phase_parts: tuple[PhaseParts, ...] = ()
    trained_modules: str | None = None
    device: str | None = None
    mixture_sources: tuple[str, ...] = ()
    mixture_tokens: tuple[dict[str, NonNegativeInt], ...] = ()
    sessions: tuple[TrainingSession, ...] = ()
    stages: tuple[TrainingStage, ...] = ()
    adapter_base: AdapterBase | None = None
    reference: ReferenceModel | None = None
    components: tuple[Component, ...] = ()

    def after(self, seconds: float) -> "Description":
        """Return the description after ``seconds`` of the present session."""
        now = tuple(replace(session, seconds=seconds) for session in self.sessions[-1:])
        return replace(self, sessions=(*self.sessions[:-1], *now))


def data_starts_after(lineage: Iterable[BranchPoint]) -> int:
    """Return the step after which a run's data order begins: the last branch to other data, or 0."""
    return max((branch.step for branch in lineage if not branch.continues_data), default=0)


@dataclass(frozen=True)
class TrainerJson:
    """The content of a trainer.json; for most fields see :class:`Description`.

    ``best_by`` is the source whose validation loss says which checkpoint is the best; "all" for the whole. ``interim``:
    it stays only while its validation loss is the lowest, see ``discovery.prune``. ``scheduled``: an interval or the
    end of an epoch or run is the reason, not a signal. ``num_steps`` and ``schedule_steps`` may be infinite.
    """

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
    components: tuple[Component, ...]
    best_by: str
    interim: bool
    scheduled: bool
    num_steps: float
    schedule_steps: float

    @property
    def arguments(self) -> dict[str, Any]:
        return self.content["arguments"]

    @property
    def versions(self) -> dict[str, str]:
        return self.content["versions"]

    @property
    def parts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The patterns of the parts that the checkpoint's step trained, and of those that were frozen."""
        train_only, freeze = (tuple(self.arguments.get(name) or ()) for name in ("train_only", "freeze"))
        of_phase = (one.train_only for one in self.phase_parts if one.first_step <= self.state.step <= one.last_step)
        return next(of_phase, train_only), freeze

    def component(self, kind: str) -> Component:
        """Return the ``objective`` or ``optimizer`` of the run; before it was saved, it was this project's own."""
        for component in self.components:
            if component.kind == kind:
                return component
        default = {"objective": "sft", "optimizer": "adamw"}[kind]
        return Component(kind, self.arguments.get(kind, default), PROJECT)

    def session_of(self, step: int) -> TrainingSession | None:
        """Return the session that took a step; None if an earlier version saved the checkpoint."""
        return next((session for session in reversed(self.sessions) if session.after_step < step), None)

    @property
    def stream(self) -> StreamOrder | None:
        """The order of the stream that the run read, None if it read token datasets."""
        return self.data if isinstance(self.data, StreamOrder) else None

    @property
    def phase_rows(self) -> tuple[PhaseRows, ...]:
        return self.data.phases if isinstance(self.data, DataOrder) else ()

    def data_changes(self, data: DataOrder | StreamOrder) -> list[str]:
        """Return each difference between the run's data order and another one, up to the checkpoint's step."""
        return describe_changes(self.data, data, self.state.step)


class _SavedArguments(BaseModel):
    """The arguments that are read from trainer.json for more than a comparison."""

    model_name: str
    streaming_dataset: list[str] | None = None
    number_epochs: PositiveInt | None = None
    max_step: PositiveInt | None = None
    best_by: str = "all"


_ADDED_LATER = {
    *("base_model", "rows_of_sources", "evaluation", "first_evaluation", "progress", "schedule_steps", "lineage"),
    *("phase_schedules", "phase_parts", "trained_modules", "device", "mixture_sources", "mixture_tokens", "sessions"),
    *("stages", "adapter_base", "reference", "steps_without_targets", "counted_of_sources", "components"),
}
"""Fields that checkpoints of earlier versions lack: then they have the default of their class, or are None."""
_FIELDS: dict[str, Any] = {
    name: (kind, getattr(owner, name, None) if name in _ADDED_LATER else ...)
    for owner in (TrainerState, Description)
    for name, kind in get_type_hints(owner, include_extras=True).items()
    if name != "attachments"
}
_FIELDS |= {"arguments": (_SavedArguments, ...), "interim": (bool, False), "scheduled": (bool, True)}
_Parsed: Any = create_model("Parsed", **_FIELDS)


def run_of(checkpoint: Path) -> Path:
    """Return the absolute path of a checkpoint's run folder."""
    folder = Path(os.path.abspath(checkpoint)).parent
    return folder.parent if folder.name == "checkpoints" else folder


def read_trainer_json(checkpoint: Path) -> TrainerJson:
    """Read a checkpoint's trainer.json; an InputError if it is damaged or has another format."""
    file = checkpoint / "trainer.json"
    content = read_json(file, dict, ADVICE)
    if (found := content.get("format")) != FORMAT:
        raise InputError(f"{checkpoint}: format {found!r} is not format {FORMAT}, which this version reads; {ADVICE}")
    parsed = read_json(file, _Parsed, ADVICE)
    num_steps = _num_steps(parsed)
    own = str(run_of(checkpoint))
    if parsed.step > num_steps:
        raise InputError(f"{file}: damaged (step {parsed.step}, but its run had {num_steps} steps); {ADVICE}")
    derived = {
        "content": content,
        "state": TrainerState(**{field.name: getattr(parsed, field.name) for field in fields(TrainerState)}),
        "lineage": tuple(replace(one, run=own) if one.run == OWN_RUN else one for one in parsed.lineage),
        "best_by": parsed.arguments.best_by,
        "num_steps": num_steps,
        "schedule_steps": parsed.schedule_steps or num_steps,
    }
    names = [field.name for field in fields(TrainerJson) if field.name not in derived]
    return TrainerJson(**derived, **{name: getattr(parsed, name) for name in names})


def read_format(checkpoint: Path) -> int | None:
    """Return the format number in trainer.json, or None if there is none or the file cannot be read."""
    try:
        found = read_json(checkpoint / "trainer.json", dict, ADVICE).get("format")
    except InputError:
        return None
    return found if isinstance(found, int) else None


def find_unreadable(checkpoint: Path) -> str | None:
    """Return the fault of trainer.json's content, or None."""
    try:
        read_trainer_json(checkpoint)
    except InputError as error:
        return str(error).removeprefix(f"{checkpoint}/").removesuffix(f"; {ADVICE}")
    return None


def _num_steps(parsed: Any) -> float:
    data = parsed.data
    arguments = parsed.arguments
    counts = isinstance(data, DataOrder) and not data.phases
    rows = (data.num_rows, data.rows_per_window) if counts else None
    return planned_steps(arguments.max_step, arguments.number_epochs, rows, data_starts_after(parsed.lineage))
