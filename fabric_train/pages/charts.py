"""Charts: described once in Vega-Lite, shown in a page by Vega, drawn as a PNG by vl-convert without a browser.

A picture never ends a program: if it cannot be drawn, a note says so, and it is left out.

Colours are of middle brightness and the ground is transparent, so a chart can be read on white and on black.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fabric_train.cli.errors import describe_os_error, note
from fabric_train.cli.output import escape_texts
from fabric_train.pages import drawing_process
from fabric_train.pages.drawing_process import DrawError

TEXT = "#767676"
COLOURS = (
    *("#3d7fc4", "#d9782d", "#2a9d6f", "#a05fb4", "#c8504f", "#8c6d46", "#1f93a8", "#b08a1e", "#6a7fa8", "#9c5b7d"),
)
BETTER = "#2a7f46"
WORSE = "#b3402e"
_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
_WIDTH = 760
_DIGITS = 5
_FEW_POINTS = 60  # each gets a mark
_NOT_DRAWABLE = re.compile("[\ud800-\udfff\ufffe\uffff]")
"""Halves of characters and others that XML, and so a drawing, does not have; controls are shown."""


@dataclass(frozen=True)
class Series:
    """A curve: float64 [N] each. ``smooth`` is drawn in place of ``y`` if the reader wants that; NaN is a gap.

    ``low`` and ``high`` are intervals. ``axis`` is the number of its run, whose tokens and hours a page knows. ``kind``
    is "line"; "points", each with a mark; or "level", one value at all x.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    smooth: np.ndarray | None = None
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    kind: str = "line"
    axis: int = 0


@dataclass(frozen=True)
class Mark:
    """Something that happened at ``x``; ``kind`` is one word, such as "resume"."""

    x: float
    kind: str
    text: str


@dataclass(frozen=True)
class Chart:
    """Curves over the optimizer steps; a page can show tokens or hours instead of steps. ``key`` is unique there."""

    key: str
    title: str
    y_title: str
    series: tuple[Series, ...]
    marks: tuple[Mark, ...] = ()
    x_title: str = "optimizer step"
    from_zero: bool = False
    note: str = ""


def numbers(values: np.ndarray) -> list[float | int | None]:
    """Return numbers with 5 significant digits for JSON; whole ones as int, None for one that is not finite."""
    found: list[float | int | None] = []
    for value in values.tolist():
        if value != value or value in (float("inf"), float("-inf")):
            found.append(None)
        elif value == int(value):
            found.append(int(value))
        else:
            found.append(float(f"{value:.{_DIGITS}g}"))
    return found


def columns(series: Series) -> dict[str, list[float | int | None]]:
    """Return the columns of a curve for JSON, without those that it lacks."""
    given = {"x": series.x, "y": series.y, "smooth": series.smooth, "low": series.low, "high": series.high}
    return {name: numbers(values) for name, values in given.items() if values is not None}


def rows(series: Series) -> list[dict[str, Any]]:
    """Return the rows that a chart's specification reads."""
    found = columns(series)
    means = found.get("smooth") or found["y"]
    found["drawn"] = [value if mean is None else mean for value, mean in zip(found["y"], means, strict=True)]
    names = ("series", *found)
    return [dict(zip(names, (series.name, *values), strict=True)) for values in zip(*found.values(), strict=True)]


def specification(chart: Chart) -> dict[str, Any]:
    """Return the chart in Vega-Lite; its data sets ``points``, ``levels`` and ``marks`` are to be filled in."""
    names = [one.name for one in chart.series]
    is_smooth = any(one.smooth is not None for one in chart.series)
    colour = {
        "field": "series",
        "type": "nominal",
        "scale": {"domain": names, "range": [COLOURS[number % len(COLOURS)] for number in range(len(names))]},
        "legend": {"title": None} if len(names) > 1 else None,
    }
    x: dict[str, Any] = {"field": "x", "type": "quantitative", "title": chart.x_title, "scale": {"nice": False}}
    if chart.x_title == Chart.x_title:  # there is no step 2.5
        x["axis"] = {"tickMinStep": 1, "format": ",d"}
    y = {"field": "drawn", "type": "quantitative", "title": chart.y_title, "scale": {"zero": chart.from_zero}}
    shown = {"condition": {"param": f"{chart.key}_shown", "value": 1}, "value": 0.08}
    tooltip = [
        {"field": "series", "type": "nominal", "title": "curve"},
        {"field": "x", "type": "quantitative", "title": chart.x_title, "format": ",~f"},
        {"field": "y", "type": "quantitative", "title": chart.y_title, "format": ".5~g"},
        *([{"field": "smooth", "type": "quantitative", "title": "mean", "format": ".5~g"}] if is_smooth else []),
    ]
    base = {"x": x, "y": y, "color": colour}
    layers: list[dict[str, Any]] = []
    if chart.marks:
        layers.append(_marks(chart, x))
    if any(one.kind == "level" for one in chart.series):
        encoding = {"y": {"field": "y", "type": "quantitative"}, "color": colour}
        layers.append(
            {"data": {"name": "levels"}, "mark": {"type": "rule", "strokeDash": [6, 4]}, "encoding": encoding}
        )
    if is_smooth:
        faint = {"type": "line", "opacity": 0.28, "strokeWidth": 1}
        layers.append({"name": "raw", "mark": faint, "encoding": {**base, "y": {**y, "field": "y"}}})
    line = {**base, "opacity": shown}
    if any(one.low is not None for one in chart.series):
        bounds = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
        layers.append({"mark": {"type": "rule", "strokeWidth": 2}, "encoding": {**line, **bounds}})
    selection = {"name": f"{chart.key}_shown", "select": {"type": "point", "fields": ["series"]}, "bind": "legend"}
    curve = {"type": "line", "strokeWidth": 1.8}
    layers.append({"params": [selection], "mark": curve, "encoding": line})
    if marked := [one.name for one in chart.series if one.kind == "points" and len(one.x) <= _FEW_POINTS]:
        chosen = [{"filter": {"field": "series", "oneOf": marked}}]
        layers.append({"transform": chosen, "mark": {"type": "circle", "size": 34, "opacity": 1}, "encoding": line})
    nearest = {"type": "point", "on": "pointermove", "clear": "pointerout", "nearest": True}
    hovered = {"condition": {"param": f"{chart.key}_hover", "empty": False, "value": 1}, "value": 0}
    layers.append(
        {
            "name": "hover",
            "params": [{"name": f"{chart.key}_hover", "select": nearest}],
            "mark": {"type": "point", "filled": True, "size": 60},
            "encoding": {**base, "opacity": hovered, "tooltip": tooltip},
        }
    )
    return {
        "data": {"name": "points"},
        "title": {"text": chart.title, "anchor": "start"},
        "description": f"{chart.title}: {', '.join(names)} by {chart.x_title}",
        "layer": layers,
    }


def _marks(chart: Chart, x: Mapping[str, Any]) -> dict[str, Any]:
    kinds = list(dict.fromkeys(mark.kind for mark in chart.marks))
    dashes = [[2, 3], [6, 3], [1, 1], [8, 2, 2, 2], [4, 4]]
    stroke = {
        "field": "kind",
        "type": "nominal",
        "scale": {"domain": kinds, "range": [dashes[number % len(dashes)] for number in range(len(kinds))]},
        "legend": {"title": None},
    }
    tooltip = [{"field": "kind", "title": "mark"}, {"field": "text", "title": "what"}]
    encoding = {"x": x, "strokeDash": stroke, "tooltip": tooltip}
    return {
        "data": {"name": "marks"},
        "mark": {"type": "rule", "color": TEXT, "strokeWidth": 1.4},
        "encoding": encoding,
    }


def configuration() -> dict[str, Any]:
    """Return the look of all charts."""
    axis = {"labelColor": TEXT, "titleColor": TEXT, "titleFontWeight": "normal", "domain": False, "ticks": False}
    axis |= {"gridColor": TEXT, "gridOpacity": 0.2, "labelFlush": False, "labelSeparation": 12}
    legend = {"labelColor": TEXT, "orient": "top", "columns": 3, "labelLimit": 260, "symbolOpacity": 1}
    title = {"color": TEXT, "fontSize": 13}
    return {
        "background": "transparent",
        "axis": axis,
        "axisX": {"tickCount": 8},
        "axisY": {"minExtent": 44},
        "legend": legend,
        "title": title,
        "view": {"stroke": None},
    }


def filled(chart: Chart) -> dict[str, Any]:
    """Return the specification of a picture, with its data."""
    specified = specification(chart)
    points = [row for one in chart.series if one.kind != "level" for row in rows(one)]
    specified["layer"] = [layer for layer in specified["layer"] if layer.get("name") != "hover"]
    specified["datasets"] = {
        "points": points,
        "levels": [row for one in chart.series if one.kind == "level" for row in rows(one)],
        "marks": [{"x": mark.x, "kind": mark.kind, "text": mark.text} for mark in chart.marks],
    }
    return specified


def draw(charts: Sequence[Chart], picture: Path, *, title: str = "", heights: Sequence[int], columns: int = 1) -> bool:
    """Write charts as a PNG, ``columns`` of them in a row; ``heights`` are in pixels. See :func:`write_png`."""
    panels: list[dict[str, Any]] = []
    datasets: dict[str, Any] = {}
    for number, (chart, height) in enumerate(zip(charts, heights, strict=True)):
        panel = {**filled(chart), "width": _WIDTH // columns, "height": height}
        datasets |= {f"{name}{number}": found for name, found in panel.pop("datasets").items()}
        for part in (panel, *panel["layer"]):
            if "data" in part:
                part["data"] = {"name": f"{part['data']['name']}{number}"}
        panels.append(panel)
    scales = {"color": "independent", "strokeDash": "independent"}
    whole = {"datasets": datasets, "concat": panels, "columns": columns, "resolve": {"scale": scales}}
    return write_png(whole, picture, title)


def write_png(specified: dict[str, Any], picture: Path, title: str) -> bool:
    """Write a Vega-Lite specification as a PNG, and return whether that was possible; if not, a note says why.

    An existing file is replaced at once, or stays.
    """
    about = {"text": title, "fontSize": 15, "color": TEXT, "anchor": "start"}
    whole = {"$schema": _SCHEMA, "config": configuration(), "title": about, **specified}
    text = _NOT_DRAWABLE.sub("\ufffd", json.dumps(escape_texts(whole), ensure_ascii=False))
    temporary = picture.with_name(f".{picture.name}")
    try:
        temporary.unlink(missing_ok=True)  # of a killed process, or a planted link
        drawing_process.run("png", text, temporary)
        temporary.replace(picture)
    except (DrawError, OSError) as error:
        _note_failure(error)
        return False
    return True


def javascript() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script; empty, with a note, if it cannot be made."""
    try:
        with TemporaryDirectory() as folder:
            file = Path(folder, "vega.js")
            drawing_process.run("javascript", "", file)
            return file.read_text(encoding="utf-8")
    except (DrawError, OSError) as error:
        _note_failure(error)
        return ""


def _note_failure(error: DrawError | OSError) -> None:
    """Say once why there are no pictures; the picture and the charts of a page fail for the same reason."""
    reason = describe_os_error(error) if isinstance(error, OSError) else error
    note(f"pictures and charts are left out: {reason}")


def sampled(x: np.ndarray, y: np.ndarray, most: int) -> np.ndarray:
    """Return the indices, int64 [M], of at most about ``most`` points that show a curve with all its extremes.

    Of each stretch of the curve these are its lowest and its highest point, and the first and last point of all.
    Points that are not finite are left out.
    """
    known = np.flatnonzero(np.isfinite(y) & np.isfinite(x))
    if len(known) <= most:
        return known
    edges = np.linspace(0, len(known), max(most // 2, 1) + 1).astype(np.int64)[:-1]
    values = y[known]
    keep = {0, len(known) - 1}
    for begin, end in zip(edges.tolist(), [*edges[1:].tolist(), len(known)], strict=True):
        part = values[begin:end]
        keep |= {begin + int(part.argmin()), begin + int(part.argmax())}
    return known[np.fromiter(sorted(keep), np.int64)]


def smoothed(y: np.ndarray, width: int) -> np.ndarray:
    """Return the mean of each value and the ``width - 1`` before it, over those that are finite, float64 [N]."""
    known = np.isfinite(y)
    sums = np.cumsum(np.where(known, y, 0.0))
    counts = np.cumsum(known)
    before = np.arange(len(y)) - width
    earlier = before >= 0
    sums = sums - np.where(earlier, sums[np.maximum(before, 0)], 0.0)
    counts = counts - np.where(earlier, counts[np.maximum(before, 0)], 0)
    return np.divide(sums, counts, out=np.full(len(y), np.nan), where=counts > 0)
