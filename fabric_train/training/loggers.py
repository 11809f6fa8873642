"""Where the metrics, samples and checkpoints of a run go: the protocol of loggers, and those that every run has.

metrics.csv is the record that a resumed run trusts: if it cannot be written, the run ends. No other logger can end a
run, or change its exit code (:class:`GuardedLogger`). To add a logger, see :data:`LOGGERS`.
"""

import csv
import json
import math
import mmap
import os
import shlex
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from textwrap import indent
from typing import Any

from fabric_train.cli.errors import describe_os_error, first_line
from fabric_train.cli.tables import LOGGERS
from fabric_train.files.regular_file import (
    check_no_link,
    check_no_links_in,
    open_to_write,
    read_json_lines,
    write_atomically,
)
from fabric_train.training.metrics import COLUMNS, Metrics, columns_of, measured, read_table
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
        """Record the report of the run, after its last save: a self-contained HTML file, and the same as Markdown."""

    def flush(self) -> None:
        """Write all logged values to disk. It is called before each save, so no checkpoint is ahead of its metrics."""

    def close(self) -> None:
        """Write the rest and close, at the end of the run."""

    def abandon(self) -> None:
        """Stop what the logger has started, after one of its methods has failed; no other one is called any more."""


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


class _Forwarding(Logger):
    """Lets ``_tell`` pass each call on."""

    def log(self, metrics: Metrics) -> None:
        self._tell(lambda logger: logger.log(metrics))

    def log_samples(self, samples: Sequence[Sample]) -> None:
        self._tell(lambda logger: logger.log_samples(samples))

    def log_save(self, checkpoint: Path) -> None:
        self._tell(lambda logger: logger.log_save(checkpoint))

    def log_model(self, checkpoint: Path) -> None:
        self._tell(lambda logger: logger.log_model(checkpoint))

    def log_report(self, page: Path, markdown: str) -> None:
        self._tell(lambda logger: logger.log_report(page, markdown))

    def flush(self) -> None:
        self._tell(lambda logger: logger.flush())

    def close(self) -> None:
        self._tell(lambda logger: logger.close())

    def _tell(self, action: Callable[[Logger], None]) -> None:
        raise NotImplementedError


class GuardedLogger(_Forwarding):
    """A logger without which a run goes on: its first failure is reported in one line, and nothing more is logged."""

    def __init__(self, name: str, open_logger: Callable[[], Logger]) -> None:
        self._name = name
        self.logger = Logger()
        self._tell(lambda _: setattr(self, "logger", open_logger()))

    def _tell(self, action: Callable[[Logger], None]) -> None:
        try:
            action(self.logger)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a folder, a disk, a network, a server, a bug
            failed = self.logger
            self.logger = Logger()
            warn(f"{self._name}: {_reason(error)}; the run goes on without it, and metrics.csv has every step")
            try:
                failed.abandon()
            except (Exception, SystemExit) as more:  # noqa: BLE001 - the same
                warn(f"{self._name}: not all that it has started could be stopped: {_reason(more)}")


def _reason(error: BaseException) -> str:
    return describe_os_error(error) if isinstance(error, OSError) else first_line(error)


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


def read_samples(path: Path, last_step: float = math.inf) -> list[Sample]:
    """Return the samples of a samples.jsonl up to a step; none without a file, an InputError if it is damaged."""
    return [*takewhile(lambda sample: sample.step <= last_step, read_json_lines(path, Sample, "move the file away"))]


class SampleFile(Logger):
    """RUN/samples.jsonl: a line for each step and prompt, up to ``last_step`` in ``past``; later ones are removed."""

    def __init__(self, path: Path, last_step: int) -> None:
        check_no_link(path)
        self._path = path
        self.past = read_samples(path, last_step)
        kept = "".join(map(_line, self.past))
        if path.exists() and kept.encode() != path.read_bytes():
            write_atomically(path, kept)

    def log_samples(self, samples: Sequence[Sample]) -> None:
        """Append samples, and wait until they are on the disk."""
        with open_to_write(self._path, "a", newline="") as file:
            file.writelines(map(_line, samples))
            file.flush()
            os.fsync(file.fileno())


def _line(sample: Sample) -> str:
    return json.dumps(asdict(sample), ensure_ascii=False) + "\n"


class TensorBoardLogger(Logger):
    """Event files in ``RUN/tensorboard``."""

    def __init__(self, folder: Path, last_step: int) -> None:
        """Continue after ``last_step``; remove what an interrupted run wrote after it."""
        from torch.utils.tensorboard import SummaryWriter  # a slow import, needed only here

        check_no_links_in(folder)
        shown = threading.excepthook  # prints a traceback of the thread that writes; flush and close raise its error
        threading.excepthook = lambda end: None if type(end.thread).__name__ == "_AsyncWriterThread" else shown(end)
        for file in folder.glob("events.out.tfevents.*"):
            _cut_events(file, last_step)
        # an open TensorBoard has read the removed steps: purge_step makes it drop them
        self._writer = SummaryWriter(str(folder), purge_step=last_step + 1)
        self._last_step = max(last_step, 0)

    def log(self, metrics: Metrics) -> None:
        self._last_step = metrics.step
        for name, value in measured(metrics).items():
            self._writer.add_scalar(name, value, metrics.step)

    def log_samples(self, samples: Sequence[Sample]) -> None:
        for number, sample in enumerate(samples, 1):
            as_code = indent(f"{sample.prompt}▸{sample.text}", "    ", lambda _: True)  # not read as Markdown
            self._writer.add_text(f"samples/{number}", as_code, sample.step)

    def log_report(self, page: Path, markdown: str) -> None:
        self._writer.add_text("report", markdown, self._last_step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _cut_events(path: Path, last_step: int) -> None:
    """Truncate an event file before its first event after ``last_step``, or before a record that is damaged or cut off.

    Its records are of tensorboard's ``RecordWriter``: uint64 length, uint32 checksum, content, uint32 checksum.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event

    size = path.stat().st_size
    end = 0
    if not size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as records:
        while end + 12 <= size:
            (length,) = struct.unpack_from("<Q", records, end)
            after = end + 12 + length + 4
            if after > size:
                break
            try:
                event = Event.FromString(records[end + 12 : after - 4])
            except DecodeError:  # TensorBoard reads nothing after a damaged record either
                break
            if event.step > last_step:
                break
            end = after
    os.truncate(path, end)


class JSONLinesLogger(Logger):
    """``metrics.jsonl``: one JSON object per logged step, without the values that were not measured."""

    def __init__(self, path: Path, last_step: int) -> None:
        """Continue after ``last_step``; remove the lines after it, and a line that a crash cut off."""
        check_no_link(path)
        kept = ""
        if path.exists():
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
                if not line.endswith("\n") or _step_of(line) > last_step:
                    break
                kept += line
        write_atomically(path, kept)
        self._file = open_to_write(path, "a", newline="")

    def log(self, metrics: Metrics) -> None:
        measured_values = {name: value for name, value in columns_of(metrics).items() if value is not None}
        self._file.write(json.dumps(measured_values) + "\n")
        self._file.flush()

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _step_of(line: str) -> float:
    """Return the step of a line of metrics.jsonl; infinite if the line is damaged."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def open_json_lines(run: LoggedRun) -> Logger:
    """Open metrics.jsonl."""
    return JSONLinesLogger(run.folder / "metrics.jsonl", run.last_step)


def open_csv(run: LoggedRun) -> Logger:
    """Open metrics.csv."""
    return CSVLogger(run.folder / "metrics.csv", run.last_step, run.columns)


def open_tensorboard(run: LoggedRun) -> Logger:
    """Open ``RUN/tensorboard``."""
    return TensorBoardLogger(run.folder / "tensorboard", run.last_step)


def open_loss_curves(run: LoggedRun) -> Logger:
    """Open loss_curves.png, which every run has."""
    from fabric_train.training.curves import LossCurves  # which imports this module

    return LossCurves(run.folder, run.branched_after)


OpenLogger = Callable[[LoggedRun], Logger]
"""Opens a logger of ``LOGGERS`` on rank 0."""


def open_loggers(names: Sequence[str], run: LoggedRun) -> list[Logger]:
    """Open metrics.csv, samples.jsonl and loss_curves.png, which every run has, and those of ``LOGGERS`` in ``names``.

    No failure of a logger except metrics.csv ends the run.
    """
    samples = SampleFile(run.folder / "samples.jsonl", run.last_step)
    opened: list[Logger] = [
        open_csv(run),
        GuardedLogger("samples.jsonl", lambda: samples),
        GuardedLogger("loss_curves.png", partial(open_loss_curves, run)),
    ]
    for name in dict.fromkeys(names):
        if name != "csv":
            opened.append(GuardedLogger(f"--loggers {name}", partial(LOGGERS[name], run)))
    return opened


class Outputs(_Forwarding):
    """All loggers of a run. ``log_model`` says which checkpoints they upload: "all", "last" or "none"."""

    def __init__(self, loggers: Sequence[Logger], log_model: str) -> None:
        self._loggers = loggers
        self._log_model = log_model

    def _tell(self, action: Callable[[Logger], None]) -> None:
        for logger in self._loggers:
            action(logger)

    def saved(self, checkpoint: Path, is_last: bool = False) -> None:
        """Record a complete checkpoint, and upload it if all are uploaded; ``is_last`` comes again, after the run."""
        if not is_last:
            self.log_save(checkpoint)
        if self._log_model == ("last" if is_last else "all"):
            self.log_model(checkpoint)


def describe_loggers(names: Sequence[str], folder: Path, project: str) -> str:
    """Return where a run's metrics are, with the command that shows or uploads each logger's."""
    places = [f"{folder / 'metrics.csv'}; after an evaluation, loss_curves.png beside it"]
    if "tensorboard" in names:
        places.append(f"tensorboard --logdir {shlex.quote(str(folder / 'tensorboard'))}")
    if "wandb" in names:
        from fabric_train.training.trackers import wandb_mode

        mode = wandb_mode()
        offline = f"{shlex.quote(str(folder / 'wandb'))}/offline-run-*"
        where = {"online": f"project {project}", "offline": f"offline; upload with: wandb sync {offline}"}
        places.append(f"Weights & Biases, {where.get(mode, mode)}")
    if "trackio" in names:
        places.append(f"trackio show --project {shlex.quote(project)}")
    if "mlflow" in names:
        files = f"MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {shlex.quote(str(folder / 'mlruns'))}"
        server = os.environ.get("MLFLOW_TRACKING_URI")
        places.append(f"MLflow at {server}, experiment {project}" if server else files)
    return "\n".join(places)
