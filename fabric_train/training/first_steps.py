"""Compare the speed of a run's first steps with the expected one, in one line of the log."""

import time

from fabric_train.training.expected_speed import PeakShare, show_duration

NUM_FIRST_STEPS = 10
"""The number of steps after which the line is logged; a resumed run counts its own steps."""


class FirstSteps:
    """Measures the speed of the first steps after a start, without the very first.

    The very first step compiles layers, chooses kernels and allocates memory. Evaluations and saves are excluded: the
    training loop restarts the clock after them. The clock is read where the host already has the results of a step.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_tokens = 0
        self._flops = 0.0
        self._seconds = 0.0
        self.restart()

    def restart(self) -> None:
        """Start the clock of the next step."""
        self._started = time.perf_counter()

    def stepped(self, num_tokens: int, flops: float) -> bool:
        """Count a step, and return whether it was the last one to measure."""
        now = time.perf_counter()
        self._num_steps += 1
        if 1 < self._num_steps <= NUM_FIRST_STEPS:
            self._num_tokens += num_tokens
            self._flops += flops
            self._seconds += now - self._started
        self._started = now
        return self._num_steps == NUM_FIRST_STEPS

    def describe(self, num_steps_left: int, expected: PeakShare, peak_flops: float | None) -> str:
        """Return the speed that was reached and expected, and the time for the steps that are left.

        Args:
            num_steps_left: the number of steps until the end of the run.
            expected: the share of the peak that was measured for such steps.
            peak_flops: the peak FLOP/s of all devices; None if unknown, and nothing is expected then.
        """
        line = f"speed of {NUM_FIRST_STEPS - 1} steps: {self._num_tokens / self._seconds:,.0f} tokens/s"
        if peak_flops is not None and self._flops:
            tokens_per_second_at_peak = self._num_tokens * peak_flops / self._flops
            lowest = tokens_per_second_at_peak * expected.lowest
            highest = tokens_per_second_at_peak * expected.highest
            share = self._flops / self._seconds / peak_flops
            expected_speed = f"{lowest:,.0f} to {highest:,.0f} tokens/s ({expected})"
            line += f", {share:.0%} of the peak; the expected speed is {expected_speed}"
        if num_steps_left:
            seconds_per_step = self._seconds / (NUM_FIRST_STEPS - 1)
            time_left = show_duration(num_steps_left * seconds_per_step)
            line += f"; at this speed, the run takes another {time_left}, without evaluations and saves"
        return line
