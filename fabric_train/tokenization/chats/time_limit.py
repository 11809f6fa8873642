"""Limit the processor time of a chat template, a program by strangers that may never end."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class OutOfTimeError(BaseException):
    """The time is over. It is not an ``Exception``: no library that catches those lets the program go on."""


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in the block after ``seconds`` of this process's processor time. Main thread only.

    A busy machine does not shorten the time. The two switches of a timer take a few microseconds.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)  # again each second: an exception in a destructor is lost
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
