"""SIGTERM, SIGINT, SIGUSR1 and SIGHUP: a wish to stop, granted at the next step border; a second one ends at once.

Signals are heard while the main thread is blocked in native code, too: what Python would run there itself waits for
the next bytecode, so a thread reads the numbers that Python's own handler writes into a pipe.
"""

import ctypes
import os
import signal
import sys
import threading
import time

from fabric_train.cli.errors import end_run
from fabric_train.cli.launcher import launcher_process

STOPPED = 75
"""Exit code: stopped by a signal, to be started again with ``--resume true``."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_REPEAT_SECONDS = 2.0  # launchers hand one signal on more than once, moments apart
_PR_SET_PDEATHSIG = 1


class StopSignals:
    """What this process has been asked by signals. There is one: ``stop_signals``."""

    def __init__(self) -> None:
        self.received = 0
        """Number of the first signal; 0 as long as there was none; SIGHUP also where the launcher has gone."""
        self._listens, self._saves, self._last = False, False, 0.0
        self._launcher: int | None = None

    def listen(self) -> None:
        """Hear signals from now on. Until ``save_first`` one ends the process, for there is nothing to save."""
        if self._listens:
            return
        self._listens, self._launcher = True, launcher_process()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._hear, args=(reader,), daemon=True, name="signals").start()
        for number in _SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the terminal's end is not to matter
            signal.signal(number, _in_the_thread)

    def save_first(self) -> None:
        """Leave it to the loop from now on to see ``received`` and to save."""
        self._saves = True

    def ignore(self) -> None:
        """Hear no signals any more: all is saved, and the process is about to end."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def heed_launcher(self) -> None:
        """Take it for a signal where the launcher that has started this rank has gone."""
        if not self.received and self._launcher is not None and os.getppid() != self._launcher:
            self._take(signal.SIGHUP)

    def _hear(self, reader: int) -> None:
        while True:
            for number in os.read(reader, 64):
                if number in _SIGNALS:  # DataLoader's SIGCHLD comes this way, too
                    self._take(number)

    def _take(self, number: int) -> None:
        now = time.monotonic()
        if self.received and now - self._last < _REPEAT_SECONDS:
            return
        if self.received:
            line = f"{_name(number)} again: ended at once, without saving: go on with --resume true"
            end_run(128 + number, line)
        self._last, self.received = now, number
        if not self._saves:
            end_run(STOPPED, outside_of_training(describe(number)))


stop_signals = StopSignals()


def describe(number: int) -> str:
    """Say what has stopped a run: a signal's name, for SIGHUP also what else it stands for."""
    return "SIGHUP (or its launcher's end)" if number == signal.SIGHUP else _name(number)


def outside_of_training(by: str) -> str:
    """Say that something has stopped a run that had nothing to save."""
    return f"stopped by {by} outside of training, nothing was to be saved: go on with --resume true"


def leave_signals_to_rank(_: int) -> None:
    """In a DataLoader's worker: let the rank that reads from it decide when to end, and end with it."""
    signal.set_wakeup_fd(-1)  # it leads to the rank
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":  # elsewhere torch's own watch over the parent ends it, after seconds
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _in_the_thread(*_: object) -> None:
    """Do nothing where Python handles the signal: the thread has it already."""


def _name(number: int) -> str:
    return signal.Signals(number).name
