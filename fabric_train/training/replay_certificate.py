"""Compare steps that were trained again with metrics.csv, and keep the result as ``RUN/replay.json``."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fabric_train.cli.errors import InputError
from fabric_train.cli.launcher import machine_name
from fabric_train.files.regular_file import read_json, write_atomically
from fabric_train.model.origin import SPLIT_ARGUMENTS
from fabric_train.training.metrics import Metrics, read_metrics

if TYPE_CHECKING:
    from fabric_train.training.prepared_run import PreparedRun

FILE_NAME = "replay.json"
_CANCELLED = tuple(f"train_{name}" for name in ("reward_chosen", "reward_rejected", "margin", "accuracy", "ties", "kl"))
"""Figures of preference pairs that are differences of nearly equal log-probabilities: only compared bit for bit."""
_EXACT = ("epoch", "num_tokens", "skipped_steps", "rows_hash")
_FIGURES = ("learning_rate", "train_loss", "grad_norm")
_SHOWN_STEPS = 8
_SHOWN_FAULTS = 20


@dataclass(frozen=True)
class RunLayout:
    """How the computation of steps was split from ``first_step`` on.

    ``device`` is None if unknown. ``split`` has ``SPLIT_ARGUMENTS``, none for an earlier version without checkpoint.
    """

    num_devices: int
    device: str | None
    split: dict[str, Any]
    first_step: int = 1

    def differences(self, there: "RunLayout") -> list[str]:
        """Return what differs from the layout ``there``, an empty list if the figures must be the same bit for bit."""
        pairs = {
            "devices": (there.num_devices, self.num_devices),
            "device": (there.device or self.device, self.device or there.device),
            **{name: (there.split.get(name, "unknown"), self.split[name]) for name in SPLIT_ARGUMENTS},
        }
        return [f"{name} {one} there, {other} here" for name, (one, other) in pairs.items() if one != other]

    def __str__(self) -> str:
        name = f"{self.num_devices} × {self.split.get('parallelism', 'unknown')}"
        return name + (f", {self.device}" if self.device else "")


@dataclass(frozen=True)
class Replay:
    """Steps of a run that are ready to be trained again.

    ``logged`` are the rows of metrics.csv from the first step that is trained to the last one. ``there`` has the layout
    of each session that took some of these steps. ``faults`` were found without training, ``contents`` says whether the
    content of the rows was checked. ``evaluations`` are validation losses in checkpoints, by step.
    """

    folder: Path
    steps: tuple[int, int]
    run: "PreparedRun"
    logged: list[Metrics]
    evaluations: dict[int, float]
    there: list[RunLayout]
    here: RunLayout
    contents: str
    faults: list[str]
    other_versions: list[str]

    def on(self, device: str) -> "Replay":
        return replace(self, here=replace(self.here, device=device))

    @property
    def same_until(self) -> float:
        """The last step that must be the same bit for bit: as long as all steps were split as they are here."""
        return next((layout.first_step for layout in self.there if self.here.differences(layout)), math.inf) - 1

    def tolerance(self, step: int) -> float:
        """Return the largest relative difference with which a figure of a step holds; 0 is bit for bit."""
        from fabric_train.training.self_check import TOLERANCES  # imports all that trains

        return 0.0 if step <= self.same_until else TOLERANCES[self.run.arguments.model.precision]

    @property
    def has_pairs(self) -> bool:
        return self.run.arguments.preference.needs_pairs

    @property
    def compared(self) -> list[str]:
        """The columns of metrics.csv that are compared: those that the logged steps have."""
        found = {name for row in self.logged for name in (*_exact(row), *_figures(row))}
        if self.has_pairs and all(map(self.tolerance, (row.step for row in self.logged))):
            found -= set(_CANCELLED)
        return [*(("val_loss",) if self.evaluations else ()), *sorted(found)]

    @property
    def _cancels(self) -> bool:
        return self.has_pairs and math.isfinite(self.same_until)

    @property
    def not_compared(self) -> list[str]:
        """What metrics.csv says of these steps that is not compared, and why."""
        evaluated = [row.step for row in self.logged if row.val_loss is not None and row.step not in self.evaluations]
        steps = ", ".join(map(str, evaluated[:_SHOWN_STEPS])) + (", …" if len(evaluated) > _SHOWN_STEPS else "")
        lacking = [name for name in (*_EXACT, *_FIGURES) if name not in self.compared]
        return [
            *([f"validation losses of step {steps}, which no checkpoint has"] if evaluated else []),
            *([f"after step {self.same_until}: {', '.join(_CANCELLED)}"] if self._cancels else []),
            *(["losses of single sources in evaluations"] if _of_sources(self.logged, "val_") else []),
            *([f"{', '.join(lacking)}: not in metrics.csv"] if lacking else []),
            "times, speeds and memory",
        ]


@dataclass(frozen=True)
class _Compared:
    """A logged step that was trained again; ``differences`` has the relative difference of each figure."""

    there: Metrics
    here: Metrics | None
    differences: dict[str, float]
    faults: list[str]


@dataclass(frozen=True)
class Certificate:
    """The result of a replay; ``steps`` is empty if nothing was trained."""

    replay: Replay
    steps: list[_Compared]

    @property
    def faults(self) -> list[str]:
        """A line for each difference, the first one first."""
        return [*self.replay.faults, *(fault for step in self.steps for fault in step.faults)]

    @property
    def holds(self) -> bool:
        return bool(self.steps) and not self.faults

    @property
    def rule(self) -> str:
        """How near the figures have to be, and why."""
        replay = self.replay
        reasons = dict.fromkeys(one for layout in replay.there for one in replay.here.differences(layout))
        if not reasons:
            return "bit for bit: the same number and kind of devices, split in the same way"
        first = replay.run.start.state.step + 1
        until = replay.same_until
        exact = f"bit for bit up to step {until}, after it " if until >= first else ""
        return f"{exact}to {replay.tolerance(replay.steps[1]):.1e} relative: {'; '.join(reasons)}"

    @property
    def largest(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for step in self.steps:
            found |= {name: max(found.get(name, 0.0), value) for name, value in step.differences.items()}
        return found

    def write(self) -> Path:
        """Write ``RUN/replay.json``, and return its path."""
        replay = self.replay
        run = self.replay.run
        path = replay.folder / FILE_NAME
        content = {
            "verdict": "holds" if self.holds else "differs",
            "steps": list(replay.steps),
            "trained_from": run.start.state.step + 1,
            "compared_steps": len(self.steps),
            "checkpoint": run.start.checkpoint.name if run.start.checkpoint else None,
            "rule": self.rule,
            "compared": replay.compared,
            "not_compared": replay.not_compared,
            "tolerance": replay.tolerance(replay.steps[1]),
            "largest_differences": self.largest,
            "faults": self.faults,
            "contents": replay.contents,
            "there": _describe_layouts(replay.there),
            "here": str(replay.here),
            "versions": run.versions,
            "other_versions": replay.other_versions,
            "machine": machine_name(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "figures": _digest(replay.logged),
        }
        write_atomically(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        return path

    def describe(self) -> Group:
        """Return the table of the steps and the result for the console."""
        columns = ("step", "loss there", "loss here", "gradient norm there", "here", "largest difference")
        table = Table(*columns, title="Replay", title_justify="left", title_style="bold", box=None, pad_edge=False)
        differing = [step for step in self.steps if step.faults][:_SHOWN_STEPS]
        for step in differing or self.steps[-_SHOWN_STEPS:]:
            figures = [(row.train_loss, row.grad_norm) if row else (None, None) for row in (step.there, step.here)]
            cells = ["" if value is None else f"{value:.9g}" for pair in zip(*figures, strict=True) for value in pair]
            table.add_row(str(step.there.step), *cells, f"{max(step.differences.values(), default=0.0):.1e}")
        about = Table.grid(padding=(0, 2))
        for name, text in self._about().items():
            about.add_row(name, text)
        verdict = Text("holds: every compared figure is reproduced", "bold green")
        if not self.holds:
            more = len(self.faults) - _SHOWN_FAULTS
            hidden = [f"and {more:,} more, see {FILE_NAME}"] if more > 0 else []
            verdict = Text("\n".join(["differs:", *self.faults[:_SHOWN_FAULTS], *hidden]), "bold red")
        return Group(*([table] if self.steps else []), about, verdict)

    def _about(self) -> dict[str, str]:
        replay = self.replay
        start = self.replay.run.start.checkpoint
        first, last = replay.steps
        came_from = f"trained from {start.name if start else 'the beginning'}" if self.steps else "nothing was trained"
        about = {
            "steps": f"{first} to {last}, {came_from}, {len(self.steps)} logged steps compared",
            "there": _describe_layouts(replay.there),
            "here": f"{replay.here}",
            "figures": self.rule,
            "compared": ", ".join(replay.compared),
            "not compared": "; ".join(replay.not_compared),
            "content of rows": replay.contents,
        }
        return about | ({"other versions": ", ".join(replay.other_versions)} if replay.other_versions else {})


def compare(replay: Replay, trained: Sequence[Metrics]) -> Certificate:
    """Compare all logged steps with those that were trained again."""
    here = {row.step: row for row in trained}
    return Certificate(replay, [_compare_step(replay, row, here.get(row.step)) for row in replay.logged])


def _compare_step(replay: Replay, there: Metrics, here: Metrics | None) -> _Compared:
    if here is None:
        return _Compared(there, None, {}, [f"step {there.step}: not reached here"])
    tolerance = replay.tolerance(there.step)
    logged, found = (_exact(row) | _figures(row) for row in (there, here))
    differences = {key: relative_difference(value, found.get(key, math.nan)) for key, value in _figures(there).items()}
    wrong = [
        f"step {there.step}, {name}: {value} in metrics.csv, {found.get(name)} here"
        for name, value in logged.items()
        if (differences[name] > tolerance if name in differences else value != found.get(name))
        and not (tolerance and replay.has_pairs and name in _CANCELLED)
    ]
    emptied = [name for name in found if name not in logged and name in replay.compared]
    wrong += [f"step {there.step}, {name}: empty in metrics.csv, {found[name]} here" for name in emptied]
    return _Compared(there, here, differences, wrong)


def _exact(row: Metrics) -> dict[str, Any]:
    """Return the values that are the same on any devices; those that are not logged are left out."""
    return {name: value for name in _EXACT if (value := getattr(row, name)) is not None}


def _figures(row: Metrics) -> dict[str, float]:
    """Return the values whose last digits may depend on the devices; those that are not logged are left out."""
    figures = {name: value for name in _FIGURES if (value := getattr(row, name)) is not None}
    of_objective = {name: value for name, value in row.further.items() if name.startswith("train_")}
    return figures | of_objective | _of_sources([row], "train_loss/")


def _of_sources(rows: Sequence[Metrics], prefix: str) -> dict[str, float]:
    """Return the values of the columns of single sources that begin with ``prefix``, the last one of each."""
    return {name: value for row in rows for name, value in row.by_source.items() if name.startswith(prefix)}


def _describe_layouts(layouts: Sequence[RunLayout]) -> str:
    first, *later = layouts
    return "; ".join([f"{first}", *(f"from step {layout.first_step} {layout}" for layout in later)])


def relative_difference(one: float, other: float) -> float:
    """Return the difference of two numbers relative to the larger; 0 if they are equal or both NaN."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    difference = abs(one - other) / max(abs(one), abs(other))
    return math.inf if math.isnan(difference) else difference


@dataclass(frozen=True)
class StoredCertificate:
    """What other programs read of ``RUN/replay.json``."""

    verdict: str
    steps: tuple[int, int]
    trained_from: int
    rule: str
    compared: list[str]
    not_compared: list[str]
    contents: str
    here: str
    date: str
    figures: str


def read_certificate(run: Path, step: int) -> StoredCertificate | None:
    """Return the certificate of a run that holds for its metrics.csv and for steps up to ``step``, or None."""
    file = run / FILE_NAME
    if not file.is_file():
        return None
    try:
        found = read_json(file, StoredCertificate, "replay again")
        first = found.trained_from
        last = found.steps[1]
        rows = [row for row in read_metrics(run / "metrics.csv", last) if row.step >= first]
    except InputError:
        return None
    return found if found.verdict == "holds" and last <= step and _digest(rows) == found.figures else None


def _digest(rows: Sequence[Metrics]) -> str:
    figures = [[row.step, _exact(row), _figures(row), row.val_loss] for row in rows]
    return hashlib.sha256(json.dumps(figures).encode()).hexdigest()
