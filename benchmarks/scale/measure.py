"""Run all parts, show them as one table, and draw them into docs/scale.png."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.measure import ROOT
from benchmarks.report import Report
from benchmarks.scale import checkpoint, collectives, dataset, goodput, watch, weights
from benchmarks.scale.series import Series, series_of
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
DRAWN = {  # quantities of each part
    "dataset": (
        "merge --parts, CPU",
        "start: to the first batch, CPU",
        "start: memory of the rank",
        "opens of a rank to its first batch",
    ),
    "watch": (
        "until all ranks have ended after one was killed",
        "CPU of rank 0's watch while all is well",
        "packets of all ranks",
        "private memory of rank 0",
    ),
    "collectives": ("collectives of a step", "bytes of these collectives", "modelled latency of these collectives"),
    "checkpoint": (
        "files of a checkpoint",
        "metadata for all ranks, per thousand tensors",
        "rank 0 alone: complete a later checkpoint, remove one of 11",
        "files opened by one of 384 ranks",
    ),
    "weights": (
        "opening the weights and the model's shape",
        f"reading a rank's part, one of {weights.RANKS}",
        "files opened by a rank to read its part",
    ),
}


@dataclass(frozen=True)
class ScaleSummary:
    """The quantities above their limit at the largest size."""

    above_limit: list[str]


def measure(work: Path, kept: Path | None = None) -> Report:
    """Measure each part.

    Args:
        work: folder for the files, relative to the project's root.
        kept: file with the parts that an earlier call has measured, which are not measured again.

    Raises:
        ChildProcessError: a measured process failed.
    """
    known = json.loads(kept.read_bytes()) if kept and kept.exists() else {}
    runs = {name: [series_of(one) for one in of_part] for name, of_part in known.items()}
    for name in [name for name in PARTS if name not in runs]:
        print(f"scale: {name}", flush=True)
        (ROOT / work / name).mkdir(parents=True)
        runs[name] = PARTS[name](work / name)
        if kept:
            kept.write_text(json.dumps({name: [asdict(one) for one in of_part] for name, of_part in runs.items()}))
    runs = {name: runs[name] for name in PARTS}
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
    """Draw each quantity of ``DRAWN`` as a multiple of its first value, as a PNG with a panel for each part."""
    drawn = [one for one in measured if one.quantity in DRAWN.get(one.part, ())]
    panels = [
        _panel(part, [one for one in drawn if one.part == part]) for part in dict.fromkeys(one.part for one in drawn)
    ]
    scales = {"scale": {"color": "independent"}}
    charts.write_png({"concat": panels, "columns": 2, "resolve": scales}, picture, "How the parts grow")


def _panel(part: str, series: list[Series]) -> dict[str, Any]:
    """Return the Vega-Lite specification of one panel; both axes are logarithmic, so values of 0 are left out."""
    values = [
        {"size": point.size, "value": point.value / one.points[0].value, "quantity": one.quantity}
        for one in series
        for point in one.points
        if point.value > 0 and one.points[0].value > 0
    ]
    axis = {"tickCount": 5, "format": "~s", "grid": False}
    logarithmic = {"type": "quantitative", "scale": {"type": "log"}, "axis": axis}
    return {
        "title": part,
        "width": 400,
        "height": 180,
        "data": {"values": values},
        "mark": {"type": "line", "point": True},
        "encoding": {
            "x": {"field": "size", "title": series[0].sizes_of, **logarithmic},
            "y": {"field": "value", "title": "times the first value", **logarithmic},
            "color": {
                "field": "quantity",
                "type": "nominal",
                "title": None,
                "legend": {"orient": "bottom", "columns": 1, "labelLimit": 400},
            },
        },
    }


def _number(series: Series, value: float) -> str:
    """Return a value with its unit, in three digits at least."""
    return f"{value:,.0f} {series.unit}" if abs(value) >= 100 else f"{value:.3g} {series.unit}"
