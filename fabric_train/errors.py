"""How a program of this project ends: the error a user can mend, and what is printed for it."""

import errno
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from fabric_train.launch import global_rank
from fabric_train.redaction import redacted

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
    system or of the program.

    What went wrong is one line per fault, said by one rank; ``--debug`` shows the traceback after it.

    The process ends without the interpreter's finalization, for which ``main`` must leave nothing to do: a native
    thread (gloo's, arrow's) that asks for the interpreter meanwhile aborts the process, and taking down what has been
    imported lasts up to seconds.
    """
    code = 0
    try:
        main()
    except InputError as error:
        code = INPUT_ERROR
        _say_once(*error.faults)
    except RunError as failure:
        code = FAILURE
        _say_once(str(failure), rank_0_knows=True)
    except OSError as error:
        code = FAILURE
        _say_once(describe_os_error(error))
    except SystemExit as end:  # a program that has said itself what is wrong
        code = end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        code = INTERRUPTED
        _say_once("interrupted")
    except Exception as error:  # noqa: BLE001 - whatever it is, it is said in a line, and ends the program
        code = FAILURE
        _say_once(describe_failure(error))
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):  # whoever read it has gone
            stream.flush()
    os._exit(code)


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


def _say_once(*lines: str, rank_0_knows: bool = False) -> None:
    """Print the lines from rank 0.

    The other ranks find the same fault, and a launcher stops every rank when the first one ends; so they give rank 0
    the time to speak, and speak themselves only when they are still alive, which means that rank 0 found nothing
    wrong: never where it is known to find the same.
    """
    rank = global_rank()
    if rank:
        time.sleep(3 if rank_0_knows else 10)
        if rank_0_knows:
            return
    for line in lines:
        said = f"error: {line}" if rank == 0 else f"error (rank {rank}): {line}"
        print(redacted(said), file=sys.stderr, flush=True)
    if wants_traceback(sys.argv):
        print(redacted(traceback.format_exc()), file=sys.stderr, flush=True)
