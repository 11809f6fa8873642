"""Stop a run on SIGTERM, SIGINT, SIGUSR1 or SIGHUP: after the current micro-batch, immediately on a second signal.

Python runs a signal handler only at the next bytecode, and so not while the main thread is blocked in native code. A
thread therefore reads the signal numbers from the pipe that Python's C handler writes to (``signal.set_wakeup_fd``).
The heartbeat holds the position of this rank in the run; ``watchdog`` sends it to the other ranks.
"""

import math
import os
import select
import signal
import threading
import time
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import FrameType
from typing import Any, NoReturn

from fabric_train.cli.errors import STOPPED, end_run
from fabric_train.cli.launcher import launcher_process
from fabric_train.cli.parent_process import end_with_parent

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_REPEAT_SECONDS = 2.0  # a launcher may send one signal several times within this time
_LAUNCHER_CHECK_SECONDS = 0.5  # between two checks that the launcher still runs
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
        self._received_at = 0.0  # on the monotonic clock
        self._launcher_pid: int | None = None
        self._replaced_handlers: dict[int, Any] = {}  # of a program that has called the training, by signal

    def listen(self) -> None:
        """Listen for signals. Until :meth:`defer`, a signal ends the process, because there is nothing to save."""
        if self._is_listening:
            return
        self._is_listening = True
        self._launcher_pid = launcher_process()

        # a thread reads the signal numbers from a pipe
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._read_signals, args=(reader,), daemon=True, name="signals").start()

        # Python writes to the pipe only for signals with a handler; this one does nothing
        for signal_number in _SIGNALS:
            if signal_number == signal.SIGHUP and signal.getsignal(signal_number) == signal.SIG_IGN:
                continue  # under nohup the run outlives its terminal
            signal.signal(signal_number, lambda *_: None)

    def defer(self) -> None:
        """From now on, only record a first signal.

        If this process has not called :meth:`listen`, a program has called the training as a function. Then this
        replaces the program's own handlers until :meth:`release`.
        """
        self.is_deferred = True
        if self._is_listening or threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        for signal_number in _SIGNALS:
            self._replaced_handlers[signal_number] = signal.signal(signal_number, self._record)

    def release(self) -> None:
        """Restore the handlers of a program that has called the training, and forget the signals."""
        for signal_number, handler in self._replaced_handlers.items():
            signal.signal(signal_number, handler)
        self._replaced_handlers = {}
        self.received = 0
        self.is_deferred = False

    def ignore(self) -> None:
        """Ignore signals from now on, because everything is saved, and a rank's process is about to end."""
        if not self._is_listening:
            return
        for signal_number in _SIGNALS:
            signal.signal(signal_number, signal.SIG_IGN)

    def _record(self, signal_number: int, _: FrameType | None) -> None:
        """Handle a signal of a program that has called the training."""
        now = time.monotonic()
        if not self.received:
            self._received_at = now
            self.received = signal_number
        elif now - self._received_at >= _REPEAT_SECONDS:
            raise KeyboardInterrupt

    def _read_signals(self, reader: int) -> None:
        """Receive signals from the pipe, and SIGHUP when the launcher has ended; this runs in a separate thread."""
        while True:
            readable, _, _ = select.select([reader], [], [], _LAUNCHER_CHECK_SECONDS)
            if readable:
                for signal_number in os.read(reader, 64):
                    if signal_number in _SIGNALS:  # the pipe also gets DataLoader's SIGCHLD
                        self._receive(signal_number)
                continue
            launcher_has_ended = self._launcher_pid is not None and os.getppid() != self._launcher_pid
            if launcher_has_ended and not self.received:
                self._receive(signal.SIGHUP)

    def _receive(self, signal_number: int) -> None:
        """Record a first signal, or end the process if the signal is not deferred or is a second one."""
        now = time.monotonic()
        if self.received and now - self._received_at < _REPEAT_SECONDS:
            return  # a repetition of the first signal
        if self.received:
            again = f"{_name(signal_number)} again: ended immediately without saving; continue with --resume true"
            end_run(128 + signal_number, again)
        self._received_at = now
        self.received = signal_number
        if not self.is_deferred:
            end_run(STOPPED, describe_stop_outside_training(describe_signal(signal_number)))


stop_signals = StopSignals()


def describe_signal(signal_number: int) -> str:
    """Return a signal's name; for SIGHUP, add that the launcher may have ended."""
    if signal_number == signal.SIGHUP:
        return "SIGHUP (or the end of its launcher)"
    return _name(signal_number)


def describe_stop_outside_training(cause: str) -> str:
    """Return the message for a run that ``cause`` stopped when it had nothing to save."""
    return f"stopped by {cause} outside training, with nothing to save; continue with --resume true"


def ignore_signals_in_worker(_: int) -> None:
    """Ignore stop signals in a DataLoader worker (``worker_init_fn``); the worker ends together with its rank."""
    signal.set_wakeup_fd(-1)  # the worker has inherited the rank's pipe, and would write to it
    for signal_number in _SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)
    end_with_parent()  # elsewhere than on Linux, torch ends the worker some seconds after its parent


def _name(signal_number: int) -> str:
    return signal.Signals(signal_number).name


class RunStopped(Exception):  # noqa: N818 - not an error
    """Raised on all ranks at the point where they stop for a signal."""


class StopBorder:
    """The border at which this rank's main thread stops; the watchdogs of the ranks agree on it.

    A job's grace period may be short: Slurm kills 30 s after SIGTERM, and a window of many micro-batches takes longer.
    So the run stops within the window, and saves the previous step.

    A rank may be a few micro-batches ahead of another, and a rank that stops alone would leave the others waiting in a
    collective. So rank 0 asks every rank to :meth:`freeze`. Each rank answers with the border that it passed last, and
    waits at its next border. All ranks then stop at the border after the last one that any rank has passed.

    Between two borders there may be work of minutes that ends in a collective, such as a reward. A rank may give such
    work up as soon as :meth:`is_due`: as the other ranks cannot leave the collective without it, all ranks are between
    these two borders. In the collective, it tells them so, and all ranks :meth:`stop` there.
    """

    def __init__(self) -> None:
        self.signal = 0
        """Number of the signal to stop for, 0 as long as there is none."""
        self._changed = threading.Condition()
        self._passed_border: Border = (0, -1)
        self._last_border: Border | None = None  # that may still be passed; None until the ranks have agreed
        self._is_frozen = False

    def enter(self, step: int, micro_batch: int) -> None:
        """Pass the border before a micro-batch; wait there while the ranks agree where to stop.

        Raises:
            RunStopped: this is the border at which the ranks stop.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_frozen or self._last_border is not None)
            if self._last_border is not None and (step, micro_batch) > self._last_border:
                raise RunStopped
            self._passed_border = (step, micro_batch)

    def is_due(self) -> bool:
        """Return whether the ranks have agreed to stop at the next border of this rank."""
        with self._changed:
            return self._last_border is not None and self._passed_border >= self._last_border

    def stop(self) -> NoReturn:
        """Stop before the next border, together with a rank on which the stop is due.

        Raises:
            RunStopped: In any case, as soon as this rank knows the signal too.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._last_border is not None)
        raise RunStopped

    def freeze(self) -> Border:
        """Keep the main thread from passing a border until :meth:`stop_after`; return the last one it has passed."""
        with self._changed:
            self._is_frozen = True
            return self._passed_border

    def stop_after(self, border: Border, signal: int) -> None:
        """Let the main thread pass the borders up to ``border`` and stop at the next one."""
        with self._changed:
            self._last_border = border
            self.signal = signal
            self._changed.notify()


class StepPhase(IntEnum):
    """The phases of a step, in the order in which every rank passes through them."""

    LOADING = 0
    DATA = 1
    ROLLOUT = 2
    COMPUTING = 3
    OPTIMIZER = 4
    SYNC = 5
    COMPLETING = 6
    VALIDATION = 7
    SAMPLING = 8
    SAVING = 9
    ENDING = 10


_PHASE_TEXTS = {
    StepPhase.LOADING: "loading",
    StepPhase.DATA: "waiting for data",
    StepPhase.ROLLOUT: "sampling batch {} of the completions",
    StepPhase.COMPUTING: "forward and backward pass {}",
    StepPhase.OPTIMIZER: "optimizer step",
    StepPhase.SYNC: "synchronizing after the step",
    StepPhase.COMPLETING: "completing a checkpoint",
    StepPhase.VALIDATION: "validation batch {}",
    StepPhase.SAMPLING: "token {} of the samples",
    StepPhase.SAVING: "saving",
    StepPhase.ENDING: "ending",
}
_COMPILING_PHASES = (StepPhase.VALIDATION, StepPhase.SAMPLING)  # at their first batch or token
_SLOW_PHASES = (StepPhase.LOADING, StepPhase.ROLLOUT, StepPhase.COMPLETING, StepPhase.SAVING, StepPhase.ENDING)


@dataclass(frozen=True, order=True)
class Position:
    """A point of the run that every rank passes; earlier positions compare as less."""

    step: int = 0
    phase: int = StepPhase.LOADING
    index: int = 0
    """The number of the micro-batch, validation batch, batch of completions or sampled token."""
    is_slow: bool = field(default=True, compare=False)
    """Whether other ranks may have to wait a long time for this rank."""

    def __str__(self) -> str:
        phase = _PHASE_TEXTS[StepPhase(self.phase)].format(self.index)
        return f"step {self.step}, {phase}" if self.step else phase


class Heartbeat:
    """The position of this rank's main thread; the watchdog's thread reads it."""

    def __init__(self, started: float | None = None) -> None:
        """Start the clock at ``started``, the ``time.monotonic()`` when the program began to load; by default now."""
        self.started = time.monotonic() if started is None else started
        self.position = Position()
        self.min_pass_seconds = 0.0
        """Duration of the fastest forward and backward pass so far; 0 before the first."""
        self.stop_border = StopBorder()
        self.machines: dict[int, str] = {}
        """On rank 0, the name of the machine of each rank."""
        self.last_completed = 0
        """The last step that this process has completed; 0 before the first."""
        self._entered_at = self.started  # when the main thread entered its phase, on the monotonic clock
        self._first_step = 0  # that this process takes, so not 1 after a resume; 0 until it is known
        self._completed_seconds = dict.fromkeys(StepPhase, 0.0)  # without the phase in progress

    def enter(self, phase: StepPhase, index: int = 0, step: int | None = None) -> None:
        """Record that the main thread enters a phase; all ranks record the same positions.

        Args:
            phase: The phase that begins.
            index: Number of the micro-batch, validation batch, batch of completions or sampled token.
            step: The optimizer step; by default the one of the last position.
        """
        # end the previous phase
        now = time.monotonic()
        phase_seconds = now - self._entered_at
        if step is None:
            step = self.position.step
        if phase == StepPhase.LOADING or not self._first_step:
            self._first_step = step
        self._completed_seconds[self._counted_phase] += phase_seconds
        if self.position.phase == StepPhase.COMPUTING:
            self.min_pass_seconds = min(self.min_pass_seconds or math.inf, phase_seconds)

        # begin this phase
        if phase == StepPhase.COMPLETING:
            self.last_completed = step
        may_compile = step == self._first_step or (phase in _COMPILING_PHASES and index == 0)
        is_slow = may_compile or phase in _SLOW_PHASES
        self.position = Position(step, phase, index, is_slow)
        self._entered_at = now

    def take_time(self) -> None:
        """Record that this rank may keep the other ranks waiting a long time at its position."""
        self.position = replace(self.position, is_slow=True)

    @property
    def seconds(self) -> dict[StepPhase, float]:
        """Seconds of the main thread in each phase since ``started``; their sum is the time since then.

        The first step, which compiles and starts the data workers, counts as loading until it is completed.
        """
        seconds = dict(self._completed_seconds)
        seconds[self._counted_phase] += time.monotonic() - self._entered_at
        return seconds

    def count_as(self, phase: StepPhase, seconds: float) -> None:
        """Move seconds from the current phase to another one."""
        self._completed_seconds[self._counted_phase] -= seconds
        self._completed_seconds[phase] += seconds

    @property
    def _counted_phase(self) -> StepPhase:
        is_first_step = self.position.step == self._first_step and self.position.phase < StepPhase.COMPLETING
        return StepPhase.LOADING if is_first_step else StepPhase(self.position.phase)

    def __str__(self) -> str:
        return str(self.position)
