"""The counters of a run after a step, and its description: what trainer.json holds."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from fabric_train.checkpoint.data_order import DataOrder, PositiveCount, StreamOrder
from fabric_train.checkpoint.validation_loss import Count, Evaluation, LossProgress
from fabric_train.model.origin import ModelOrigin

Seconds: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class TrainerState:
    """The counters of a run after ``step`` optimizer steps.

    ``epoch`` and the losses are those of the last step. ``skipped_steps`` were skipped because their loss or gradient
    was not finite. ``rows_hash`` is the hash of consumed rows of token datasets, see ``WindowOrder.rows_hash``; None
    for a stream. ``rows_of_sources`` counts the consumed rows of each token dataset of a mixture; None without one.
    ``val_loss`` and ``evaluation`` are None if the step had no evaluation. ``first_evaluation`` is the run's first one
    of the rows that it evaluates now, for a branch that of the run that it comes from. ``progress`` is that of
    ``--early_stopping``. ``unlogged`` are the step's metrics by column of metrics.csv, if a signal came before its
    evaluation was complete.
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


SPLIT_ARGUMENTS = (
    *("parallelism", "micro_batch_size", "gradient_accumulation_steps", "tensor_parallel_size", "sharding_strategy"),
    *("cpu_offload", "gradient_reduction", "compile", "activation_checkpointing"),
)
"""Arguments that change the order of additions, and so the last digits of the losses."""


@dataclass(frozen=True)
class TrainingSession:
    """The steps of a run after ``after_step`` that the same processes took, and the devices and the time for them.

    ``device`` is the name of a device, see ``device_name``. ``seconds`` are wall-clock time from the first step to the
    save of the checkpoint, evaluations included. ``arguments`` are ``SPLIT_ARGUMENTS``, as they were resolved, and
    ``log_step_interval``; empty if an earlier version saved the checkpoint. No step of a run depends on it.
    """

    after_step: Count
    device: str
    num_devices: PositiveCount
    seconds: Seconds = 0.0
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def device_hours(self) -> float:
        """The hours of all devices together."""
        return self.num_devices * self.seconds / 3600


@dataclass(frozen=True)
class HubDataset:
    """A dataset on the hub; ``revision`` is its commit, None if it is not known."""

    repository: str
    revision: str | None


@dataclass(frozen=True)
class StageSource:
    """What a stage of training read of a source, by the source's public name.

    ``share`` is that of the stage's tokens, for a stream that of its pass. ``tokens`` and ``documents`` are those of
    the token dataset; None for a stream. ``files`` are lines of ``sha256sum`` with names of the form SOURCE/FILE.
    """

    name: str
    share: float
    tokens: Count | None
    documents: Count | None
    files: list[str]
    datasets: list[HubDataset]


@dataclass(frozen=True)
class TrainingStage:
    """A run whose weights the next stage began with, after ``step``, in words that may be published.

    ``base_model`` is what the first stage began with. ``sessions`` are those up to ``step``.
    """

    run: str
    step: Count
    num_tokens: Count
    base_model: ModelOrigin | None
    sources: list[StageSource]
    sessions: list[TrainingSession]


@dataclass(frozen=True)
class Description:
    """The description of a run in each of its checkpoints, sufficient to export, generate or resume.

    ``attachments`` are files and folders that are copied into each checkpoint: the tokenizer, the token dataset's
    manifest and the base model's licence. ``base_model`` is None for a model that began with random weights.
    ``schedule_steps`` is the length of the learning-rate schedule, see ``StartingPoint``. ``lineage`` are the branch
    points from the first run to this one. ``phase_schedules`` are those of the phases that have their own. ``device``
    is the name of a device of the run, see ``device_name``. ``mixture_sources`` names the sources of a mixture as
    ``--shares`` does, in the order of their rows. ``mixture_tokens`` are the tokens of each by the source of documents.
    ``sessions`` are those from the first step to the present one, which is the last; a branch has those of the run that
    it comes from too. ``stages`` are the runs before this one, in their order: each began with the weights of the one
    before.
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
    mixture_tokens: tuple[dict[str, int], ...] = ()
    sessions: tuple[TrainingSession, ...] = ()
    stages: tuple[TrainingStage, ...] = ()

    def after(self, seconds: float) -> "Description":
        """Return the description after ``seconds`` of the present session."""
        now = tuple(replace(session, seconds=seconds) for session in self.sessions[-1:])
        return replace(self, sessions=(*self.sessions[:-1], *now))


def data_starts_after(lineage: Iterable[BranchPoint]) -> int:
    """Return the step after which a run's data order begins: that of the last branch to other data, or 0."""
    return max((branch.step for branch in lineage if not branch.continues_data), default=0)
