"""The metrics of a step, and metrics.csv, which only rank 0 writes."""

import csv
import os
import resource
import sys
import time
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Protocol

import torch

from fabric_train.checkpoint import TrainerState
from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import check_no_link, open_to_write


@dataclass(frozen=True)
class Metrics:
    """One row of metrics.csv. None is an empty cell: not measured at this step.

    Losses are in nats per token over all ranks. ``num_tokens`` counts from the run's first step, without padding.
    ``step_time`` is in seconds, ``data_wait`` the share of it spent waiting for batches. ``peak_memory_gb`` is in 1e9
    bytes on rank 0: allocated on the GPU, or resident on CPU. ``skipped_steps`` counts steps left out because loss or
    gradient was not finite. Samples are rows. ``mfu`` is between 0 and 1 (``model.flops``), None if the device's peak
    is unknown.
    """

    step: int
    epoch: int
    train_loss: float | None = None
    val_loss: float | None = None
    perplexity: float | None = None
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


_COLUMNS = [field.name for field in fields(Metrics)]
_INTEGERS = {field.name for field in fields(Metrics) if field.type in (int, int | None)}
_REQUIRED = [field.name for field in fields(Metrics) if field.default is MISSING]


class Logger(Protocol):
    """A destination of metrics."""

    def log(self, metrics: Metrics) -> None:
        """Record one step's metrics."""

    def flush(self) -> None:
        """Write what was logged to disk. It is called before each save, so no checkpoint is ahead of its metrics."""

    def close(self) -> None:
        """Write the rest and close."""


class CSVLogger:
    """``metrics.csv``: one header, one row per logged step, no step twice. Flushed after each row."""

    def __init__(self, path: Path, last_step: int) -> None:
        """Open for appending after ``last_step``; remove rows that an interrupted run wrote after it.

        Raises:
            InputError: the file is no metrics.csv, or a link.
        """
        check_no_link(path)
        kept = read_metrics(path, last_step)
        temporary = path.with_suffix(".csv.new")
        temporary.unlink(missing_ok=True)  # of a killed run, or a planted link
        with open_to_write(temporary, "x", newline="") as file:
            writer = csv.DictWriter(file, _COLUMNS)
            writer.writeheader()
            writer.writerows(map(asdict, kept))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        self._file = open_to_write(path, "a", newline="")
        self._writer = csv.DictWriter(self._file, _COLUMNS)

    def log(self, metrics: Metrics) -> None:
        """Append the row."""
        self._writer.writerow(asdict(metrics))
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
    if not path.exists():
        return []
    fix = "put the file of this run back, or move this one away to go on without its rows"
    if not path.is_file():
        raise InputError(f"{path}: not a file; {fix}")
    *lines, cut_off = path.read_text(encoding="utf-8", errors="replace").split("\n")
    names = (lines or [cut_off])[0].split(",")
    if not set(_REQUIRED) <= set(names) <= set(_COLUMNS) or len(set(names)) < len(names):
        raise InputError(f"{path}: its first line is not the header of a metrics.csv, {','.join(_COLUMNS)}; {fix}")
    rows: list[Metrics] = []
    for number, line in enumerate(lines[1:], 2):
        row = _parse_row(names, line)
        if row is None or row.step <= (rows[-1].step if rows else 0):
            raise InputError(f"{path}, line {number}: not the row of a step after the one before it; {fix}")
        if row.step > last_step:
            break
        rows.append(row)
    return rows


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


def _parse_row(names: list[str], line: str) -> Metrics | None:
    """Return the row in a line of metrics.csv, None if it is damaged."""
    cells = line.split(",")
    if len(cells) != len(names):
        return None
    try:
        return Metrics(
            **{
                name: (int if name in _INTEGERS else float)(cell)  # type: ignore[arg-type]
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

    def read(self) -> dict[str, float]:
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
    """Return the measured values by name, without the step."""
    return {name: value for name, value in asdict(metrics).items() if value is not None and name != "step"}
