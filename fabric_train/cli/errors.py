"""How a program of this project ends: the error a user can mend, and what is printed for it."""

import errno
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Protocol

from fabric_train.cli.launcher import end_children, global_rank
from fabric_train.cli.redaction import redacted

INPUT_ERROR = 2
FAILURE = 1
INTERRUPTED = 130


class InputError(ValueError):
    """What the user gave cannot be used.

    Args:
        faults: one line each; says what is wrong, where, and how to mend it.
    """

    def __init__(self, *faults: str) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


class RunError(Exception):
    """What ends a run under way, in one line; raised on all ranks alike."""


def run_program(main: Callable[[], None]) -> NoReturn:
    """Run ``main`` and leave the process with the project's exit codes: 0 done, 2 wrong input, 1 a failure of the
    system or of the program; what else ``main`` gives to ``SystemExit``.

    What went wrong is one line per fault, said by one rank; ``--debug`` shows the traceback after it.
    """
    code = 0
    try:
        main()
    except InputError as error:
        _fail(INPUT_ERROR, *error.faults)
    except RunError as failure:
        _fail(FAILURE, str(failure), on_all_ranks=True)
    except OSError as error:
        is_name = error.errno in (errno.ENAMETOOLONG, errno.ELOOP)  # of what the user gave
        _fail(INPUT_ERROR if is_name else FAILURE, describe_os_error(error))
    except SystemExit as end:  # a program that has said itself what is wrong
        code = end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        _fail(INTERRUPTED, "interrupted")
    except Exception as error:  # noqa: BLE001 - whatever it is, it is said in a line, and ends the program
        _fail(FAILURE, describe_failure(error), may_follow_another=True)
    leave(code)


class Ranks(Protocol):
    """The ranks of a run that are in touch with each other."""

    def end(self, code: int, lines: Sequence[str], may_follow_another: bool) -> None:
        """Have rank 0 say the lines and end every rank with ``code``; return where this one is to end by itself.

        ``may_follow_another``: the failure may be what another rank's end looks like from here, which is then to be
        said instead.
        """


_ranks: Ranks | None = None


def end_through(ranks: Ranks | None) -> None:
    """End all ranks together from now on; None: each for itself."""
    global _ranks
    _ranks = ranks


def end_run(code: int, *lines: str, may_follow_another: bool = False) -> NoReturn:
    """Say the lines, once for all ranks, and end this process; of ranks that are in touch with each other, all.

    Ranks that are not yet in touch find the same fault or get the same signal. A launcher stops every rank when the
    first one ends; so they give rank 0 the time to speak, and speak of a fault themselves only when they are still
    alive, which means that rank 0 found nothing wrong.
    """
    if _ranks is not None:
        _ranks.end(code, lines, may_follow_another)
    elif not global_rank():
        say(*lines)
    elif code in (FAILURE, INPUT_ERROR):
        time.sleep(10)
        say(*lines)
    leave(code)


def say(*lines: str) -> None:
    """Print lines on standard error, with no token or key in them."""
    for line in lines:
        print(redacted(line), file=sys.stderr, flush=True)


def leave(code: int) -> NoReturn:
    """End this process, and the ranks that it has started.

    It ends without the interpreter's finalization, for which nothing may be left to do: a native thread (gloo's,
    arrow's) that asks for the interpreter meanwhile aborts the process, and taking down what has been imported lasts
    up to seconds.
    """
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(timeout=2)  # another thread may be stuck in writing to the same stream
    end_children()
    os._exit(code)


def absent_folder(path: Path) -> str:
    """Say what there is in the place of a folder."""
    return "a file, not a folder" if path.exists() else "no such folder"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].strip()


def describe_os_error(error: OSError) -> str:
    """Say in a line what the system refused, on which file, and what to do about a full disk or a missing right."""
    where = "".join(f": {name}" for name in (error.filename, error.filename2) if name)
    mend = _MENDS.get(error.errno or 0)
    return f"{error.strerror or first_line(error)}{where}" + (f"; {mend}" if mend else "")


_MENDS = {
    errno.ENOSPC: "make room on that disk, or choose a folder on another one",
    errno.EDQUOT: "your quota on that disk is used up: make room, or choose a folder on another one",
    errno.EFBIG: "a file may not be so large there (ulimit -f, or the file system's limit)",
    errno.EACCES: "give this user the right to it, or choose another place",
    errno.EROFS: "that disk can only be read: choose another place",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "links there lead in a circle: give another place",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def describe_failure(error: Exception) -> str:
    """Say in a line what failed that no check has foreseen: no memory left, or a fault of the program and its place."""
    message = first_line(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate" in message:
        mend = "use a smaller --micro_batch_size or --max_length, --activation_checkpointing full, or more devices"
        return f"memory ran out: {message}; {mend}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/lib/python" not in frame.filename] or frames  # not a library's
    place = f" in {own[-1].name} ({Path(own[-1].filename).name}, line {own[-1].lineno})"
    kind = type(error).__name__
    said = message if message == kind else f"{kind}: {message}"
    return f"{said}{place}; a fault of the program, or an input it does not foresee: --debug shows the traceback"


def wants_traceback(argv: Sequence[str]) -> bool:
    """Whether ``--debug`` stands on the command line, alone or with true; asked before and after it is parsed."""
    for number, token in enumerate(argv):
        flag, equals, value = token.partition("=")
        if flag == "--debug":
            following = argv[number + 1] if number + 1 < len(argv) else ""
            return (value if equals else following).lower() != "false"
    return False


def _fail(code: int, *faults: str, on_all_ranks: bool = False, may_follow_another: bool = False) -> NoReturn:
    """End the run for the exception that is being handled."""
    rank = global_rank()
    if wants_traceback(sys.argv):
        say(traceback.format_exc())
    said = f"error (rank {rank})" if rank and not on_all_ranks and code != INPUT_ERROR else "error"
    end_run(code, *(f"{said}: {fault}" for fault in faults), may_follow_another=may_follow_another)


def _flush() -> None:
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")  # a progress bar has hidden the cursor
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):  # whoever read it has gone
            stream.flush()
