"""The figures of docs/explanation/, drawn from what the program itself computes: ``python -m docs_build figures``."""

import hashlib
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import vl_convert

from benchmarks import plan_table
from docs_build import data_flow, fsdp_figures
from docs_build.site import DOCS
from fabric_train.arguments import TrainingArguments
from fabric_train.optim.learning_rate import learning_rate
from fabric_train.optim.stochastic_rounding import round_stochastically
from fabric_train.pages import charts
from fabric_train.token_dataset.rows import plan_rows

FOLDER = DOCS / "explanation"
_WIDTH = 620
_COLOURS = ["#3d7edb", "#e0803a", "#3a9d6e", "#a06bd6", "#c8506b", "#8a8a3c"]


def draw() -> None:
    """Write each figure as an SVG file, with a hash of what it shows."""
    for name in FIGURES:
        specified = specification(name)
        svg = vl_convert.vegalite_to_svg(json.dumps(specified))
        path = FOLDER / f"{name}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{svg}\n<!-- {digest(specified)} -->\n", encoding="utf-8")
        print(f"wrote {path}")


def specification(name: str) -> dict[str, Any]:
    """Return the Vega-Lite specification of a figure."""
    return {"config": charts.configuration(), "width": _WIDTH, **FIGURES[name]()}


def digest(specified: dict[str, Any]) -> str:
    """Return a hash of a figure's specification, data included."""
    return hashlib.sha256(json.dumps(specified, sort_keys=True).encode()).hexdigest()


def packing() -> dict[str, Any]:
    """Show ten documents in rows of 64 tokens, for each value of ``--packing``."""
    lengths = np.array([50, 20, 90, 12, 30, 8, 44, 25, 70, 15])
    pieces = []
    for kind in ("concat", "best_fit", "none"):
        plan = plan_rows(lengths, np.arange(len(lengths)), kind, 64, 0)
        for row in range(plan.num_rows):
            end = 0
            for piece in range(plan.row_offsets[row], plan.row_offsets[row + 1]):
                length = int(plan.lengths[piece])
                named = chr(ord("A") + int(plan.documents(slice(piece, piece + 1))[0]))
                pieces.append({"packing": kind, "row": row + 1, "from": end, "to": end + length, "document": named})
                end += length
    axis = {"title": "tokens", "scale": {"domain": [0, 64]}, "axis": {"values": [0, 32, 64]}}
    x = {"field": "from", "type": "quantitative", **axis}
    y = {"field": "row", "type": "ordinal", "title": "row"}
    middle = {"calculate": "(datum.from + datum.to) / 2", "as": "middle"}
    colour = {"field": "document", "legend": None, "scale": {"range": _COLOURS}}
    places = {"x": x, "x2": {"field": "to"}, "y": y}
    bars = {"mark": {"type": "bar", "stroke": "white"}, "encoding": {**places, "color": colour}}
    letters = {
        "mark": {"type": "text", "fontSize": 9, "color": "white"},
        "transform": [middle],
        "encoding": {"x": {**x, "field": "middle"}, "y": y, "text": {"field": "document"}},
    }
    header = {"labelColor": charts.TEXT}
    head = {"field": "packing", "title": None, "sort": ["concat", "best_fit", "none"], "header": header}
    return {
        "data": {"values": pieces},
        "facet": {"column": head},
        "spec": {"width": _WIDTH // 3 - 40, "height": 190, "layer": [bars, letters]},
    }


def schedule() -> dict[str, Any]:
    """Show the learning rate of two schedules, a resumed run, and a branch that decays early."""
    runs = {
        "cosine": (TrainingArguments(lr=1.0, min_lr=0.1, warmup_steps=50, max_step=1000), range(1, 1001), 1000),
        "wsd": (
            TrainingArguments(lr=1.0, warmup_steps=50, lr_schedule="wsd", decay_share=0.2, max_step=1000),
            range(1, 1001),
            1000,
        ),
        "branch of wsd at step 500": (
            TrainingArguments(lr=1.0, warmup_steps=50, lr_schedule="wsd", decay_steps=100, max_step=600),
            range(501, 601),
            600,
        ),
    }
    values = [
        {"run": run, "step": step, "rate": learning_rate(step, num_steps, arguments)}
        for run, (arguments, steps, num_steps) in runs.items()
        for step in steps
        if step % 5 in (0, 1)
    ]
    line = {
        "mark": {"type": "line"},
        "encoding": {
            "x": {"field": "step", "type": "quantitative"},
            "y": {"field": "rate", "type": "quantitative", "title": "share of --lr"},
            "color": {"field": "run", "title": None, "scale": {"range": _COLOURS}},
        },
    }
    killed = {
        "data": {"values": [{"step": 370, "text": "killed at step 370, resumed from step 300"}]},
        "layer": [
            {"mark": {"type": "rule", "strokeDash": [4, 4], "color": charts.TEXT}},
            {
                "mark": {"type": "text", "align": "left", "dx": 6, "color": charts.TEXT},
                "encoding": {"text": {"field": "text"}, "y": {"value": 40}},
            },
        ],
        "encoding": {"x": {"field": "step", "type": "quantitative"}},
    }
    return {"height": 220, "data": {"values": values}, "layer": [line, killed]}


def precision() -> dict[str, Any]:
    """Show a weight of 1 that 2,000 steps make smaller by 1e-4 each: in fp32, and in bf16 with both ways to round."""
    generator = torch.Generator().manual_seed(0)
    weights = {"fp32": torch.ones(1), "bf16, to the nearest": torch.ones(1), "bf16, stochastically": torch.ones(1)}
    values = []
    for step in range(2001):
        if step % 20 == 0:
            values += [{"step": step, "weights": name, "value": float(one)} for name, one in weights.items()]
        changed = {name: one - 1e-4 for name, one in weights.items()}
        bits = torch.randint(0, 1 << 16, (1,), dtype=torch.int32, generator=generator)
        weights = {
            "fp32": changed["fp32"],
            "bf16, to the nearest": changed["bf16, to the nearest"].bfloat16().float(),
            "bf16, stochastically": round_stochastically(changed["bf16, stochastically"], bits).float(),
        }
    return {
        "height": 200,
        "data": {"values": values},
        "mark": {"type": "line"},
        "encoding": {
            "x": {"field": "step", "type": "quantitative"},
            "y": {"field": "value", "type": "quantitative", "title": "weight", "scale": {"zero": False}},
            "color": {"field": "weights", "title": None, "scale": {"range": _COLOURS}},
        },
    }


def memory() -> dict[str, Any]:
    """Show the parts of a GPU's memory by the plan of Llama-3-8B on four GPUs of 80 GB."""
    names = ("nothing recomputed", "all recomputed", "+ micro_batch", "+ fp32 weights")
    values = []
    for name, row in zip(names, plan_table.TABLE, strict=False):  # the first lines are of the 8B on four GPUs
        forecast = plan_table.request_of(row).forecast()
        for part, size in {**forecast.budget.most.parts, "the process": forecast.process}.items():
            if size:
                values.append({"options": name, "part": part, "GB": round(size / 1e9, 2)})
    bars = {
        "mark": {"type": "bar"},
        "encoding": {
            "y": {"field": "options", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 300}},
            "x": {"field": "GB", "type": "quantitative", "title": "GB of a GPU"},
            "color": {"field": "part", "title": None, "sort": None, "scale": {"range": _COLOURS}},
        },
    }
    limit = {"data": {"values": [{"GB": 80}]}, "mark": {"type": "rule", "color": charts.TEXT, "strokeDash": [4, 4]}}
    limit["encoding"] = {"x": {"field": "GB", "type": "quantitative"}}
    return {"width": _WIDTH - 180, "height": 150, "data": {"values": values}, "layer": [bars, limit]}


FIGURES: dict[str, Callable[[], dict[str, Any]]] = {
    "packing": packing,
    "schedule": schedule,
    "precision": precision,
    "memory": memory,
    "fsdp_memory": partial(fsdp_figures.memory, fsdp_figures.ENGLISH),
    "fsdp_memory_es": partial(fsdp_figures.memory, fsdp_figures.SPANISH),
    "fsdp_collectives": partial(fsdp_figures.collectives, fsdp_figures.ENGLISH),
    "fsdp_collectives_es": partial(fsdp_figures.collectives, fsdp_figures.SPANISH),
    "fsdp_step": partial(fsdp_figures.step, fsdp_figures.ENGLISH),
    "fsdp_step_es": partial(fsdp_figures.step, fsdp_figures.SPANISH),
    "data_flow": data_flow.specification,
}
