"""Run all parts, show them as one table, and draw them into docs/scale.png."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.measure import ROOT
from benchmarks.report import Report
from benchmarks.scale import checkpoint, collectives, dataset, goodput, watch, weights
from benchmarks.scale.series import Series
from fabric_train.pages import charts

PARTS: dict[str, Callable[[Path], list[Series]]] = {
    "dataset": dataset.measure,
    "watch": watch.measure,
    "collectives": collectives.measure,
    "checkpoint": checkpoint.measure,
    "weights": weights.measure,
    "goodput": goodput.measure,
}
PICTURE = ROOT / "docs" / "scale.png"


@dataclass(frozen=True)
class ScaleSummary:
    """The quantities above their limit at the largest size."""

    above_limit: list[str]


def measure(work: Path) -> Report:
    """Measure each part.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        ChildProcessError: a measured process failed.
    """
    runs = {}
    for name, part in PARTS.items():
        print(f"scale: {name}", flush=True)
        (ROOT / work / name).mkdir(parents=True)
        runs[name] = part(work / name)
    measured = [one for series in runs.values() for one in series]
    draw(measured, PICTURE)
    return Report("scale", {}, {}, runs, ScaleSummary(above_limits(measured)))


def above_limits(measured: list[Series]) -> list[str]:
    """Return the part and quantity of each series whose last value is above its limit."""
    return [
        f"{one.part}: {one.quantity}" for one in measured if one.limit is not None and one.points[-1].value > one.limit
    ]


def table(report: Report) -> Table:
    """Return a table with the first and last value of each quantity, its limit, and the parts that are simulated."""
    columns = ("part", "quantity", "from", "to", "limit", "simulated", "real")
    title = "Growth: the value at the smallest and at the largest size"
    shown = Table(*columns, title=title, title_justify="left", box=box.SIMPLE)
    for series in report.runs.values():
        for one in series:
            ends = [f"{_number(one, point.value)} at {point.size:,}" for point in (one.points[0], one.points[-1])]
            limit = "" if one.limit is None else _number(one, one.limit)
            shown.add_row(one.part, f"{one.quantity} ({one.sizes_of})", *ends, limit, one.simulated, one.real)
    shown.caption = "\n".join(f"above its limit: {name}" for name in report.summary.above_limit)
    return shown


def draw(measured: list[Series], picture: Path) -> None:
    """Draw each quantity over its sizes as a PNG, both axes logarithmic, one panel for each part and unit."""
    panels: dict[tuple[str, str, str], list[Series]] = {}
    for one in measured:
        panels.setdefault((one.part, one.unit, one.sizes_of), []).append(one)
    drawn = [panel for of_panel, series in panels.items() if (panel := _panel(of_panel, series))]
    scales = {"scale": {"color": "independent"}}
    charts.write_png({"concat": drawn, "columns": 2, "resolve": scales}, picture, "How the parts grow")


def _panel(of_panel: tuple[str, str, str], series: list[Series]) -> dict[str, Any] | None:
    """Return the Vega-Lite specification of one panel; None if no value can be shown on a logarithmic axis."""
    part, unit, sizes_of = of_panel
    values = [
        {"size": point.size, "value": point.value, "quantity": one.quantity}
        for one in series
        for point in one.points
        if point.size > 0 and point.value > 0
    ]
    if not values:
        return None
    logarithmic = {"type": "quantitative", "scale": {"type": "log"}, "axis": {"tickCount": 5, "format": "~s"}}
    return {
        "title": part,
        "width": 420,
        "height": 200,
        "data": {"values": values},
        "mark": {"type": "line", "point": True},
        "encoding": {
            "x": {"field": "size", "title": sizes_of, **logarithmic},
            "y": {"field": "value", "title": unit, **logarithmic},
            "color": {
                "field": "quantity",
                "type": "nominal",
                "title": None,
                "legend": {"orient": "bottom", "columns": 1, "labelLimit": 420},
            },
        },
    }


def _number(series: Series, value: float) -> str:
    """Return a value with its unit, in three digits at least."""
    return f"{value:,.0f} {series.unit}" if abs(value) >= 100 else f"{value:.3g} {series.unit}"
