"""The curves of metrics.csv: columns of a run of any length, the charts that show them, and RUN/loss_curves.png."""

import io
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
from pyarrow import csv

from fabric_train.cli.errors import InputError, first_line
from fabric_train.files.regular_file import check_regular_or_absent
from fabric_train.pages.charts import Chart, Mark, Series, draw, moving_average, sample_points
from fabric_train.training.loggers import Logger
from fabric_train.training.metrics import COLUMNS, Metrics, are_columns

if TYPE_CHECKING:
    from fabric_train.checkpoint import BranchPoint

PICTURE = "loss_curves.png"
_MAX_SHARE = 0.01  # of the run's time
_SMOOTHED_FROM = 200  # points
_ALL_POINTS = 48_000
_MOST_POINTS = 2000
_FEWEST_POINTS = 120
_MOST_STEPS = 1e18
_ADVICE = "put the file of this run back, or move this one away"
_KNOTS = 500  # steps whose tokens and hours a page knows
_FIGURES = {"val_bits_per_byte": "bits per byte", "val_loss": "nats per token"}
_SINGLE = (
    ("learning_rate", "Learning rate", "learning rate", True),
    ("grad_norm", "Gradient norm", "norm before clipping", True),
    ("tokens_per_second", "Speed", "tokens/s", True),
    ("mfu", "MFU", "share of the peak FLOP/s", True),
    ("data_wait", "Waiting for data", "share of the step's time", True),
    ("step_time", "Time of a step", "seconds", True),
    ("rank_lag", "Lag of the slowest rank", "seconds a step above the median", True),
    ("peak_memory_gb", "Peak memory of rank 0", "10⁹ bytes", True),
)


@dataclass(frozen=True)
class MetricsTable:
    """Rows of metrics.csv: ``steps`` int64 [N], rising; ``columns`` float64 [N] each, NaN for an empty cell."""

    steps: np.ndarray
    columns: dict[str, np.ndarray]

    def known(self, name: str) -> np.ndarray:
        """Return the indices of the rows with a finite value in a column, int64 [M]; empty without the column."""
        values = self.columns.get(name)
        return np.empty(0, np.int64) if values is None else np.flatnonzero(np.isfinite(values))

    def last(self, name: str) -> float | None:
        """Return the last finite value of a column."""
        known = self.known(name)
        return float(self.columns[name][known[-1]]) if len(known) else None

    def sources_of(self, figure: str) -> list[str]:
        """Return the names of the sources that have values of a figure, such as "val_loss"."""
        names = (name.partition("/") for name in self.columns if name.startswith(f"{figure}/"))
        return [source for _, _, source in names if len(self.known(f"{figure}/{source}"))]

    def between(self, after: int, last: float) -> "MetricsTable":
        """Return the rows of the steps after ``after`` up to ``last``."""
        chosen = (self.steps > after) & (self.steps <= last)
        return MetricsTable(self.steps[chosen], {name: column[chosen] for name, column in self.columns.items()})

    def hours(self) -> np.ndarray:
        """Return the hours that the steps up to each row took, float64 [N], without evaluations and saves."""
        seconds = self.columns.get("step_time", np.full(len(self.steps), np.nan))
        return np.cumsum(np.nan_to_num(seconds) * np.diff(self.steps, prepend=0)) / 3600


def read_curves(path: Path) -> MetricsTable:
    """Read a metrics.csv of any length, without a last line that a crash cut off; an InputError if it is damaged."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    content = path.read_bytes()
    content = content[: content.rfind(b"\n") + 1]
    head, _, rows = content.partition(b"\n")
    _check_text(path, head)
    try:
        names = csv.read_csv(io.BytesIO(head + b"\n")).column_names
        if not are_columns(names) or len(set(names)) < len(names):
            raise InputError(f"{path}: its first line is not the header of a metrics.csv; {_ADVICE}")
        kinds: dict[str, Any] = {name: pyarrow.float64() for name in names} | {"rows_hash": pyarrow.string()}
        options = csv.ConvertOptions(column_types=kinds, null_values=[""])
        table = csv.read_csv(io.BytesIO(content), convert_options=options) if rows else None
    except pyarrow.ArrowInvalid as error:
        raise InputError(f"{path}: damaged ({first_line(error)}); {_ADVICE}") from None
    columns = {name: table[name].to_numpy() if table else np.empty(0) for name in names if name != "rows_hash"}
    steps = columns["step"]
    if (~(np.abs(steps) < _MOST_STEPS)).any() or (np.diff(steps) <= 0).any():
        raise InputError(f"{path}: damaged (its steps do not rise); {_ADVICE}")
    return MetricsTable(steps.astype(np.int64), columns)


def _check_text(path: Path, head: bytes) -> None:
    """Raise an InputError if the header of a metrics.csv, whose names become text of pages, is not UTF-8."""
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: damaged (byte {error.start} of its header is not UTF-8); {_ADVICE}") from None


def read_lineage(run: Path, lineage: Iterable["BranchPoint"], last_step: float = np.inf) -> MetricsTable:
    """Return a run's rows up to a step, after the rows of the runs that it branched off, as far as these are there.

    A run that it branched off is also found beside it, as in a copy of several runs. Errors as in :func:`read_curves`.
    """
    parts: list[MetricsTable] = []
    after = -1
    for branch in lineage:
        trunk = Path(branch.run) if Path(branch.run).is_dir() else run.resolve().parent / Path(branch.run).name
        if (trunk / "metrics.csv").is_file():
            parts.append(read_curves(trunk / "metrics.csv").between(after, branch.step))
        after = branch.step
    return joined([*parts, read_curves(run / "metrics.csv").between(after, last_step)])


def joined(tables: Iterable[MetricsTable]) -> MetricsTable:
    """Return the rows of one table after another; a column that one lacks is empty there."""
    parts = list(tables)
    names = dict.fromkeys(name for part in parts for name in part.columns)
    columns = {
        name: np.concatenate([part.columns.get(name, np.full(len(part.steps), np.nan)) for part in parts])
        for name in names
    }
    return MetricsTable(np.concatenate([part.steps for part in parts]), columns)


def page_axis(table: MetricsTable) -> dict[str, list[float]]:
    """Return steps, tokens and hours of at most 500 rows, from which a page interpolates."""
    chosen = np.unique(np.linspace(0, max(len(table.steps) - 1, 0), _KNOTS).astype(np.int64))[: len(table.steps)]
    tokens = table.columns.get("num_tokens", np.full(len(table.steps), np.nan))
    known = table.known("num_tokens")
    if len(known):
        tokens = np.interp(table.steps, table.steps[known], tokens[known])
    hours = table.hours()
    return {
        "step": table.steps[chosen].tolist(),
        "tokens": np.nan_to_num(tokens[chosen]).round().tolist(),
        "hours": [float(f"{value:.5g}") for value in hours[chosen]],
    }


def metric_charts(runs: Sequence[tuple[str, MetricsTable]], marks: Sequence[Mark] = ()) -> list[Chart]:
    """Return the charts of one run, or of several over one another. ``marks`` are of the first run."""
    tables = [table for _, table in runs]
    of_source = next((figure for figure in _FIGURES if any(len(one.sources_of(figure)) > 1 for one in tables)), "")
    planned: list[tuple[str, str, str, bool, list[tuple[str, str]]]] = [
        ("loss", "Loss", "nats per token", False, [("training", "train_loss"), ("validation", "val_loss")])
    ]
    if of_source:
        names = dict.fromkeys(name for one in tables for name in one.sources_of(of_source))
        columns = [(name, f"{of_source}/{name}") for name in names]
        planned.append(("sources", "Validation by source", _FIGURES[of_source], False, columns))
    trained = dict.fromkeys(name for one in tables for name in one.sources_of("train_loss"))
    if len(trained) > 1:
        columns = [(name, f"train_loss/{name}") for name in trained]
        planned.append(("trained", "Training loss by source", "nats per token", False, columns))
    planned += [
        (f"metric-{name}", name.replace("_", " ").capitalize(), name.replace("_", " "), False, columns)
        for name, columns in _objective_metrics(tables)
    ]
    planned += [(key, title, y_title, zero, [(title.lower(), key)]) for key, title, y_title, zero in _SINGLE]
    number = sum(len(table.known(column)) > 0 for *_, columns in planned for _, column in columns for table in tables)
    most = min(max(_ALL_POINTS // max(number, 1), _FEWEST_POINTS), _MOST_POINTS)
    charts = []
    for key, title, y_title, zero, columns in planned:
        series = [one for label, column in columns for one in _series(runs, label, column, most, len(columns) > 1)]
        if series:
            note = _note(series, tables)
            charts.append(Chart(key, title, y_title, tuple(series), _on(marks, series), from_zero=zero, note=note))
    return charts


def _objective_metrics(tables: Sequence[MetricsTable]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the metrics of an objective or an evaluation, each with its columns of training and validation."""
    names = dict.fromkeys(name for one in tables for name in one.columns if "/" not in name and name not in COLUMNS)
    for name in dict.fromkeys(name.partition("_")[2] for name in names):
        pairs = (("training", f"train_{name}"), ("validation", f"val_{name}"))
        yield name, [(label, column) for label, column in pairs if column in names]


def _series(
    runs: Sequence[tuple[str, MetricsTable]], label: str, column: str, most: int, is_one_of_several: bool
) -> Iterator[Series]:
    counts = [len(table.known(column)) for _, table in runs]
    is_smooth = max(counts) > _SMOOTHED_FROM and column not in ("learning_rate", "peak_memory_gb")
    for number, (run, table) in enumerate(runs):
        known = table.known(column)
        if not len(known):
            continue
        steps = table.steps[known].astype(np.float64)
        values = table.columns[column][known]
        smooth = moving_average(values, _width(max(counts))) if is_smooth else None
        chosen = sample_points(steps, values, most)
        name = label if len(runs) == 1 else f"{run}: {label}" if is_one_of_several else run
        kind = "points" if column.startswith("val_") else "line"
        own = None if smooth is None else smooth[chosen]
        yield Series(name, steps[chosen], values[chosen], own, kind=kind, axis=number)


def _width(number: int) -> int:
    return number // 50


def _note(series: Sequence[Series], tables: Sequence[MetricsTable]) -> str:
    if all(one.smooth is None for one in series):
        return ""
    width = _width(max(len(table.steps) for table in tables))
    return f"Smooth curves are means of about {width:,} logged steps; of the faint ones all extremes are kept."


def _on(marks: Sequence[Mark], series: Sequence[Series]) -> tuple[Mark, ...]:
    first = min(one.x[0] for one in series)
    last = max(one.x[-1] for one in series)
    return tuple(mark for mark in marks if first <= mark.x <= last)


def draw_loss_curves(table: MetricsTable, picture: Path, title: str, branched_after: Sequence[int] = ()) -> None:
    """Draw losses, also of sources, and the learning rate as a PNG; dotted lines mark branches."""
    marks = [Mark(step, "branch", f"branch after step {step:,}") for step in branched_after]
    charts = [one for one in metric_charts([(title, table)], marks) if one.key in _HEIGHTS]
    draw(charts, picture, heights=[_HEIGHTS[one.key] for one in charts], title=title)


_HEIGHTS = {"loss": 260, "sources": 220, "learning_rate": 90}
"""The charts of the picture, and their heights in pixels."""


class LossCurves(Logger):
    """``RUN/loss_curves.png`` after the evaluations, while drawing takes at most 1 % of the time, and at the end."""

    def __init__(self, folder: Path, branched_after: Sequence[int] = ()) -> None:
        """``folder`` is RUN, whose metrics.csv has every row before this logger gets it."""
        self._folder = folder
        self._branched_after = branched_after
        self._is_behind = False
        self._drawn_at = 0.0
        self._seconds = 0.0

    def log(self, metrics: Metrics) -> None:
        self._is_behind |= metrics.val_loss is not None
        if self._is_behind and time.monotonic() - self._drawn_at >= self._seconds / _MAX_SHARE:
            self._draw()

    def close(self) -> None:
        if self._is_behind:
            self._draw()

    def _draw(self) -> None:
        started = time.monotonic()
        check_regular_or_absent(self._folder / PICTURE)
        table = read_curves(self._folder / "metrics.csv")
        draw_loss_curves(table, self._folder / PICTURE, self._folder.name, self._branched_after)
        self._is_behind = False
        self._drawn_at = time.monotonic()
        self._seconds = self._drawn_at - started
