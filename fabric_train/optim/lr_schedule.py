"""The learning rate as a pure function of the optimizer step."""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arguments import TrainingArguments

SCHEDULES_VERSION = "2"
"""Of the schedules below. Those of version 1 reached ``min_lr`` at the last step, which changed nothing if it was 0."""

_STEP_DECAYS = 3
"""The ``step`` schedule falls to ``min_lr`` in this many equal steps, of the logarithm if ``min_lr`` is above 0."""


def learning_rate(step: int, num_steps: int, arguments: "TrainingArguments") -> float:
    """Return the learning rate of optimizer step ``step``, counted from 1, of a run of ``num_steps``.

    It rises linearly over the warm-up steps and reaches ``lr`` at the last of them, or at step 1 without warm-up. Then
    it decays by the schedule towards ``min_lr``, which it reaches one step after the last: so every step changes the
    weights, also if ``min_lr`` is 0. The cosine schedule follows arXiv:1608.03983, without restarts.
    """
    warmup, peak, end = arguments.warmup_steps, arguments.lr, arguments.min_lr
    if step <= warmup:
        return peak * (step / warmup)  # in this order, exactly lr at the last warm-up step
    if not arguments.lr_decay or arguments.lr_schedule == "constant":
        return peak
    if step > num_steps:
        return end
    first = max(warmup, 1)  # the step at the peak
    done, total = step - first, num_steps + 1 - first
    progress = done / total
    if arguments.lr_schedule == "cosine":
        return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * progress))
    if arguments.lr_schedule == "exponential":
        return peak * (end / peak) ** progress
    if arguments.lr_schedule == "step":
        progress = done * _STEP_DECAYS // total / _STEP_DECAYS
        return peak * (end / peak) ** progress if end > 0 else peak * (1 - progress)
    return peak + (end - peak) * progress


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
