"""Build the charts that show the metrics of one run, or of several runs over one another."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fabric_train.pages.charts import Chart, Mark, Series, moving_average, sample_points
from fabric_train.training.metrics import COLUMNS
from fabric_train.training.metrics_table import MetricsTable

_MIN_SMOOTHED_POINTS = 200
_MAX_PAGE_POINTS = 48_000  # of all curves of a page
_MAX_CURVE_POINTS = 2000
_MIN_CURVE_POINTS = 120
_NOT_SMOOTHED = ("learning_rate", "peak_memory_gb")
_SOURCE_FIGURES = {"val_bits_per_byte": "bits per byte", "val_loss": "nats per token"}
"""The figures of sources, with their units; a chart shows the first one that exists."""

_METRICS_BY_SOURCE = ("accuracy", "divergence", "cross_entropy", "agreement")
_REWARD = "reward"
"""The metric of reinforcement learning; those of its single rewards, whose names begin so too, share its chart."""
_STANDARD_ERROR = "stderr_"
"""The beginning of the names of standard errors, which have no curves."""
_UNITS = {
    "divergence": "nats per token",
    "cross_entropy": "nats per token",
    "agreement": "share of tokens",
    "completions": "number in a step",
    "completion_tokens": "tokens of a completion",
    "cut_completions": "share of completions",
    "failed_rewards": "share of completions",
    "flat_groups": "share of completions, in groups of equal rewards",
    "sampler_weight": "mean over tokens",
    "weights_cut": "share of tokens",
    "sampler_kl": "nats per token",
    "reference_kl": "nats per token",
    "entropy": "nats per token",
}
"""The units of metrics that need one on the axis; of others, it has the name."""

NamedTable = tuple[str, MetricsTable]
"""The name of a run, and its metrics."""


@dataclass(frozen=True)
class _Curve:
    label: str
    column: str


@dataclass(frozen=True)
class _ChartPlan:
    """A planned chart, for which there may be no values."""

    key: str
    title: str
    y_title: str
    curves: Sequence[_Curve]
    from_zero: bool = False


def _single_curve(column: str, title: str, y_title: str) -> _ChartPlan:
    return _ChartPlan(column, title, y_title, [_Curve(title.lower(), column)], from_zero=True)


_SINGLE_CURVES = (
    _single_curve("learning_rate", "Learning rate", "learning rate"),
    _single_curve("grad_norm", "Gradient norm", "norm before clipping"),
    _single_curve("tokens_per_second", "Speed", "tokens/s"),
    _single_curve("mfu", "MFU", "share of the peak FLOP/s"),
    _single_curve("data_wait", "Waiting for data", "share of the step time"),
    _single_curve("step_time", "Step time", "seconds"),
    _single_curve("rank_lag", "Lag of the slowest rank", "seconds per step above the median"),
    _single_curve("peak_memory_gb", "Peak memory of rank 0", "10⁹ bytes"),
)


def metric_charts(runs: Sequence[NamedTable], marks: Sequence[Mark] = ()) -> list[Chart]:
    """Return the charts of one run, or of several over one another. ``marks`` belong to the first run."""
    # A page has a limited number of points, which its curves share.
    tables = [table for _, table in runs]
    plans = list(_plan_charts(tables))
    num_curves = sum(_count_curves(plan, tables) for plan in plans)
    max_points = _MAX_PAGE_POINTS // max(num_curves, 1)
    max_points = min(max(max_points, _MIN_CURVE_POINTS), _MAX_CURVE_POINTS)

    # Charts without any value are left out.
    charts = []
    for plan in plans:
        series: list[Series] = []
        for curve in plan.curves:
            series.extend(_build_series(runs, curve, max_points, names_curves=len(plan.curves) > 1))
        if series:
            chart = Chart(
                key=plan.key,
                title=plan.title,
                y_title=plan.y_title,
                series=tuple(series),
                marks=_select_marks(marks, series),
                from_zero=plan.from_zero,
                note=_describe_smoothing(series, tables),
            )
            charts.append(chart)
    return charts


def _plan_charts(tables: Sequence[MetricsTable]) -> Iterator[_ChartPlan]:
    """Yield the charts in the order of the page."""
    yield _ChartPlan(
        "loss", "Loss", "nats per token", [_Curve("training", "train_loss"), _Curve("validation", "val_loss")]
    )
    for figure, unit in _SOURCE_FIGURES.items():
        if any(len(table.sources_of(figure)) > 1 for table in tables):
            yield _ChartPlan("sources", "Validation by source", unit, _source_curves(tables, figure))
            break
    training_curves = _source_curves(tables, "train_loss")
    if len(training_curves) > 1:
        yield _ChartPlan("trained", "Training loss by source", "nats per token", training_curves)
    yield from _plan_extra_metrics(tables)
    yield from _SINGLE_CURVES


def _source_curves(tables: Sequence[MetricsTable], figure: str) -> list[_Curve]:
    """Return a curve of a figure for each source that any run has."""
    sources: dict[str, None] = {}
    for table in tables:
        sources |= dict.fromkeys(table.sources_of(figure))
    return [_Curve(source, f"{figure}/{source}") for source in sources]


def _plan_extra_metrics(tables: Sequence[MetricsTable]) -> Iterator[_ChartPlan]:
    """Yield charts of each metric of an objective or an evaluation: of training and validation, and by source.

    Preference pairs have so many metrics that only their accuracy is shown by source.
    """
    columns: dict[str, None] = {}
    for table in tables:
        columns |= dict.fromkeys(name for name in table.columns if "/" not in name and name not in COLUMNS)
    names = [column.partition("_")[2] for column in columns]  # after train_ or val_
    metric_names = dict.fromkeys(name for name in names if not name.startswith(_STANDARD_ERROR))
    if _REWARD in metric_names:
        reward_names = [name for name in metric_names if name.startswith(f"{_REWARD}_")]
        yield from _plan_rewards(tables, reward_names, columns)
        for name in (_REWARD, *reward_names):
            del metric_names[name]
    for name in metric_names:
        curves = [_Curve("training", f"train_{name}"), _Curve("validation", f"val_{name}")]
        words = name.replace("_", " ")
        logged_curves = [curve for curve in curves if curve.column in columns]
        unit = _UNITS.get(name, words)
        yield _ChartPlan(f"metric-{name}", words.capitalize(), unit, logged_curves)
        source_curves = _source_curves(tables, f"val_{name}")
        if len(source_curves) > 1 and name in _METRICS_BY_SOURCE:
            yield _ChartPlan(f"sources-{name}", f"{words.capitalize()} by source", unit, source_curves)


def _plan_rewards(
    tables: Sequence[MetricsTable], reward_names: Sequence[str], columns: Collection[str]
) -> Iterator[_ChartPlan]:
    """Yield a chart of the rewards of completions by name, and of their sum by source in training and validation.

    ``reward_names`` are the metrics of the single rewards, such as reward_exact_answer.
    """
    label_by_metric = {_REWARD: "reward"}
    if len(reward_names) > 1:  # a single reward and the sum would have the same curve
        label_by_metric = {_REWARD: "weighted sum"}
        label_by_metric |= {name: name.removeprefix(f"{_REWARD}_") for name in reward_names}
    curves = []
    for name, label in label_by_metric.items():
        for column, suffix in ((f"train_{name}", ""), (f"val_{name}", ", validation")):
            if column in columns:
                curves.append(_Curve(f"{label}{suffix}", column))
    yield _ChartPlan("rewards", "Rewards", "mean over completions", curves)
    source_curves = _source_curves(tables, f"train_{_REWARD}")
    if len(source_curves) > 1:
        yield _ChartPlan("sources-reward", "Reward by source", "mean over completions", source_curves)
    validation_curves = _source_curves(tables, f"val_{_REWARD}")
    if len(validation_curves) > 1:
        title = "Validation reward by source"
        yield _ChartPlan("sources-validation-reward", title, "mean over completions", validation_curves)


def _count_curves(plan: _ChartPlan, tables: Sequence[MetricsTable]) -> int:
    """Return the number of curves in a chart that have values, over all runs."""
    count = 0
    for curve in plan.curves:
        count += sum(len(table.measured_rows(curve.column)) > 0 for table in tables)
    return count


def _build_series(
    runs: Sequence[NamedTable], curve: _Curve, max_points: int, *, names_curves: bool
) -> Iterator[Series]:
    """Yield the curve of each run that has values. With ``names_curves``, the chart has several curves of each run."""
    num_points = max(len(table.measured_rows(curve.column)) for _, table in runs)
    is_smooth = num_points > _MIN_SMOOTHED_POINTS and curve.column not in _NOT_SMOOTHED
    for run_index, (run_name, table) in enumerate(runs):
        rows = table.measured_rows(curve.column)
        if len(rows) == 0:
            continue
        steps = table.steps[rows].astype(np.float64)
        values = table.columns[curve.column][rows]
        points = sample_points(steps, values, max_points)  # indices; extremes are kept
        smooth = None
        if is_smooth:
            smooth = moving_average(values, _smoothing_width(num_points))[points]

        name = curve.label
        if len(runs) > 1:
            name = f"{run_name}: {curve.label}" if names_curves else run_name
        kind = "points" if curve.column.startswith("val_") else "line"
        yield Series(name, steps[points], values[points], smooth, kind=kind, axis=run_index)


def _smoothing_width(num_points: int) -> int:
    """Return the number of points over which a smooth curve is a mean."""
    return num_points // 50


def _describe_smoothing(series: Sequence[Series], tables: Sequence[MetricsTable]) -> str:
    if all(curve.smooth is None for curve in series):
        return ""
    width = _smoothing_width(max(len(table.steps) for table in tables))
    return f"Smooth curves are means over about {width:,} logged steps; the faint curves keep all extremes."


def _select_marks(marks: Sequence[Mark], series: Sequence[Series]) -> tuple[Mark, ...]:
    """Return the marks between the first and the last point of a chart."""
    begin = min(curve.x[0] for curve in series)
    end = max(curve.x[-1] for curve in series)
    return tuple(mark for mark in marks if begin <= mark.x <= end)
