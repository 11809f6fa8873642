"""Read a run folder tolerantly: its state, progress and best loss, and a line for each file that cannot be read.

A run is a folder with two of config.yaml, metrics.csv and checkpoints/.
"""

import csv
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fabric_train.cli.argument_types import REWARD, is_higher_better, planned_steps
from fabric_train.files.typed_json import read_json
from fabric_train.run_folder.config_file import CONFIG, read_config
from fabric_train.run_folder.log_lines import LOG
from fabric_train.run_folder.metrics_tail import METRICS, read_last_rows
from fabric_train.run_folder.run_state import find_state

T = TypeVar("T")
_CHECKPOINTS = "checkpoints"
_RUN_ENTRIES = (CONFIG, METRICS, _CHECKPOINTS)
_CHECKPOINT_NAME = re.compile(r"step-[0-9]{8,18}")


@dataclass(frozen=True)
class RunSummary:
    """The summary of one run; a value that is not known is None."""

    run: str
    """The run's folder."""
    state: str
    """What :func:`run_state.find_state` returns."""
    step: int | None
    num_steps: int | None
    best_by: str
    best: float | None
    """The best loss, reward or figure of ``best_by``."""
    best_step: int | None
    higher_is_better: bool
    """Whether ``best`` is the highest value, such as a reward, rather than the lowest."""
    speed: float | None
    """Tokens per second."""
    data: str | None
    model: str | None
    code: str | None
    """Version and commit of the code that saved the newest checkpoint."""
    changed: float
    """When the run last wrote a file, in seconds since 1970."""
    damage: tuple[str, ...]
    """A line for each file that cannot be read."""
    arguments: dict[str, Any]


@dataclass(frozen=True)
class _Best:
    """The best value of a loss, reward or figure, and the step of its evaluation."""

    value: float
    step: int
    higher_is_better: bool


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the run folders at and below a folder; hidden folders and links are left out."""
    for current, subfolders, files in os.walk(folder):
        names = {*files, *subfolders}
        if len(names.intersection(_RUN_ENTRIES)) >= 2:
            yield Path(current)
            subfolders.clear()  # ``os.walk`` does not enter them
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))


def summarize_run(run_dir: Path) -> RunSummary:
    """Summarize a run from the files in its folder; a file that cannot be read becomes a line of ``damage``."""
    # Read the files.
    damage: list[str] = []
    config: dict[str, Any] = _read_or_note(lambda: read_config(run_dir), {}, CONFIG, damage)
    rows: list[dict[str, float]] = _read_or_note(lambda: read_last_rows(run_dir), [], METRICS, damage)
    checkpoints = _read_checkpoints(run_dir / _CHECKPOINTS, damage)
    newest_checkpoint = checkpoints[-1] if checkpoints else {"arguments": {}}
    arguments = config or newest_checkpoint["arguments"]

    # Compute the planned steps, the best loss and the version. This may fail too: a trainer.json is read without the
    # checks of ``checkpoint.read_trainer_json``, so its values may be damaged.
    num_steps = _read_or_note(lambda: _plan_steps(arguments, newest_checkpoint), None, _CHECKPOINTS, damage)
    best_by = str(arguments.get("best_by") or "all")
    of_completions = bool(arguments.get("validation_prompts"))
    best = _read_or_note(
        lambda: _find_best(best_by, checkpoints, rows, of_completions=of_completions), None, _CHECKPOINTS, damage
    )
    code = _read_or_note(lambda: newest_checkpoint.get("versions", {}).get("fabric-train"), None, _CHECKPOINTS, damage)

    # Find how far the run is, and how fast. It logs more often than it saves, but metrics.csv may be missing.
    reached_steps = []
    if rows:
        reached_steps.append(int(rows[-1]["step"]))
    if checkpoints:
        reached_steps.append(newest_checkpoint["step"])
    speeds = [row["tokens_per_second"] for row in rows if math.isfinite(row.get("tokens_per_second", math.nan))]

    # Tell a run that has ended from one that was stopped before its last step.
    changed = _find_last_change(run_dir)
    state = find_state(run_dir, changed)
    if state.startswith("stopped") and _has_ended(newest_checkpoint, num_steps):
        state = "done"

    model_name = arguments.get("model_name")
    return RunSummary(
        run=str(run_dir),
        state=state,
        step=max(reached_steps, default=None),
        num_steps=num_steps,
        best_by=best_by,
        best=best.value if best else None,
        best_step=best.step if best else None,
        higher_is_better=best is not None and best.higher_is_better,
        speed=speeds[-1] if speeds else None,
        data=_describe_data(arguments),
        model=str(model_name) if model_name else model_name,
        code=code,
        changed=changed,
        damage=tuple(dict.fromkeys(damage)),
        arguments=arguments,
    )


def _read_or_note(read: Callable[[], T], default: T, file_name: str, damage: list[str]) -> T:
    """Return the result of ``read``; if it fails, add the reason to ``damage`` and return ``default``."""
    try:
        return read()
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, csv.Error) as error:
        damage.append(f"{file_name}: {_describe(error)}")
        return default


def _describe(error: Exception) -> str:
    """Return the system's reason if a file could not be opened, and "damaged" for any other error.

    An InputError has the error of the system as its cause.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__
    return "damaged"


def _read_checkpoints(checkpoints_dir: Path, damage: list[str]) -> list[dict[str, Any]]:
    """Return the content of each checkpoint's trainer.json, in the order of steps.

    For each one that cannot be read, a line is added to ``damage``, unless the run has just removed the checkpoint.
    """
    contents = []
    for checkpoint in sorted(checkpoints_dir.glob("step-*")):
        if not _CHECKPOINT_NAME.fullmatch(checkpoint.name):
            continue
        faults: list[str] = []
        read = partial(_read_trainer_json, checkpoint / "trainer.json")
        content: dict[str, Any] = _read_or_note(read, {}, "trainer.json", faults)
        if content:
            contents.append(content)
        elif checkpoint.is_dir():
            damage += [f"{checkpoint.name}/{fault}" for fault in faults]
    return contents


def _read_trainer_json(file: Path) -> dict[str, Any]:
    content = read_json(file, dict, "")
    return content | {"step": int(content["step"]), "arguments": dict(content["arguments"])}


def _plan_steps(arguments: dict[str, Any], checkpoint: dict[str, Any]) -> int | None:
    """Return the number of steps that a run has planned; None if no argument or data limit it.

    ``TrainerJson.num_steps`` is the same, but its module imports pydantic, which would make a list of runs slow.
    """
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
    """Return whether a checkpoint was saved after the last planned step, or early stopping ended the run there."""
    if num_steps is not None and checkpoint.get("step") == num_steps:
        return True
    early_stopping = str(checkpoint["arguments"].get("early_stopping") or "")
    patience = early_stopping.rpartition(":")[2]
    progress = checkpoint.get("progress") or {}
    return patience.isdigit() and progress.get("num_since", 0) >= int(patience)


def _find_best(
    source: str, checkpoints: Sequence[dict[str, Any]], rows: Sequence[dict[str, float]], *, of_completions: bool
) -> _Best | None:
    """Return the best loss, reward or figure among the checkpoints and the last rows of metrics.csv.

    Earlier rows are not needed with ``--save_best``, which keeps the checkpoint of the best one. Evaluations of other
    rows than those of the newest evaluated checkpoint are left out.

    Args:
        source: ``best_by``: "all", a source, or a figure, as FIGURE or FIGURE/SOURCE.
        checkpoints: The content of each trainer.json, the newest last.
        rows: The last rows of metrics.csv.
        of_completions: Whether the run evaluates completions of prompts, which have a reward instead of a loss.
    """
    evaluations = [checkpoint["evaluation"] for checkpoint in checkpoints if checkpoint.get("evaluation")]
    comparable = [evaluation for evaluation in evaluations if evaluation.get("rows") == evaluations[-1].get("rows")]
    figure, _, figure_source = source.partition("/")
    is_figure = any(figure in evaluation["whole"].get("further", {}) for evaluation in comparable)
    first_evaluation = (checkpoints[-1].get("first_evaluation") if checkpoints else None) or {}
    if first_evaluation.get("follows_other_rows"):
        rows = [row for row in rows if row["step"] >= first_evaluation["step"]]
    if not is_figure and of_completions:
        is_figure = True
        figure = REWARD
        figure_source = "" if source == "all" else source
    higher_is_better = is_figure and is_higher_better(figure, of_completions=of_completions)

    # values of metrics.csv
    if is_figure:
        column = f"val_{figure}/{figure_source}" if figure_source else f"val_{figure}"
    elif source == "all":
        column = "val_loss"
    else:
        column = f"val_loss/{source}"
    candidates = [_Best(row[column], int(row["step"]), higher_is_better) for row in rows if column in row]

    # values of checkpoints
    source_name = (figure_source or "all") if is_figure else source
    for evaluation in comparable:
        losses = {**evaluation["sources"], "all": evaluation["whole"]}
        loss = losses.get(source_name)
        if not loss:
            continue
        value = loss["further"][figure] if is_figure else loss["nats"] / loss["num_tokens"]
        if value is not None:
            candidates.append(_Best(value, evaluation["step"], higher_is_better))

    finite = [candidate for candidate in candidates if math.isfinite(candidate.value)]
    sign = -1 if higher_is_better else 1
    return min(finite, key=lambda candidate: sign * candidate.value, default=None)


def _find_last_change(run_dir: Path) -> float:
    """Return when the newest of the files that a run writes was changed, in seconds since 1970."""
    files = [run_dir / name for name in (*_RUN_ENTRIES, LOG)]
    files += (run_dir / _CHECKPOINTS).glob("step-*")
    newest = run_dir.stat().st_mtime
    for file in files:
        with suppress(FileNotFoundError):
            newest = max(newest, file.stat().st_mtime)
    return newest


def _describe_data(arguments: dict[str, Any]) -> str | None:
    """Return the paths of the token datasets, or the names of streams or prompts, joined; None if none is given."""
    sources = arguments.get("streaming_dataset") or arguments.get("prompts") or arguments.get("train_data_dir")
    if isinstance(sources, list):
        return ", ".join(str(source) for source in sources)
    return str(sources) if sources else sources
