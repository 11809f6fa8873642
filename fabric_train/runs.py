# PYTHON_ARGCOMPLETE_OK
"""List the runs below a folder: ``python -m fabric_train.runs [FOLDER]``.

A damaged file leaves cells of its run empty; see ``run_folder/run_summary.py``.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from fabric_train.cli.argument_types import POSITIONAL, nearest_name
from fabric_train.cli.errors import InputError, missing_folder, run_program
from fabric_train.cli.output import ago, open_console
from fabric_train.cli.parser import parse_arguments
from fabric_train.run_folder.run_summary import RunSummary, find_runs, summarize_run

_COLOURS = {"running": "bold green", "running?": "green", "failed": "bold red", "stopped": "yellow"}
_DESCENDING = ("step", "speed", "changed")
_OPTIONAL_COLUMNS = ("data", "model", "tokens/s", "changed")
"""The columns that a narrow terminal leaves out, in this order."""
_REDIRECTED_WIDTH = 200  # of a table in redirected output, which rich would cut to 80
_COLUMN_GAP = 2


@dataclass(frozen=True)
class RunsArguments:
    """List the runs under a folder with their state, step, best loss, data, model and speed

    PROGRAM runs --sort best --columns lr warmup_steps
    PROGRAM runs --filter running llama
    PROGRAM runs --json
    """

    folder: str = field(default=".", metadata=POSITIONAL)
    """Folder that contains runs, at any depth; default: the current folder."""
    sort: Literal["run", "state", "step", "best", "speed", "data", "model", "changed"] = "changed"
    """Column to sort by: step, speed and changed in descending order, the others in ascending order. best lists the
    best run first; it ranks runs separately by their --best_by, and accuracies in descending order.
    """
    columns: list[str] | None = None
    """Training arguments to show, such as lr warmup_steps, instead of data, model and speed."""
    filter: list[str] | None = None
    """Show only runs that have all of these words in their name, state, data or model."""
    json: bool = False
    """Print the runs as JSON, with all their arguments."""


def main(argv: list[str] | None = None) -> None:
    """Print the runs as a table or as JSON."""
    arguments = parse_arguments(RunsArguments, argv)
    folder = Path(arguments.folder).expanduser()
    if not folder.is_dir():
        raise InputError(f"{folder}: {missing_folder(folder)}; give a folder that contains runs")
    runs = []
    for run_dir in find_runs(folder):
        run = summarize_run(run_dir)
        if _matches(run, arguments.filter or ()):
            runs.append(run)
    _check_columns(arguments.columns or [], runs)
    # Sorting is stable: runs with the same value stay in the order of their names.
    runs.sort(key=lambda run: run.run)
    runs.sort(key=lambda run: _sort_key(run, arguments.sort))
    if arguments.json:
        print(json.dumps([_to_json(run) for run in runs], indent=2, ensure_ascii=False))
    elif runs:
        _print_table(runs, folder, arguments.columns)
    elif arguments.filter:
        print(f"no matching runs under {folder}")
    else:
        print(f"no runs under {folder}")


def _matches(run: RunSummary, words: Sequence[str]) -> bool:
    """Return whether a run has each of some words in its name, state, data or model."""
    texts = [run.run, run.state, run.data or "", run.model or ""]
    text = " ".join(texts).lower()
    return all(word.lower() in text for word in words)


def _sort_key(run: RunSummary, column: str) -> tuple[bool, Any]:
    """Return the sort key of a run; runs without a value come last."""
    value = getattr(run, column)
    if value is None:
        return True, 0
    if column == "best":
        sign = -1 if run.higher_is_better else 1
        return False, (run.best_by, run.higher_is_better, sign * value)
    if column in _DESCENDING:
        return False, -value
    return False, value


def _check_columns(columns: Sequence[str], runs: Sequence[RunSummary]) -> None:
    """Raise an InputError that names each column that is not an argument of any run."""
    argument_names = set[str]()
    for run in runs:
        argument_names.update(run.arguments)
    faults = []
    for name in columns:
        if name not in argument_names:
            hint = nearest_name(name, argument_names)
            faults.append(f"--columns {name}: no run has this argument{hint}")
    if runs and faults:
        raise InputError(*faults)


def _to_json(run: RunSummary) -> dict[str, Any]:
    changed = datetime.fromtimestamp(run.changed, timezone.utc).isoformat(timespec="seconds")
    return dataclasses.asdict(run) | {"changed": changed}


def _print_table(runs: Sequence[RunSummary], folder: Path, columns: Sequence[str] | None) -> None:
    """Print a row for each run; if the terminal is too narrow for a column, name the column below the table."""
    console = open_console(width=None if sys.stdout.isatty() else _REDIRECTED_WIDTH)
    rows = [_build_cells(run, folder, columns) for run in runs]
    names = list(rows[0])
    if not any(row["cannot be read"].plain for row in rows):
        names.remove("cannot be read")

    # Leave columns out until the table fits.
    hidden_names: list[str] = []
    for name in _OPTIONAL_COLUMNS:
        if _table_width(names, rows) <= console.width:
            break
        if name in names:
            names.remove(name)
            hidden_names.append(name)

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _COLUMN_GAP, 0, 0))
    for name in names:
        is_text = name in ("run", "state", "data", "model", "cannot be read")
        table.add_column(
            name,
            justify="left" if is_text else "right",
            overflow="fold",
            style="red" if name == "cannot be read" else "",
            # the name of a run and its damage have no bound; other cells are never broken
            no_wrap=name not in ("run", "cannot be read"),
        )
    for row in rows:
        table.add_row(*(row[name] for name in names))
    console.print(table)
    if hidden_names:
        console.print(f"no room for {', '.join(hidden_names)}; use a wider terminal, or --json", style="dim")


def _table_width(names: Sequence[str], rows: Sequence[dict[str, Text]]) -> int:
    """Return the width of a table with these columns."""
    width = _COLUMN_GAP * (len(names) - 1)
    for name in names:
        width += max(cell_len(name), *(row[name].cell_len for row in rows))
    return width


def _build_cells(run: RunSummary, folder: Path, columns: Sequence[str] | None) -> dict[str, Text]:
    """Return the cells of a run's row by the titles of their columns."""
    run_dir = run.run
    name = os.path.relpath(run_dir, folder)
    if name == ".":  # the run's folder is the searched folder itself
        name = folder.resolve().name
    planned = f"/{run.num_steps:,}" if run.num_steps else ""
    cells = {
        "run": Text(name),
        "state": Text(run.state, _COLOURS.get(run.state, "")),
        "step": Text("" if run.step is None else f"{run.step:,}{planned}"),
        "best": Text("" if run.best is None else f"{run.best:.4f} at {run.best_step:,}"),
    }
    if columns is None:
        cells["tokens/s"] = Text("" if run.speed is None else f"{run.speed:,.0f}")
        cells["data"] = Text(run.data or "")
        cells["model"] = Text(run.model or "")
    else:
        for column in columns:
            cells[column] = Text(_format_argument(run.arguments.get(column)))
    cells["changed"] = Text(ago(time.time() - run.changed))
    cells["cannot be read"] = Text("; ".join(run.damage))
    return cells


def _format_argument(value: Any) -> str:
    """Return an argument's value as it is written on a command line; "" for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


if __name__ == "__main__":
    run_program(main)
