"""The metrics of a step, and metrics.csv, which only rank 0 writes."""

import csv
import io
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fabric_train.checkpoint import Evaluation, TrainerState
from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import check_no_link, open_to_write

if TYPE_CHECKING:
    from fabric_train.training.evaluation import Sample


@dataclass(frozen=True)
class Metrics:
    """One row of metrics.csv. None is an empty cell: not measured at this step.

    Losses are in nats per token over all ranks. ``num_tokens`` counts from the run's first step, without padding.
    ``step_time`` is in seconds, ``data_wait`` the share of it spent waiting for batches. ``peak_memory_gb`` is in 1e9
    bytes on rank 0: allocated on the GPU, or resident on CPU. ``skipped_steps`` counts steps left out because loss or
    gradient was not finite. Samples are rows. ``mfu`` is between 0 and 1 (``model.flops``), None if the device's peak
    is unknown. ``rows_hash`` is that of ``TrainerState``. ``by_source`` has the columns of single sources, such as
    ``val_loss/NAME``.
    """

    step: int
    epoch: int
    train_loss: float | None = None
    val_loss: float | None = None
    perplexity: float | None = None
    val_bits_per_byte: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    num_tokens: int | None = None
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    step_time: float | None = None
    data_wait: float | None = None
    mfu: float | None = None
    peak_memory_gb: float | None = None
    skipped_steps: int | None = None
    rows_hash: str | None = None
    by_source: dict[str, float] = field(default_factory=dict)


_COLUMNS = [column.name for column in fields(Metrics) if column.name != "by_source"]
_INTEGERS = {column.name for column in fields(Metrics) if column.type in (int, int | None)}
_TEXTS = {"rows_hash"}
_REQUIRED = ["step", "epoch"]
_OF_SOURCES = ("train_loss", "val_loss", "val_perplexity", "val_bits_per_byte")


def columns_of(metrics: Metrics) -> dict[str, Any]:
    """Return the value of every column of metrics.csv, None for an empty cell."""
    columns = asdict(metrics)
    return columns | columns.pop("by_source")


def read_columns(columns: Mapping[str, Any]) -> Metrics:
    """Return the metrics from what :func:`columns_of` returned."""
    by_source = {name: value for name, value in columns.items() if name not in _COLUMNS and value is not None}
    return Metrics(**{name: value for name, value in columns.items() if name in _COLUMNS}, by_source=by_source)


def are_columns(names: Sequence[str]) -> bool:
    """Return whether these can be the columns of a metrics.csv."""
    others = set(names) - set(_COLUMNS)
    return set(_REQUIRED) <= set(names) and all("/" in name and name.split("/")[0] in _OF_SOURCES for name in others)


def with_train_losses(metrics: Metrics, of_sources: Mapping[str, float | None]) -> Metrics:
    """Add the mean training loss of each source by its name; one that is None was not in the window."""
    losses = {f"train_loss/{name}": loss for name, loss in of_sources.items() if loss is not None}
    return replace(metrics, by_source=metrics.by_source | losses)


def with_evaluation(metrics: Metrics, evaluation: Evaluation, source_names: Sequence[str]) -> Metrics:
    """Add the losses of an evaluation, those of single sources for ``source_names``."""
    whole = evaluation.whole
    by_source = {
        f"val_{figure}/{name}": value
        for name in source_names
        if name in evaluation.sources
        for figure, value in evaluation.sources[name].figures().items()
        if value is not None
    }
    return replace(
        metrics,
        val_loss=whole.loss,
        perplexity=whole.perplexity,
        val_bits_per_byte=whole.bits_per_byte,
        by_source=metrics.by_source | by_source,
    )


class Logger:
    """A destination of metrics, and of what else it can show. This one records nothing."""

    def log(self, metrics: Metrics) -> None:
        """Record one step's metrics."""

    def log_samples(self, samples: Sequence["Sample"]) -> None:
        """Record the samples of a step, whose metrics follow."""

    def log_model(self, checkpoint: Path) -> None:
        """Upload a complete checkpoint."""

    def flush(self) -> None:
        """Write what was logged to disk. It is called before each save, so no checkpoint is ahead of its metrics."""

    def close(self) -> None:
        """Write the rest and close."""


class CSVLogger(Logger):
    """``metrics.csv``: one header, one row per logged step, no step twice. Flushed after each row."""

    def __init__(self, path: Path, last_step: int, source_names: Sequence[str] = ()) -> None:
        """Open for appending after ``last_step``; remove rows that an interrupted run wrote after it.

        There are columns for each of ``source_names``, and for those that the file has.

        Raises:
            InputError: the file is no metrics.csv, or a link.
        """
        check_no_link(path)
        found, kept = _read_table(path, last_step)
        of_sources = (f"{figure}/{name}" for name in source_names for figure in _OF_SOURCES)
        columns = list(dict.fromkeys((*_COLUMNS, *found, *of_sources)))
        temporary = path.with_suffix(".csv.new")
        temporary.unlink(missing_ok=True)  # of a killed run, or a planted link
        with open_to_write(temporary, "x", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(map(columns_of, kept))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        self._file = open_to_write(path, "a", newline="")
        self._writer = csv.DictWriter(self._file, columns)

    def log(self, metrics: Metrics) -> None:
        """Append the row."""
        self._writer.writerow(columns_of(metrics))
        self._file.flush()

    def flush(self) -> None:
        """Sync the rows to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path, last_step: int) -> list[Metrics]:
    """Return the rows of metrics.csv up to ``last_step``, none if there is no such file.

    Rows after it are not looked at, and neither is a last line that a crash has cut off.

    Raises:
        InputError: the file is no metrics.csv, or a row is damaged.
    """
    _, rows = _read_table(path, last_step)
    return rows


def _read_table(path: Path, last_step: int) -> tuple[list[str], list[Metrics]]:
    """Return the columns of metrics.csv and its rows up to ``last_step``; see :func:`read_metrics`."""
    if not path.exists():
        return [], []
    fix = "put the file of this run back, or move this one away to go on without its rows"
    if not path.is_file():
        raise InputError(f"{path}: not a file; {fix}")
    text = path.read_text(encoding="utf-8", errors="replace")
    table = csv.reader(io.StringIO(text[: text.rfind("\n") + 1] or text))
    names, rows = _next_row(table) or [], list[Metrics]()
    if not are_columns(names) or len(set(names)) < len(names):
        raise InputError(f"{path}: its first line is not the header of a metrics.csv, {','.join(_COLUMNS)}; {fix}")
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
    """Return a line if metrics.csv has rows, but not up to the checkpoint that a run resumes from.

    A step that is saved is logged before, unless its evaluation was interrupted, or a fault ended the run after it.

    Raises:
        InputError: the file is a link; or see :func:`read_metrics`.
    """
    check_no_link(path)
    rows = read_metrics(path, state.step)
    if not rows or state.unlogged or state.step - rows[-1].step < log_step_interval:
        return None
    return (
        f"{path}: rows are lost: it ends at step {rows[-1].step}, and the run resumes after step {state.step}; the "
        "steps between are missing from every logger that is filled from it"
    )


def _parse_row(names: list[str], cells: list[str]) -> Metrics | None:
    """Return a row of metrics.csv, None if it is damaged."""
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


@dataclass(frozen=True)
class StepWork:
    """The work of a step on all ranks: tokens without padding, rows, and model FLOPs."""

    num_tokens: int
    num_samples: int
    flops: float


class Stopwatch:
    """Wall-clock time of training between two readings, and the share of it spent waiting for data.

    The loop calls :meth:`restart` after evaluation and saves, which are not counted.
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        """``peak_flops`` is the FLOP/s of all devices together, None if unknown."""
        self._peak_flops = peak_flops
        self.restart()

    def restart(self) -> None:
        """Start counting from zero."""
        self._started, self._waited = time.perf_counter(), 0.0
        self._steps: list[StepWork] = []

    def waited(self, seconds: float) -> None:
        """Add time spent waiting for a window."""
        self._waited += seconds

    def stepped(self, work: StepWork) -> None:
        """Add a step."""
        self._steps.append(work)

    def read(self) -> dict[str, Any]:
        """Return step_time, data_wait, tokens and samples per second, and mfu if the peak is known; then restart."""
        elapsed = time.perf_counter() - self._started
        reading = {
            "step_time": elapsed / len(self._steps),
            "data_wait": self._waited / elapsed,
            "tokens_per_second": sum(work.num_tokens for work in self._steps) / elapsed,
            "samples_per_second": sum(work.num_samples for work in self._steps) / elapsed,
        }
        if self._peak_flops:
            reading["mfu"] = sum(work.flops for work in self._steps) / elapsed / self._peak_flops
        self.restart()
        return reading


def peak_memory_gb(device: torch.device) -> float:
    """Return the peak memory so far, in 1e9 bytes: allocated on the GPU, or resident in this process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def measured(metrics: Metrics) -> dict[str, float]:
    """Return the measured values by name, without the step and the hash of rows."""
    unmeasured = {"step", *_TEXTS}
    return {name: value for name, value in columns_of(metrics).items() if value is not None and name not in unmeasured}
