"""How a program of this project ends: the error a user can mend, and what is printed for it."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from fabric_train.launch import global_rank

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


def run_program(main: Callable[[], None]) -> NoReturn:
    """Run ``main`` and leave the process with the project's exit codes: 0 done, 2 wrong input, 1 a failure of the
    system.

    A programming error keeps its traceback; everything a user can mend is one line per fault, said by one rank.

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
    except OSError as error:
        code = FAILURE
        _say_once(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
    except SystemExit as end:  # a program that has said itself what is wrong
        code = end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        code = INTERRUPTED
        _say_once("interrupted")
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):  # whoever read it has gone
            stream.flush()
    os._exit(code)


def _say_once(*lines: str) -> None:
    """Print the lines from rank 0.

    The other ranks find the same fault, and a launcher stops every rank when the first one ends; so they give rank 0
    the time to speak, and speak themselves only when they are still alive, which means that rank 0 found nothing
    wrong.
    """
    rank = global_rank()
    if rank:
        time.sleep(10)
    for line in lines:
        print(f"error: {line}" if rank == 0 else f"error (rank {rank}): {line}", file=sys.stderr, flush=True)
