"""Describe charts in Vega-Lite, which Vega shows in a page, and vl-convert draws as a PNG without a browser.

A picture never ends a program: if it cannot be drawn, a note says so, and it is left out.

Colours have a medium brightness and the background is transparent, so a chart can be read on white and on black.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
    "#3d7fc4",
    "#d9782d",
    "#2a9d6f",
    "#a05fb4",
    "#c8504f",
    "#8c6d46",
    "#1f93a8",
    "#b08a1e",
    "#6a7fa8",
    "#9c5b7d",
)
BETTER = "#2a7f46"
WORSE = "#b3402e"
_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
_DASHES = ([2, 3], [6, 3], [1, 1], [8, 2, 2, 2], [4, 4])  # of the kinds of marks
_WIDTH = 760  # pixels
_SIGNIFICANT_DIGITS = 5
_MAX_TICKS = 8
_MAX_POINTS_WITH_MARKS = 60
_NOT_DRAWABLE = re.compile("[\ud800-\udfff\ufffe\uffff]")
"""Characters that XML, and therefore a drawing, cannot have, such as surrogates; control characters are escaped."""


@dataclass(frozen=True)
class Series:
    """A curve; its arrays are float64 [N]."""

    name: str
    x: np.ndarray
    y: np.ndarray
    """NaN is a gap."""
    smooth: np.ndarray | None = None
    """A moving average, which is drawn in place of ``y`` unless the reader switches it off."""
    low: np.ndarray | None = None
    """The lower ends of intervals."""
    high: np.ndarray | None = None
    kind: str = "line"
    """"line", "points" (a mark at each), or "level" (one value at all x)."""
    axis: int = 0
    """The index of the curve's run, whose tokens and hours a page knows."""


@dataclass(frozen=True)
class Mark:
    """An event at ``x``; ``kind`` is one word, such as "resume"."""

    x: float
    kind: str
    text: str


@dataclass(frozen=True)
class Chart:
    """Curves over the optimizer steps; a page can show tokens or hours instead of steps."""

    key: str
    """Unique in a page."""
    title: str
    y_title: str
    series: tuple[Series, ...]
    marks: tuple[Mark, ...] = ()
    x_title: str = "optimizer step"
    from_zero: bool = False
    note: str = ""


def round_numbers(values: np.ndarray) -> list[float | int | None]:
    """Round numbers to 5 significant digits for JSON; whole numbers become int, and NaN and infinity become None."""
    rounded: list[float | int | None] = []
    for value in values.tolist():
        if not math.isfinite(value):
            rounded.append(None)
        elif value == int(value):
            rounded.append(int(value))
        else:
            rounded.append(float(f"{value:.{_SIGNIFICANT_DIGITS}g}"))
    return rounded


def curve_columns(series: Series) -> dict[str, list[float | int | None]]:
    """Return the columns of a curve for JSON, without those that it lacks."""
    arrays = {"x": series.x, "y": series.y, "smooth": series.smooth, "low": series.low, "high": series.high}
    return {name: round_numbers(values) for name, values in arrays.items() if values is not None}


def curve_rows(series: Series) -> list[dict[str, Any]]:
    """Return the rows that a chart's specification reads, a dict for each point."""
    columns = curve_columns(series)
    averages = columns.get("smooth") or columns["y"]
    # where there is no average yet, the value itself is drawn
    pairs = zip(columns["y"], averages, strict=True)
    columns["drawn"] = [value if average is None else average for value, average in pairs]
    rows = []
    for values in zip(*columns.values(), strict=True):
        rows.append({"series": series.name, **dict(zip(columns, values, strict=True))})
    return rows


def specification(chart: Chart, x_scale: str = "x") -> dict[str, Any]:
    """Return the chart in Vega-Lite; its data sets ``points``, ``levels`` and ``marks`` are still empty.

    ``x_scale`` is what Vega-Lite will call the scale of the x axis: ``concat_0_x`` in the first of several charts.
    """
    names = [series.name for series in chart.series]
    has_averages = any(series.smooth is not None for series in chart.series)
    has_levels = any(series.kind == "level" for series in chart.series)
    has_intervals = any(series.low is not None for series in chart.series)

    # axes and colours, the same in all layers
    x: dict[str, Any] = {"field": "x", "type": "quantitative", "title": chart.x_title, "scale": {"nice": False}}
    if chart.x_title == Chart.x_title:
        # there is no step 2.5; tickMinStep would count from 0, and from 2 to 3 have a tick in the middle
        num_steps = f"floor(domain('{x_scale}')[1] - domain('{x_scale}')[0])"
        x["axis"] = {"tickCount": {"expr": f"max(1, min({_MAX_TICKS}, {num_steps}))"}, "format": ",d"}
    y = {"field": "drawn", "type": "quantitative", "title": chart.y_title, "scale": {"zero": chart.from_zero}}
    colour = {
        "field": "series",
        "type": "nominal",
        "scale": {"domain": names, "range": [COLOURS[index % len(COLOURS)] for index in range(len(names))]},
        "legend": {"title": None} if len(names) > 1 else None,
    }
    encoding = {"x": x, "y": y, "color": colour}
    # a click on the legend fades the other curves
    is_selected = {"condition": {"param": f"{chart.key}_shown", "value": 1}, "value": 0.08}
    curve_encoding = {**encoding, "opacity": is_selected}

    # layers, the lowest first
    layers: list[dict[str, Any]] = []
    if chart.marks:
        layers.append(_mark_layer(chart, x))
    if has_levels:
        layers.append(
            {
                "data": {"name": "levels"},
                "mark": {"type": "rule", "strokeDash": [6, 4]},
                "encoding": {"y": {"field": "y", "type": "quantitative"}, "color": colour},
            }
        )
    if has_averages:  # the values themselves, faintly
        layers.append(
            {
                "name": "raw",
                "mark": {"type": "line", "opacity": 0.28, "strokeWidth": 1},
                "encoding": {**encoding, "y": {**y, "field": "y"}},
            }
        )
    if has_intervals:
        layers.append(
            {
                "mark": {"type": "rule", "strokeWidth": 2},
                "encoding": {**curve_encoding, "y": {**y, "field": "low"}, "y2": {"field": "high"}},
            }
        )
    selection = {"name": f"{chart.key}_shown", "select": {"type": "point", "fields": ["series"]}, "bind": "legend"}
    layers.append({"params": [selection], "mark": {"type": "line", "strokeWidth": 1.8}, "encoding": curve_encoding})
    curves_with_points = [
        series.name for series in chart.series if series.kind == "points" and len(series.x) <= _MAX_POINTS_WITH_MARKS
    ]
    if curves_with_points:
        layers.append(
            {
                "transform": [{"filter": {"field": "series", "oneOf": curves_with_points}}],
                "mark": {"type": "circle", "size": 34, "opacity": 1},
                "encoding": curve_encoding,
            }
        )
    layers.append(_hover_layer(chart, encoding, has_averages=has_averages))
    return {
        "data": {"name": "points"},
        "title": {"text": chart.title, "anchor": "start"},
        "description": f"{chart.title}: {', '.join(names)} by {chart.x_title}",
        "layer": layers,
    }


def _hover_layer(chart: Chart, encoding: Mapping[str, Any], *, has_averages: bool) -> dict[str, Any]:
    """Return the layer that marks the point nearest to the pointer, and shows its values."""
    tooltip = [
        {"field": "series", "type": "nominal", "title": "curve"},
        {"field": "x", "type": "quantitative", "title": chart.x_title, "format": ",~f"},
        {"field": "y", "type": "quantitative", "title": chart.y_title, "format": ".5~g"},
    ]
    if has_averages:
        tooltip.append({"field": "smooth", "type": "quantitative", "title": "mean", "format": ".5~g"})
    nearest_point = {"type": "point", "on": "pointermove", "clear": "pointerout", "nearest": True}
    is_hovered = {"condition": {"param": f"{chart.key}_hover", "empty": False, "value": 1}, "value": 0}
    return {
        "name": "hover",
        "params": [{"name": f"{chart.key}_hover", "select": nearest_point}],
        "mark": {"type": "point", "filled": True, "size": 60},
        "encoding": {**encoding, "opacity": is_hovered, "tooltip": tooltip},
    }


def _mark_layer(chart: Chart, x: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer of vertical lines at the chart's marks; each kind of mark has its own dashes."""
    kinds = list(dict.fromkeys(mark.kind for mark in chart.marks))
    dashes = {
        "field": "kind",
        "type": "nominal",
        "scale": {"domain": kinds, "range": [_DASHES[index % len(_DASHES)] for index in range(len(kinds))]},
        "legend": {"title": None},
    }
    tooltip = [{"field": "kind", "title": "mark"}, {"field": "text", "title": "what"}]
    return {
        "data": {"name": "marks"},
        "mark": {"type": "rule", "color": TEXT, "strokeWidth": 1.4},
        "encoding": {"x": x, "strokeDash": dashes, "tooltip": tooltip},
    }


def configuration() -> dict[str, Any]:
    """Return the style of all charts, as Vega-Lite's ``config``."""
    return {
        "background": "transparent",
        "axis": {
            "labelColor": TEXT,
            "titleColor": TEXT,
            "titleFontWeight": "normal",
            "domain": False,
            "ticks": False,
            "gridColor": TEXT,
            "gridOpacity": 0.2,
            "labelFlush": False,
            "labelSeparation": 12,
        },
        "axisX": {"tickCount": _MAX_TICKS},
        "axisY": {"minExtent": 44},
        "legend": {"labelColor": TEXT, "orient": "top", "columns": 3, "labelLimit": 260, "symbolOpacity": 1},
        "title": {"color": TEXT, "fontSize": 13},
        "view": {"stroke": None},
    }


def _picture_specification(chart: Chart, x_scale: str) -> dict[str, Any]:
    """Return the specification of a chart in a picture, with its data and without the layer for the pointer."""
    points: list[dict[str, Any]] = []
    levels: list[dict[str, Any]] = []
    for series in chart.series:
        if series.kind == "level":
            levels += curve_rows(series)
        else:
            points += curve_rows(series)
    picture = specification(chart, x_scale)
    picture["layer"] = [layer for layer in picture["layer"] if layer.get("name") != "hover"]
    picture["datasets"] = {
        "points": points,
        "levels": levels,
        "marks": [{"x": mark.x, "kind": mark.kind, "text": mark.text} for mark in chart.marks],
    }
    return picture


def draw(charts: Sequence[Chart], picture: Path, *, title: str = "", heights: Sequence[int], columns: int = 1) -> bool:
    """Write charts as a PNG, ``columns`` of them in a row; ``heights`` are in pixels. See :func:`write_png`."""
    panels: list[dict[str, Any]] = []
    datasets: dict[str, Any] = {}
    for index, (chart, height) in enumerate(zip(charts, heights, strict=True)):
        panel = {**_picture_specification(chart, f"concat_{index}_x"), "width": _WIDTH // columns, "height": height}
        # all panels share one table of data sets, so their names get the panel's index
        for name, rows in panel.pop("datasets").items():
            datasets[f"{name}{index}"] = rows
        for panel_or_layer in (panel, *panel["layer"]):
            if "data" in panel_or_layer:
                name = panel_or_layer["data"]["name"]
                panel_or_layer["data"] = {"name": f"{name}{index}"}
        panels.append(panel)
    scales = {"color": "independent", "strokeDash": "independent"}
    figure = {"datasets": datasets, "concat": panels, "columns": columns, "resolve": {"scale": scales}}
    return write_png(figure, picture, title)


def write_png(figure: dict[str, Any], picture: Path, title: str) -> bool:
    """Write a Vega-Lite specification as a PNG, and return whether that was possible; if not, a note says why.

    An existing file is replaced only by a complete one.
    """
    heading = {"text": title, "fontSize": 15, "color": TEXT, "anchor": "start"}
    content = {"$schema": _SCHEMA, "config": configuration(), "title": heading, **figure}
    text = _NOT_DRAWABLE.sub("\ufffd", json.dumps(escape_texts(content), ensure_ascii=False))
    temporary = picture.with_name(f".{picture.name}")
    try:
        temporary.unlink(missing_ok=True)  # left by a killed process, or a link that somebody planted
        drawing_process.run("png", text, temporary)
        temporary.replace(picture)  # atomic, so nobody sees half a picture
    except (DrawError, OSError) as error:
        _note_failure(error)
        return False
    return True


def javascript() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script; empty, with a note, if it cannot be made."""
    try:
        # the drawing process answers with a file, since the script is large
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
    note(f"no pictures and charts: {reason}")


def sample_points(x: np.ndarray, y: np.ndarray, max_points: int) -> np.ndarray:
    """Return the indices, int64 [M], of at most about ``max_points`` points that show a curve with all its extremes.

    The curve is divided into blocks. The lowest and the highest point of each block are chosen, and the first and the
    last point of the curve. Points that are not finite are left out.
    """
    finite_indices = np.flatnonzero(np.isfinite(y) & np.isfinite(x))
    num_points = len(finite_indices)
    if num_points <= max_points:
        return finite_indices
    values = y[finite_indices]
    num_blocks = max(max_points // 2, 1)
    edges = np.linspace(0, num_points, num_blocks + 1).astype(np.int64).tolist()
    chosen = {0, num_points - 1}
    for begin, end in pairwise(edges):
        block = values[begin:end]
        chosen.add(begin + int(block.argmin()))
        chosen.add(begin + int(block.argmax()))
    return finite_indices[np.fromiter(sorted(chosen), np.int64)]


def moving_average(y: np.ndarray, width: int) -> np.ndarray:
    """Return the mean of each value and the ``width - 1`` values before it, over those that are finite, float64 [N]."""
    is_finite = np.isfinite(y)
    sums = np.cumsum(np.where(is_finite, y, 0.0))
    counts = np.cumsum(is_finite)
    # subtract the cumulative sums up to the value before each window
    previous = np.arange(len(y)) - width
    has_previous = previous >= 0
    previous = np.maximum(previous, 0)
    window_sums = sums - np.where(has_previous, sums[previous], 0.0)
    window_counts = counts - np.where(has_previous, counts[previous], 0)
    nan = np.full(len(y), np.nan)
    return np.divide(window_sums, window_counts, out=nan, where=window_counts > 0)
