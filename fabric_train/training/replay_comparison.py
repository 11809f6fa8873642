"""Compare steps that were trained again with metrics.csv."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fabric_train.model.origin import SPLIT_ARGUMENTS
from fabric_train.training.metrics import Metrics

if TYPE_CHECKING:
    from fabric_train.training.prepared_run import PreparedRun

_CANCELLING_COLUMNS = (
    "train_reward_chosen",
    "train_reward_rejected",
    "train_reward_desirable",
    "train_reward_undesirable",
    "train_margin",
    "train_accuracy",
    "train_ties",
    "train_kl",
)
"""Figures of preferences that are only compared bit for bit, because they are differences of nearly equal values."""
_EXACT_COLUMNS = ("epoch", "num_tokens", "skipped_steps", "rows_hash")
"""The columns that are the same on any devices."""
_FIGURE_COLUMNS = ("learning_rate", "train_loss", "grad_norm")
"""The columns whose last digits may depend on the devices."""
_MAX_SHOWN_STEPS = 8
_MAX_SHOWN_FAULTS = 20


@dataclass(frozen=True)
class RunLayout:
    """How the computation of steps was split from ``first_step`` on."""

    num_devices: int
    device: str | None
    """The ``device_name``; None if unknown."""
    split: dict[str, Any]
    """The values of ``SPLIT_ARGUMENTS``; empty for an earlier version without a checkpoint."""
    first_step: int = 1

    def differences(self, run_layout: "RunLayout") -> list[str]:
        """Return the differences from the run's layout; without any, figures must be bit-identical."""
        run_values: dict[str, Any] = {"devices": run_layout.num_devices}
        replay_values: dict[str, Any] = {"devices": self.num_devices}
        if run_layout.device and self.device:  # an unknown device is taken to be the same
            run_values["device"] = run_layout.device
            replay_values["device"] = self.device
        for name in SPLIT_ARGUMENTS:
            run_values[name] = run_layout.split.get(name, "unknown")
            replay_values[name] = self.split[name]
        differences = []
        for name, run_value in run_values.items():
            if run_value != replay_values[name]:
                differences.append(f"{name} {run_value} in the run, {replay_values[name]} in the replay")
        return differences

    def __str__(self) -> str:
        name = f"{self.num_devices} × {self.split.get('parallelism', 'unknown')}"
        return f"{name}, {self.device}" if self.device else name


@dataclass(frozen=True)
class Replay:
    """Steps of a run that are ready to be trained again."""

    folder: Path
    first_step: int
    """The first step to compare; training may begin with an earlier step, see ``logged``."""
    last_step: int
    """The last step to compare."""
    run: "PreparedRun"
    logged: list[Metrics]
    """The rows of metrics.csv from the first step that is trained to the last one."""
    evaluations: dict[int, float]
    """The validation losses in checkpoints, by step."""
    run_layouts: list[RunLayout]
    """The layout of each session of the run that took some of these steps."""
    replay_layout: RunLayout
    """The layout of the replay."""
    contents: str
    """Whether the content of the rows was checked."""
    faults: list[str]
    """The faults that were found without training."""
    other_versions: list[str]
    """The packages whose version differs from the run's."""

    def on(self, device: str) -> "Replay":
        """Return the replay with the name of its device."""
        return replace(self, replay_layout=replace(self.replay_layout, device=device))

    @property
    def same_until(self) -> float:
        """The last step that must be bit-identical: up to this step, the run split its windows as the replay does."""
        for layout in self.run_layouts:
            if self.replay_layout.differences(layout):
                return layout.first_step - 1
        return math.inf

    def tolerance(self, step: int) -> float:
        """Return the largest relative difference that a figure of a step may have; 0 means bit for bit."""
        from fabric_train.training.self_check import TOLERANCES  # imports all that trains

        if step <= self.same_until:
            return 0.0
        return TOLERANCES[self.run.arguments.model.precision]

    @property
    def has_pairs(self) -> bool:
        """Whether the run trains on preference pairs or unpaired answers."""
        return self.run.arguments.preference.compares_answers

    @property
    def compared(self) -> list[str]:
        """The columns of metrics.csv that are compared, because the logged steps have values."""
        columns = set[str]()
        for row in self.logged:
            columns.update(_exact_values(row), _figures(row))
        is_never_exact = all(self.tolerance(row.step) > 0 for row in self.logged)
        if self.has_pairs and is_never_exact:
            columns.difference_update(_CANCELLING_COLUMNS)
        compared = sorted(columns)
        if self.evaluations:
            compared.insert(0, "val_loss")
        return compared

    @property
    def not_compared(self) -> list[str]:
        """The values of these steps that are not compared, including columns that metrics.csv lacks."""
        lines = []
        steps = [row.step for row in self.logged if row.val_loss is not None and row.step not in self.evaluations]
        if steps:
            listed = ", ".join(str(step) for step in steps[:_MAX_SHOWN_STEPS])
            if len(steps) > _MAX_SHOWN_STEPS:
                listed += ", …"
            lines.append(f"validation losses of step {listed}, which are in no checkpoint")
        # Steps after that are split otherwise than in the run, and the rounding of these figures then differs.
        if self.has_pairs and math.isfinite(self.same_until):
            lines.append(f"after step {self.same_until}: {', '.join(_CANCELLING_COLUMNS)}")
        if _source_values(self.logged, "val_"):
            lines.append("validation losses of individual sources")
        missing = [name for name in (*_EXACT_COLUMNS, *_FIGURE_COLUMNS) if name not in self.compared]
        if missing:
            lines.append(f"{', '.join(missing)}: not in metrics.csv")
        lines.append("times, speeds and memory")
        return lines


@dataclass(frozen=True)
class _ComparedStep:
    """A logged step that was trained again."""

    logged: Metrics
    repeated: Metrics | None
    """The metrics of the repeated step; None if the replay has not reached the step."""
    differences: dict[str, float]
    """The relative difference of each figure."""
    faults: list[str]


@dataclass(frozen=True)
class ReplayComparison:
    """The comparison of a run with its replay; ``steps`` is empty if nothing was trained."""

    replay: Replay
    steps: list[_ComparedStep]

    @property
    def faults(self) -> list[str]:
        """A line for each difference, in the order of the steps."""
        faults = list(self.replay.faults)
        for step in self.steps:
            faults += step.faults
        return faults

    @property
    def holds(self) -> bool:
        """Whether steps were trained and nothing differs."""
        return bool(self.steps) and not self.faults

    @property
    def rule(self) -> str:
        """How close the figures must be, and why."""
        replay = self.replay
        reasons: dict[str, None] = {}
        for layout in replay.run_layouts:
            reasons |= dict.fromkeys(replay.replay_layout.differences(layout))
        if not reasons:
            return "bit-identical: same number and kind of devices, same parallelism"
        first_step = replay.run.start.state.step + 1
        exact = ""
        if replay.same_until >= first_step:
            exact = f"bit-identical up to step {replay.same_until}, then "
        return (
            f"{exact}equal within a relative difference of {replay.tolerance(replay.last_step):.1e}: "
            f"{'; '.join(reasons)}"
        )

    @property
    def largest_differences(self) -> dict[str, float]:
        """The largest relative difference of each figure."""
        largest: dict[str, float] = {}
        for step in self.steps:
            for name, difference in step.differences.items():
                largest[name] = max(largest.get(name, 0.0), difference)
        return largest

    def describe(self) -> Group:
        """Return the table of the steps and the result for the console."""
        facts = Table.grid(padding=(0, 2))
        for name, text in self._facts().items():
            facts.add_row(name, text)
        if self.holds:
            verdict = Text("passed: every compared value is reproduced", "bold green")
        else:
            lines = ["differs:", *self.faults[:_MAX_SHOWN_FAULTS]]
            num_hidden = len(self.faults) - _MAX_SHOWN_FAULTS
            if num_hidden > 0:
                lines.append(f"and {num_hidden:,} more")
            verdict = Text("\n".join(lines), "bold red")
        if not self.steps:
            return Group(facts, verdict)
        return Group(self._step_table(), facts, verdict)

    def _step_table(self) -> Table:
        """Return the table of the first steps that differ, or of the last ones if none does."""
        columns = ("step", "loss in run", "in replay", "gradient norm in run", "in replay", "largest difference")
        table = Table(*columns, title="Replay", title_justify="left", title_style="bold", box=None, pad_edge=False)
        steps = [step for step in self.steps if step.faults][:_MAX_SHOWN_STEPS]
        if not steps:
            steps = self.steps[-_MAX_SHOWN_STEPS:]
        for step in steps:
            repeated_loss = step.repeated.train_loss if step.repeated else None
            repeated_norm = step.repeated.grad_norm if step.repeated else None
            table.add_row(
                str(step.logged.step),
                _format_figure(step.logged.train_loss),
                _format_figure(repeated_loss),
                _format_figure(step.logged.grad_norm),
                _format_figure(repeated_norm),
                f"{max(step.differences.values(), default=0.0):.1e}",
            )
        return table

    def _facts(self) -> dict[str, str]:
        """Return what was compared and how, as facts by name."""
        replay = self.replay
        checkpoint = replay.run.start.checkpoint
        origin = "nothing was trained"
        if self.steps:
            origin = f"trained from {checkpoint.name if checkpoint else 'the beginning'}"
        facts = {
            "steps": f"{replay.first_step} to {replay.last_step}, {origin}, {len(self.steps)} logged steps compared",
            "run": _describe_layouts(replay.run_layouts),
            "replay": f"{replay.replay_layout}",
            "figures": self.rule,
            "compared": ", ".join(replay.compared),
            "not compared": "; ".join(replay.not_compared),
            "content of rows": replay.contents,
        }
        if replay.other_versions:
            facts["other versions"] = ", ".join(replay.other_versions)
        return facts


def _format_figure(value: float | None) -> str:
    return "" if value is None else f"{value:.9g}"


def compare(replay: Replay, repeated_rows: Sequence[Metrics]) -> ReplayComparison:
    """Compare all logged steps with those that were trained again."""
    repeated = {row.step: row for row in repeated_rows}
    return ReplayComparison(replay, [_compare_step(replay, row, repeated.get(row.step)) for row in replay.logged])


def _compare_step(replay: Replay, logged: Metrics, repeated: Metrics | None) -> _ComparedStep:
    """Compare a row of metrics.csv with the same step of the replay."""
    if repeated is None:
        return _ComparedStep(logged, None, {}, [f"step {logged.step}: not reached in the replay"])
    # How far each figure is from the logged one.
    tolerance = replay.tolerance(logged.step)
    logged_values = _exact_values(logged) | _figures(logged)
    repeated_values = _exact_values(repeated) | _figures(repeated)
    differences = {}
    for name, figure in _figures(logged).items():
        differences[name] = relative_difference(figure, repeated_values.get(name, math.nan))

    # What differs: values of metrics.csv, and values that it lacks.
    faults = []
    for name, value in logged_values.items():
        if tolerance and replay.has_pairs and name in _CANCELLING_COLUMNS:
            continue
        if name in differences:
            is_wrong = differences[name] > tolerance
        else:
            is_wrong = value != repeated_values.get(name)
        if is_wrong:
            faults.append(f"step {logged.step}, {name}: {value} in metrics.csv, {repeated_values.get(name)} here")
    for name, value in repeated_values.items():
        if name not in logged_values and name in replay.compared:
            faults.append(f"step {logged.step}, {name}: empty in metrics.csv, {value} here")
    return _ComparedStep(logged, repeated, differences, faults)


def _exact_values(row: Metrics) -> dict[str, Any]:
    """Return the values of ``_EXACT_COLUMNS``, without columns that are not logged."""
    return _logged_values(row, _EXACT_COLUMNS)


def _figures(row: Metrics) -> dict[str, float]:
    """Return the values whose last digits may depend on the devices, without columns that are not logged."""
    objective_metrics = {name: value for name, value in row.extra.items() if name.startswith("train_")}
    return _logged_values(row, _FIGURE_COLUMNS) | objective_metrics | _source_values([row], "train_loss/")


def _logged_values(row: Metrics, columns: Sequence[str]) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in columns}
    return {name: value for name, value in values.items() if value is not None}


def _source_values(rows: Sequence[Metrics], prefix: str) -> dict[str, float]:
    """Return the values of the columns of sources that begin with ``prefix``."""
    values: dict[str, float] = {}
    for row in rows:
        values.update({name: value for name, value in row.by_source.items() if name.startswith(prefix)})
    return values


def _describe_layouts(layouts: Sequence[RunLayout]) -> str:
    descriptions = [str(layouts[0])]
    descriptions += [f"from step {layout.first_step} {layout}" for layout in layouts[1:]]
    return "; ".join(descriptions)


def relative_difference(value: float, reference: float) -> float:
    """Return the difference of two numbers relative to the larger; 0 if they are equal or both NaN."""
    if value == reference or (math.isnan(value) and math.isnan(reference)):
        return 0.0
    difference = abs(value - reference) / max(abs(value), abs(reference))
    return math.inf if math.isnan(difference) else difference
