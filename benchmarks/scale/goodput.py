"""Goodput through failures: the interval of saves by formula beside others, and a run that is killed beside both.

The first part draws weeks of failures and adds up what they cost: for 10 to 10,000 devices, at the interval of
``Costs.best_interval`` and at a quarter, half, twice and four times of it. The second part trains a tiny model on two
ranks, with failures after some dozens of steps, and compares the goodput of its report with the same sum.
"""

import random
import signal
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.measure import ROOT
from benchmarks.scale.series import Point, Series
from fabric_train.cli.errors import STOPPED
from fabric_train.preflight.save_interval import LLAMA_3_HOURS, Costs
from fabric_train.training.run_times import RunTimes, read_times
from tests.support.forked_runs import ForkedRuns, start_forked_runs
from tests.support.kills import Training
from tests.support.random_inputs import write_rows
from tests.support.short_runs import TERMINATE, at_point
from tests.support.tiny_model import write_tiny_model

DEVICES = (10, 100, 1_000, 10_000)
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
# seconds
STALL = 10.0
SAVE = 60.0
RESTART = 300.0
WEEK = 7 * 24 * 3600.0
NUM_WEEKS = 400
SEED = 33
# steps that a run takes, also in vain, and the mean between two kills
NUM_STEPS = 240
BETWEEN_KILLS = 30
# of the run that measures what saves and starts cost
FIRST_STEPS = 60
FIRST_INTERVAL = 10
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
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
    kept = 0.0
    cycle = interval + costs.stall
    for attempt in attempts[:-1]:
        num_saves = (attempt.seconds - costs.restart - costs.background + step) // cycle
        kept += max(num_saves * interval - step, 0.0)
    running = max(attempts[-1].seconds - costs.restart + step, step)
    kept += running // cycle * interval + min(running % cycle, interval) - step
    return kept / sum(attempt.seconds + attempt.break_seconds for attempt in attempts)


def draw_week(random_: random.Random, between_failures: float) -> list[Attempt]:
    """Return the attempts of a week in which failures come at a constant rate."""
    attempts: list[Attempt] = []
    left = WEEK
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
    """Train at the plan's interval and at four times of it, with the same kills; a run before measures the costs."""
    model = folder / "model"
    tokens = folder / "tokens"
    write_tiny_model(model, ["a few words for a tokenizer of a tiny model"] * 4)
    write_rows(tokens, num_rows=8 * NUM_STEPS, length=64)  # one epoch, because its end is saved too
    lengths = _draw_lengths(random.Random(SEED))
    runs = start_forked_runs(folder / "output", draws=False)
    try:
        given = {**OPTIONS, "model_name": model, "train_data_dir": tokens}
        costs, step, _ = _costs_of(_train(runs, folder, given, FIRST_INTERVAL, [FIRST_STEPS]))
        best = max(round(costs.best_interval / step), 1)
        intervals = (best, 4 * best)
        found = [_train(runs, folder, given, interval, lengths) for interval in intervals]
    finally:
        runs.close()
    replayed = [_replay(times, interval, lengths) for interval, times in zip(intervals, found, strict=True)]
    kills = f"{len(lengths) - 1} kills in {sum(lengths)} steps, drawn from seed {SEED}"
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
            f"all: the same {kills}, with the run's mean stall, start, step and time between two starts",
            "nothing",
        ),
    ]


def _draw_lengths(random_: random.Random) -> list[int]:
    """Return the number of steps that each attempt completes before its kill; the last one is stopped by a signal."""
    lengths: list[int] = []
    while (left := NUM_STEPS - sum(lengths)) > 0:
        lengths.append(min(1 + int(random_.expovariate(1 / BETWEEN_KILLS)), left))
    return lengths


def _train(runs: ForkedRuns, folder: Path, given: dict[str, object], interval: int, lengths: Sequence[int]) -> RunTimes:
    """Train on two ranks through some kills; SIGTERM, which saves, ends the last attempt."""
    run = folder / f"run-{interval}-{len(lengths)}"
    saved = 0
    words = Training({**given, "save_step_interval": interval}, 2).line(run)
    for number, length in enumerate(lengths, 1):
        is_last = number == len(lengths)
        action, ranks = (TERMINATE, (0,)) if is_last else (KILL, (0, 1))
        process = runs.start(words, 2, before=at_point(action, saved + length + 1, "COMPUTING", ranks=ranks))
        codes = process.wait()
        assert set(codes) == {STOPPED if is_last else -signal.SIGKILL}, process.report()
        saved = (saved + length) // interval * interval
    times = read_times(run)
    assert times is not None
    return times


def _replay(times: RunTimes, interval: int, lengths: Sequence[int]) -> float:
    """Return the goodput of attempts of these lengths, in steps, with the mean costs of a run."""
    costs, step, idle = _costs_of(times)
    attempts = [
        Attempt(costs.restart + (length - 0.5) * step + length // interval * costs.stall, idle) for length in lengths
    ]  # a kill comes in the middle of a step; the first one is part of the start
    return goodput_of([*attempts[:-1], replace(attempts[-1], break_seconds=0.0)], costs, interval * step, step)


def _costs_of(times: RunTimes) -> tuple[Costs, float, float]:
    """Return the mean costs of a run, its mean step, and the mean time between two starts, in seconds."""
    stall, save, start = map(statistics.fmean, (times.stalls, times.saves, times.starts))
    assert times.step is not None
    num_breaks = max(len(times.starts) - 1, 1)
    return Costs(stall, save, start, BETWEEN_KILLS * times.step), times.step, times.idle / num_breaks
