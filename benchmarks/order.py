"""Measure how long a mixture of 10⁹ rows takes to give the rows of its first step, and of one after 10⁶ steps.

``python -m benchmarks.order FOLDER STEP`` is the process that is measured.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table

from benchmarks.measure import ROOT, Command, run
from benchmarks.report import Report
from fabric_train.data.mixture import Mixture, rows_of_shares
from fabric_train.data.mixture_order import MixtureOrder

NUM_ROWS = 10**9
NUM_SOURCES = 100
ROWS_PER_WINDOW = 512
TOKENS_PER_ROW = 2048
SHARES = [1.0, 0.15, 2.0, 0.5]
LATER_STEP = 1_000_000
_REPETITIONS = 3


@dataclass(frozen=True)
class OrderRun:
    """A process that reads the rows of one window; ``milliseconds_per_step`` are for each further window.

    ``cpu_seconds`` are the processor time from its start to these rows.
    """

    seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    milliseconds_per_step: float


@dataclass(frozen=True)
class OrderSummary:
    """The medians for a start and for a resume, in processor time."""

    start_cpu_seconds: float
    resume_cpu_seconds: float
    peak_rss_bytes: int


def measure(work: Path) -> Report:
    """Measure processes that start, and that resume.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        ChildProcessError: one failed.
    """
    _write_sources(ROOT / work)
    commands = {
        name: Command(("python", "-m", "benchmarks.order", str(work), str(step)), {"OMP_NUM_THREADS": "1"})
        for name, step in (("start", 0), ("resume", LATER_STEP))
    }
    runs: dict[str, list[OrderRun]] = {name: [] for name in commands}
    for _ in range(_REPETITIONS):
        for name, command in commands.items():
            measured = run(command)
            runs[name].append(
                OrderRun(measured.seconds, peak_rss_bytes=measured.peak_rss_bytes, **json.loads(measured.output))
            )
    start, resume = (float(np.median([once.cpu_seconds for once in runs[name]])) for name in commands)
    peak = max(once.peak_rss_bytes for each in runs.values() for once in each)
    settings = {
        "sources": NUM_SOURCES,
        "rows": NUM_ROWS,
        "rows_per_window": ROWS_PER_WINDOW,
        "shares": SHARES,
        "resumes_after_step": LATER_STEP,
    }
    return Report("order", settings, commands, runs, OrderSummary(start, resume, peak))


def table(report: Report) -> Table:
    """Return a table of the processes."""
    title = f"Order: {NUM_SOURCES} sources, {NUM_ROWS:,} rows, steps of {ROWS_PER_WINDOW}; resume after {LATER_STEP:,}"
    columns = ("process", "seconds", "CPU seconds", "RSS, MB", "ms of CPU for each further step")
    shown = Table(*columns, title=title, title_justify="left", box=box.SIMPLE)
    for name, runs in report.runs.items():
        names = ("seconds", "cpu_seconds", "milliseconds_per_step")
        ranges = [
            f"{min(values):.2f}–{max(values):.2f}"
            for values in ([getattr(once, each) for once in runs] for each in names)
        ]
        peak = max(once.peak_rss_bytes for once in runs)
        shown.add_row(name, *ranges[:2], f"{peak / 1e6:,.0f}", ranges[2])
    return shown


def _write_sources(folder: Path) -> None:
    """Write a made-up manifest for each source, and its rows as a sparse file of zeros, int32 [rows, tokens]."""
    weights = np.random.default_rng(0).uniform(1, 100, NUM_SOURCES)
    ends = (np.cumsum(weights) / weights.sum() * NUM_ROWS).round().astype(int)
    for source, num_rows in enumerate(np.diff(ends, prepend=0).tolist()):
        ledger = {"train": {"rows": num_rows}}
        (folder / f"{source:03d}.json").write_text(json.dumps({"ledger": ledger}))
        with (folder / f"{source:03d}.rows").open("wb") as file:
            file.truncate(num_rows * TOKENS_PER_ROW * 4)


def _read_windows(folder: Path, step: int) -> dict[str, float]:
    """Read the window after ``step`` as a run does that starts or resumes; return what ``OrderRun`` has of it."""
    manifests = sorted(folder.glob("*.json"))
    num_rows = [json.loads(file.read_text())["ledger"]["train"]["rows"] for file in manifests]
    shape = (-1, TOKENS_PER_ROW)
    rows = [np.memmap(file.with_suffix(".rows"), np.int32, "r").reshape(shape) for file in manifests]
    starts = np.cumsum([0, *num_rows])
    rows_per_epoch = tuple(rows_of_shares(num_rows, SHARES * (NUM_SOURCES // len(SHARES))))
    order = MixtureOrder((Mixture(tuple(num_rows), rows_per_epoch, ROWS_PER_WINDOW, seed=0),))
    order.rows_hash(step)  # which a resumed run compares
    order.rows_until(step)
    num_tokens = 0
    for number in range(step + 1, step + 11):
        if number == step + 2:
            read = time.process_time()
        indices = order.rows_of(number)
        order.rows_hash(number)
        if number == step + 1:
            sources = np.searchsorted(starts, indices, side="right") - 1
            places = zip(sources.tolist(), (indices - starts[sources]).tolist(), strict=True)
            num_tokens += sum(int((rows[source][row] == 0).sum()) for source, row in places)
    assert num_tokens == ROWS_PER_WINDOW * TOKENS_PER_ROW
    return {"cpu_seconds": read, "milliseconds_per_step": (time.process_time() - read) / 9 * 1000}


if __name__ == "__main__":
    print(json.dumps(_read_windows(ROOT / sys.argv[1], int(sys.argv[2]))))
