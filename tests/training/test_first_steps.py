"""After ten steps, a run logs the speed it reached, the speed that was expected, and the time to its end."""

import re
import time
from pathlib import Path

import pytest

from fabric_train.training.expected_speed import ADAPTER
from fabric_train.training.first_steps import NUM_FIRST_STEPS, FirstSteps
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv

MEASURED = NUM_FIRST_STEPS - 1
LINE = re.compile(rf"speed of {MEASURED} steps: ([\d,]+) tokens/s; at this speed, the run takes another (\S+ \S+), ")


def steps_of(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> FirstSteps:
    """Return ten steps of 4,096 tokens and 2e14 FLOPs: the first takes 100 s, the others 2 s."""
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    first_steps = FirstSteps()
    for step in range(1, NUM_FIRST_STEPS + 1):
        clock[0] += 100.0 if step == 1 else 2.0
        assert first_steps.stepped(4096, 2e14) == (step == NUM_FIRST_STEPS)
        if step == 5:
            clock[0] += 1000.0  # an evaluation
            first_steps.restart()
    return first_steps


def test_the_first_step_and_evaluations_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    first_steps = steps_of([0.0], monkeypatch)
    line = first_steps.describe(num_steps_left=5400, expected=ADAPTER, peak_flops=None)
    # 4,096 tokens in 2 s; 5,400 steps of 2 s are 3 hours
    assert line == (
        "speed of 9 steps: 2,048 tokens/s; at this speed, the run takes another 3.0 h, without evaluations and saves"
    )


def test_the_expected_speed_follows_from_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    first_steps = steps_of([0.0], monkeypatch)
    line = first_steps.describe(num_steps_left=0, expected=ADAPTER, peak_flops=250e12)
    # at 250 TFLOP/s, 2e14 FLOPs take 0.8 s: 5,120 tokens/s at the peak, of which 43 % to 45 % are expected
    assert line == (
        "speed of 9 steps: 2,048 tokens/s, 40% of the peak; the expected speed is 2,202 to 2,304 tokens/s (43% to 45% "
        "of the peak, as measured on one H200 for LoRA and QLoRA, not compiled)"
    )


def test_a_run_and_its_resume_say_their_speed_after_ten_steps_of_their_own(
    forked_runs: ForkedRuns, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> None:
    run = tmp_path / "run"
    options = {"eval_step_interval": 99, "save_step_interval": 99}
    forked_runs.start(argv(tiny_model_dir, tiny_tokens_dir, run, max_step=NUM_FIRST_STEPS + 1, **options)).finish()
    first_lines = LINE.findall((run / "run.log").read_text())
    assert len(first_lines) == 1
    resumed = argv(tiny_model_dir, tiny_tokens_dir, run, max_step=2 * NUM_FIRST_STEPS + 2, resume="true", **options)
    forked_runs.start(resumed).finish()
    lines = LINE.findall((run / "run.log").read_text())
    assert len(lines) == 2
    # one step of less than a minute is left
    for speed, time_left in lines:
        assert float(speed.replace(",", "")) > 0
        assert re.fullmatch(r"0\.\d min", time_left)
