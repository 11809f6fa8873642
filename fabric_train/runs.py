# PYTHON_ARGCOMPLETE_OK
"""List the runs below a folder: ``python -m fabric_train.runs [FOLDER]``. It reads files on disk alone, without torch.

A run is a folder with two of config.yaml, metrics.csv and checkpoints/. A damaged file leaves cells of its run empty.
"""

import csv
import dataclasses
import fcntl
import io
import json
import math
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from fabric_train.cli import yaml_core
from fabric_train.cli.argument_types import HIGHER_IS_BETTER, POSITIONAL, nearest_name, planned_steps
from fabric_train.cli.errors import InputError, missing_folder, run_program
from fabric_train.cli.output import ago, open_console
from fabric_train.cli.parser import parse_arguments
from fabric_train.files.regular_file import open_regular, read_json

_PARTS = ("config.yaml", "metrics.csv", "checkpoints")
_CHECKPOINT = re.compile(r"step-[0-9]{8,18}")
_LOG_LINE = re.compile(r"[0-9-]{10} [0-9:]{8}\S* .* rank [0-9]+: (.*)")
_ENDS = {"Done": "done", "early stopping": "done", "stopped by": "stopped", "error": "failed"}
"""How the last line of a session in run.log begins, and the state of its run."""
_TAIL = 1 << 18  # bytes that are read from the end of metrics.csv and run.log
_RECENT = 600.0  # seconds
_COLOURS = {"running": "bold green", "running?": "green", "failed": "bold red", "stopped": "yellow"}
_FALLING = ("step", "speed", "changed")
_LEFT_OUT_FIRST = ("data", "model", "tokens/s", "changed")
"""The columns that a narrow terminal does not show, in this order."""
_WIDTH_OF_FILES = 200  # columns of a table in redirected output, which rich would cut to 80
_BETWEEN_COLUMNS = 2


@dataclass(frozen=True)
class RunsArguments:
    """List the runs below a folder: their state, step, best loss, data, model and speed

    PROGRAM runs --sort best --columns lr warmup_steps
    PROGRAM runs --filter running llama
    PROGRAM runs --json
    """

    folder: str = field(default=".", metadata=POSITIONAL)
    """Folder with runs in it, at any depth; default: the current one."""
    sort: Literal["run", "state", "step", "best", "speed", "data", "model", "changed"] = "changed"
    """Column to sort by: step, speed and changed with the highest first, the others with the lowest. best puts the best
    run first, so the highest accuracy, of runs with another --best_by each for itself.
    """
    columns: list[str] | None = None
    """Arguments of training to show, such as lr warmup_steps, in place of data, model and speed."""
    filter: list[str] | None = None
    """Show only runs that have each of these words in their name, state, data or model."""
    json: bool = False
    """Print the runs as JSON, with all their arguments."""


@dataclass(frozen=True)
class Run:
    """One run; None is not known. ``best`` is the loss or figure of ``best_by``, ``speed`` is in tokens/s,
    ``code`` the version and commit of its newest checkpoint.

    ``state`` is running, done, stopped (by a signal, or it has not begun) or failed. ``running?`` and ``stopped?``: the
    lock file of a run is there, but nobody on this machine holds it. Then the run was killed, the folder is a copy, or
    another machine holds it on a file system without locks; if it changed recently, that is more likely.
    """

    run: str
    state: str
    step: int | None
    num_steps: int | None
    best_by: str
    best: float | None
    best_step: int | None
    speed: float | None
    data: str | None
    model: str | None
    code: str | None
    changed: float
    damage: tuple[str, ...]
    arguments: dict[str, Any]


def main(argv: list[str] | None = None) -> None:
    """Print the runs as a table or as JSON."""
    arguments = parse_arguments(RunsArguments, argv)
    folder = Path(arguments.folder).expanduser()
    if not folder.is_dir():
        raise InputError(f"{folder}: {missing_folder(folder)}; give a folder with runs in it")
    runs = [run for run in map(read_run, find_runs(folder)) if _matches(run, arguments.filter or ())]
    _check_columns(arguments.columns or [], runs)
    runs.sort(key=lambda run: run.run)
    runs.sort(key=lambda run: _sort_key(run, arguments.sort))
    if arguments.json:
        print(json.dumps([_as_json(run) for run in runs], indent=2, ensure_ascii=False))
    elif runs:
        _print_table(runs, folder, arguments.columns)
    else:
        print(f"no runs {'that match ' if arguments.filter else ''}below {folder}")


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the run folders at and below a folder; hidden folders and links are left out."""
    for place, folders, files in os.walk(folder):
        if sum(part in files or part in folders for part in _PARTS) >= 2:
            yield Path(place)
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def read_run(folder: Path) -> Run:
    """Return what the files of a run folder say; ``damage`` has a line for each that cannot be read."""
    damage: list[str] = []
    config = _try(damage, {}, folder / "config.yaml", _read_config)
    rows = _try(damage, [], folder / "metrics.csv", read_last_rows)
    checkpoints = _read_checkpoints(folder / "checkpoints", damage)
    newest = checkpoints[-1] if checkpoints else {"arguments": {}}
    given = config or newest["arguments"]
    steps = [int(row["step"]) for row in rows[-1:]] + [checkpoint["step"] for checkpoint in checkpoints[-1:]]
    num_steps = _try(damage, None, folder / "checkpoints", lambda _: _num_steps(given, newest))
    best_by = str(given.get("best_by") or "all")
    best = _try(damage, None, folder / "checkpoints", lambda _: _best(best_by, checkpoints, rows))
    speeds = [row["tokens_per_second"] for row in rows if math.isfinite(row.get("tokens_per_second", math.nan))]
    changed = _last_change(folder)
    state = _state(folder, changed)
    if state.startswith("stopped") and _has_ended(newest, num_steps):
        state = "done"
    sources = given.get("streaming_dataset") or given.get("train_data_dir")
    return Run(
        run=str(folder),
        state=state,
        step=max(steps, default=None),
        num_steps=num_steps,
        best_by=best_by,
        best=best[0] if best else None,
        best_step=best[1] if best else None,
        speed=speeds[-1] if speeds else None,
        data=", ".join(map(str, sources)) if isinstance(sources, list) else sources and str(sources),
        model=given.get("model_name") and str(given["model_name"]),
        code=_try(damage, None, folder / "checkpoints", lambda _: newest.get("versions", {}).get("fabric-train")),
        changed=changed,
        damage=tuple(dict.fromkeys(damage)),
        arguments=given,
    )


def _try(damage: list[str], instead: Any, file: Path, read: Any) -> Any:
    """Return what ``read`` finds in a file, or add to ``damage`` why it cannot."""
    try:
        return read(file)
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else "damaged"
        damage.append(f"{file.name}: {reason}")
        return instead


def _read_config(file: Path) -> dict[str, Any]:
    with open_regular(file, "") as opened:
        return dict(yaml_core.load(opened.read().decode()))


def read_last_rows(file: Path) -> list[dict[str, float]]:
    """Return the last rows of metrics.csv without empty cells and rows that are not complete; none without a file."""
    if not file.exists():
        return []
    with open_regular(file, "") as opened:
        lines = io.TextIOWrapper(opened, encoding="utf-8", newline="")
        names = next(csv.reader(iter(lines.readline, "")), [])  # names of sources may have line breaks
        begin = lines.tell()
        end = opened.seek(0, os.SEEK_END)
        opened.seek(max(begin, end - _TAIL))
        text = opened.read(_TAIL).decode()
    tail = text[: text.rfind("\n") + 1].splitlines()[int(end - begin > _TAIL) :]
    cells_by_name = [dict(zip(names, row, strict=True)) for row in csv.reader(tail)]
    rows = [
        {name: float(cell) for name, cell in cells.items() if cell and name != "rows_hash"} for cells in cells_by_name
    ]
    if not all(math.isfinite(row.get("step", math.nan)) for row in rows):
        raise ValueError(f"{file}: a row without a step")
    return rows


def _read_checkpoints(folder: Path, damage: list[str]) -> list[dict[str, Any]]:
    """Return the trainer.json of the checkpoints that can be read, by step."""
    found = []
    for checkpoint in sorted(path for path in folder.glob("step-*") if _CHECKPOINT.fullmatch(path.name)):
        faults: list[str] = []
        content = _try(faults, None, checkpoint / "trainer.json", _read_trainer_json)
        if content is not None:
            found.append(content)
        elif checkpoint.is_dir():  # it was not removed meanwhile
            damage += (f"{checkpoint.name}/{fault}" for fault in faults)
    return found


def _read_trainer_json(file: Path) -> dict[str, Any]:
    content = read_json(file, dict, "")
    return content | {"step": int(content["step"]), "arguments": dict(content["arguments"])}


def _num_steps(arguments: dict[str, Any], checkpoint: dict[str, Any]) -> int | None:
    """Return the steps that a run has planned, as far as they are known without torch, see ``TrainerJson``."""
    data = checkpoint.get("data") or {}
    lineage = checkpoint.get("lineage") or ()
    rows = (data["num_rows"], data["rows_per_window"]) if "num_rows" in data and not data.get("phases") else None
    begins = max((branch["step"] for branch in lineage if not branch["continues_data"]), default=0)
    steps = planned_steps(arguments.get("max_step"), arguments.get("number_epochs"), rows, begins)
    return None if math.isinf(steps) else int(steps)


def _has_ended(checkpoint: dict[str, Any], num_steps: int | None) -> bool:
    """Whether a checkpoint is the last step's, or early stopping ends the run there."""
    patience = str(checkpoint["arguments"].get("early_stopping") or "").rpartition(":")[2]
    progress = checkpoint.get("progress") or {}
    ends_early = patience.isdigit() and progress.get("num_since", 0) >= int(patience)
    return ends_early or (num_steps is not None and checkpoint.get("step") == num_steps)


def _best(
    source: str, checkpoints: Sequence[dict[str, Any]], rows: Sequence[dict[str, float]]
) -> tuple[float, int] | None:
    """Return the best loss (or figure) of a source and its step, in checkpoints and the last rows of metrics.csv.

    With ``--save_best``, the best of all rows has a checkpoint. Those validated on other rows than the last are left
    out.
    """
    evaluated = [checkpoint["evaluation"] for checkpoint in checkpoints if checkpoint.get("evaluation")]
    same = [each for each in evaluated if each.get("rows") == evaluated[-1].get("rows")]
    figure, _, of_source = source.partition("/")
    is_figure = any(figure in each["whole"].get("further", {}) for each in same)
    column = f"val_{source}" if is_figure else "val_loss" if source == "all" else f"val_loss/{source}"
    found = [(row[column], int(row["step"])) for row in rows if column in row]
    for each in same:
        part = {**each["sources"], "all": each["whole"]}.get((of_source or "all") if is_figure else source)
        value = part and (part["further"][figure] if is_figure else part["nats"] / part["num_tokens"])
        found += [] if value is None else [(value, each["step"])]
    sign = -1 if is_figure and figure in HIGHER_IS_BETTER else 1
    return min((pair for pair in found if math.isfinite(pair[0])), key=lambda pair: sign * pair[0], default=None)


def _last_change(folder: Path) -> float:
    """Return when the newest of the files that a run writes was changed, in seconds since 1970."""
    newest = folder.stat().st_mtime
    for file in (*(folder / name for name in (*_PARTS, "run.log")), *folder.glob("checkpoints/step-*")):
        with suppress(FileNotFoundError):
            newest = max(newest, file.stat().st_mtime)
    return newest


def _state(folder: Path, changed: float) -> str:
    lock = folder / ".lock"
    if lock.is_file() and not lock.is_symlink():
        if _is_held(lock):
            return "running"
        _, _, host = lock.read_text(encoding="utf-8", errors="replace").strip().partition(" on ")
        is_elsewhere = host != socket.gethostname()
        return "running?" if is_elsewhere and time.time() - changed < _RECENT else "stopped?"
    log = folder / "run.log"
    if not log.is_file():
        return "stopped"
    with open_regular(log, "") as opened:
        opened.seek(max(0, log.stat().st_size - _TAIL))
        lines = opened.read(_TAIL).decode(errors="replace").splitlines()
    messages = [found[1] for line in lines if (found := _LOG_LINE.fullmatch(line))]
    after = ("warning: ", "note: ", "written ")  # which may follow the last line
    last = next((line for line in reversed(messages) if not line.startswith(after)), "")
    return next((state for begin, state in _ENDS.items() if last.startswith(begin)), "stopped")


def _is_held(lock: Path) -> bool:
    """Whether a process holds a lock file. To try it could disturb a start, so not if its process has ended here."""
    with lock.open(encoding="utf-8", errors="replace") as file:
        found = re.fullmatch(r"process ([0-9]{1,9}) on (.*)", file.readline().strip())
        if found and found[2] == socket.gethostname() and not psutil.pid_exists(int(found[1])):
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks
            return False
    return False


def _matches(run: Run, words: Sequence[str]) -> bool:
    text = " ".join(filter(None, (run.run, run.state, run.data, run.model))).lower()
    return all(word.lower() in text for word in words)


def _sort_key(run: Run, column: str) -> tuple[bool, Any]:
    """Return what sorts the runs: those without a value come last."""
    value = getattr(run, column)
    if value is None:
        return True, 0
    if column == "best":
        figure = run.best_by.partition("/")[0]
        return False, (run.best_by, -value if figure in HIGHER_IS_BETTER else value)
    return False, -value if column in _FALLING else value


def _check_columns(columns: Sequence[str], runs: Sequence[Run]) -> None:
    """Raise an InputError for each column that is an argument of no run."""
    known = {name for run in runs for name in run.arguments}
    unknown = [name for name in columns if name not in known]
    if runs and unknown:
        raise InputError(
            *(f"--columns {name}: no run has this argument{nearest_name(name, known)}" for name in unknown)
        )


def _as_json(run: Run) -> dict[str, Any]:
    changed = datetime.fromtimestamp(run.changed, timezone.utc).isoformat(timespec="seconds")
    return dataclasses.asdict(run) | {"changed": changed}


def _print_table(runs: Sequence[Run], folder: Path, columns: Sequence[str] | None) -> None:
    """Print a row for each run. Columns for which a terminal has no room are named below the table instead."""
    console = open_console(width=None if sys.stdout.isatty() else _WIDTH_OF_FILES)
    rows = [_cells(run, folder, columns) for run in runs]
    names = list(rows[0])
    if not any(row["cannot be read"].plain for row in rows):
        names.remove("cannot be read")
    left_out: list[str] = []
    for name in _LEFT_OUT_FIRST:
        widths = [max(cell_len(name), *(row[name].cell_len for row in rows)) for name in names]
        if sum(widths) + _BETWEEN_COLUMNS * (len(names) - 1) <= console.width:
            break
        if name in names:
            names.remove(name)
            left_out.append(name)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _BETWEEN_COLUMNS, 0, 0))
    for name in names:
        is_text = name in ("run", "state", "data", "model", "cannot be read")
        style = "red" if name == "cannot be read" else ""
        # the name of a run and its damage have no bound; other cells are never broken
        table.add_column(
            name,
            justify="left" if is_text else "right",
            overflow="fold",
            style=style,
            no_wrap=name not in ("run", "cannot be read"),
        )
    for row in rows:
        table.add_row(*(row[name] for name in names))
    console.print(table)
    if left_out:
        console.print(f"no room for {', '.join(left_out)}: use a wider terminal, or --json", style="dim")


def _cells(run: Run, folder: Path, columns: Sequence[str] | None) -> dict[str, Text]:
    """Return the cells of a run's row by the titles of their columns."""
    name = os.path.relpath(run.run, folder)
    of_all = f"/{run.num_steps:,}" if run.num_steps else ""
    cells = {
        "run": Text(folder.resolve().name if name == "." else name),
        "state": Text(run.state, _COLOURS.get(run.state, "")),
        "step": Text("" if run.step is None else f"{run.step:,}{of_all}"),
        "best": Text("" if run.best is None else f"{run.best:.4f} at {run.best_step:,}"),
    }
    if columns is None:
        cells["tokens/s"] = Text("" if run.speed is None else f"{run.speed:,.0f}")
        cells["data"] = Text(run.data or "")
        cells["model"] = Text(run.model or "")
    else:
        cells |= {name: Text(_shown(run.arguments.get(name))) for name in columns}
    cells["changed"] = Text(ago(time.time() - run.changed))
    cells["cannot be read"] = Text("; ".join(run.damage))
    return cells


def _shown(value: Any) -> str:
    """Return an argument's value as a command line takes it; '' for null."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    run_program(main)
