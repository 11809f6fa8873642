"""Time the steps of a peer of the training benchmark; print speeds, losses and memory as a line of JSON."""

import json
import resource
import sys
import time
from typing import Any

import torch


class StepClock:
    """A clock for optimizer steps; a step lasts from the end of the one before to its own end."""

    def __init__(self) -> None:
        self._started = 0.0
        self._num_tokens = 0
        self._loss = torch.zeros(())
        self._speeds: list[float] = []
        self._losses: list[float] = []

    def start(self, optimizer: torch.optim.Optimizer) -> None:
        """Start to time this optimizer's steps; the first one starts now."""
        optimizer.register_step_post_hook(self._end_step)
        self._started = time.perf_counter()

    def add_micro_batch(self, loss: torch.Tensor, num_tokens: int) -> None:
        """Add a micro-batch: its share of the step's loss (0-dim tensor) and its number of tokens without padding."""
        self._loss = self._loss + loss.detach()
        self._num_tokens += num_tokens

    def print_result(self) -> None:
        """Print the measurements as a line of JSON."""
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        result: dict[str, Any] = {"tokens_per_second": self._speeds, "losses": self._losses, "peak_rss_bytes": peak}
        if torch.cuda.is_available():
            result["peak_device_bytes"] = torch.cuda.max_memory_allocated()
        print(json.dumps(result))

    def _end_step(self, *_: Any) -> None:
        now = time.perf_counter()
        self._speeds.append(self._num_tokens / (now - self._started))
        self._losses.append(self._loss.item())
        self._started = now
        self._num_tokens = 0
        self._loss = torch.zeros(())
