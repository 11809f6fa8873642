"""Measure a run: the metrics of a step and their columns in metrics.csv, memory, and ``--profile``."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fabric_train.checkpoint import Evaluation, TrainerState
from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import check_no_link


@dataclass(frozen=True)
class Metrics:
    """One row of metrics.csv. None is an empty cell: not measured at this step.

    The text below a field is its unit and meaning, which docs/reference/metrics.md shows.
    """

    step: int
    """Number: optimizer steps of the run so far; 0 is the evaluation before training."""
    epoch: int
    """Number: pass over the training rows, counted from 0."""
    train_loss: float | None = None
    """Nats per token: mean over the supervised tokens of the step, all rows on all ranks; of preference pairs, per
    pair. Empty if the step has none: then the optimizer takes no step.
    """
    val_loss: float | None = None
    """Nats per token: the same mean over the validation split, after the step."""
    perplexity: float | None = None
    """Number: e to the power of val_loss; empty for preference pairs."""
    val_bits_per_byte: float | None = None
    """Bits per byte: nats / (ln 2 × UTF-8 bytes of the text), which can be compared between tokenizers; empty without a
    document index.
    """
    learning_rate: float | None = None
    """Number: learning rate of the step."""
    grad_norm: float | None = None
    """Number: 2-norm of the gradient before clipping, summed in fp64; empty if train_loss is."""
    num_tokens: int | None = None
    """Tokens: of documents, without padding, since the first step of the run. Padding is the last run of one
    unsupervised token in a row, if it is two tokens or longer.
    """
    tokens_per_second: float | None = None
    """Tokens per second: of documents, of all ranks, without padding, evaluation and saves."""
    samples_per_second: float | None = None
    """Rows per second: of all ranks."""
    step_time: float | None = None
    """Seconds: mean time of a step since the row before, without evaluation and saves."""
    data_wait: float | None = None
    """Share from 0 to 1: of step_time, spent waiting for batches."""
    slowest_rank: int | None = None
    """Rank: the one that the others wait for; empty with a single rank. With sharded weights the ranks also wait for
    each other in each layer, so a slow device shows as less than it costs.
    """
    rank_lag: float | None = None
    """Seconds per step: by which the slowest rank's own time is above the median. Own time is what a rank does without
    the others: waiting for data, the optimizer, logging, and the passes up to the last backward pass.
    """
    mfu: float | None = None
    """Share from 0 to 1: model FLOPs utilization; empty if the device's peak is not known."""
    peak_memory_gb: float | None = None
    """1e9 bytes: the highest memory so far on rank 0, allocated on a GPU, resident on a CPU."""
    skipped_steps: int | None = None
    """Steps: left out so far because the loss or the gradient was not finite."""
    rows_hash: str | None = None
    """Text: hash of the rows of all steps so far, the same in a replay or a resumed run."""
    further: dict[str, float] = field(default_factory=dict)
    """As named: metrics of the objective and of an evaluation, columns train_NAME and val_NAME."""
    by_source: dict[str, float] = field(default_factory=dict)
    """As without /SOURCE: the losses of one source, such as val_loss/es, if a run has several; empty if the step had no
    token of it.
    """


COLUMNS = tuple(column.name for column in fields(Metrics) if column.name not in ("further", "by_source"))
_INTEGERS = {column.name for column in fields(Metrics) if column.type in (int, int | None)}
_TEXTS = {"rows_hash"}
_REQUIRED = ["step", "epoch"]
_GROUPS = {
    **dict.fromkeys(("epoch", "learning_rate", "grad_norm", "num_tokens", "skipped_steps"), "train"),
    "perplexity": "val",
    **dict.fromkeys(("tokens_per_second", "samples_per_second", "step_time", "data_wait", "mfu"), "speed"),
    **dict.fromkeys(("slowest_rank", "rank_lag"), "speed"),
    "peak_memory_gb": "system",
}
"""The group of each column whose name does not begin with it."""
_USUAL_FIGURES = ("loss", "perplexity", "bits_per_byte")


def columns_of(metrics: Metrics) -> dict[str, Any]:
    """Return the value of every column of metrics.csv, None for an empty cell."""
    columns = asdict(metrics)
    further = columns.pop("further") | columns.pop("by_source")
    return columns | further


def read_columns(columns: Mapping[str, Any]) -> Metrics:
    """Return the metrics from what :func:`columns_of` returned."""
    usual = {name: value for name, value in columns.items() if name in COLUMNS}
    others = {name: value for name, value in columns.items() if name not in usual and value is not None}
    by_source = {name: value for name, value in others.items() if "/" in name}
    return Metrics(**usual, further={name: others[name] for name in others if "/" not in name}, by_source=by_source)


def are_columns(names: Sequence[str]) -> bool:
    """Return whether these can be the columns of a metrics.csv."""
    others = set(names) - set(COLUMNS)
    return set(_REQUIRED) <= set(names) and all(name.startswith(("train_", "val_")) for name in others)


def further_columns(
    objective: Sequence[str], evaluation: Sequence[str], sources: Sequence[str], of_pieces: bool = False
) -> list[str]:
    """Return the columns beside ``COLUMNS``: of the metrics of an objective and an evaluation, and of sources.

    ``of_pieces``: the objective sums over pieces, and its metrics are told apart by source too.
    """
    train = [f"train_{name}" for name in objective]
    val = [f"val_{name}" for name in objective]
    whole = [*train, *(f"val_{name}" for name in evaluation), *val]
    of_sources = ["train_loss", *(f"val_{name}" for name in (*_USUAL_FIGURES, *evaluation))]
    if of_pieces:
        of_sources = ["train_loss", "val_loss", *train, *val]
    return [*whole, *(f"{column}/{source}" for source in sources for column in of_sources)]


def with_objective(
    metrics: Metrics,
    means: Mapping[str, float],
    of_sources: Mapping[str, float | None],
    metrics_of_sources: Mapping[str, Mapping[str, float]],
) -> Metrics:
    """Add the objective's metrics, and those and the mean training loss of each source; None was not in the window."""
    losses = {f"train_loss/{name}": loss for name, loss in of_sources.items() if loss is not None}
    losses |= {
        f"train_{metric}/{name}": value
        for name, of_source in metrics_of_sources.items()
        if of_sources[name] is not None
        for metric, value in of_source.items()
    }
    further = {f"train_{name}": value for name, value in means.items()}
    return replace(metrics, further=metrics.further | further, by_source=metrics.by_source | losses)


def with_evaluation(metrics: Metrics, evaluation: Evaluation, source_names: Sequence[str]) -> Metrics:
    """Add the figures of an evaluation, and of each source in ``source_names``."""
    whole = evaluation.whole
    by_source = {
        f"val_{figure}/{name}": value
        for name in source_names
        if name in evaluation.sources
        for figure, value in evaluation.sources[name].figures().items()
        if value is not None
    }
    further = {f"val_{name}": value for name, value in whole.further.items() if value is not None}
    return replace(
        metrics,
        val_loss=whole.loss,
        perplexity=whole.perplexity if whole.is_likelihood else None,
        val_bits_per_byte=whole.bits_per_byte,
        further=metrics.further | further,
        by_source=metrics.by_source | by_source,
    )


def read_metrics(path: Path, last_step: int) -> list[Metrics]:
    """Return the rows of metrics.csv up to ``last_step``, without one that a crash cut off; none without a file."""
    return read_table(path, last_step)[1]


def read_table(path: Path, last_step: int) -> tuple[list[str], list[Metrics]]:
    """Return the columns of metrics.csv and its rows up to ``last_step``; see :func:`read_metrics`."""
    if not path.exists():
        return [], []
    fix = "put the file of this run back, or move this one away to go on without its rows"
    if not path.is_file():
        raise InputError(f"{path}: not a file; {fix}")
    text = path.read_text(encoding="utf-8", errors="replace")
    table = csv.reader(io.StringIO(text[: text.rfind("\n") + 1] or text))
    names = _next_row(table) or []
    rows: list[Metrics] = []
    if not are_columns(names) or len(set(names)) < len(names):
        raise InputError(f"{path}: its first line is not the header of a metrics.csv, {','.join(COLUMNS)}; {fix}")
    while (cells := _next_row(table)) is not None:
        row = _parse_row(names, cells)
        if row is None or row.step <= (rows[-1].step if rows else -1):
            raise InputError(f"{path}, line {table.line_num}: not the row of a step after the one before it; {fix}")
        if row.step > last_step:
            break
        rows.append(row)
    return names, rows


def _next_row(table: Iterator[list[str]]) -> list[str] | None:
    """Return the cells of the next row, none if it is damaged, and None at the end."""
    try:
        return next(table, None)
    except csv.Error:
        return []


def find_lost_rows(path: Path, state: TrainerState, log_step_interval: int) -> str | None:
    """Return a line if metrics.csv has rows, but not up to the checkpoint that a run resumes from."""
    check_no_link(path)
    rows = read_metrics(path, state.step)
    if not rows or state.unlogged or state.step - rows[-1].step < log_step_interval:
        return None
    return (
        f"{path}: rows are lost: it ends at step {rows[-1].step}, and the run resumes after step {state.step}; the "
        "steps between are missing from every logger that is filled from it"
    )


def _parse_row(names: list[str], cells: list[str]) -> Metrics | None:
    if len(cells) != len(names):
        return None
    try:
        return read_columns(
            {
                name: (int if name in _INTEGERS else str if name in _TEXTS else float)(cell)
                for name, cell in zip(names, cells, strict=True)
                if cell or name in _REQUIRED
            }
        )
    except ValueError:
        return None


def measured(metrics: Metrics) -> dict[str, float]:
    """Return the measured values by :func:`grouped_name`, without the step and the hash of rows."""
    unmeasured = {"step", *_TEXTS}
    values = columns_of(metrics).items()
    return {grouped_name(name): value for name, value in values if value is not None and name not in unmeasured}


def grouped_name(column: str) -> str:
    """Return the name that loggers give a column of metrics.csv: ``val_loss/es`` is ``val/es/loss``.

    The first part is the group: train, val, speed or system.
    """
    figure, _, source = column.partition("/")
    group, _, name = figure.partition("_")
    if column in _GROUPS:
        group = _GROUPS[column]
        name = column
    return "/".join(filter(None, (group, source, name)))
