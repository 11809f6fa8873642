"""What a peer of the training benchmark tells of its steps: speeds, losses and memory, as a line of JSON."""

import json
import resource
import sys
import time
from typing import Any

import torch


class StepClock:
    """Times optimizer steps from the end of one to the end of the next, whatever lies between."""

    def __init__(self) -> None:
        self._started = 0.0
        self._num_tokens, self._loss = 0, torch.zeros(())
        self._speeds: list[float] = []
        self._losses: list[float] = []

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Time this optimizer's steps, the first one from now on."""
        optimizer.register_step_post_hook(self._stepped)
        self._started = time.perf_counter()

    def micro_batch(self, loss: torch.Tensor, num_tokens: int) -> None:
        """Add a micro-batch's share of the step's loss, a 0-dim tensor, and its tokens that are not padding."""
        self._loss = self._loss + loss.detach()
        self._num_tokens += num_tokens

    def tell(self) -> None:
        """Print what was measured."""
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        told: dict[str, Any] = {"tokens_per_second": self._speeds, "losses": self._losses, "peak_rss_bytes": peak}
        if torch.cuda.is_available():
            told["peak_device_bytes"] = torch.cuda.max_memory_allocated()
        print(json.dumps(told))

    def _stepped(self, *_: Any) -> None:
        now = time.perf_counter()
        self._speeds.append(self._num_tokens / (now - self._started))
        self._losses.append(self._loss.item())
        self._started, self._num_tokens, self._loss = now, 0, torch.zeros(())
