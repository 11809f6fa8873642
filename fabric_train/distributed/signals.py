"""Stop a run on SIGTERM, SIGINT, SIGUSR1 or SIGHUP: after the current micro-batch, or at once on a second signal.

Python runs a signal handler only at the next bytecode, so not while the main thread is blocked in native code. A thread
therefore reads the signal numbers from the pipe that Python's C handler writes to (``signal.set_wakeup_fd``). The
heartbeat has the point of a step at which this rank is; ``watchdog`` sends it to the others.
"""

import ctypes
import math
import os
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import FrameType
from typing import Any

from fabric_train.cli.errors import STOPPED, end_run
from fabric_train.cli.launcher import launcher_process

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_REPEAT_SECONDS = 2.0  # a launcher may send one signal several times within this time
_LAUNCHER_SECONDS = 0.5  # between two looks at whether the launcher is there
_PR_SET_PDEATHSIG = 1  # sys/prctl.h
Border = tuple[int, int]
"""The moment before a micro-batch: (optimizer step, index of the micro-batch). All ranks pass all borders in order."""


class StopSignals:
    """The stop signals that this process has received. The only instance is ``stop_signals``."""

    def __init__(self) -> None:
        self.received = 0
        """Number of the first signal, 0 if there was none; SIGHUP also if the launcher has ended."""
        self.is_deferred = False
        """Whether the first signal is only recorded: the ranks agree where to stop, and save."""
        self._is_listening = False
        self._received_at = 0.0
        self._launcher: int | None = None
        self._replaced: dict[int, Any] = {}  # handlers of a program that has called the training, by signal

    def listen(self) -> None:
        """Listen for signals. Until :meth:`defer` a signal ends the process, because nothing is to be saved."""
        if self._is_listening:
            return
        self._is_listening = True
        self._launcher = launcher_process()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._read_signals, args=(reader,), daemon=True, name="signals").start()
        for number in _SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # under nohup the run outlives its terminal
            signal.signal(number, lambda *_: None)  # the thread reads it from the pipe

    def defer(self) -> None:
        """Only record the first signal from now on, also if this process has not called :meth:`listen`.

        It is then a program that has called the training as a function, with handlers of its own: see :meth:`release`.
        """
        self.is_deferred = True
        if not self._is_listening and threading.current_thread() is threading.main_thread():
            self._replaced = {number: signal.signal(number, self._record) for number in _SIGNALS}

    def release(self) -> None:
        """Give a program that has called the training its own handlers back, and forget the signals."""
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        self._replaced = {}
        self.received = 0
        self.is_deferred = False

    def ignore(self) -> None:
        """Ignore signals from now on: everything is saved and the process, if it is a rank, is about to end."""
        for number in _SIGNALS if self._is_listening else ():
            signal.signal(number, signal.SIG_IGN)

    def _record(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.received and now - self._received_at >= _REPEAT_SECONDS:
            raise KeyboardInterrupt
        if not self.received:
            self._received_at = now
            self.received = number

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
            end_run(128 + number, f"{_name(number)} again: ended at once, without saving; continue with --resume true")
        self._received_at = now
        self.received = number
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


def _name(number: int) -> str:
    return signal.Signals(number).name


class RunStopped(Exception):  # noqa: N818 - not an error
    """All ranks stop here for a signal."""


class StopBorder:
    """The border at which this rank's main thread stops; the watchdogs of the ranks agree on it.

    It is for jobs with a short grace period on large windows: Slurm kills 30 s after SIGTERM, and a window of many
    micro-batches takes longer. The run stops within the window and saves the step before it.

    A rank may be a few micro-batches ahead of another, and one that stops alone would leave the others waiting in a
    collective. So rank 0 asks every rank to :meth:`freeze`. Each answers with the border that it passed last, and waits
    at its next one. All ranks then stop at the first border after the last one that any rank has passed.
    """

    def __init__(self) -> None:
        self.signal = 0
        """Number of the signal to stop for, 0 as long as there is none."""
        self._changed = threading.Condition()
        self._passed: Border = (0, -1)
        self._last: Border | None = None
        self._is_frozen = False

    def enter(self, step: int, micro_batch: int) -> None:
        """Pass the border before a micro-batch; wait there while the ranks agree. RunStopped if they stop there."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_frozen or self._last is not None)
            if self._last is not None and (step, micro_batch) > self._last:
                raise RunStopped
            self._passed = (step, micro_batch)

    def freeze(self) -> Border:
        """Let the main thread pass no further border until :meth:`stop_after`; return the last one it has passed."""
        with self._changed:
            self._is_frozen = True
            return self._passed

    def stop_after(self, last: Border, signal: int) -> None:
        """Let the main thread pass the borders up to ``last`` and stop at the next one."""
        with self._changed:
            self._last = last
            self.signal = signal
            self._changed.notify()


class StepPhase(IntEnum):
    """The phases of a step, in the order in which every rank passes through them."""

    LOADING = 0
    DATA = 1
    COMPUTING = 2
    OPTIMIZER = 3
    SYNC = 4
    COMPLETING = 5
    VALIDATION = 6
    SAMPLING = 7
    SAVING = 8
    ENDING = 9


_TEXTS = {
    StepPhase.LOADING: "loading",
    StepPhase.DATA: "waiting for data",
    StepPhase.COMPUTING: "forward and backward pass {}",
    StepPhase.OPTIMIZER: "optimizer step",
    StepPhase.SYNC: "synchronizing after the step",
    StepPhase.COMPLETING: "completing a checkpoint",
    StepPhase.VALIDATION: "validation batch {}",
    StepPhase.SAMPLING: "token {} of the samples",
    StepPhase.SAVING: "saving",
    StepPhase.ENDING: "ending",
}
_SLOW_AT_FIRST = (StepPhase.VALIDATION, StepPhase.SAMPLING)
_SLOW_PHASES = (StepPhase.LOADING, StepPhase.COMPLETING, StepPhase.SAVING, StepPhase.ENDING)


@dataclass(frozen=True, order=True)
class Position:
    """A point that every rank passes; an earlier one compares as less.

    ``index`` counts micro-batches or validation batches. ``is_slow``: the others may have to wait here for long.
    """

    step: int = 0
    phase: int = StepPhase.LOADING
    index: int = 0
    is_slow: bool = field(default=True, compare=False)

    def __str__(self) -> str:
        text = _TEXTS[StepPhase(self.phase)].format(self.index)
        return f"step {self.step}, {text}" if self.step else text


class Heartbeat:
    """The position of this rank's main thread; the watchdog's thread reads it."""

    def __init__(self, started: float | None = None) -> None:
        """``started`` is the ``time.monotonic()`` at which the program began to load; by default it is now."""
        self.started = time.monotonic() if started is None else started
        self.position = Position()
        self.min_pass_seconds = 0.0
        """Duration of the fastest forward and backward pass so far; 0 before the first."""
        self.stop_border = StopBorder()
        self.machines: dict[int, str] = {}
        """On rank 0, the name of the machine of each rank."""
        self.last_completed = 0
        """The last step that this process has completed; 0 before the first."""
        self._since = self.started
        self._first_step = 0
        self._seconds = dict.fromkeys(StepPhase, 0.0)

    def enter(self, phase: StepPhase, index: int = 0, step: int | None = None) -> None:
        """Record that the main thread enters a phase; all ranks record the same positions."""
        step = self.position.step if step is None else step
        self._first_step = step if phase == StepPhase.LOADING else self._first_step or step
        may_compile = step == self._first_step or (phase in _SLOW_AT_FIRST and index == 0)
        now = time.monotonic()
        self._seconds[self._counted_phase] += now - self._since
        if self.position.phase == StepPhase.COMPUTING:
            self.min_pass_seconds = min(self.min_pass_seconds or math.inf, now - self._since)
        if phase == StepPhase.COMPLETING:
            self.last_completed = step
        is_slow = may_compile or phase in _SLOW_PHASES
        self.position = Position(step, phase, index, is_slow)
        self._since = now

    def take_time(self) -> None:
        """Record that this rank may keep the others waiting for long at its position."""
        self.position = replace(self.position, is_slow=True)

    @property
    def seconds(self) -> dict[StepPhase, float]:
        """Seconds of the main thread in each phase since ``started``; their sum is the time since then.

        The first step, which compiles and starts the data workers, counts as loading until it is completed.
        """
        phase = self._counted_phase
        now = time.monotonic()
        return {**self._seconds, phase: self._seconds[phase] + now - self._since}

    def count_as(self, phase: StepPhase, seconds: float) -> None:
        """Count seconds of the present phase as another one's."""
        self._seconds[self._counted_phase] -= seconds
        self._seconds[phase] += seconds

    @property
    def _counted_phase(self) -> StepPhase:
        is_first = self.position.step == self._first_step and self.position.phase < StepPhase.COMPLETING
        return StepPhase.LOADING if is_first else StepPhase(self.position.phase)

    def __str__(self) -> str:
        return str(self.position)
