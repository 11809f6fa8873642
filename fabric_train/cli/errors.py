"""Define error classes and exit codes, and end every program of this project."""

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
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from fabric_train.cli.launcher import end_started_ranks, global_rank, report_to_torchrun
from fabric_train.cli.output import escape_controls, keep_streams_writable, redact

if TYPE_CHECKING:
    import subprocess

# docs/reference/exit_codes.md has these texts
DONE = 0
"""Done."""
FAILURE = 1
"""A failure while the program was running, reported in one line; `--debug` also shows its traceback."""
INPUT_ERROR = 2
"""Invalid input: one line for each error, and nothing was written."""
STOPPED = 75
"""A run was stopped by SIGTERM, SIGINT, SIGUSR1 or SIGHUP and has saved; `--resume true` continues it."""
INTERRUPTED = 130
"""Another program was interrupted with Ctrl-C."""


_log = logging.getLogger("fabric_train")  # a training run writes it to RUN/run.log
_log.addHandler(logging.NullHandler())


class InputError(ValueError):
    """An error that the user can fix; a line for each fault says what is wrong, where, and how to fix it."""

    def __init__(self, *faults: str) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


@contextmanager
def naming_option(option: str, instead_of: str = "--model_name") -> Iterator[None]:
    """Make an InputError that is raised in the block name this program's ``option`` instead of training's."""
    try:
        yield
    except InputError as error:
        raise InputError(*(fault.replace(instead_of, option) for fault in error.faults)) from None


class RunError(Exception):
    """A failure that ends a running program with one line; all ranks must raise it."""


def run_program(main: Callable[[], None]) -> NoReturn:
    """Run ``main`` and exit the process: with 0 when it is done, 2 for wrong input, 1 for any other failure, or the
    code of a ``SystemExit``. One rank prints one line for each fault; ``--debug`` prints the traceback as well.
    """
    keep_streams_writable()
    code = DONE
    try:
        if sys.flags.optimize > 1:
            without = "leave out -OO and PYTHONOPTIMIZE"
            raise InputError(f"Python runs without docstrings, but transformers and --help need them; {without}")
        main()
    except InputError as error:
        _fail(INPUT_ERROR, *error.faults)
    except RunError as failure:
        _fail(FAILURE, str(failure), on_all_ranks=True)
    except OSError as error:
        is_bad_name = error.errno in (errno.ENAMETOOLONG, errno.ELOOP)  # only a path from the user can be one
        _fail(INPUT_ERROR if is_bad_name else FAILURE, describe_os_error(error))
    except SystemExit as system_exit:  # the program has printed its reason already
        code = _resolve_exit_code(system_exit)
    except KeyboardInterrupt:
        _fail(INTERRUPTED, "interrupted")
    except Exception as error:  # noqa: BLE001 - every failure is reported in one line and ends the program
        _fail(FAILURE, describe_failure(error), may_follow_another=True)
    exit_process(code)


def _resolve_exit_code(system_exit: SystemExit) -> int:
    """Return the exit code that Python would use for a SystemExit, and print its text if it has one."""
    if system_exit.code is None:
        return DONE
    if isinstance(system_exit.code, int):
        return system_exit.code
    print(system_exit.code, file=sys.stderr)
    return FAILURE


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt in the block, as Ctrl-C does, so that unfinished files are removed."""

    def interrupt(_signal_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # Python sets signal handlers only in the main thread
        yield
        return
    previous_handler = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


class ConnectedRanks(Protocol):
    """The ranks of a run, once they can exchange messages."""

    def end(self, code: int, lines: Sequence[str], may_follow_another: bool) -> None:
        """Let rank 0 print the lines and end every rank with ``code``; return if this rank has to end on its own.

        ``may_follow_another`` means that this failure may only be the consequence of another rank's end. If it is,
        that rank's lines are printed instead.
        """


@dataclass
class ProgramState:
    """The state on which the end of this process, and the lines that it prints then, depend."""

    connected_ranks: ConnectedRanks | None = None
    """The ranks that :func:`end_run` ends together; if None, each rank ends alone."""
    started_ranks: list["subprocess.Popen[Any]"] = field(default_factory=list)
    """The ranks that this process has started, which end with it."""
    end_display: Callable[[], None] | None = None
    """A function that removes the progress display before errors are printed; None if there is no display."""
    memory_advice: str = "use a machine with more memory, or stop other programs on this one"
    """The advice for a program that runs out of memory."""
    told_notes: set[str] = field(default_factory=set)
    """The lines that :func:`note` has already printed, because each is printed once."""


program = ProgramState()
"""The state of this process. It is a global object because any code, of libraries too, may fail or end the process, in
any thread, and nothing could be passed to all of it."""


def end_run(code: int, *lines: str, may_follow_another: bool = False) -> NoReturn:
    """Print the lines once for all ranks and end this process; end all ranks if they are connected.

    Before the ranks are connected, all of them find the same fault or get the same signal, and the launcher stops them
    when the first rank ends. Ranks other than 0 therefore wait so that only rank 0 prints. A rank that is still alive
    after the wait has a fault that rank 0 does not have, and prints it.
    """
    is_error = code in (FAILURE, INPUT_ERROR)
    waits_for_rank_0 = program.connected_ranks is None and global_rank() > 0
    # The wait comes before the report: torchrun uses the exit code of the rank that reports first.
    if is_error and waits_for_rank_0:
        time.sleep(10)
    if is_error:
        report_to_torchrun([escape_controls(redact(line)) for line in lines])

    if program.connected_ranks is not None:
        program.connected_ranks.end(code, lines, may_follow_another)
    elif is_error or not waits_for_rank_0:
        print_errors(*lines)
    exit_process(code)


def announce(line: str) -> None:
    """Log that the run is about to stop, and print this on standard error unless the progress display shows it."""
    if program.end_display is None or not os.isatty(2):
        print(redact(line), file=sys.stderr, flush=True)
    _log.error(line)


def note(line: str) -> None:
    """Print a note for the user once: in the log of a training run, or on standard error in any other program.

    This is for modules that several programs share. Only rank 0 prints the note.
    """
    if global_rank() or line in program.told_notes:
        return
    program.told_notes.add(line)
    has_run_log = not all(isinstance(handler, logging.NullHandler) for handler in _log.handlers)
    if not has_run_log:
        print(redact(escape_controls(f"note: {line}")), file=sys.stderr, flush=True)
    else:
        _log.warning("note: %s", line)


def print_errors(*lines: str) -> None:
    """Print lines on standard error without tokens, keys and passwords, and log them."""
    if program.end_display is not None:
        program.end_display()
    for line in lines:
        print(redact(line), file=sys.stderr, flush=True)
    # All lines are printed before the first one is logged: a log on a disk that hangs must not delay the message.
    for line in lines:
        _log.error(line)


def exit_process(code: int) -> NoReturn:
    """End this process and the ranks that it has started, without new memory, threads or file descriptors.

    ``os._exit`` skips the interpreter's finalization, which can take seconds, and in which a native thread (of gloo or
    arrow) that asks for the interpreter lock aborts the process. Nothing has to be flushed, because
    ``keep_streams_writable`` makes every line reach its file immediately.
    """
    end_started_ranks(program.started_ranks)
    os._exit(code)


def missing_folder(path: Path) -> str:
    """Return why ``path`` is not a folder: it is a file or does not exist."""
    return "a file, not a folder" if path.exists() else "no such folder"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if the message is empty."""
    message = str(error).strip()
    if not message:
        return type(error).__name__
    return message.splitlines()[0].strip()


def describe_os_error(error: OSError) -> str:
    """Return one line with the system's error, the file, and how to fix it."""
    description = error.strerror or first_line(error)
    for filename in (error.filename, error.filename2):  # a rename or a link has two
        if filename:
            description += f": {filename}"
    fix = _FIXES.get(error.errno or 0)
    return f"{description}; {fix}" if fix else description


def raise_if_limit_reached(error: BaseException) -> None:
    """Raise an OSError if reading failed because of a limit rather than because of the file.

    The limits are those of open files and memory. Some libraries replace the system's error by their own error,
    which only contains its text.
    """
    for limit in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        description = os.strerror(limit)
        if getattr(error, "errno", None) == limit or description in str(error):
            raise OSError(limit, description) from error


_FIXES = {
    errno.ENOSPC: "free some space there, or choose a folder on another disk (docs/reference/errors.md#disk-full)",
    errno.EDQUOT: "your quota on that disk is used up; free some space, or choose a folder on another disk",
    errno.EFBIG: "the file is larger than the limit (ulimit -f, or the file system's)",
    errno.EACCES: "give this user permission, or choose another path",
    errno.EROFS: "that disk is read-only; choose another path",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "the links form a loop; choose another path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "stop other programs on this machine, or raise its limit (sysctl fs.file-max)",
    errno.ENOMEM: "stop other programs on this machine, or raise the memory limit (ulimit -v, or the container's)",
}


def describe_failure(error: Exception) -> str:
    """Return one line for a failure that no check has caught: memory ran out, or a bug and where it happened."""
    message = first_line(error)
    error_name = type(error).__name__

    # The machine's limits. torch.OutOfMemoryError is recognised by its name, since torch may not be imported.
    if "can't start new thread" in message:
        return f"{message}: the limit on processes and threads is reached; raise it (ulimit -u, or the container's)"
    if isinstance(error, MemoryError) or error_name == "OutOfMemoryError" or "can't allocate" in message:
        return f"out of memory: {message}; {program.memory_advice}"

    # A bug: the innermost frame that is not a library's, or the innermost of all.
    frames = traceback.extract_tb(error.__traceback__)
    project_frames = [frame for frame in frames if "/lib/python" not in frame.filename]
    frame = (project_frames or frames)[-1]
    location = f"in {frame.name} ({Path(frame.filename).name}, line {frame.lineno})"
    text = message if message == error_name else f"{error_name}: {message}"
    return f"{text} {location}; this is a bug, or unexpected input; --debug shows the traceback"


def is_debug(argv: Sequence[str]) -> bool:
    """Return whether the command line has ``--debug``, alone or with true; it may not have been parsed yet."""
    for index, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if flag != "--debug":
            continue
        if not equals:
            value = argv[index + 1] if index + 1 < len(argv) else ""
        return value.lower() != "false"
    return False


def _fail(code: int, *faults: str, on_all_ranks: bool = False, may_follow_another: bool = False) -> NoReturn:
    """End the run for the exception that is being handled; ``on_all_ranks`` if every rank raises it."""
    if is_debug(sys.argv):
        print(redact(traceback.format_exc()), file=sys.stderr, flush=True)
    if code == FAILURE and not on_all_ranks:
        _log.error("traceback", exc_info=True)

    # Wrong input is the same on all ranks; any other failure names its rank.
    prefix = "error"
    rank = global_rank()
    if rank and not on_all_ranks and code != INPUT_ERROR:
        prefix = f"error (rank {rank})"
    lines = [f"{prefix}: {fault}" for fault in faults]
    end_run(code, *lines, may_follow_another=may_follow_another)
