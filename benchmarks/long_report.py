"""Build the report of a run of a million steps: seconds, memory, and bytes of the page."""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import csv
from rich import box
from rich.table import Table

from benchmarks.measure import Command, run
from benchmarks.report import Report
from fabric_train.pages.markdown import library, to_html
from fabric_train.report.reported_run import ReportedRun
from fabric_train.report.sections import run_sections

STEPS = 1_000_000
SOURCES = 4
RUNS = 3
EVAL_STEP_INTERVAL = 1000


@dataclass(frozen=True)
class LongReport:
    """``build_seconds`` are of reading, sampling and the page with its script, in a process that has imported all."""

    seconds: list[float]
    build_seconds: list[float]
    peak_rss_bytes: int
    metrics_bytes: int
    page_bytes: int


def measure(work: Path) -> Report:
    """Write a metrics.csv, then run ``python -m fabric_train.report`` on it, and its parts in this process."""
    folder = work / "run"
    folder.mkdir()
    write_metrics(folder / "metrics.csv")
    command = Command(("python", "-m", "fabric_train.report", str(folder)))
    whole = [run(command) for _ in range(RUNS)]
    seconds = []
    for _ in range(RUNS):
        library.cache_clear()
        started = time.perf_counter()
        long = ReportedRun(folder)
        to_html("long", run_sections(long), [long.metrics.page_axis()])
        seconds.append(time.perf_counter() - started)
    summary = LongReport(
        [one.seconds for one in whole],
        seconds,
        max(one.peak_rss_bytes for one in whole),
        (folder / "metrics.csv").stat().st_size,
        (folder / "report.html").stat().st_size,
    )
    settings = {"steps": STEPS, "sources": SOURCES, "eval_step_interval": EVAL_STEP_INTERVAL}
    return Report("long_report", settings, {"report": command}, {"report": whole}, summary)


def write_metrics(file: Path) -> None:
    """Write rows with every usual column, of sources too."""
    steps = np.arange(1, STEPS + 1)
    rng = np.random.default_rng(0)
    evaluated = steps % EVAL_STEP_INTERVAL == 0
    columns: dict[str, np.ndarray] = {"step": steps, "epoch": steps // 400_000, "num_tokens": steps * 4_194_304}
    names = [
        "train_loss",
        "learning_rate",
        "grad_norm",
        "tokens_per_second",
        "step_time",
        "data_wait",
        "peak_memory_gb",
    ]
    for name in [*names, *(f"train_loss/source-{number}" for number in range(SOURCES))]:
        columns[name] = 2 + np.exp(-steps / 2e5) + rng.normal(0, 0.05, STEPS)
    for name in ["val_loss", *(f"val_bits_per_byte/source-{number}" for number in range(SOURCES))]:
        columns[name] = np.where(evaluated, 2 + np.exp(-steps / 2e5), np.nan)
    table = pyarrow.table({name: pyarrow.array(values, from_pandas=True) for name, values in columns.items()})
    csv.write_csv(table, file)


def table(report: Report) -> Table:
    """Return the figures as a table."""
    summary: LongReport = report.summary
    shown = Table("what", "", box=box.SIMPLE, title=f"Report of {STEPS:,} steps")
    shown.add_row("whole command, s", ", ".join(f"{value:.1f}" for value in summary.seconds))
    shown.add_row("reading, sampling, page, s", ", ".join(f"{value:.1f}" for value in summary.build_seconds))
    shown.add_row("peak memory, GB", f"{summary.peak_rss_bytes / 1e9:.2f}")
    shown.add_row("metrics.csv, MB", f"{summary.metrics_bytes / 1e6:.0f}")
    shown.add_row("report.html, MB", f"{summary.page_bytes / 1e6:.2f}")
    return shown
