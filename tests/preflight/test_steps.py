"""The interval of saves: the formula's is the best of its neighbours, and a plan takes what the run has measured."""

import json
import math
import random
import re
import statistics
from pathlib import Path

import pytest

from benchmarks.scale.goodput import Attempt, draw_week, goodput_of
from fabric_train.preflight.save_interval import LLAMA_3_HOURS, Costs
from tests.preflight.test_memory import write_model, write_rows
from tests.support.short_runs import argv


@pytest.mark.parametrize("stall, hours", [(0.1, 3.09), (10, 3.09), (60, 1), (600, 24)])
def test_the_best_interval_loses_the_least(stall: float, hours: float) -> None:
    costs = Costs(stall, save=stall, restart=300, between_failures=3600 * hours)
    young = math.sqrt(2 * stall * 3600 * hours)
    assert costs.best_interval == pytest.approx(young, rel=0.35)
    best = max(costs.goodput(factor / 100 * young) for factor in range(5, 400))
    assert costs.goodput(costs.best_interval) == pytest.approx(best, abs=2e-4)
    for factor in (1 / 4, 1 / 2, 2, 4):
        assert costs.goodput(factor * costs.best_interval) < costs.goodput(costs.best_interval)


def test_goodput_is_first_orders_if_failures_are_rare() -> None:
    costs = Costs(stall=2, save=20, restart=100, between_failures=1e6)
    lost = 2 / 1000 + (1000 / 2 + 2 / 2 + 18 + 100) / 1e6  # stalls; half an interval, a save and a restart a failure
    assert costs.goodput(1000) == pytest.approx(1 - lost, abs=1e-5)
    assert Costs(2, 2, 100, 1).goodput(1e6) == 0


def test_no_interval_is_shorter_than_a_save_in_the_background() -> None:
    assert Costs(stall=0.001, save=500.001, restart=1, between_failures=3600).best_interval == pytest.approx(500)
    assert Costs(stall=100, save=100, restart=1, between_failures=40).best_interval == 40
    background = Costs(stall=1, save=101, restart=1, between_failures=3600)
    assert background.goodput(50) == pytest.approx(background.goodput(100) / 2)  # steps wait half of the time


def test_drawn_failures_lose_what_the_formula_says() -> None:
    costs = Costs(stall=10, save=60, restart=300, between_failures=3 * 3600)
    random_ = random.Random(7)
    weeks = [draw_week(random_, costs.between_failures) for _ in range(200)]
    for factor in (0.25, 1, 4):
        interval = factor * costs.best_interval
        drawn = statistics.fmean(goodput_of(week, costs, interval) for week in weeks)
        assert drawn == pytest.approx(costs.goodput(interval), abs=3e-3)


def test_goodput_of_two_attempts_is_the_one_worked_out_by_hand() -> None:
    """Two of three saves are complete in the first attempt; the second one begins with one step, which is no training.

    First: 20 s until a step is completed, then 9 s of training and 1 s of saving, twice (10 + 1), and 12 s in vain.
    """
    costs = Costs(stall=1, save=5, restart=20, between_failures=100)
    first = Attempt(20 + 10 + 11 + 12, 7)
    second = Attempt(20 + 10 + 11 + 4, 0)
    kept = (10 - 1 + 10) + (10 - 1 + 10 + 4)
    assert goodput_of([first, second], costs, 10, 1) == kept / (53 + 7 + 45)


def test_the_known_rate_is_one_interruption_of_llama_3_in_three_hours() -> None:
    assert pytest.approx(3.093, abs=1e-3) == LLAMA_3_HOURS / 16_384


def test_a_plan_takes_what_the_run_has_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fabric_train.__main__ import main

    run = tmp_path / "run"
    run.mkdir()
    begin = {"event": "start", "time": 0, "step": 0, "num_devices": 2, "seconds": {}}
    spent = {"starting": 90.0, "training": 199.0, "data": 0.0, "evaluation": 0.0, "ending": 0.0}
    save = {"event": "save", "time": 289, "step": 200, "num_devices": 2, "seconds": {**spent, "saving": 0.0}}
    saved = {"event": "saved", "time": 319, "step": 200, "num_devices": 2, "seconds": {**spent, "saving": 4.0}}
    (run / "times.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (begin, save, saved)))
    words = argv(write_model(tmp_path / "model"), write_rows(tmp_path / "tokens"), run, max_step=10_000)
    words += ["--number_epochs", "5000", "--save_step_interval", "1000"]
    main([*words, "--plan", "true", "--resume", "true", "--devices", "2", "--mtbf_hours", "2"])
    printed = capsys.readouterr().out
    assert "one in 60 min: 2 devices, each fails once in 2 h\n" in printed
    assert f"steps wait 4 s, complete after 30 s (median of 1 in {run}, on 2 devices)" in printed
    assert f"90 s (median of 1 start in {run}, not counting the wait for machines)" in printed
    costs = Costs(4, 30, 90, 3600)
    steps = round(costs.best_interval)  # a step took a second
    shown = re.search(r"--save_step_interval (\d+), .*: goodput ([\d.]+)%; a step takes 1 s", printed)
    assert shown
    assert int(shown[1]) == steps
    assert float(shown[2]) == pytest.approx(100 * costs.goodput(steps), abs=0.01)
    lost = 48 * (costs.goodput(steps) - costs.goodput(1000))
    assert f"goodput {costs.goodput(1000):.2%}; that costs {lost:,.2f} more device hours per day" in printed
