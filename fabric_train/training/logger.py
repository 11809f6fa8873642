"""Define the protocol of loggers, which record a run's metrics, samples and checkpoints, and call them together.

metrics.csv is the record that a resumed run trusts: if it cannot be written, the run ends. No other logger can end a
run, or change its exit code (:class:`GuardedLogger`). To add a logger, see :data:`LOGGERS`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fabric_train.cli.errors import describe_os_error, first_line
from fabric_train.training.metrics import Metrics
from fabric_train.training.run_log import warn


@dataclass(frozen=True)
class Sample:
    """A line of samples.jsonl: a prompt, and its continuation by the model after a step."""

    step: int
    prompt: str
    text: str


class Logger:
    """The protocol of loggers, which only rank 0 has. Each method does nothing here; override those that you need."""

    def log(self, metrics: Metrics) -> None:
        """Record one step's metrics."""

    def log_samples(self, samples: Sequence[Sample]) -> None:
        """Record the samples of a step, whose metrics follow."""

    def log_save(self, checkpoint: Path) -> None:
        """Record that a checkpoint is complete."""

    def log_model(self, checkpoint: Path) -> None:
        """Upload a complete checkpoint; called for all checkpoints or the last one, as ``--log_model`` says."""

    def log_report(self, page: Path, markdown: str) -> None:
        """Record the report of the run, after its last save: a self-contained HTML file, and the same as Markdown."""

    def flush(self) -> None:
        """Write all logged values to disk. It is called before each save, so no checkpoint is ahead of its metrics."""

    def close(self) -> None:
        """Write everything that is left and close, at the end of the run."""

    def abandon(self) -> None:
        """Stop all that the logger has started, after one of its methods failed; no other method is called then."""


@dataclass(frozen=True)
class LoggedRun:
    """The run for which loggers are opened."""

    folder: Path
    last_step: int
    """The last step that is already logged, or -1."""
    config: dict[str, Any] = field(default_factory=dict)
    """The arguments by name."""
    columns: Sequence[str] = ()
    """The columns of metrics.csv in addition to ``COLUMNS``."""
    branched_after: Sequence[int] = ()
    """The steps after which the run branched off another one."""


OpenLogger = Callable[[LoggedRun], Logger]
"""A function that opens a logger of ``LOGGERS`` on rank 0."""


class _ForwardingLogger(Logger):
    """Passes each call on to other loggers; ``_forward`` decides to which."""

    def log(self, metrics: Metrics) -> None:
        self._forward(lambda logger: logger.log(metrics))

    def log_samples(self, samples: Sequence[Sample]) -> None:
        self._forward(lambda logger: logger.log_samples(samples))

    def log_save(self, checkpoint: Path) -> None:
        self._forward(lambda logger: logger.log_save(checkpoint))

    def log_model(self, checkpoint: Path) -> None:
        self._forward(lambda logger: logger.log_model(checkpoint))

    def log_report(self, page: Path, markdown: str) -> None:
        self._forward(lambda logger: logger.log_report(page, markdown))

    def flush(self) -> None:
        self._forward(lambda logger: logger.flush())

    def close(self) -> None:
        self._forward(lambda logger: logger.close())

    def _forward(self, call: Callable[[Logger], None]) -> None:
        """Apply ``call`` to each logger."""
        raise NotImplementedError


class GuardedLogger(_ForwardingLogger):
    """A logger that a run can do without: its first failure is reported in one line, and then it logs nothing more."""

    def __init__(self, name: str, open_logger: Callable[[], Logger]) -> None:
        """``name`` is for messages; a failure of ``open_logger`` is handled like a later failure of the logger."""
        self._name = name
        self.logger = Logger()
        self._forward(lambda _: setattr(self, "logger", open_logger()))

    def _forward(self, call: Callable[[Logger], None]) -> None:
        try:
            call(self.logger)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a folder, a disk, a network, a server, a bug
            failed_logger = self.logger
            self.logger = Logger()
            warn(
                f"{self._name}: {_describe_error(error)}; the run continues without it, and metrics.csv has every step"
            )
            try:
                failed_logger.abandon()
            except (Exception, SystemExit) as abandon_error:  # noqa: BLE001 - the same
                reason = _describe_error(abandon_error)
                warn(f"{self._name}: could not stop everything that it started: {reason}")


def _describe_error(error: BaseException) -> str:
    if isinstance(error, OSError):
        return describe_os_error(error)
    return first_line(error)


class Outputs(_ForwardingLogger):
    """All loggers of a run. ``log_model`` says which checkpoints they upload: "all", "last" or "none"."""

    def __init__(self, loggers: Sequence[Logger], log_model: str) -> None:
        self._loggers = loggers
        self._log_model = log_model

    def _forward(self, call: Callable[[Logger], None]) -> None:
        for logger in self._loggers:
            call(logger)

    def saved(self, checkpoint: Path, *, is_last: bool = False) -> None:
        """Record a complete checkpoint, and upload it if all are uploaded.

        The last checkpoint of a run is passed twice: when it is complete, and with ``is_last`` when the run has ended.
        """
        if is_last:
            if self._log_model == "last":
                self.log_model(checkpoint)
            return
        self.log_save(checkpoint)
        if self._log_model == "all":
            self.log_model(checkpoint)
