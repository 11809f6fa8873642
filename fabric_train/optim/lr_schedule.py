"""The learning rate as a pure function of the optimizer step."""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arguments import TrainingArguments

_STEP_DECAYS = 3
"""The ``step`` schedule falls to ``min_lr`` in this many equal steps, of the logarithm if ``min_lr`` is above 0."""


def learning_rate(step: int, num_steps: int, arguments: "TrainingArguments") -> float:
    """Return the learning rate of optimizer step ``step``, counted from 1, of a run of ``num_steps``.

    It rises linearly over the warm-up steps and reaches ``lr`` at the last of them, or at step 1 without warm-up. Then
    it decays by the schedule, and is exactly ``min_lr`` at the last step. The cosine schedule follows arXiv:1608.03983,
    without restarts.
    """
    warmup, peak, end = arguments.warmup_steps, arguments.lr, arguments.min_lr
    if step <= warmup:
        return peak * (step / warmup)  # in this order, exactly lr at the last warm-up step
    if not arguments.lr_decay or arguments.lr_schedule == "constant":
        return peak
    first = max(warmup, 1)  # the step at the peak
    if num_steps <= first:  # no room to decay in
        return peak
    if step >= num_steps:
        return end
    progress = (step - first) / (num_steps - first)
    if arguments.lr_schedule == "cosine":
        return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * progress))
    if arguments.lr_schedule == "exponential":
        return peak * (end / peak) ** progress
    if arguments.lr_schedule == "step":
        progress = math.floor(progress * (_STEP_DECAYS + 1)) / _STEP_DECAYS
        return peak * (end / peak) ** progress if end > 0 else peak * (1 - progress)
    return peak + (end - peak) * progress


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
