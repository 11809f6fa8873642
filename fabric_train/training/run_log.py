"""Print the log of a run on standard output, and write the same lines to ``RUN/run.log``.

``cli.errors`` logs the error that ends a program to ``fabric_train``, and prints it itself. ``fabric_train.progress``
gets what the process is doing while it starts, which is only shown if the run would otherwise be silent.
"""

import logging
import os
import sys
import threading
import time
import warnings
from io import StringIO
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from fabric_train.cli.errors import InputError, describe_os_error
from fabric_train.cli.launcher import global_rank, machine_name
from fabric_train.cli.output import escape_controls, open_console, redact
from fabric_train.files.regular_file import open_to_write

log = logging.getLogger("fabric_train")
"""DEBUG is printed only where standard output is no terminal; INFO is printed, and written to run.log; WARNING is
printed in colour as well."""

progress = logging.getLogger("fabric_train.progress")
"""The logger for what this process is doing while it starts, such as "loading weights 3/8"; "" ends it."""

SILENT_SECONDS = 8.0
"""The seconds without a line after which the log says what this process is doing."""
_MAX_EARLY_LINES = 1000
_NEVER = logging.CRITICAL + 1  # a level that no record has
_UNLIMITED_WIDTH = 10_000
_PLAIN_TEXT = {"markup": False, "highlight": False, "emoji": False}


def start_log(console: Console | None = None) -> Console:
    """Print the lines of both loggers from now on, on rank 0 alone, and return the console that prints them."""
    prints = global_rank() == 0
    if console is None:
        # without force_terminal, an environment variable could bring escape codes into a file
        console = open_console(quiet=not prints, force_terminal=os.isatty(1), **_PLAIN_TEXT)
    end_log()
    for logger in (log, progress):
        logger.setLevel(logging.DEBUG if prints else logging.ERROR)
        logger.propagate = False
    if prints:
        console_handler = _ConsoleHandler(console)
        log.addHandler(console_handler)
        # keeps the lines until ``write_log`` opens run.log
        log.addHandler(MemoryHandler(_MAX_EARLY_LINES, flushLevel=_NEVER))
        progress.addHandler(_ProgressHandler(console_handler))
    return console


def end_log() -> None:
    """Stop printing and writing."""
    for logger in (log, progress):
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()
        logger.addHandler(logging.NullHandler())  # without any, logging prints warnings itself


def write_log(path: Path) -> None:
    """Append the lines so far and all later ones to the file ``path``, with time, host and rank.

    Ranks other than 0 append only their errors, and open the file only for them.

    Raises:
        InputError: ``path`` exists and is not a file.
    """
    rank = global_rank()
    file_handler = _FileHandler(path, rank)
    file_handler.setLevel(logging.ERROR if rank else logging.INFO)
    for handler in list(log.handlers):
        if isinstance(handler, MemoryHandler):
            handler.setTarget(file_handler)
            handler.close()  # passes its lines on
            log.removeHandler(handler)
    log.addHandler(file_handler)


def note(line: str) -> None:
    """Print a line that the user should read, marked as a note."""
    log.warning("note: %s", line)


def warn(line: str) -> None:
    """Print a line that the user should read, marked as a warning."""
    log.warning("warning: %s", line)


def show(renderable: RenderableType) -> None:
    """Print a table or another renderable from rich, and log it as text."""
    if log.isEnabledFor(logging.INFO):
        log.info(_as_text(renderable), extra={"renderable": renderable})


def quiet_libraries() -> None:
    """Hide messages from libraries, on every rank, about things that are intended."""
    for name in ("lightning.fabric", "lightning.pytorch", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*FSDP.state_dict_type.*")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.*")
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.*")


class _ConsoleHandler(logging.Handler):
    """Prints everything except errors."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.printed_at = time.monotonic()

    def filter(self, record: logging.LogRecord) -> Any:
        """Leave errors to ``cli.errors``, without waiting for the lock, which a stuck write may hold."""
        return record.levelno < logging.ERROR and super().filter(record)

    def emit(self, record: logging.LogRecord) -> None:
        self.printed_at = time.monotonic()
        line = _clean(record.getMessage())
        if not self._console.is_terminal:
            created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
            self._console.print(Text(f"{created} {line}"), soft_wrap=True)
        elif hasattr(record, "renderable"):
            self._console.print(record.renderable)
        else:
            style = "yellow" if record.levelno >= logging.WARNING else ""
            self._console.print(Text(line, style), soft_wrap=True)


class _ProgressHandler(logging.Handler):
    """Keeps the last record, and repeats it whenever nothing has been printed for some seconds."""

    def __init__(self, console_handler: _ConsoleHandler) -> None:
        super().__init__()
        self._console_handler = console_handler
        self._started = time.monotonic()
        self._last_record: logging.LogRecord | None = None
        self._is_closed = threading.Event()
        threading.Thread(target=self._repeat, daemon=True, name="progress").start()

    def emit(self, record: logging.LogRecord) -> None:
        self._last_record = record if record.getMessage() else None

    def close(self) -> None:
        self._is_closed.set()
        super().close()

    def _repeat(self) -> None:
        """Log the last record again while nothing is printed; it runs in a thread."""
        while not self._is_closed.wait(min(1.0, SILENT_SECONDS)):
            record = self._last_record
            now = time.monotonic()
            if record and now - self._console_handler.printed_at >= SILENT_SECONDS:
                log.info("%s (%.0f s)", record.getMessage(), now - self._started)


class _FileHandler(logging.FileHandler):
    """Appends to a file; the first disk error ends the file, but not the run."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace", delay=rank > 0)
        self.setFormatter(_LogFormatter(rank))

    def _open(self) -> TextIO:  # type: ignore[override]
        return open_to_write(Path(self.baseFilename), "a", errors=self.errors)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except (OSError, InputError):  # the file cannot be opened
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Report the error that is being handled once, and write nothing more."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError | InputError):
            raise  # a bug
        self.setLevel(_NEVER)
        reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
        print(f"warning: {self.baseFilename}: {reason}; no more lines will be written to it", file=sys.stderr)


class _LogFormatter(logging.Formatter):
    """Formats a record as time, host, rank and message, with the traceback of an exception."""

    def __init__(self, rank: int) -> None:
        host = machine_name().replace("%", "")
        super().__init__(f"%(asctime)s {host} rank {rank}: %(message)s", "%Y-%m-%d %H:%M:%S%z")

    def format(self, record: logging.LogRecord) -> str:
        return _clean(super().format(record))


def _clean(text: str) -> str:
    """Return a text without control characters and secrets."""
    return redact(escape_controls(text))


def _as_text(renderable: RenderableType) -> str:
    """Return a console's output without the spaces that fill its lines."""
    output = StringIO()
    console = open_console(file=output, width=_UNLIMITED_WIDTH, force_terminal=False, **_PLAIN_TEXT)
    console.print(renderable)
    lines = [line.rstrip() for line in output.getvalue().splitlines()]
    return "\n".join(lines)
