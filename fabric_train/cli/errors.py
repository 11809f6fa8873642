"""Error classes, exit codes and the one place where every program of this project ends."""

import errno
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn, Protocol

from fabric_train.cli.launcher import end_children, global_rank, report_to_torchrun
from fabric_train.cli.output import escape_controls, keep_streams_writable, redact

# docs/reference/exit_codes.md has these texts
DONE = 0
"""Done."""
FAILURE = 1
"""A failure while the program was running, reported in one line; `--debug` also shows its traceback."""
INPUT_ERROR = 2
"""Wrong input: one line for each fault, and nothing was written."""
STOPPED = 75
"""A run was stopped by SIGTERM, SIGINT, SIGUSR1 or SIGHUP and has saved; `--resume true` continues it."""
INTERRUPTED = 130
"""Another program was interrupted with Ctrl-C."""


_log = logging.getLogger("fabric_train")  # a training run writes it to RUN/run.log
_log.addHandler(logging.NullHandler())


class InputError(ValueError):
    """An error that the user can fix; a line for each fault says what it is, where, and how to fix it."""

    def __init__(self, *faults: str) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


@contextmanager
def naming_option(option: str, instead_of: str = "--model_name") -> Iterator[None]:
    """Let the faults of an InputError name the ``option`` of this program, not the one that training has for it."""
    try:
        yield
    except InputError as error:
        raise InputError(*(fault.replace(instead_of, option) for fault in error.faults)) from None


class RunError(Exception):
    """A failure that ends a running program with one line; all ranks raise it."""


def run_program(main: Callable[[], None]) -> NoReturn:
    """Run ``main`` and exit the process: with 0 when it is done, 2 for wrong input, 1 for any other failure, or the
    code of a ``SystemExit``. One rank prints one line for each fault; ``--debug`` prints the traceback as well.
    """
    keep_streams_writable()
    code = DONE
    try:
        if sys.flags.optimize > 1:
            without = "leave -OO and PYTHONOPTIMIZE out"
            raise InputError(f"Python runs without docstrings, which transformers and --help need; {without}")
        main()
    except InputError as error:
        _fail(INPUT_ERROR, *error.faults)
    except RunError as failure:
        _fail(FAILURE, str(failure), on_all_ranks=True)
    except OSError as error:
        is_name = error.errno in (errno.ENAMETOOLONG, errno.ELOOP)  # a name that the user gave
        _fail(INPUT_ERROR if is_name else FAILURE, describe_os_error(error))
    except SystemExit as end:  # the program has printed its reason already
        code = _exit_code_of(end)
    except KeyboardInterrupt:
        _fail(INTERRUPTED, "interrupted")
    except Exception as error:  # noqa: BLE001 - every failure is reported in one line and ends the program
        _fail(FAILURE, describe_failure(error), may_follow_another=True)
    exit_process(code)


def _exit_code_of(end: SystemExit) -> int:
    """Return the exit code that Python gives a SystemExit: a text is printed, and means a failure."""
    if end.code is None:
        return DONE
    if isinstance(end.code, int):
        return end.code
    print(end.code, file=sys.stderr)
    return FAILURE


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt as Ctrl-C does, so that unfinished files are removed."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # others have no signal handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class ConnectedRanks(Protocol):
    """The ranks of a run that can send each other messages."""

    def end(self, code: int, lines: Sequence[str], may_follow_another: bool) -> None:
        """Let rank 0 print the lines and end every rank with ``code``; return if this rank has to end on its own.

        If ``may_follow_another`` and this failure is only the consequence of another rank's end, print that one.
        """


_connected_ranks: ConnectedRanks | None = None


def set_connected_ranks(ranks: ConnectedRanks | None) -> None:
    """From now on, end all ranks together; None ends each rank on its own."""
    global _connected_ranks
    _connected_ranks = ranks


def end_run(code: int, *lines: str, may_follow_another: bool = False) -> NoReturn:
    """Print the lines once for all ranks and end this process; end all ranks if they are connected.

    Ranks that are not connected yet find the same fault or get the same signal, and a launcher stops them all when the
    first one ends. So the others let rank 0 print. If they are still alive then, rank 0 has found no fault.
    """
    is_error = code in (FAILURE, INPUT_ERROR)
    waits_for_rank_0 = _connected_ranks is None and global_rank() > 0
    if is_error and waits_for_rank_0:
        time.sleep(10)  # before the report: torchrun takes the exit code of the rank that has reported first
    if is_error:
        report_to_torchrun([escape_controls(redact(line)) for line in lines])
    if _connected_ranks is not None:
        _connected_ranks.end(code, lines, may_follow_another)
    elif is_error or not waits_for_rank_0:
        print_errors(*lines)
    exit_process(code)


_end_display: Callable[[], None] | None = None


def set_display(end: Callable[[], None] | None) -> None:
    """From now on, call ``end`` before errors are printed: it takes the display of the progress off the terminal."""
    global _end_display
    _end_display = end


def announce(line: str) -> None:
    """Log that the run is about to stop, and print it on standard error, unless a display shows it there."""
    if _end_display is None or not os.isatty(2):
        print(redact(line), file=sys.stderr, flush=True)
    _log.error(line)


_notes: set[str] = set()


def note(line: str) -> None:
    """Tell the user something once: in the log of a training run, on standard error in every other program.

    For modules that several programs share; rank 0 speaks for all.
    """
    if global_rank() or line in _notes:
        return
    _notes.add(line)
    if all(isinstance(handler, logging.NullHandler) for handler in _log.handlers):
        print(redact(escape_controls(f"note: {line}")), file=sys.stderr, flush=True)
    else:
        _log.warning("note: %s", line)


def print_errors(*lines: str) -> None:
    """Print lines on standard error without tokens, keys and passwords, and log them."""
    if _end_display is not None:
        _end_display()
    for line in lines:
        print(redact(line), file=sys.stderr, flush=True)
    for line in lines:  # last: a log on a disk that hangs must not delay the message
        _log.error(line)


def exit_process(code: int) -> NoReturn:
    """End this process and the ranks that it has started. It needs no memory, thread or file descriptor.

    It skips the interpreter's finalization, which takes up to seconds, and in which a native thread (of gloo or arrow)
    that asks for the interpreter aborts the process. ``keep_streams_writable`` leaves nothing to flush.
    """
    end_children()
    os._exit(code)


def missing_folder(path: Path) -> str:
    """Return why ``path`` is not a folder: it is a file, or does not exist."""
    return "a file, not a folder" if path.exists() else "no such folder"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].strip()


def describe_os_error(error: OSError) -> str:
    """Return one line with the system's error, the file, and how to fix it."""
    where = "".join(f": {name}" for name in (error.filename, error.filename2) if name)
    fix = _FIXES.get(error.errno or 0)
    return f"{error.strerror or first_line(error)}{where}" + (f"; {fix}" if fix else "")


def raise_reached_limit(error: BaseException) -> None:
    """Raise an OSError if reading failed for no fault of the file: too many files are open, or memory ran out.

    Some libraries turn the system's error into one of their own with its text.
    """
    for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        if getattr(error, "errno", None) == number or os.strerror(number) in str(error):
            raise OSError(number, os.strerror(number)) from error


_FIXES = {
    errno.ENOSPC: "free some space there, or choose a folder on another disk (docs/reference/errors.md#disk-full)",
    errno.EDQUOT: "your quota on that disk is used up: free some space, or choose a folder on another disk",
    errno.EFBIG: "the file is too large for the limit there (ulimit -f, or the file system's)",
    errno.EACCES: "give this user permission, or choose another place",
    errno.EROFS: "that disk is read-only: choose another place",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "the links there form a circle: give another place",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "end other programs on this machine, or raise its limit (sysctl fs.file-max)",
    errno.ENOMEM: "end other programs on this machine, or raise the limit of memory (ulimit -v, or the container's)",
}


_memory_advice = "use a machine with more memory, or end other programs on this one"


def set_memory_advice(advice: str) -> None:
    """From now on, give this advice when memory runs out: what helps depends on the program."""
    global _memory_advice
    _memory_advice = advice


def describe_failure(error: Exception) -> str:
    """Return one line for a failure that no check foresees: memory that ran out, or a bug and its place."""
    message = first_line(error)
    if "can't start new thread" in message:
        return f"{message}: the limit of processes and threads is reached; raise it (ulimit -u, or the container's)"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate" in message:
        return f"memory ran out: {message}; {_memory_advice}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/lib/python" not in frame.filename] or frames  # not a library's
    place = f" in {own[-1].name} ({Path(own[-1].filename).name}, line {own[-1].lineno})"
    kind = type(error).__name__
    text = message if message == kind else f"{kind}: {message}"
    return f"{text}{place}; this is a bug, or an input that the program does not expect: --debug shows the traceback"


def is_debug(argv: Sequence[str]) -> bool:
    """Whether the command line has ``--debug``, alone or with true; it may not have been parsed yet."""
    for number, token in enumerate(argv):
        flag, equals, value = token.partition("=")
        if flag == "--debug":
            following = argv[number + 1] if number + 1 < len(argv) else ""
            return (value if equals else following).lower() != "false"
    return False


def _fail(code: int, *faults: str, on_all_ranks: bool = False, may_follow_another: bool = False) -> NoReturn:
    """End the run for the exception that is being handled."""
    rank = global_rank()
    if is_debug(sys.argv):
        print(redact(traceback.format_exc()), file=sys.stderr, flush=True)
    if code == FAILURE and not on_all_ranks:
        _log.error("traceback", exc_info=True)
    prefix = f"error (rank {rank})" if rank and not on_all_ranks and code != INPUT_ERROR else "error"
    end_run(code, *(f"{prefix}: {fault}" for fault in faults), may_follow_another=may_follow_another)
