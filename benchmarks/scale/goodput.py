"""Goodput through failures: the interval of saves by formula beside others, and a run that is killed beside both.

The first part draws weeks of failures and adds up what they cost: for 10 to 10,000 devices, at the interval of
``Costs.best_interval`` and at a quarter, half, twice and four times of it. The second part trains a tiny model on two
ranks, with failures in seconds instead of hours, and compares the goodput of its report with the same sum.
"""

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import ROOT
from benchmarks.scale.series import Point, Series
from fabric_train.preflight.save_interval import LLAMA_3_HOURS, Costs
from fabric_train.training.run_times import RunTimes, read_times
from tests.support.forked_runs import ForkedRuns
from tests.support.kills import Training
from tests.support.plan_accuracy import write_rows
from tests.support.tiny_model import write_tiny_model

DEVICES = (10, 100, 1_000, 10_000)
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
STALL, SAVE, RESTART = 10.0, 60.0, 300.0  # seconds
WEEK, NUM_WEEKS, SEED = 7 * 24 * 3600.0, 400, 33
COMPRESSED, BETWEEN_KILLS = 60.0, 6.0  # seconds of a run, and the mean between its kills
LONGEST_BREAK = 1.0  # seconds between a kill and the next start
OPTIONS = {
    "accelerator": "cpu",
    "precision": "32-true",
    "micro_batch_size": 2,
    "total_batch_size": 8,
    "number_epochs": 100_000,
    "max_step": 1_000_000,
    "lr": 1e-3,
    "warmup_steps": 2,
    "eval_at_start": "false",
    "eval_step_interval": 1_000_000,
    "keep_checkpoints": 2,
    "async_save": "false",
    "num_workers": 0,
    "loggers": "csv",
    "report": "false",
}


@dataclass(frozen=True)
class Attempt:
    """The seconds from a start to its failure, and from there to the next start."""

    seconds: float
    break_seconds: float


def measure(work: Path) -> list[Series]:
    """Return the goodput of simulated weeks, and of runs that are killed."""
    return [*_simulated_weeks(), *_killed_runs(ROOT / work)]


def goodput_of(attempts: Sequence[Attempt], costs: Costs, interval: float, step: float = 0.0) -> float:
    """Return the share of the time of some attempts that trains steps which count; after the last one all count.

    ``interval`` is in seconds of training between two saves. A start takes ``costs.restart``; the first ``step`` after
    it belongs to it, as in times.jsonl.
    """
    kept, cycle = 0.0, interval + costs.stall
    for attempt in attempts[:-1]:
        num_saves = (attempt.seconds - costs.restart - costs.background + step) // cycle
        kept += max(num_saves * interval - step, 0.0)
    running = max(attempts[-1].seconds - costs.restart + step, step)
    kept += running // cycle * interval + min(running % cycle, interval) - step
    return kept / sum(attempt.seconds + attempt.break_seconds for attempt in attempts)


def draw_week(random_: random.Random, between_failures: float) -> list[Attempt]:
    """Return the attempts of a week in which failures come at a constant rate."""
    attempts, left = list[Attempt](), WEEK
    while left > 0:
        seconds = min(random_.expovariate(1 / between_failures), left)
        attempts.append(Attempt(seconds, 0.0))
        left -= seconds
    return attempts


def _simulated_weeks() -> Iterator[Series]:
    simulated = (
        f"{NUM_WEEKS} weeks for each size, drawn from seed {SEED}: failures at the rate of Llama 3, a save that stops "
        f"steps for {STALL:g} s and is complete after {SAVE:g} s, a restart of {RESTART:g} s"
    )
    costs = {
        devices: Costs(STALL, SAVE, RESTART, between_failures=3600 * LLAMA_3_HOURS / devices) for devices in DEVICES
    }
    weeks = {
        devices: [draw_week(random_, costs[devices].between_failures) for _ in range(NUM_WEEKS)]
        for devices, random_ in ((devices, random.Random(f"{SEED} {devices}")) for devices in DEVICES)
    }
    real = "the formula and the rate, which --plan true uses"
    for factor in FACTORS:
        name = "the plan's interval" if factor == 1 else f"{factor:g} × the plan's interval"
        means = [
            statistics.fmean(
                goodput_of(week, costs[devices], factor * costs[devices].best_interval) for week in weeks[devices]
            )
            for devices in DEVICES
        ]
        yield _series(f"goodput at {name}", "devices", DEVICES, means, simulated, real)
    expected = [costs[devices].goodput(costs[devices].best_interval) for devices in DEVICES]
    yield _series("goodput that the plan expects", "devices", DEVICES, expected, "nothing: the formula", real)


def _series(
    quantity: str, sizes_of: str, sizes: Sequence[int], shares: Sequence[float], simulated: str, real: str
) -> Series:
    points = tuple(Point(size, round(100 * share, 3)) for size, share in zip(sizes, shares, strict=True))
    return Series("goodput", quantity, "% of the time", sizes_of, points, simulated, real)


def _killed_runs(folder: Path) -> list[Series]:
    """Train at the plan's interval and at four times of it, with the same kills; the first run measures the costs."""
    model, tokens = folder / "model", folder / "tokens"
    write_tiny_model(model, ["a few words for a tokenizer of a tiny model"] * 4)
    write_rows(tokens, length=64)
    random_ = random.Random(SEED)
    attempts = _draw_attempts(random_)
    runs = ForkedRuns(folder / "output", draws=False)
    try:
        measured = _train(runs, folder, model, tokens, 20, [Attempt(10.0, 0.0)])
        costs = _costs_of(measured)
        assert measured.step is not None
        best = max(round(costs.best_interval / measured.step), 1)
        intervals = (best, 4 * best)
        found = [_train(runs, folder, model, tokens, steps, attempts) for steps in intervals]
    finally:
        runs.close()
    replayed = [
        goodput_of(attempts, _costs_of(times), steps * times.step, times.step)
        for steps, times in zip(intervals, found, strict=True)
        if times.step is not None
    ]
    kills = f"{len(attempts) - 1} kills in {COMPRESSED:g} s, drawn from seed {SEED}"
    sizes_of = "steps between two saves"
    return [
        _series(
            "goodput of a killed run, its report's",
            sizes_of,
            intervals,
            [times.goodput for times in found],
            f"the clock: {kills}, of a tiny model",
            "the program on two ranks, SIGKILL, --resume true, times.jsonl",
        ),
        _series(
            "goodput of a killed run, simulated",
            sizes_of,
            intervals,
            replayed,
            f"all: the same {kills}, with the means of stall, save, start and step of the run",
            "nothing",
        ),
    ]


def _draw_attempts(random_: random.Random) -> list[Attempt]:
    attempts, left = list[Attempt](), COMPRESSED
    while left > 0:
        seconds = min(random_.expovariate(1 / BETWEEN_KILLS), left)
        left -= seconds
        attempts.append(Attempt(seconds, random_.uniform(0, LONGEST_BREAK) if left > 0 else 0.0))
    return attempts


def _train(
    runs: ForkedRuns, folder: Path, model: Path, tokens: Path, steps: int, attempts: Sequence[Attempt]
) -> RunTimes:
    """Train on two ranks through some kills; SIGTERM, which saves, ends the last attempt."""
    run = folder / f"run-{steps}-{len(attempts)}"
    given = {**OPTIONS, "model_name": model, "train_data_dir": tokens, "save_step_interval": steps}
    words = Training(given, 2).line(run)
    for number, attempt in enumerate(attempts, 1):
        process = runs.start(words, 2)
        process.wait_until(process.has_ended, attempt.seconds)
        assert not process.has_ended(), process.report()
        process.kill(*(() if number < len(attempts) else (15,)))
        process.wait()
        time.sleep(attempt.break_seconds)
    times = read_times(run)
    assert times is not None
    return times


def _costs_of(times: RunTimes) -> Costs:
    stall, save, start = map(statistics.fmean, (times.stalls, times.saves, times.starts))
    return Costs(stall, save, start, BETWEEN_KILLS)
