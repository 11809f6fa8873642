"""Measure how long a rank works in each step without waiting for the other ranks."""

import time
from typing import Any

import torch

_MARKS_PER_STEP = 4  # start and end of the work before the first exchange, and start and end of the passes


class OwnTime:
    """Measures the seconds of a step that this rank spends without waiting for the others.

    Ranks wait for one another, so a step takes the same time on all of them. A rank's own time has two spans:

    - from the exchange at the end of a step to the first collective of the next one: optimizer, logging, data;
    - from that collective to the last backward pass, in which the gradients are averaged.

    With sharded weights, the ranks also wait for one another in each layer, so own times differ by less than the ranks
    do. On a GPU, the spans are measured by events, which are read after the device has passed them.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        """Own time of the previous step; 0 until one is complete."""
        self._device = device
        self._marks = list[Any]()  # torch.cuda.Event on a GPU, and otherwise time.perf_counter()

    def mark(self) -> None:
        """Start or end a span of own time."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def restart(self) -> None:
        """End a step and start the next one; call it after the host has waited for the device."""
        if len(self._marks) == _MARKS_PER_STEP:  # the first step has no start
            self.seconds = self._span(0) + self._span(2)
        self._marks.clear()
        self.mark()

    def _span(self, index: int) -> float:
        """Return the seconds between the marks ``index`` and ``index + 1``."""
        start = self._marks[index]
        end = self._marks[index + 1]
        if self._device.type == "cuda":
            return start.elapsed_time(end) / 1e3  # milliseconds
        return end - start
