"""Where the metrics, samples and checkpoints of a run go: the protocol of loggers, and those that every run has.

metrics.csv is the record that a resumed run trusts: if it cannot be written, the run ends. No other logger can end a
run, or change its exit code (:class:`GuardedLogger`). To add a logger, see :data:`LOGGERS`.
"""

import csv
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.text import Text

from fabric_train.cli.errors import InputError, describe_os_error, first_line, set_display
from fabric_train.files.regular_file import check_no_link, open_to_write, parse_json, write_atomically
from fabric_train.training.metrics import COLUMNS, Metrics, columns_of, read_table
from fabric_train.training.run_log import log, progress, warn

_SECONDS_BETWEEN_LINES = 2.0
_SECONDS_BETWEEN_DRAWINGS = 0.1
_BAR_WIDTH = 10


@dataclass(frozen=True)
class Sample:
    """A line of samples.jsonl: the prompt, and the text with which the model of a step continues it."""

    step: int
    prompt: str
    text: str


class Logger:
    """The protocol of loggers, on rank 0 alone. Each method does nothing here: override those that are needed."""

    def log(self, metrics: Metrics) -> None:
        """Record one step's metrics."""

    def log_samples(self, samples: Sequence[Sample]) -> None:
        """Record the samples of a step, whose metrics follow."""

    def log_model(self, checkpoint: Path) -> None:
        """Upload a complete checkpoint; called for all or the last, as ``--log_model`` says."""

    def log_report(self, page: Path, markdown: str) -> None:
        """Record the report of the run: a page without other files, and the same as Markdown."""

    def flush(self) -> None:
        """Write what was logged to disk. It is called before each save, so no checkpoint is ahead of its metrics."""

    def close(self) -> None:
        """Write the rest and close, at the end of the run."""


@dataclass(frozen=True)
class LoggedRun:
    """The run that loggers are opened for.

    ``last_step`` is the last one that is logged already, or -1. ``columns`` are further ones of metrics.csv.
    """

    folder: Path
    last_step: int
    config: dict[str, Any] = field(default_factory=dict)
    columns: Sequence[str] = ()
    branched_after: Sequence[int] = ()


class GuardedLogger(Logger):
    """A logger without which a run goes on: its first failure is reported in one line, and nothing more is logged."""

    def __init__(self, name: str, open_logger: Callable[[], Logger]) -> None:
        self._name, self.logger = name, Logger()
        self._try(lambda _: setattr(self, "logger", open_logger()))

    def log(self, metrics: Metrics) -> None:
        self._try(lambda logger: logger.log(metrics))

    def log_samples(self, samples: Sequence[Sample]) -> None:
        self._try(lambda logger: logger.log_samples(samples))

    def log_model(self, checkpoint: Path) -> None:
        self._try(lambda logger: logger.log_model(checkpoint))

    def log_report(self, page: Path, markdown: str) -> None:
        self._try(lambda logger: logger.log_report(page, markdown))

    def flush(self) -> None:
        self._try(lambda logger: logger.flush())

    def close(self) -> None:
        self._try(lambda logger: logger.close())

    def _try(self, action: Callable[[Logger], None]) -> None:
        try:
            action(self.logger)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a folder, a disk, a network, a server, a bug
            self.logger = Logger()
            reason = describe_os_error(error) if isinstance(error, OSError) else first_line(error)
            warn(f"{self._name}: {reason}; the run goes on without it, and metrics.csv has every step")


class CSVLogger(Logger):
    """``metrics.csv``: one header, one row per logged step, no step twice. Flushed after each row."""

    def __init__(self, path: Path, last_step: int, further: Sequence[str] = ()) -> None:
        """Open for appending after ``last_step``, with the ``further`` columns; remove the rows after it."""
        check_no_link(path)
        found, kept = read_table(path, last_step)
        columns = list(dict.fromkeys((*COLUMNS, *found, *further)))
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
        self._writer.writerow(columns_of(metrics))
        self._file.flush()

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class SampleFile(Logger):
    """RUN/samples.jsonl: a line for each step and prompt, up to ``last_step`` in ``past``; later ones are removed."""

    def __init__(self, path: Path, last_step: int) -> None:
        self._path = path
        self.past: list[Sample] = []
        check_no_link(path)
        if not path.exists():
            return
        content = path.read_bytes()
        for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
            try:
                sample = parse_json(line, Sample)
            except ValueError as error:
                raise InputError(f"{path}, line {number}: damaged ({error}); move the file away") from None
            if sample.step > last_step:
                break
            self.past.append(sample)
        kept = "".join(map(_line, self.past))
        if kept.encode() != content:
            write_atomically(path, kept)

    def log_samples(self, samples: Sequence[Sample]) -> None:
        """Append samples, and wait until they are on the disk."""
        with open_to_write(self._path, "a", newline="") as file:
            file.writelines(map(_line, samples))
            file.flush()
            os.fsync(file.fileno())


def _line(sample: Sample) -> str:
    return json.dumps(asdict(sample), ensure_ascii=False) + "\n"


class ProgressLine(Logger):
    """Shows step, time left, loss, learning rate, gradient norm, tokens/s and memory."""

    def __init__(self, first_step: int, num_steps: int, console: Console) -> None:
        self._first_step, self._num_steps = first_step, num_steps
        self._started, self._shown_at = time.monotonic(), 0.0
        self._bar: Live | None = None
        if console.is_interactive:
            # without a thread that redraws it, nothing draws the bar after an error message
            bar = _Bar(first_step, num_steps, "-:--", ())
            self._bar = Live(bar, console=console, auto_refresh=False, redirect_stderr=sys.stderr.isatty())
            self._bar.start(refresh=True)
            set_display(self._bar.stop)

    def log(self, metrics: Metrics) -> None:
        progress.info("")
        if metrics.val_loss is not None:
            whole = f"validation loss {metrics.val_loss:.4f}"
            whole += "" if metrics.perplexity is None else f", perplexity {metrics.perplexity:.3f}"
            whole += f", accuracy {metrics.further['val_accuracy']:.3f}" if "val_accuracy" in metrics.further else ""
            pairs = ((column.partition("val_loss/"), loss) for column, loss in metrics.by_source.items())
            of_sources = (f"{name} {loss:.4f}" for (before, found, name), loss in pairs if found and not before)
            log.info("step %d: %s", metrics.step, "; ".join([whole, *of_sources]))
        now, is_last = time.monotonic(), metrics.step == self._num_steps
        if metrics.step == 0:  # an evaluation before the first step
            self._started = now
            return
        pace = (now - self._started) / max(metrics.step - self._first_step, 1)
        eta, values = _clock(pace * (self._num_steps - metrics.step)), _in_short(metrics)
        pause = _SECONDS_BETWEEN_DRAWINGS if self._bar else _SECONDS_BETWEEN_LINES
        is_due = now - self._shown_at > pause or is_last
        if is_due:
            self._shown_at = now
        if self._bar is None and is_due:
            log.debug("step %d/%d %s eta %s", metrics.step, self._num_steps, " ".join(values), eta)
        elif self._bar is not None and self._bar.is_started:
            self._bar.update(_Bar(metrics.step, self._num_steps, eta, values), refresh=is_due)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            set_display(None)


@dataclass(frozen=True)
class _Bar:
    """A line that fits the terminal: the values that do not fit are left out, the last ones first."""

    step: int
    num_steps: int
    eta: str
    values: tuple[str, ...]

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Text]:
        filled = _BAR_WIDTH * self.step // self.num_steps
        bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
        counts = f"{self.step:,}/{self.num_steps:,} eta {self.eta}"
        line = f"train [{bar}] {counts}"
        if len(line) >= options.max_width:
            line = counts
        for value in self.values:
            if len(f"{line} {value}") >= options.max_width:
                break
            line = f"{line} {value}"
        yield Text(line, no_wrap=True, overflow="crop")


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _in_short(metrics: Metrics) -> tuple[str, ...]:
    parts = [
        ("loss", metrics.train_loss, "{:.4f}"),
        ("lr", metrics.learning_rate, "{:.2e}"),
        ("grad", metrics.grad_norm, "{:.3f}"),
        ("tok/s", metrics.tokens_per_second, "{:,.0f}"),
        ("mfu", metrics.mfu, "{:.1%}"),
        ("mem", metrics.peak_memory_gb, "{:.2f} GB"),
    ]
    return tuple(f"{name} {form.format(value)}" for name, value, form in parts if value is not None)


def _trackers() -> Any:
    from fabric_train.training import trackers  # which imports this module

    return trackers


def _loss_curves(run: LoggedRun) -> Logger:
    from fabric_train.training.curves import LossCurves  # which imports this module

    return LossCurves(run.folder, run.branched_after)


LOGGERS: dict[str, Callable[[LoggedRun], Logger]] = {
    "loss_curves.png": _loss_curves,
    "--loggers tensorboard": lambda run: _trackers().TensorBoardLogger(run.folder / "tensorboard", run.last_step),
    "--loggers wandb": lambda run: _trackers().open_wandb(run),
}
"""How loggers are opened, by the name that messages call them. A name with ``--loggers`` is opened if that option names
it, and any other one in every run."""


def open_loggers(names: Sequence[str], run: LoggedRun) -> list[Logger]:
    """Open metrics.csv, samples.jsonl and all of ``LOGGERS``, but of ``--loggers`` only what is among ``names``."""
    table = CSVLogger(run.folder / "metrics.csv", run.last_step, run.columns)
    samples = SampleFile(run.folder / "samples.jsonl", run.last_step)
    opened: list[Logger] = [table, GuardedLogger("samples.jsonl", lambda: samples)]
    for name, open_logger in LOGGERS.items():
        option, _, chosen = name.partition(" ")
        if option != "--loggers" or chosen in names:
            opened.append(GuardedLogger(name, partial(open_logger, run)))
    return opened


class Outputs:
    """All loggers of a run. ``log_model`` says which checkpoints they upload: "all", "last" or "none"."""

    def __init__(self, loggers: Sequence[Logger], log_model: str) -> None:
        self._loggers, self._log_model = loggers, log_model

    def log(self, metrics: Metrics) -> None:
        for logger in self._loggers:
            logger.log(metrics)

    def log_samples(self, samples: Sequence[Sample]) -> None:
        """Log the samples of a step to all, before its metrics."""
        for logger in self._loggers:
            logger.log_samples(samples)

    def log_report(self, page: Path, markdown: str) -> None:
        for logger in self._loggers:
            logger.log_report(page, markdown)

    def flush(self) -> None:
        for logger in self._loggers:
            logger.flush()

    def saved(self, checkpoint: Path, is_last: bool = False) -> None:
        """Upload a complete checkpoint, if all are uploaded, or this is the run's last one and only that is."""
        if self._log_model == ("last" if is_last else "all"):
            for logger in self._loggers:
                logger.log_model(checkpoint)

    def close(self) -> None:
        for logger in self._loggers:
            logger.close()


def describe_loggers(names: Sequence[str], folder: Path, project: str) -> str:
    """Return where a run's metrics are, with the command that shows or uploads each logger's."""
    places = [f"{folder / 'metrics.csv'}; after an evaluation, loss_curves.png beside it"]
    if "tensorboard" in names:
        places.append(f"tensorboard --logdir {shlex.quote(str(folder / 'tensorboard'))}")
    if "wandb" in names:
        mode = _trackers().wandb_mode()
        offline = f"{shlex.quote(str(folder / 'wandb'))}/offline-run-*"
        where = {"online": f"project {project}", "offline": f"offline; upload with: wandb sync {offline}"}
        places.append(f"Weights & Biases, {where.get(mode, mode)}")
    return "\n".join(places)
