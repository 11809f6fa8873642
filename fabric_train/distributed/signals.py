"""Stop a run on SIGTERM, SIGINT, SIGUSR1 or SIGHUP: after the current micro-batch, or at once on a second signal.

Python runs a signal handler only at the next bytecode, so not while the main thread is blocked in native code. A thread
therefore reads the signal numbers from the pipe that Python's C handler writes to (``signal.set_wakeup_fd``).
"""

import ctypes
import os
import select
import signal
import sys
import threading
import time

from fabric_train.cli.errors import STOPPED, end_run
from fabric_train.cli.launcher import launcher_process

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_REPEAT_SECONDS = 2.0  # a launcher may send one signal several times within this time
_LAUNCHER_SECONDS = 0.5  # between two looks at whether the launcher is there
_PR_SET_PDEATHSIG = 1  # sys/prctl.h


class StopSignals:
    """The stop signals that this process has received. The only instance is ``stop_signals``."""

    def __init__(self) -> None:
        self.received = 0
        """Number of the first signal, 0 if there was none; SIGHUP also if the launcher has ended."""
        self.is_deferred = False
        """Whether the first signal is only recorded: the ranks agree where to stop, and save."""
        self._is_listening, self._received_at = False, 0.0
        self._launcher: int | None = None

    def listen(self) -> None:
        """Listen for signals. Until :meth:`defer` a signal ends the process, because nothing is to be saved."""
        if self._is_listening:
            return
        self._is_listening, self._launcher = True, launcher_process()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._read_signals, args=(reader,), daemon=True, name="signals").start()
        for number in _SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # under nohup the run outlives its terminal
            signal.signal(number, _do_nothing)

    def defer(self) -> None:
        """Only record the first signal from now on."""
        self.is_deferred = True

    def ignore(self) -> None:
        """Ignore signals from now on: everything is saved and the process is about to end."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _read_signals(self, reader: int) -> None:
        while True:
            if not select.select([reader], [], [], _LAUNCHER_SECONDS)[0]:
                if not self.received and self._launcher is not None and os.getppid() != self._launcher:
                    self._receive(signal.SIGHUP)
                continue
            for number in os.read(reader, 64):
                if number in _SIGNALS:  # the pipe also gets DataLoader's SIGCHLD
                    self._receive(number)

    def _receive(self, number: int) -> None:
        now = time.monotonic()
        if self.received and now - self._received_at < _REPEAT_SECONDS:
            return
        if self.received:
            line = f"{_name(number)} again: ended at once, without saving; continue with --resume true"
            end_run(128 + number, line)
        self._received_at, self.received = now, number
        if not self.is_deferred:
            end_run(STOPPED, describe_stop_outside_training(describe_signal(number)))


stop_signals = StopSignals()


def describe_signal(number: int) -> str:
    """Return a signal's name; for SIGHUP also that the launcher may have ended."""
    return "SIGHUP (or its launcher's end)" if number == signal.SIGHUP else _name(number)


def describe_stop_outside_training(cause: str) -> str:
    """Return the line for a run that ``cause`` stopped when it had nothing to save."""
    return f"stopped by {cause} outside of training, with nothing to save; continue with --resume true"


def ignore_signals_in_worker(_: int) -> None:
    """Ignore stop signals in a DataLoader worker (``worker_init_fn``); the worker ends together with its rank."""
    signal.set_wakeup_fd(-1)  # it would write to the rank's pipe
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":  # elsewhere torch ends the worker some seconds after its parent
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _do_nothing(*_: object) -> None:
    """Handle a signal that the thread reads from the pipe."""


def _name(number: int) -> str:
    return signal.Signals(number).name
