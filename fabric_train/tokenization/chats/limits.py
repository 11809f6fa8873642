"""Limit the processor time and the memory of a block, and try a program from strangers in a separate process."""

import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import FrameType

from fabric_train.reading.documents import BadRowError

_SECONDS_OF_CHILD = 30  # of processor time, for all renderings of a trial
_LONGEST_TRIAL = 300.0  # seconds; the machine may be busy


class OutOfTimeError(BaseException):
    """The time is over. This is not an ``Exception``, so no library can catch it and let the program continue."""


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """Raise an OutOfTimeError in the block after ``seconds`` of this process's processor time. Main thread only."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise OutOfTimeError

    previous_handler = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)  # again each second: an exception in a destructor is lost
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous_handler)


@contextmanager
def limited_memory(num_bytes: int) -> Iterator[None]:
    """Let allocations in the block raise MemoryError at ``num_bytes`` more address space than before (Linux only)."""
    if sys.platform != "linux":
        yield
        return
    previous_limits = resource.getrlimit(resource.RLIMIT_AS)
    _, hard_limit = previous_limits
    statm = os.pread(_open_statm(os.getpid()), 64, 0)
    num_pages = int(statm.split()[0])  # of address space
    limit = num_pages * resource.getpagesize() + num_bytes
    for previous_limit in previous_limits:  # a stricter limit of the user stays
        if previous_limit != resource.RLIM_INFINITY:
            limit = min(limit, previous_limit)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, previous_limits)


@lru_cache(maxsize=1)
def _open_statm(_process: int) -> int:
    """Return a descriptor for the file with this process's size in pages, which each rendering of a chat reads.

    A forked process needs its own.
    """
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def find_fault_in_child(attempt: Callable[[], object]) -> str | None:
    """Return the message of the BadRowError that ``attempt`` raises in a forked process; None if it raises none.

    The child is killed if it does not end. ``attempt`` must touch no device and wait for no other thread.
    """
    if sys.platform != "linux":
        return None
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _run_child(attempt, writer)
    os.close(writer)  # the child has the only other one: its end is the end of the pipe

    # read the message until the child ends, or says nothing for too long
    message = b""
    has_ended = False
    try:
        while not has_ended and select.select([reader], [], [], _LONGEST_TRIAL)[0]:
            data = os.read(reader, 1 << 16)
            message += data
            has_ended = not data
    finally:
        os.close(reader)
        if not has_ended:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "the chat template was stopped because it does not end, or crashes"
    return message.decode() or None


def _run_child(attempt: Callable[[], object], writer: int) -> None:
    """Run ``attempt`` in this process, a forked child, write the message of its BadRowError, and end the process."""
    try:
        for signal_number in (signal.SIGINT, signal.SIGTERM):  # the parent's handlers are not for the child
            signal.signal(signal_number, signal.SIG_DFL)
        _, hard_limit = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard_limit))
        with suppress(ValueError):  # a lower limit is set already
            resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS_OF_CHILD, _SECONDS_OF_CHILD))
        try:
            attempt()
        except BadRowError as error:
            os.write(writer, str(error).encode(errors="backslashreplace"))
    finally:
        os._exit(0)  # any other exception occurs in the parent as well
