"""Where the metrics, samples and checkpoints of a run go: the protocol of loggers, and those that every run has.

metrics.csv is the record that a resumed run trusts: if it cannot be written, the run ends. No other logger can end a
run, or change its exit code (:class:`GuardedLogger`). To add a logger, see :data:`LOGGERS`.
"""

import csv
import json
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fabric_train.cli.errors import InputError, describe_os_error, first_line
from fabric_train.files.regular_file import check_no_link, open_to_write, parse_json, write_atomically
from fabric_train.training.metrics import COLUMNS, Metrics, columns_of, read_table
from fabric_train.training.run_log import warn


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

    def log_save(self, checkpoint: Path) -> None:
        """Record that a checkpoint is complete."""

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

    def log_save(self, checkpoint: Path) -> None:
        self._try(lambda logger: logger.log_save(checkpoint))

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
        """Record a complete checkpoint, and upload it if all are uploaded; ``is_last`` comes again, after the run."""
        for logger in self._loggers:
            if not is_last:
                logger.log_save(checkpoint)
            if self._log_model == ("last" if is_last else "all"):
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
