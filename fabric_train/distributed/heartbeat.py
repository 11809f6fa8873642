"""Track where a rank's main thread is, as positions that every rank passes in the same order."""

import math
import time
from dataclasses import dataclass, field, replace
from enum import IntEnum

from fabric_train.distributed.stop_border import StopBorder


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

    Attributes:
        step: the optimizer step, 0 before the first.
        phase: of the step.
        index: of the micro-batch or validation batch in the phase.
        is_slow: a rank may legitimately keep the others waiting here for long.
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

    def __init__(self) -> None:
        self.position = Position()
        self.min_pass_seconds = 0.0
        """Duration of the fastest forward and backward pass so far; 0 before the first."""
        self.stop_border = StopBorder()
        self._since, self._first_step = time.monotonic(), 0

    def enter(self, phase: StepPhase, index: int = 0, step: int | None = None) -> None:
        """Record that the main thread enters a phase. All ranks must record the same positions.

        Args:
            phase: of the step.
            index: of the micro-batch or validation batch.
            step: None for the current one.
        """
        step = self.position.step if step is None else step
        self._first_step = self._first_step or step
        may_compile = step == self._first_step or (phase in _SLOW_AT_FIRST and index == 0)
        now = time.monotonic()
        if self.position.phase == StepPhase.COMPUTING:
            self.min_pass_seconds = min(self.min_pass_seconds or math.inf, now - self._since)
        is_slow = may_compile or phase in _SLOW_PHASES
        self.position, self._since = Position(step, phase, index, is_slow), now

    def take_time(self) -> None:
        """Record that this rank may keep the others waiting for long at its position."""
        self.position = replace(self.position, is_slow=True)

    def __str__(self) -> str:
        return str(self.position)
