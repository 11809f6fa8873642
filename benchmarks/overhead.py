"""Measure the overhead of a run: the time to its first step, and the time of a step of an almost empty model."""

import csv
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.measure import ROOT, Command, Spread, interleave, run, spread
from benchmarks.report import Report
from benchmarks.training import (
    BARE,
    OURS,
    THREADS,
    RunLength,
    TrainingRun,
    our_command,
    peer_command,
    run_ours,
    run_peer,
)
from fabric_train.sample_data import real_data
from tests.support.random_inputs import write_model, write_rows

REPETITIONS = 3
STARTED = "start: fabric_train"
LOADED = "start: transformers"
STEPS = 60
ACCUMULATION = 8
WARM_UP_STEPS = 10
LENGTH = 16
SIZES = {"num_hidden_layers": 1, "hidden_size": 16, "vocab_size": 128, "num_attention_heads": 2}
PEERS = (BARE, "lightning", "transformers")
# published for Llama-3 8B on one H200 with rows of this length
GPU_TOKENS_PER_SECOND = 10_471
GPU_ROW = 4096


@dataclass(frozen=True)
class Times:
    """One run: the seconds to its first step, or the seconds of each step."""

    seconds: list[float]


@dataclass(frozen=True)
class OverheadSummary:
    """Seconds to the first step, and seconds per step.

    Attributes:
        start: seconds to the first step, or to import transformers and load the same model.
        start_ratio: the first over the second, of the medians.
        step: seconds per step of each system.
        beside_the_model: a system's median step minus the bare loop's, in seconds.
        gpu_share: ours of those, relative to a step of as many rows of 4,096 tokens of an 8B model on one H200.
    """

    start: dict[str, Spread]
    start_ratio: float
    step: dict[str, Spread]
    beside_the_model: dict[str, float]
    gpu_share: float


def measure(work: Path) -> Report:
    """Measure the starts and the steps.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        ChildProcessError: a system failed.
    """
    model = real_data.smollm2().relative_to(ROOT)
    rows = work / "rows"
    tiny = work / "model"
    length = RunLength(STEPS, ACCUMULATION)
    write_rows(ROOT / rows, num_rows=STEPS * ACCUMULATION, length=LENGTH)
    write_model(ROOT / tiny, **SIZES, num_key_value_heads=2)
    load = f"python -m benchmarks.peers.load_model --model_name {model}"
    commands = {
        STARTED: our_command(model, rows, work / "start", RunLength(1, 1)),
        LOADED: Command(tuple(load.split()), {"OMP_NUM_THREADS": str(THREADS)}),
        OURS: our_command(tiny, rows, work / OURS, length),
        **{name: peer_command(name, tiny, rows, length) for name in PEERS},
    }
    systems: dict[str, Callable[[], Times]] = {
        STARTED: partial(_start_time, commands[STARTED], work / "start"),
        LOADED: lambda: Times([run(commands[LOADED]).seconds]),
        OURS: lambda: _step_times(run_ours(commands[OURS], work / OURS)),
        **{name: partial(_peer_step_times, commands[name]) for name in PEERS},
    }
    runs = interleave(systems, dict.fromkeys(systems, REPETITIONS), "overhead")
    settings = {
        "threads": THREADS,
        "repetitions": REPETITIONS,
        "model of the start": "SmolLM2-135M",
        "model of the steps": SIZES,
        "steps": STEPS,
        "warm_up_steps": WARM_UP_STEPS,
        "accumulation": ACCUMULATION,
        "length": LENGTH,
        "tokens a second of an 8B on one H200": GPU_TOKENS_PER_SECOND,
    }
    return Report("overhead", settings, commands, runs, _summarize(runs))


def table(report: Report) -> Table:
    """Return a table of the times and how they compare."""
    summary: OverheadSummary = report.summary
    title = f"Start to first step, SmolLM2-135M; and a step of {ACCUMULATION} micro-batches of an almost empty model"
    shown = Table("system", "median", "lowest–highest", "", title=title, title_justify="left", box=box.SIMPLE)
    for name, seconds in summary.start.items():
        ratio = f"{summary.start_ratio:.2f}×" if name == STARTED else ""
        shown.add_row(name, f"{seconds.median:.2f} s", f"{seconds.lowest:.2f}–{seconds.highest:.2f}", ratio)
    for name, seconds in summary.step.items():
        more = f"{1e3 * summary.beside_the_model[name]:+.1f} ms" if name != BARE else ""
        between = f"{1e3 * seconds.lowest:.1f}–{1e3 * seconds.highest:.1f}"
        shown.add_row(f"a step: {name}", f"{1e3 * seconds.median:.1f} ms", between, more)
    shown.add_row("our overhead, relative to a step of an 8B on an H200", "", "", f"{summary.gpu_share:.2%}")
    return shown


def _start_time(command: Command, target: Path) -> Times:
    """Return the seconds from the start of the process until it begins to compute its first batch."""
    shutil.rmtree(ROOT / target, ignore_errors=True)
    started = time.time()
    run(command)
    metrics = ROOT / target / "metrics.csv"
    with metrics.open(newline="", encoding="utf-8") as file:
        (step,) = csv.DictReader(file)
    computing = float(step["step_time"]) * (1 - float(step["data_wait"]))
    return Times([metrics.stat().st_mtime - started - computing])  # the row is the last write to it


def _peer_step_times(command: Command) -> Times:
    return _step_times(run_peer(command))


def _step_times(found: TrainingRun) -> Times:
    return Times([ACCUMULATION * LENGTH / speed for speed in found.tokens_per_second])


def _summarize(runs: dict[str, list[Times]]) -> OverheadSummary:
    start = {name: spread([found.seconds[0] for found in runs[name]]) for name in (STARTED, LOADED)}
    step = {
        name: spread([spread(found.seconds[WARM_UP_STEPS:]).median for found in runs[name]]) for name in (OURS, *PEERS)
    }
    overhead = {name: seconds.median - step[BARE].median for name, seconds in step.items()}
    return OverheadSummary(
        start=start,
        start_ratio=start[STARTED].median / start[LOADED].median,
        step=step,
        beside_the_model=overhead,
        gpu_share=overhead[OURS] / (ACCUMULATION * GPU_ROW / GPU_TOKENS_PER_SECOND),
    )
