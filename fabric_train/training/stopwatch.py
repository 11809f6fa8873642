"""Measure the speed and the memory of training."""

import resource
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from fabric_train.data.step_sampler import RolloutSeconds


class Stopwatch:
    """Measures the wall-clock time between two readings, and the share spent waiting for data.

    Evaluations and saves are excluded: the training loop restarts the stopwatch after them.
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        """``peak_flops`` is the peak FLOP/s of all devices, or None if unknown."""
        self._peak_flops = peak_flops
        self.restart()

    def restart(self) -> None:
        self._started = time.perf_counter()
        self._data_seconds = 0.0
        self._rollout_seconds: list[RolloutSeconds] = []
        self._num_steps = 0
        self._num_tokens = 0
        self._num_samples = 0
        self._flops = 0.0
        self._own_seconds: list[Sequence[float]] = []  # of each rank, for each step

    def waited(self, seconds: float) -> None:
        """Count time that was spent waiting for data."""
        self._data_seconds += seconds

    def rolled_out(self, seconds: RolloutSeconds) -> None:
        """Count the time in which the completions of a step were made; ``waited`` does not have it."""
        self._rollout_seconds.append(seconds)

    def stepped(self, num_tokens: int, num_samples: int, flops: float, own_seconds: Sequence[float] = ()) -> None:
        """Count a step; ``own_seconds`` is the own time of each rank."""
        self._num_steps += 1
        self._num_tokens += num_tokens
        self._num_samples += num_samples
        self._flops += flops
        self._own_seconds.append(own_seconds)

    def read(self) -> dict[str, Any]:
        """Return the time of a step, the share waited for data, tokens and samples per second, then restart.

        If the peak is known, the result also has the MFU; with several ranks, the slowest one and its lag; and if
        completions were made, the seconds of a step for each part of that.
        """
        elapsed = time.perf_counter() - self._started
        reading = {
            "step_time": elapsed / self._num_steps,
            "data_wait": self._data_seconds / elapsed,
            "tokens_per_second": self._num_tokens / elapsed,
            "samples_per_second": self._num_samples / elapsed,
        }
        if self._peak_flops:
            reading["mfu"] = self._flops / elapsed / self._peak_flops
        if self._rollout_seconds:
            reading["weights_time"] = sum(seconds.weights for seconds in self._rollout_seconds) / self._num_steps
            reading["sampling_time"] = sum(seconds.sampling for seconds in self._rollout_seconds) / self._num_steps
            reading["rewards_time"] = sum(seconds.rewards for seconds in self._rollout_seconds) / self._num_steps
        mean_seconds = [sum(seconds) / self._num_steps for seconds in zip(*self._own_seconds, strict=True)]  # by rank
        if len(mean_seconds) > 1:
            slowest = max(mean_seconds)
            reading["slowest_rank"] = mean_seconds.index(slowest)
            reading["rank_lag"] = slowest - statistics.median_low(mean_seconds)
        self.restart()
        return reading


def peak_memory_gb(device: torch.device) -> float:
    """Return the peak memory so far, in 1e9 bytes: allocated on the GPU, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss, see getrusage(2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
