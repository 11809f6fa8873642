"""The loggers that need no extra package, and ``open_loggers``, which opens all loggers of a run.

These are metrics.csv, samples.jsonl, metrics.jsonl and TensorBoard. See ``logger`` for the protocol, and ``trackers``
for loggers that keep many runs.
"""

import csv
import json
import math
import mmap
import os
import shlex
import struct
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from textwrap import indent

from fabric_train.cli.tables import LOGGERS
from fabric_train.files.regular_file import check_no_link, check_no_links_in, open_to_write, write_atomically
from fabric_train.training.logger import GuardedLogger, LoggedRun, Logger, Sample
from fabric_train.training.metrics import COLUMNS, Metrics, columns_of, measured_values, read_table
from fabric_train.training.sample_file import SampleFile

# The format of tensorboard's RecordWriter: uint64 length, uint32 checksum, content, uint32 checksum.
_LENGTH_FORMAT = "<Q"
_BYTES_BEFORE_CONTENT = 12
_BYTES_AFTER_CONTENT = 4


class CSVLogger(Logger):
    """``metrics.csv``, with one header and one row per logged step, each step once. It is flushed after each row."""

    def __init__(self, path: Path, last_step: int, extra_columns: Sequence[str] = ()) -> None:
        """Open for appending after ``last_step``; remove the rows after it, and add ``extra_columns``."""
        check_no_link(path)
        old_columns, rows = read_table(path, last_step)
        columns = list(dict.fromkeys((*COLUMNS, *old_columns, *extra_columns)))
        temporary = path.with_suffix(".csv.new")
        temporary.unlink(missing_ok=True)  # of a killed run, or a planted link
        with open_to_write(temporary, "x", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            for metrics in rows:
                writer.writerow(columns_of(metrics))
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


class TensorBoardLogger(Logger):
    """Event files in ``RUN/tensorboard``."""

    def __init__(self, folder: Path, last_step: int) -> None:
        """Continue after ``last_step``; remove what an interrupted run wrote after it."""
        from torch.utils.tensorboard import SummaryWriter  # a slow import, needed only here

        check_no_links_in(folder)
        _silence_writer_threads()
        for file in folder.glob("events.out.tfevents.*"):
            _truncate_events(file, last_step)
        # A TensorBoard that is open has read the removed steps: purge_step makes it drop them.
        self._writer = SummaryWriter(str(folder), purge_step=last_step + 1)
        self._last_step = max(last_step, 0)

    def log(self, metrics: Metrics) -> None:
        self._last_step = metrics.step
        for name, value in measured_values(metrics).items():
            self._writer.add_scalar(name, value, metrics.step)

    def log_samples(self, samples: Sequence[Sample]) -> None:
        for prompt_number, sample in enumerate(samples, 1):
            # Indented text is code in Markdown, in which nothing else is markup.
            code = indent(f"{sample.prompt}▸{sample.text}", "    ", lambda _: True)
            self._writer.add_text(f"samples/{prompt_number}", code, sample.step)

    def log_report(self, page: Path, markdown: str) -> None:
        self._writer.add_text("report", markdown, self._last_step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _silence_writer_threads() -> None:
    """Keep TensorBoard's threads from printing a traceback; ``flush`` and ``close`` raise a thread's error."""
    print_traceback = threading.excepthook

    def print_other_threads(error: threading.ExceptHookArgs) -> None:
        if type(error.thread).__name__ != "_AsyncWriterThread":
            print_traceback(error)

    threading.excepthook = print_other_threads


def _truncate_events(path: Path, last_step: int) -> None:
    """Truncate an event file before its first event after ``last_step``, or before a damaged or incomplete record."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event

    size = path.stat().st_size
    if not size:
        return
    end = 0  # of the records to keep
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as records:
        while end + _BYTES_BEFORE_CONTENT <= size:
            (length,) = struct.unpack_from(_LENGTH_FORMAT, records, end)
            content_start = end + _BYTES_BEFORE_CONTENT
            content_end = content_start + length
            record_end = content_end + _BYTES_AFTER_CONTENT
            if record_end > size:
                break
            try:
                event = Event.FromString(records[content_start:content_end])
            except DecodeError:  # TensorBoard also stops at a damaged record
                break
            if event.step > last_step:
                break
            end = record_end
    os.truncate(path, end)


class JSONLinesLogger(Logger):
    """``metrics.jsonl``, with one JSON object per logged step, without values that were not measured."""

    def __init__(self, path: Path, last_step: int) -> None:
        """Continue after ``last_step``; remove the lines after it, and a line that a crash cut off."""
        check_no_link(path)
        write_atomically(path, _read_lines(path, last_step))
        self._file = open_to_write(path, "a", newline="")

    def log(self, metrics: Metrics) -> None:
        values = {name: value for name, value in columns_of(metrics).items() if value is not None}
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _read_lines(path: Path, last_step: int) -> str:
    """Return the complete lines of metrics.jsonl up to a step; "" without the file."""
    if not path.exists():
        return ""
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        if not line.endswith("\n") or _read_step(line) > last_step:
            break
        lines.append(line)
    return "".join(lines)


def _read_step(line: str) -> float:
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
    from fabric_train.training.loss_curves import LossCurves  # slow: it imports pyarrow

    return LossCurves(run.folder, run.branched_after)


def open_loggers(names: Sequence[str], run: LoggedRun) -> list[Logger]:
    """Open metrics.csv, samples.jsonl and loss_curves.png, which every run has, and the loggers in ``names``.

    Only a failure of metrics.csv ends the run.
    """
    # A samples.jsonl that is damaged is wrong input, so it is not opened by its guard.
    samples = SampleFile(run.folder / "samples.jsonl", run.last_step)
    loggers: list[Logger] = [
        open_csv(run),
        GuardedLogger("samples.jsonl", lambda: samples),
        GuardedLogger("loss_curves.png", partial(open_loss_curves, run)),
    ]
    for name in dict.fromkeys(names):
        if name != "csv":
            loggers.append(GuardedLogger(f"--loggers {name}", partial(LOGGERS[name], run)))
    return loggers


def describe_loggers(names: Sequence[str], folder: Path, project: str) -> str:
    """Return where a run's metrics are, and for each logger the command that shows or uploads them."""
    lines = [f"{folder / 'metrics.csv'}; after an evaluation, also loss_curves.png next to it"]
    if "tensorboard" in names:
        lines.append(f"tensorboard --logdir {shlex.quote(str(folder / 'tensorboard'))}")
    if "wandb" in names:
        lines.append(f"Weights & Biases, {_describe_wandb(folder, project)}")
    if "trackio" in names:
        lines.append(f"trackio show --project {shlex.quote(project)}")
    if "mlflow" in names:
        lines.append(_describe_mlflow(folder, project))
    return "\n".join(lines)


def _describe_wandb(folder: Path, project: str) -> str:
    from fabric_train.training.trackers import wandb_mode

    mode = wandb_mode()
    if mode == "online":
        return f"project {project}"
    if mode == "offline":
        return f"offline; upload with: wandb sync {shlex.quote(str(folder / 'wandb'))}/offline-run-*"
    return mode


def _describe_mlflow(folder: Path, project: str) -> str:
    server = os.environ.get("MLFLOW_TRACKING_URI")
    if server:
        return f"MLflow at {server}, experiment {project}"
    return f"MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {shlex.quote(str(folder / 'mlruns'))}"
