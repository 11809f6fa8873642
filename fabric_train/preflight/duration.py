"""Estimate how long the steps of a run take, from their FLOPs and the peak speed of GPUs: a line of ``--plan``."""

from collections.abc import Sequence

import torch

from fabric_train.model.flops import peak_flops

LOWEST_UTILIZATION = 0.40
HIGHEST_UTILIZATION = 0.61
"""MFU on one H200, from LoRA with DPO to the compiled 8B (benchmarks/results/gpu-*-nvidia-h200.json)."""
USUAL_GPUS = ("A100", "H100", "B200")
"""The GPUs that a plan for other machines compares. An H200 has the peak of an H100."""


def describe_duration(flops: float, device_names: Sequence[str], dtype: torch.dtype) -> str:
    """Return how long a device computes, by the kind of device.

    Args:
        flops: of all steps, on each device.
        device_names: as ``torch.cuda.get_device_name`` gives them.
        dtype: of the matrix products.
    """
    durations: list[str] = []
    for name in device_names:
        peak = peak_flops(name, dtype)
        if peak is None:
            continue
        shortest = _show_hours(flops / (peak * HIGHEST_UTILIZATION))
        longest = _show_hours(flops / (peak * LOWEST_UTILIZATION))
        durations.append(f"{shortest} to {longest} on {name}")
    if not durations:
        return f"not known: {', '.join(device_names)} has no known peak speed; the run shows the time left"
    return (
        f"{', '.join(durations)}: {LOWEST_UTILIZATION:.0%} to {HIGHEST_UTILIZATION:.0%} of the peak, as measured on "
        "one H200; without evaluation, saves and waiting for other devices"
    )


def _show_hours(seconds: float) -> str:
    hours = seconds / 3600
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    if hours >= 1:
        return f"{hours:,.1f} h"
    return f"{seconds / 60:,.1f} min"
