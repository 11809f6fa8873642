"""What a run tells its user: lines on standard output, and the same lines in ``RUN/run.log``.

``cli.errors`` logs what ends a program to ``fabric_train``, and prints it itself. ``fabric_train.progress`` gets what
the process is doing while it starts; that is shown only if the run would be silent otherwise.
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
"""What this process is doing while it starts, such as "loading weights 3/8". An empty message ends that."""

SILENT_SECONDS = 8.0
"""After so long without a line, the log says what this process is doing."""
_MAX_EARLY_LINES = 1000
_UNLIMITED_WIDTH = 10_000
_AS_WRITTEN = {"markup": False, "highlight": False, "emoji": False}


def start_log(console: Console | None = None) -> Console:
    """Print the lines of both loggers from now on, on rank 0 alone, and return the console that prints them."""
    prints = global_rank() == 0
    if console is None:
        # without force_terminal, an environment variable could bring escape codes into a file
        console = open_console(quiet=not prints, force_terminal=os.isatty(1), **_AS_WRITTEN)
    end_log()
    for logger in (log, progress):
        logger.setLevel(logging.DEBUG if prints else logging.ERROR)
        logger.propagate = False
    if prints:
        lines = _ConsoleLines(console)
        log.addHandler(lines)
        log.addHandler(MemoryHandler(_MAX_EARLY_LINES, flushLevel=logging.CRITICAL + 1))
        progress.addHandler(_WhileSilent(lines))
    return console


def end_log() -> None:
    """Print and write nothing more."""
    for logger in (log, progress):
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()
        logger.addHandler(logging.NullHandler())  # without any, logging prints warnings itself


def write_log(path: Path) -> None:
    """Append the lines so far and all further ones to the file ``path``, with time, host and rank.

    Ranks other than 0 append only their errors, and open the file only for them. An InputError if ``path`` is no file.
    """
    rank = global_rank()
    file = _LogFile(path, rank)
    file.setLevel(logging.ERROR if rank else logging.INFO)
    for early in [handler for handler in log.handlers if isinstance(handler, MemoryHandler)]:
        early.setTarget(file)
        early.close()  # passes its lines on
        log.removeHandler(early)
    log.addHandler(file)


def note(line: str) -> None:
    """Print a line that the user should read, marked as a note."""
    log.warning("note: %s", line)


def warn(line: str) -> None:
    """Print a line that the user should read, marked as a warning."""
    log.warning("warning: %s", line)


def show(renderable: RenderableType) -> None:
    """Print a table or another renderable of rich, and log it as text."""
    if log.isEnabledFor(logging.INFO):
        log.info(_as_text(renderable), extra={"renderable": renderable})


def quiet_libraries() -> None:
    """Hide messages of the libraries, on every rank, about things that are intended."""
    for name in ("lightning.fabric", "lightning.pytorch", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*FSDP.state_dict_type.*")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.*")
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.*")


class _ConsoleLines(logging.Handler):
    """Prints everything except errors."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.printed_at = time.monotonic()

    def filter(self, record: logging.LogRecord) -> Any:
        """Leave errors to ``cli.errors``; without waiting for the lock, which a stuck write may hold."""
        return record.levelno < logging.ERROR and super().filter(record)

    def emit(self, record: logging.LogRecord) -> None:
        self.printed_at = time.monotonic()
        line = _clean(record.getMessage())
        if not self._console.is_terminal:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
            self._console.print(Text(f"{when} {line}"), soft_wrap=True)
        elif hasattr(record, "renderable"):
            self._console.print(record.renderable)
        else:
            self._console.print(Text(line, "yellow" if record.levelno >= logging.WARNING else ""), soft_wrap=True)


class _WhileSilent(logging.Handler):
    """Keeps the last record, and repeats it whenever nothing has been printed for some seconds."""

    def __init__(self, lines: _ConsoleLines) -> None:
        super().__init__()
        self._lines = lines
        self._started = time.monotonic()
        self._doing: logging.LogRecord | None = None
        self._is_closed = threading.Event()
        threading.Thread(target=self._repeat, daemon=True, name="progress").start()

    def emit(self, record: logging.LogRecord) -> None:
        self._doing = record if record.getMessage() else None

    def close(self) -> None:
        self._is_closed.set()
        super().close()

    def _repeat(self) -> None:
        while not self._is_closed.wait(min(1.0, SILENT_SECONDS)):
            doing = self._doing
            now = time.monotonic()
            if doing and now - self._lines.printed_at >= SILENT_SECONDS:
                log.info("%s (%.0f s)", doing.getMessage(), now - self._started)


class _LogFile(logging.FileHandler):
    """Appends to a file; the first error of the disk ends that, and not the run."""

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
        self.setLevel(logging.CRITICAL + 1)
        reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
        print(f"warning: {self.baseFilename}: {reason}; nothing more is written to it", file=sys.stderr)


class _LogFormatter(logging.Formatter):
    """Formats a record as time, host, rank and message, with the traceback of an exception."""

    def __init__(self, rank: int) -> None:
        host = machine_name().replace("%", "")
        super().__init__(f"%(asctime)s {host} rank {rank}: %(message)s", "%Y-%m-%d %H:%M:%S%z")

    def format(self, record: logging.LogRecord) -> str:
        return _clean(super().format(record))


def _clean(text: str) -> str:
    return redact(escape_controls(text))


def _as_text(renderable: RenderableType) -> str:
    text = StringIO()
    open_console(file=text, width=_UNLIMITED_WIDTH, force_terminal=False, **_AS_WRITTEN).print(renderable)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
