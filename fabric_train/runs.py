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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
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

_RUN_ENTRIES = ("config.yaml", "metrics.csv", "checkpoints")
_CHECKPOINT_NAME = re.compile(r"step-[0-9]{8,18}")
_LOG_LINE = re.compile(r"[0-9-]{10} [0-9:]{8}\S* .* rank [0-9]+: (.*)")
_STATES_BY_LAST_LINE = {"Done": "done", "early stopping": "done", "stopped by": "stopped", "error": "failed"}
"""The state of a run by the beginning of the last line of its last session in run.log."""
_LINES_AFTER_LAST = ("warning: ", "note: ", "written ")
"""Lines that may follow it."""
_TAIL_BYTES = 1 << 18  # read from the end of metrics.csv and run.log
_RECENT_SECONDS = 600.0
_COLOURS = {"running": "bold green", "running?": "green", "failed": "bold red", "stopped": "yellow"}
_DESCENDING = ("step", "speed", "changed")
_OPTIONAL_COLUMNS = ("data", "model", "tokens/s", "changed")
"""The columns that a narrow terminal does not show, in the order in which they are left out."""
_REDIRECTED_WIDTH = 200  # of a table in redirected output, which rich would cut to 80
_COLUMN_GAP = 2


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
    """One run; None is not known."""

    run: str
    """Its folder."""
    state: str
    """running, done, stopped (by a signal, or it has not begun) or failed. ``running?`` and ``stopped?``: the run has a
    lock file, but nobody on this machine holds it. Then the run was killed, the folder is a copy, or another machine
    holds it on a file system without locks; if it changed recently, that is more likely.
    """
    step: int | None
    num_steps: int | None
    best_by: str
    best: float | None
    """The best loss or figure of ``best_by``."""
    best_step: int | None
    speed: float | None
    """Tokens per second."""
    data: str | None
    model: str | None
    code: str | None
    """Version and commit of its newest checkpoint."""
    changed: float
    """Seconds since 1970."""
    damage: tuple[str, ...]
    """A line for each file that cannot be read."""
    arguments: dict[str, Any]


@dataclass(frozen=True)
class _Best:
    """The best value of a loss or figure, and the step of its evaluation."""

    value: float
    step: int


def main(argv: list[str] | None = None) -> None:
    """Print the runs as a table or as JSON."""
    arguments = parse_arguments(RunsArguments, argv)
    folder = Path(arguments.folder).expanduser()
    if not folder.is_dir():
        raise InputError(f"{folder}: {missing_folder(folder)}; give a folder with runs in it")
    runs = []
    for run_dir in find_runs(folder):
        run = read_run(run_dir)
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
        print(f"no runs that match below {folder}")
    else:
        print(f"no runs below {folder}")


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the run folders at and below a folder; hidden folders and links are left out."""
    for current, subfolders, files in os.walk(folder):
        names = {*files, *subfolders}
        if len(names.intersection(_RUN_ENTRIES)) >= 2:
            yield Path(current)
            subfolders.clear()  # ``os.walk`` does not enter them
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))


def read_run(run_dir: Path) -> Run:
    """Return what the files of a run folder say; ``damage`` has a line for each that cannot be read."""
    damage: list[str] = []
    checkpoints_dir = run_dir / "checkpoints"
    config = _try(lambda: _read_config(run_dir / "config.yaml"), {}, damage, "config.yaml")
    rows = _try(lambda: read_last_rows(run_dir / "metrics.csv"), [], damage, "metrics.csv")
    checkpoints = _read_checkpoints(checkpoints_dir, damage)
    newest = checkpoints[-1] if checkpoints else {"arguments": {}}
    arguments = config or newest["arguments"]

    # Numbers of a trainer.json may be damaged although the file can be read.
    num_steps = _try(lambda: _plan_steps(arguments, newest), None, damage, "checkpoints")
    best_by = str(arguments.get("best_by") or "all")
    best = _try(lambda: _find_best(best_by, checkpoints, rows), None, damage, "checkpoints")
    code = _try(lambda: newest.get("versions", {}).get("fabric-train"), None, damage, "checkpoints")

    steps = []
    if rows:
        steps.append(int(rows[-1]["step"]))
    if checkpoints:
        steps.append(newest["step"])
    speeds = [row["tokens_per_second"] for row in rows if math.isfinite(row.get("tokens_per_second", math.nan))]

    changed = _find_last_change(run_dir)
    state = _find_state(run_dir, changed)
    if state.startswith("stopped") and _has_ended(newest, num_steps):
        state = "done"
    model_name = arguments.get("model_name")
    return Run(
        run=str(run_dir),
        state=state,
        step=max(steps, default=None),
        num_steps=num_steps,
        best_by=best_by,
        best=best.value if best else None,
        best_step=best.step if best else None,
        speed=speeds[-1] if speeds else None,
        data=_describe_data(arguments),
        model=str(model_name) if model_name else model_name,
        code=code,
        changed=changed,
        damage=tuple(dict.fromkeys(damage)),
        arguments=arguments,
    )


def _describe_data(arguments: dict[str, Any]) -> str | None:
    """Return the places of the data, joined."""
    sources = arguments.get("streaming_dataset") or arguments.get("train_data_dir")
    if isinstance(sources, list):
        return ", ".join(str(source) for source in sources)
    return str(sources) if sources else sources


def _try(read: Callable[[], Any], default: Any, damage: list[str], file_name: str) -> Any:
    """Return what ``read`` returns; if it fails, add to ``damage`` why, and return the default."""
    try:
        return read()
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else "damaged"
        damage.append(f"{file_name}: {reason}")
        return default


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
        opened.seek(max(begin, end - _TAIL_BYTES))
        text = opened.read(_TAIL_BYTES).decode()
    complete_lines = text[: text.rfind("\n") + 1].splitlines()
    if end - begin > _TAIL_BYTES:
        complete_lines = complete_lines[1:]  # the first one is cut
    rows = []
    for cells in csv.reader(complete_lines):
        row = {}
        for name, cell in zip(names, cells, strict=True):
            if cell and name != "rows_hash":
                row[name] = float(cell)
        if not math.isfinite(row.get("step", math.nan)):
            raise ValueError(f"{file}: a row without a step")
        rows.append(row)
    return rows


def _read_checkpoints(folder: Path, damage: list[str]) -> list[dict[str, Any]]:
    """Return the trainer.json of the checkpoints that can be read, by step."""
    contents = []
    for checkpoint in sorted(folder.glob("step-*")):
        if not _CHECKPOINT_NAME.fullmatch(checkpoint.name):
            continue
        faults: list[str] = []
        content = _try(partial(_read_trainer_json, checkpoint / "trainer.json"), None, faults, "trainer.json")
        if content is not None:
            contents.append(content)
        elif checkpoint.is_dir():  # it was not removed meanwhile
            damage += [f"{checkpoint.name}/{fault}" for fault in faults]
    return contents


def _read_trainer_json(file: Path) -> dict[str, Any]:
    content = read_json(file, dict, "")
    return content | {"step": int(content["step"]), "arguments": dict(content["arguments"])}


def _plan_steps(arguments: dict[str, Any], checkpoint: dict[str, Any]) -> int | None:
    """Return the steps that a run has planned, as far as they are known without torch, see ``TrainerJson``."""
    data = checkpoint.get("data") or {}
    rows = None
    if "num_rows" in data and not data.get("phases"):
        rows = (data["num_rows"], data["rows_per_window"])
    data_starts_after = 0
    for branch in checkpoint.get("lineage") or ():
        if not branch["continues_data"]:
            data_starts_after = max(data_starts_after, branch["step"])
    steps = planned_steps(arguments.get("max_step"), arguments.get("number_epochs"), rows, data_starts_after)
    return None if math.isinf(steps) else int(steps)


def _has_ended(checkpoint: dict[str, Any], num_steps: int | None) -> bool:
    """Return whether a checkpoint is the last step's, or early stopping ends the run there."""
    if num_steps is not None and checkpoint.get("step") == num_steps:
        return True
    early_stopping = str(checkpoint["arguments"].get("early_stopping") or "")
    patience = early_stopping.rpartition(":")[2]
    progress = checkpoint.get("progress") or {}
    return patience.isdigit() and progress.get("num_since", 0) >= int(patience)


def _find_best(source: str, checkpoints: Sequence[dict[str, Any]], rows: Sequence[dict[str, float]]) -> _Best | None:
    """Return the best loss (or figure) of a source, in checkpoints and the last rows of metrics.csv.

    With ``--save_best``, the best of all rows has a checkpoint. Checkpoints that were validated on other rows than the
    last one are left out.
    """
    evaluations = [checkpoint["evaluation"] for checkpoint in checkpoints if checkpoint.get("evaluation")]
    comparable = [evaluation for evaluation in evaluations if evaluation.get("rows") == evaluations[-1].get("rows")]
    figure, _, figure_source = source.partition("/")
    is_figure = any(figure in evaluation["whole"].get("further", {}) for evaluation in comparable)

    # values of metrics.csv
    if is_figure:
        column = f"val_{source}"
    elif source == "all":
        column = "val_loss"
    else:
        column = f"val_loss/{source}"
    candidates = [_Best(row[column], int(row["step"])) for row in rows if column in row]

    # values of checkpoints
    source_name = (figure_source or "all") if is_figure else source
    for evaluation in comparable:
        losses = {**evaluation["sources"], "all": evaluation["whole"]}
        loss = losses.get(source_name)
        if not loss:
            continue
        value = loss["further"][figure] if is_figure else loss["nats"] / loss["num_tokens"]
        if value is not None:
            candidates.append(_Best(value, evaluation["step"]))

    finite = [candidate for candidate in candidates if math.isfinite(candidate.value)]
    sign = -1 if is_figure and figure in HIGHER_IS_BETTER else 1
    return min(finite, key=lambda candidate: sign * candidate.value, default=None)


def _find_last_change(run_dir: Path) -> float:
    """Return when the newest of the files that a run writes was changed, in seconds since 1970."""
    files = [run_dir / name for name in (*_RUN_ENTRIES, "run.log")]
    files += run_dir.glob("checkpoints/step-*")
    newest = run_dir.stat().st_mtime
    for file in files:
        with suppress(FileNotFoundError):
            newest = max(newest, file.stat().st_mtime)
    return newest


def _find_state(run_dir: Path, changed: float) -> str:
    """Return the state of a run, see :class:`Run`, from its lock file and its log."""
    lock = run_dir / ".lock"
    if lock.is_file() and not lock.is_symlink():
        if _is_held(lock):
            return "running"
        _, _, host = lock.read_text(encoding="utf-8", errors="replace").strip().partition(" on ")
        is_elsewhere = host != socket.gethostname()
        is_recent = time.time() - changed < _RECENT_SECONDS
        return "running?" if is_elsewhere and is_recent else "stopped?"

    last_message = _read_last_message(run_dir / "run.log")
    for beginning, state in _STATES_BY_LAST_LINE.items():
        if last_message.startswith(beginning):
            return state
    return "stopped"


def _read_last_message(log: Path) -> str:
    """Return the last line of run.log that says how a session has ended; an empty text without one."""
    if not log.is_file():
        return ""
    with open_regular(log, "") as opened:
        opened.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = opened.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    for line in reversed(lines):
        match = _LOG_LINE.fullmatch(line)
        if match and not match[1].startswith(_LINES_AFTER_LAST):
            return match[1]
    return ""


def _is_held(lock: Path) -> bool:
    """Return whether a process holds a lock file.

    To try the lock could disturb a run that starts, so it is not tried if the process has ended on this machine.
    """
    with lock.open(encoding="utf-8", errors="replace") as file:
        match = re.fullmatch(r"process ([0-9]{1,9}) on (.*)", file.readline().strip())
        if match and match[2] == socket.gethostname() and not psutil.pid_exists(int(match[1])):
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks
            return False
    return False


def _matches(run: Run, words: Sequence[str]) -> bool:
    """Return whether a run has each of some words in its name, state, data or model."""
    texts = [run.run, run.state, run.data or "", run.model or ""]
    text = " ".join(texts).lower()
    return all(word.lower() in text for word in words)


def _sort_key(run: Run, column: str) -> tuple[bool, Any]:
    """Return what sorts the runs: those without a value come last."""
    value = getattr(run, column)
    if value is None:
        return True, 0
    if column == "best":
        figure = run.best_by.partition("/")[0]
        sign = -1 if figure in HIGHER_IS_BETTER else 1
        return False, (run.best_by, sign * value)
    if column in _DESCENDING:
        return False, -value
    return False, value


def _check_columns(columns: Sequence[str], runs: Sequence[Run]) -> None:
    """Raise an InputError for each column that is an argument of no run."""
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


def _to_json(run: Run) -> dict[str, Any]:
    changed = datetime.fromtimestamp(run.changed, timezone.utc).isoformat(timespec="seconds")
    return dataclasses.asdict(run) | {"changed": changed}


def _print_table(runs: Sequence[Run], folder: Path, columns: Sequence[str] | None) -> None:
    """Print a row for each run. Columns for which a terminal has no room are named below the table instead."""
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
        console.print(f"no room for {', '.join(hidden_names)}: use a wider terminal, or --json", style="dim")


def _table_width(names: Sequence[str], rows: Sequence[dict[str, Text]]) -> int:
    """Return the width of a table with these columns."""
    width = _COLUMN_GAP * (len(names) - 1)
    for name in names:
        width += max(cell_len(name), *(row[name].cell_len for row in rows))
    return width


def _build_cells(run: Run, folder: Path, columns: Sequence[str] | None) -> dict[str, Text]:
    """Return the cells of a run's row by the titles of their columns."""
    name = os.path.relpath(run.run, folder)
    planned = f"/{run.num_steps:,}" if run.num_steps else ""
    cells = {
        "run": Text(folder.resolve().name if name == "." else name),
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
    """Return an argument's value as a command line takes it; '' for null."""
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
