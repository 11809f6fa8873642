"""Limit what a chat template takes, a program by strangers: its processor time, which may never end, and its memory.

A template is tried in a process of its own first (``find_fault_in_child``), so that one that takes all it can get never
gets it here. Later renderings, of other conversations, have the same limits in this process.
"""

import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import FrameType

from fabric_train.tokenization.documents import BadRowError

MEMORY = 1 << 30  # bytes that a rendering may take beyond what the process has
_SECONDS_OF_CHILD = 30  # of processor time, for all renderings of a trial
_LONGEST_TRIAL = 300.0  # seconds; the machine may be busy


class OutOfTimeError(BaseException):
    """The time is over. It is not an ``Exception``: no library that catches those lets the program go on."""


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in the block after ``seconds`` of this process's processor time. Main thread only."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)  # again each second: an exception in a destructor is lost
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def limited_memory(num_bytes: int) -> Iterator[None]:
    """Let allocations in the block raise MemoryError at ``num_bytes`` more address space than before (Linux only)."""
    if sys.platform != "linux":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = int(os.pread(_open_statm(os.getpid()), 64, 0).split()[0]) * resource.getpagesize() + num_bytes
    lowest = min([most, *(limit for limit in before if limit != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_AS, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@lru_cache(maxsize=1)
def _open_statm(_process: int) -> int:
    """Return a descriptor of the file with this process's size in pages; a forked process needs its own."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def find_fault_in_child(attempt: Callable[[], object]) -> str | None:
    """Return the message of the BadRowError that ``attempt`` raises in a forked process, None if it raises none.

    The child is killed if it does not end. ``attempt`` must touch no device and wait for no other thread.
    """
    if sys.platform != "linux":
        return None
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _attempt(attempt, writer)
    os.close(writer)
    text, is_over = b"", False
    try:
        while not is_over and select.select([reader], [], [], _LONGEST_TRIAL)[0]:
            part = os.read(reader, 1 << 16)
            text, is_over = text + part, not part
    finally:
        os.close(reader)
        if not is_over:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "the chat template was stopped: it does not end, or crashes"
    return text.decode() or None


def _attempt(attempt: Callable[[], object], writer: int) -> None:
    """End this process, a forked child, after ``attempt``; write the message of its BadRowError."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # the parent's handlers are not for the child
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        with suppress(ValueError):  # a lower limit is set already
            resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS_OF_CHILD, _SECONDS_OF_CHILD))
        try:
            attempt()
        except BadRowError as error:
            os.write(writer, str(error).encode(errors="backslashreplace"))
    finally:
        os._exit(0)  # any other exception: the parent will have it, too
