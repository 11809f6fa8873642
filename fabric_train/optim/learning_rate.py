"""Compute the learning rate of each step, a pure function of the step and the arguments."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fabric_train.arguments import TrainingArguments

SCHEDULES_VERSION = "2"
"""The version of these schedules. In version 1, the last step had ``min_lr``, so it changed nothing if that was 0."""

_STEP_DECAYS = 3
"""The number of equal steps in which the ``step`` schedule falls to ``min_lr``; of the logarithm if that is above 0."""

RATE_ARGUMENTS = ("lr", "min_lr", "lr_decay", "lr_schedule", "warmup_steps", "decay_steps", "decay_share", "decay_form")
"""The arguments that decide the learning rate."""


def learning_rate(step: int, num_steps: int, arguments: "TrainingArguments") -> float:
    """Return the learning rate of optimizer step ``step``, counted from 1, of a run of ``num_steps``.

    It rises linearly over the warm-up steps and reaches ``lr`` at the last of them, or at step 1 without warm-up. Then
    it decays by the schedule towards ``min_lr``, which it reaches one step after the last: so every step changes the
    weights, also if ``min_lr`` is 0. The cosine schedule follows arXiv:1608.03983, without restarts.

    The ``wsd`` schedule (warm-up, stable, decay) follows arXiv:2404.06395 (MiniCPM), and its form ``1-sqrt``
    arXiv:2405.18392. It stays at ``lr`` up to step N - D, and its decay ends at step N + 1, for N steps with D
    steps of decay. In the formula of that paper, these are N + 1 steps with a decay of D + 1.
    """
    warmup_steps = arguments.warmup_steps
    peak = arguments.lr
    end = arguments.min_lr

    # warm-up, and rates that stay
    if step <= warmup_steps:
        return peak * (step / warmup_steps)  # in this order, exactly lr at the last warm-up step
    if not arguments.lr_decay or arguments.lr_schedule == "constant":
        return peak
    if step > num_steps:
        return end

    # the form of the decay, and the last step at the peak
    form: str = arguments.lr_schedule
    last_peak_step = max(warmup_steps, 1)
    if form == "wsd":
        form = decay_form(arguments)
        last_peak_step = num_steps - num_decay_steps(num_steps, arguments)
        if step <= last_peak_step:
            return peak

    decayed_steps = step - last_peak_step
    total_steps = num_steps + 1 - last_peak_step
    progress = decayed_steps / total_steps
    if form == "cosine":
        return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * progress))
    if form == "1-sqrt":
        return end + (peak - end) * (1 - math.sqrt(progress))
    if form == "exponential":
        return peak * (end / peak) ** progress
    if form == "step":
        progress = decayed_steps * _STEP_DECAYS // total_steps / _STEP_DECAYS
        if end > 0:
            return peak * (end / peak) ** progress
        return peak * (1 - progress)
    return peak + (end - peak) * progress  # linear


def num_decay_steps(num_steps: int, arguments: "TrainingArguments") -> int:
    """Return the number of a run's last steps in which the ``wsd`` schedule is below ``lr``."""
    if arguments.decay_steps is not None:
        return arguments.decay_steps
    assert arguments.decay_share is not None  # one of them is required
    return max(1, round(arguments.decay_share * num_steps))


def decay_form(arguments: "TrainingArguments") -> str:
    """Return how the rate of the ``wsd`` schedule falls; arXiv:2405.18392 found 1-sqrt to be the best form."""
    return arguments.decay_form or "1-sqrt"


@dataclass(frozen=True)
class Schedule:
    """The learning rates of a run, or of a phase of it."""

    num_steps: int
    """The length of the schedule in steps; afterwards the rate stays the same."""
    arguments: "TrainingArguments"
    after_step: int = 0
    """The step before the first one of the schedule."""
    last_step: int | None = None
    """The last step of the phase; None for the schedule of the run."""

    def rate(self, step: int) -> float:
        """Return the learning rate of the run's optimizer step ``step``."""
        step_of_schedule = min(step - self.after_step, self.num_steps)
        return learning_rate(step_of_schedule, self.num_steps, self.arguments)

    def covers(self, step: int) -> bool:
        """Return whether a step is in the phase."""
        return self.last_step is not None and self.after_step < step <= self.last_step

    @property
    def decided_by(self) -> dict[str, Any]:
        """The arguments that decide the rates, by name."""
        return {name: getattr(self.arguments, name) for name in RATE_ARGUMENTS}


@dataclass(frozen=True)
class Schedules:
    """The schedule of a run, and the schedules of phases, which replace it in their steps."""

    run_schedule: Schedule
    phase_schedules: tuple[Schedule, ...] = ()

    def with_length(self, num_steps: int) -> "Schedules":
        """Return the schedules with another length of the run's own."""
        return replace(self, run_schedule=replace(self.run_schedule, num_steps=num_steps))

    def with_schedule(self, schedule: Schedule) -> "Schedules":
        """Return the schedules with ``schedule`` in place of the one for the same steps."""
        if schedule.last_step is None:  # the run's own
            return replace(self, run_schedule=schedule)
        phase_schedules = []
        for phase_schedule in self.phase_schedules:
            is_replaced = phase_schedule.after_step == schedule.after_step
            phase_schedules.append(schedule if is_replaced else phase_schedule)
        return replace(self, phase_schedules=tuple(phase_schedules))

    def at(self, step: int) -> Schedule:
        """Return the schedule of a step."""
        for schedule in self.phase_schedules:
            if schedule.covers(step):
                return schedule
        return self.run_schedule

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.at(step).rate(step)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group, multiplied by the ``lr_ratio`` of the group."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_ratio", 1.0)
