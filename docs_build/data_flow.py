"""The figure of README: the files that each program reads and writes, from texts to a Hugging Face folder."""

from dataclasses import dataclass
from typing import Any

from fabric_train.pages import charts

_WIDTH = 850
_HEIGHT = 90
_BOX_WIDTH = 150
_ARROW_WIDTH = 83
_BOX_TOP = 5
_BOX_BOTTOM = 80
_LINE_HEIGHT = 17
_BLUE = "#3d7edb"


@dataclass(frozen=True)
class _Stage:
    """Files on the disk: what they are called, two lines about them, and the program that makes the next stage."""

    title: str
    lines: tuple[str, str]
    next_program: str | None


_STAGES = (
    _Stage("texts", ("jsonl, parquet, txt,", "or a hub dataset"), "tokenize"),
    _Stage("token dataset", ("packed rows, borders,", "hashes, manifest"), "fabric run"),
    _Stage("run", ("checkpoints, metrics,", "log, report"), "convert"),
    _Stage("Hugging Face folder", ("weights, tokenizer,", "card; verified"), None),
)


def specification() -> dict[str, Any]:
    """Return the Vega-Lite specification of the figure: one box for each stage, an arrow for each program."""
    stage_width = _BOX_WIDTH + _ARROW_WIDTH
    boxes = []
    titles = []
    lines = []
    arrows = []
    for index, stage in enumerate(_STAGES):
        box_left = index * stage_width
        box_right = box_left + _BOX_WIDTH
        middle = box_left + _BOX_WIDTH / 2
        boxes.append({"left": box_left, "right": box_right, "top": _BOX_TOP, "bottom": _BOX_BOTTOM})
        titles.append({"x": middle, "y": _BOX_TOP + _LINE_HEIGHT + 2, "text": stage.title})
        for line_number, line in enumerate(stage.lines, 2):  # the title is the first line
            lines.append({"x": middle, "y": _BOX_TOP + line_number * _LINE_HEIGHT + 4, "text": line})
        if stage.next_program is not None:
            next_left = box_left + stage_width
            arrows.append(
                {
                    "left": box_right + 4,
                    "right": next_left - 8,
                    "middle": (box_right + next_left) / 2,
                    "y": (_BOX_TOP + _BOX_BOTTOM) / 2,
                    "program": stage.next_program,
                }
            )
    horizontal = _pixels([0, _WIDTH])
    vertical = _pixels([_HEIGHT, 0])  # downwards, as in a picture
    box_layer = {
        "data": {"values": boxes},
        "mark": {"type": "rect", "fill": None, "stroke": _BLUE, "strokeWidth": 1.5, "cornerRadius": 6},
        "encoding": {
            "x": {"field": "left", **horizontal},
            "x2": {"field": "right"},
            "y": {"field": "top", **vertical},
            "y2": {"field": "bottom"},
        },
    }
    arrow_lines = {
        "data": {"values": arrows},
        "mark": {"type": "rule", "color": charts.TEXT, "strokeWidth": 1.5},
        "encoding": {"x": {"field": "left", **horizontal}, "x2": {"field": "right"}, "y": {"field": "y", **vertical}},
    }
    arrow_heads = {
        "data": {"values": arrows},
        "mark": {
            "type": "point",
            "shape": "triangle-right",
            "filled": True,
            "size": 70,
            "color": charts.TEXT,
            "opacity": 1,
        },
        "encoding": {"x": {"field": "right", **horizontal}, "y": {"field": "y", **vertical}},
    }
    programs = _text(
        arrows, "middle", "program", {"color": charts.TEXT, "dy": -12, "font": "monospace", "fontSize": 11}
    )
    title_layer = _text(titles, "x", "text", {"color": charts.TEXT, "fontSize": 13, "fontWeight": "bold"})
    line_layer = _text(lines, "x", "text", {"color": charts.TEXT, "fontSize": 11})
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "layer": [box_layer, arrow_lines, arrow_heads, programs, title_layer, line_layer],
    }


def _pixels(domain: list[int]) -> dict[str, Any]:
    """Return a position channel in pixels, without an axis."""
    return {"type": "quantitative", "scale": {"domain": domain, "nice": False, "zero": False}, "axis": None}


def _text(values: list[dict[str, Any]], x: str, field: str, style: dict[str, Any]) -> dict[str, Any]:
    """Return a layer that writes ``field`` of each value, centred at its ``x`` and ``y``."""
    return {
        "data": {"values": values},
        "mark": {"type": "text", **style},
        "encoding": {
            "x": {"field": x, **_pixels([0, _WIDTH])},
            "y": {"field": "y", **_pixels([_HEIGHT, 0])},
            "text": {"field": field},
        },
    }
