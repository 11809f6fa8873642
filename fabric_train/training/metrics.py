"""The metrics of a step, metrics.csv and the progress line. Only rank 0 writes them."""

import csv
import os
import resource
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fabric_train.files.regular_file import check_no_link, open_to_write

_SECONDS_BETWEEN_LINES = 2.0


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
        """Open for appending after ``last_step``; remove rows that an interrupted run wrote after it."""
        check_no_link(path)
        names = [field.name for field in fields(Metrics)]
        kept = _rows_up_to(path, last_step)
        temporary = path.with_suffix(".csv.new")
        temporary.unlink(missing_ok=True)  # of a killed run, or a planted link
        with open_to_write(temporary, "x", newline="") as file:
            writer = csv.DictWriter(file, names, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        self._file = open_to_write(path, "a", newline="")
        self._writer = csv.DictWriter(self._file, names)

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
    """Return the rows of metrics.csv up to ``last_step``, none if there is no such file."""
    integers = {field.name for field in fields(Metrics) if field.type in (int, int | None)}
    return [
        Metrics(
            **{  # type: ignore[arg-type]
                name: (int if name in integers else float)(cell) for name, cell in row.items() if cell
            }
        )
        for row in _rows_up_to(path, last_step)
    ]


def _rows_up_to(path: Path, last_step: int) -> list[dict[str, str]]:
    """Return the complete rows up to a step; a crash may have truncated the last one."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if None not in row.values() and int(row["step"]) <= last_step]


class ProgressLine:
    """A bar on a terminal, otherwise a line every few seconds: step, loss, learning rate, tokens/s, memory, ETA."""

    def __init__(self, first_step: int, num_steps: int, console: Console) -> None:
        self._console, self._num_steps = console, num_steps
        self._first_step, self._started, self._last_line = first_step, time.monotonic(), 0.0
        self._bar = Progress(
            TextColumn("[bold]train"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=num_steps, completed=first_step, text="")
        self._bar.start()

    def log(self, metrics: Metrics) -> None:
        """Show the step."""
        text = _in_short(metrics)
        self._bar.update(self._task, completed=metrics.step, text=text)
        now = time.monotonic()
        if metrics.val_loss is not None:
            validation = (
                f"step {metrics.step}: validation loss {metrics.val_loss:.4f}, perplexity {metrics.perplexity:.3f}"
            )
            self._console.print(validation, highlight=False, soft_wrap=True)
        if not self._console.is_terminal and (
            now - self._last_line > _SECONDS_BETWEEN_LINES or metrics.step == self._num_steps
        ):
            self._last_line = now
            left = (now - self._started) / max(metrics.step - self._first_step, 1) * (self._num_steps - metrics.step)
            line = f"step {metrics.step}/{self._num_steps} {text} eta {int(left) // 60}:{int(left) % 60:02d}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def flush(self) -> None:
        """Do nothing: a shown line needs no flush."""

    def close(self) -> None:
        """Stop the bar where it is."""
        self._bar.stop()


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


def _in_short(metrics: Metrics) -> str:
    parts = [
        ("loss", metrics.train_loss, "{:.4f}"),
        ("lr", metrics.learning_rate, "{:.2e}"),
        ("grad", metrics.grad_norm, "{:.3f}"),
        ("tok/s", metrics.tokens_per_second, "{:,.0f}"),
        ("mfu", metrics.mfu, "{:.1%}"),
        ("mem", metrics.peak_memory_gb, "{:.2f} GB"),
    ]
    return " ".join(f"{name} {form.format(value)}" for name, value, form in parts if value is not None)
