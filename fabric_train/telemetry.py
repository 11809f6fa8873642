"""What a run tells: metrics.csv, TensorBoard, Weights & Biases and the progress line. Only rank 0 has one of these."""

import csv
import netrc
import os
import resource
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fabric_train.errors import InputError

_SECONDS_BETWEEN_LINES = 2.0


@dataclass(frozen=True)
class Metrics:
    """One row of metrics.csv. None is an empty cell: not measured at this step.

    Losses in nats a token over all ranks; ``num_tokens`` consumed since the run's first step; ``step_time`` in seconds,
    ``data_wait`` the share of it spent waiting for batches; ``peak_memory_gb`` in 1e9 bytes on rank 0: allocated on
    the GPU, resident on CPU. ``mfu`` stays empty: it needs the device's peak FLOP/s.
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
    step_time: float | None = None
    data_wait: float | None = None
    mfu: float | None = None
    peak_memory_gb: float | None = None


class Logger(Protocol):
    """Where metrics go."""

    def log(self, metrics: Metrics) -> None:
        """Take one step's metrics."""

    def close(self) -> None:
        """Write what is left."""


class CSVLogger:
    """``metrics.csv``: one header, one row a logged step, no step twice; flushed at each row."""

    def __init__(self, path: Path, last_step: int) -> None:
        """Open for appending after ``last_step``; rows that an interrupted run wrote beyond it are taken back."""
        names = [field.name for field in fields(Metrics)]
        kept: list[dict[str, str]] = []
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                kept = [
                    row
                    for row in csv.DictReader(file)
                    if None not in row.values() and int(row["step"]) <= last_step  # a crash may have cut the last row
                ]
        temporary = path.with_suffix(".csv.new")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(kept)
        temporary.replace(path)
        self._file = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, names)

    def log(self, metrics: Metrics) -> None:
        """Append the row."""
        self._writer.writerow(asdict(metrics))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardLogger:
    """Event files in ``RUN/tensorboard``."""

    def __init__(self, folder: Path, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imports slowly, and only where it is asked for

        self._writer = SummaryWriter(str(folder), purge_step=last_step + 1)

    def log(self, metrics: Metrics) -> None:
        """Write every measured value as a scalar."""
        for name, value in _measured(metrics).items():
            self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandbLogger:
    """Weights & Biases; offline, under ``RUN/wandb``, where there is no account. Never asks on the terminal."""

    def __init__(self, folder: Path, project: str, entity: str | None, config: dict[str, Any]) -> None:
        import wandb  # imports slowly, and only where it is asked for

        identity = folder / "wandb_run_id"  # one W&B run for a run folder, however often it is resumed
        if not identity.is_file():
            identity.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
        self.mode = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
        self._run = wandb.init(
            project=project,
            entity=entity,
            dir=str(folder),
            id=identity.read_text(encoding="utf-8").strip(),
            resume="allow",
            mode=self.mode,  # type: ignore[arg-type]
            config=config,
            settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True),
        )
        self._wandb = wandb

    def log(self, metrics: Metrics) -> None:
        """Log every measured value at its step."""
        self._run.log(_measured(metrics), step=metrics.step)

    def log_model(self, checkpoint: Path) -> None:
        """Upload a checkpoint without its optimizer as an artifact."""
        artifact = self._wandb.Artifact(f"model-{self._run.id}", type="model", metadata={"checkpoint": checkpoint.name})
        for path in sorted(checkpoint.rglob("*")):
            name = path.relative_to(checkpoint)
            if path.is_file() and name.parts[0] != "optimizer":
                artifact.add_file(str(path), name=name.as_posix())
        self._run.log_artifact(artifact)

    def close(self) -> None:
        """Wait for what is to be uploaded."""
        self._run.finish()


class ProgressLine:
    """A bar on a terminal, else a line every few seconds: step, loss, learning rate, tokens/s, memory, time left."""

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

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.stop()


class Stopwatch:
    """Wall-clock seconds of training between two readings, and the share of them spent waiting for data.

    Evaluation and saves are taken out by :meth:`restart`.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin to count anew."""
        self._started, self._waited, self._steps, self._tokens = time.perf_counter(), 0.0, 0, 0

    def waited(self, seconds: float) -> None:
        """Add time spent waiting for a window."""
        self._waited += seconds

    def stepped(self, num_tokens: int) -> None:
        """Add a step over so many tokens on all ranks."""
        self._steps += 1
        self._tokens += num_tokens

    def read(self) -> dict[str, float]:
        """Return step_time, data_wait and tokens_per_second since the last reading, and restart."""
        elapsed = time.perf_counter() - self._started
        reading = {
            "step_time": elapsed / self._steps,
            "data_wait": self._waited / elapsed,
            "tokens_per_second": self._tokens / elapsed,
        }
        self.restart()
        return reading


def open_loggers(
    names: Sequence[str], folder: Path, last_step: int, project: str, entity: str | None, config: dict[str, Any]
) -> list[Logger]:
    """Open metrics.csv and the loggers named.

    Raises:
        InputError: where Weights & Biases refuses the run.
    """
    loggers: list[Logger] = [CSVLogger(folder / "metrics.csv", last_step)]
    if "tensorboard" in names:
        loggers.append(TensorBoardLogger(folder / "tensorboard", last_step))
    if "wandb" in names:
        import wandb

        try:
            loggers.append(WandbLogger(folder, project, entity, config))
        except wandb.Error as error:
            raise InputError(f"--loggers wandb: {error}; WANDB_MODE=offline logs without it") from error
    return loggers


def peak_memory_gb(device: torch.device) -> float:
    """Return the most memory held so far, in 1e9 bytes: allocated on the GPU, or resident in this process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def _measured(metrics: Metrics) -> dict[str, float]:
    return {name: value for name, value in asdict(metrics).items() if value is not None and name != "step"}


def _in_short(metrics: Metrics) -> str:
    parts = [
        ("loss", metrics.train_loss, "{:.4f}"),
        ("lr", metrics.learning_rate, "{:.2e}"),
        ("grad", metrics.grad_norm, "{:.3f}"),
        ("tok/s", metrics.tokens_per_second, "{:,.0f}"),
        ("mem", metrics.peak_memory_gb, "{:.2f} GB"),
    ]
    return " ".join(f"{name} {form.format(value)}" for name, value, form in parts if value is not None)


def _has_wandb_key() -> bool:
    """Whether wandb would find a key without asking: in the environment or in the user's netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    try:
        return netrc.netrc().authenticators(host) is not None
    except (FileNotFoundError, netrc.NetrcParseError):
        return False
