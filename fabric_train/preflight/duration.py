"""Estimate how long the steps of a run take, from their FLOPs and the peak speed of GPUs: a line of ``--plan``."""

from collections.abc import Sequence

import torch

from fabric_train.model.flops import memory_bandwidth, peak_flops
from fabric_train.preflight.memory_sampling import SamplingWork
from fabric_train.training.expected_speed import PeakShare, show_duration

USUAL_GPUS = ("A100", "H100", "B200")
"""The GPUs that a plan for other machines compares. An H200 has the peak of an H100."""


def describe_least_sampling(work: SamplingWork, num_steps: int, device_names: Sequence[str], dtype: torch.dtype) -> str:
    """Return the least time in which devices could sample the completions of all steps, by the kind of device.

    Args:
        work: of a step, on each device.
        num_steps: of the run.
        device_names: as ``torch.cuda.get_device_name`` gives them.
        dtype: of the matrix products.
    """
    durations: list[str] = []
    for name in device_names:
        peak = peak_flops(name, dtype)
        bandwidth = memory_bandwidth(name)
        if peak is None or bandwidth is None:
            continue
        seconds = num_steps * work.least_seconds(peak, bandwidth)
        durations.append(f"{show_duration(seconds)} on {name}")
    if not durations:
        return "time not known"
    return (
        f"at least {', '.join(durations)}, in addition to the time above: a lower bound by the peak and the memory's "
        "bandwidth, for prompts of mean length and completions of full length"
    )


def describe_duration(
    flops: float, num_tokens: int, device_names: Sequence[str], dtype: torch.dtype, share: PeakShare
) -> str:
    """Return how long a device computes, and the tokens per second of all devices, by the kind of device.

    Args:
        flops: of all steps, on each device.
        num_tokens: of all steps, on all devices.
        device_names: as ``torch.cuda.get_device_name`` gives them.
        dtype: of the matrix products.
        share: of the peak, as measured for such steps.
    """
    durations: list[str] = []
    for name in device_names:
        peak = peak_flops(name, dtype)
        if peak is None:
            continue
        shortest = flops / (peak * share.highest)
        longest = flops / (peak * share.lowest)
        speeds = f"{num_tokens / longest:,.0f} to {num_tokens / shortest:,.0f} tokens/s"
        durations.append(f"{show_duration(shortest)} to {show_duration(longest)} on {name} ({speeds})")
    if not durations:
        return f"not known: {', '.join(device_names)} has no known peak speed; the run shows the time left"
    return f"{', '.join(durations)}: {share}; without evaluation, saves and waiting for other devices"
