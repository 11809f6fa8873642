"""Read a metrics.csv of any length into columns, after those of the runs that the run branched off."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
from pyarrow import csv

from fabric_train.cli.errors import InputError, first_line
from fabric_train.training.metrics import are_columns

if TYPE_CHECKING:
    from fabric_train.checkpoint import BranchPoint

_MAX_STEP = 1e18  # fits int64
_ADVICE = "restore this run's file, or move this file away"
_MAX_AXIS_ROWS = 500
_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class MetricsTable:
    """The rows of metrics.csv."""

    steps: np.ndarray
    """int64 [N], rising."""
    columns: dict[str, np.ndarray]
    """float64 [N] each; NaN for an empty cell."""

    def measured_rows(self, name: str) -> np.ndarray:
        """Return the indices of the rows with a finite value in a column, int64 [M]; empty without the column."""
        values = self.columns.get(name)
        if values is None:
            return np.empty(0, np.int64)
        return np.flatnonzero(np.isfinite(values))

    def last_value(self, name: str) -> float | None:
        """Return the last finite value of a column; None if it has none."""
        rows = self.measured_rows(name)
        if len(rows) == 0:
            return None
        return float(self.columns[name][rows[-1]])

    @property
    def deciding_column(self) -> str:
        """The column of the validation: the loss, or the reward of held-out prompts if there is no loss."""
        has_reward = len(self.measured_rows("val_reward")) > 0
        has_loss = len(self.measured_rows("val_loss")) > 0
        return "val_reward" if has_reward and not has_loss else "val_loss"

    def sources_of(self, figure: str) -> list[str]:
        """Return the names of the sources that have values of a figure, such as "val_loss"."""
        prefix = f"{figure}/"
        sources = []
        for name in self.columns:
            if name.startswith(prefix) and len(self.measured_rows(name)):
                sources.append(name.removeprefix(prefix))
        return sources

    def between(self, after_step: int, last_step: float) -> "MetricsTable":
        """Return the rows of the steps after ``after_step`` up to ``last_step``."""
        is_between = (self.steps > after_step) & (self.steps <= last_step)
        columns = {name: values[is_between] for name, values in self.columns.items()}
        return MetricsTable(self.steps[is_between], columns)

    def hours(self) -> np.ndarray:
        """Return the hours that the steps up to each row took, float64 [N], without evaluations and saves."""
        seconds_per_step = self.columns.get("step_time", self._empty_column())
        num_steps = np.diff(self.steps, prepend=0)  # since the row before
        return np.cumsum(np.nan_to_num(seconds_per_step) * num_steps) / _SECONDS_PER_HOUR

    def page_axis(self) -> dict[str, list[float]]:
        """Return the steps, tokens and hours of at most 500 rows, between which a page interpolates."""
        last_row = len(self.steps) - 1
        rows = np.empty(0, np.int64)
        if last_row >= 0:
            rows = np.unique(np.linspace(0, last_row, _MAX_AXIS_ROWS).astype(np.int64))
        tokens = self.columns.get("num_tokens", self._empty_column())
        token_rows = self.measured_rows("num_tokens")
        if len(token_rows):
            tokens = np.interp(self.steps, self.steps[token_rows], tokens[token_rows])
        hours = self.hours()
        return {
            "step": self.steps[rows].tolist(),
            "tokens": np.nan_to_num(tokens[rows]).round().tolist(),
            "hours": [float(f"{value:.5g}") for value in hours[rows]],
        }

    def _empty_column(self) -> np.ndarray:
        return np.full(len(self.steps), np.nan)


def read_metrics_table(path: Path) -> MetricsTable:
    """Read a metrics.csv of any length, without a last line that a crash cut off.

    Raises:
        InputError: The file does not exist, or is damaged.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    content = path.read_bytes()
    content = content[: content.rfind(b"\n") + 1]
    header, _, rows = content.partition(b"\n")
    _check_header_text(path, header)
    try:
        names = csv.read_csv(io.BytesIO(header + b"\n")).column_names
        if not are_columns(names) or len(set(names)) < len(names):
            raise InputError(f"{path}: its first line is not the metrics.csv header; {_ADVICE}")
        numeric_names = [name for name in names if name != "rows_hash"]
        columns = _read_columns(content, numeric_names) if rows else {name: np.empty(0) for name in numeric_names}
    except pyarrow.ArrowInvalid as error:
        raise InputError(f"{path}: damaged ({first_line(error)}); {_ADVICE}") from None

    steps = columns["step"]
    has_possible_steps = (np.abs(steps) < _MAX_STEP).all()  # NaN is not below
    if not has_possible_steps or (np.diff(steps) <= 0).any():
        raise InputError(f"{path}: damaged (its steps are not in ascending order); {_ADVICE}")
    return MetricsTable(steps.astype(np.int64), columns)


def _read_columns(content: bytes, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the named columns of a file with rows, float64 [N] each."""
    types: dict[str, Any] = dict.fromkeys(names, pyarrow.float64())
    types["rows_hash"] = pyarrow.string()
    options = csv.ConvertOptions(column_types=types, null_values=[""])
    table = csv.read_csv(io.BytesIO(content), convert_options=options)
    return {name: table[name].to_numpy() for name in names}


def _check_header_text(path: Path, header: bytes) -> None:
    """Raise an InputError if the header of a metrics.csv, whose names appear on pages, is not UTF-8."""
    try:
        header.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: damaged (byte {error.start} of its header is not UTF-8); {_ADVICE}") from None


def read_lineage(run_dir: Path, lineage: Iterable["BranchPoint"], last_step: float = np.inf) -> MetricsTable:
    """Return a run's rows up to a step, after the rows of the runs that it branched off, if these still exist.

    A run that it branched off is also found if it is in the same parent folder, as in a copy of several runs. Errors
    are as in :func:`read_metrics_table`.
    """
    tables: list[MetricsTable] = []
    after_step = -1
    for branch in lineage:
        trunk_dir = Path(branch.run)
        if not trunk_dir.is_dir():
            trunk_dir = run_dir.resolve().parent / trunk_dir.name
        if (trunk_dir / "metrics.csv").is_file():
            tables.append(read_metrics_table(trunk_dir / "metrics.csv").between(after_step, branch.step))
        after_step = branch.step
    tables.append(read_metrics_table(run_dir / "metrics.csv").between(after_step, last_step))
    return join_tables(tables)


def join_tables(tables: Sequence[MetricsTable]) -> MetricsTable:
    """Return the rows of one table after another; a column that a table lacks is empty there."""
    names: dict[str, None] = {}
    for table in tables:
        names |= dict.fromkeys(table.columns)
    columns = {}
    for name in names:
        values = [table.columns.get(name, np.full(len(table.steps), np.nan)) for table in tables]
        columns[name] = np.concatenate(values)
    return MetricsTable(np.concatenate([table.steps for table in tables]), columns)
