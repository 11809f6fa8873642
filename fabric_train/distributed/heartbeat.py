"""Where a rank's main thread is: marks that every rank passes at the same points, so that they can be compared."""

import math
import time
from dataclasses import dataclass, field
from enum import IntEnum


class Phase(IntEnum):
    """What the main thread does, in the order of a step. Every rank passes through the same phases of a step."""

    LOADING = 0
    DATA = 1
    COMPUTING = 2
    OPTIMIZER = 3
    BORDER = 4
    COMPLETING = 5
    VALIDATION = 6
    SAVING = 7
    ENDING = 8


_TEXTS = {
    Phase.LOADING: "loading",
    Phase.DATA: "waiting for data",
    Phase.COMPUTING: "forward and backward pass {}",
    Phase.OPTIMIZER: "optimizer step",
    Phase.BORDER: "step border",
    Phase.COMPLETING: "completing a checkpoint",
    Phase.VALIDATION: "validation batch {}",
    Phase.SAVING: "saving",
    Phase.ENDING: "ending",
}
_LASTING = (Phase.LOADING, Phase.COMPLETING, Phase.SAVING, Phase.ENDING)


@dataclass(frozen=True, order=True)
class Mark:
    """A point that every rank passes. ``index`` counts micro-batches, batches or files of the phase.

    ``lasts``: one rank may lawfully keep the others waiting for long here.
    """

    step: int = 0
    phase: int = Phase.LOADING
    index: int = 0
    lasts: bool = field(default=True, compare=False)

    def __str__(self) -> str:
        text = _TEXTS[Phase(self.phase)].format(self.index)
        return f"step {self.step}, {text}" if self.step else text


class Progress:
    """Where this rank's main thread is."""

    def __init__(self) -> None:
        self.mark = Mark()
        self.quickest = 0.0
        """Seconds that the quickest forward and backward pass has taken; 0 before the first."""
        self._since, self._first_step = time.monotonic(), 0

    def at(self, phase: Phase, index: int = 0, step: int | None = None) -> None:
        """Mark that the main thread has come to a phase; ``step``, where it is left out, is the one before.

        All ranks do so at the same points.
        """
        step = self.mark.step if step is None else step
        self._first_step = self._first_step or step
        begins = step == self._first_step or (phase == Phase.VALIDATION and index == 0)  # it may compile
        now = time.monotonic()
        if self.mark.phase == Phase.COMPUTING:
            self.quickest = min(self.quickest or math.inf, now - self._since)
        self.mark, self._since = Mark(step, phase, index, lasts=begins or phase in _LASTING), now
