"""The figures of docs/explanation/fsdp.md and docs/es/fsdp.md, and the arithmetic that they and their table show."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import plan_table
from fabric_train.pages import charts

NUM_GPUS = 8
DEVICE_GB = 80
NUM_LAYERS = 4
"""Layers of the model in the figure of a step."""
NUM_RANKS = 4
"""GPUs in the figure of the two collectives."""
BYTES_PER_PARAMETER = {"weights": 4, "gradients": 4, "optimizer": 8}
"""AdamW in fp32: its two moments have the dtype of the weights."""
SHARDED = {
    "DDP": (),
    "ZeRO-1": ("optimizer",),
    "ZeRO-2": ("optimizer", "gradients"),
    "ZeRO-3, FSDP": ("optimizer", "gradients", "weights"),
}
"""What each strategy divides among the GPUs (arXiv:1910.02054)."""

# durations in the figure of a step, in no unit: a layer's backward pass takes twice as long as its forward pass
_GATHER = 1.0
_FORWARD = 2.0
_BACKWARD = 4.0
_REDUCE = 1.0
_UPDATE = 2.0


@dataclass(frozen=True)
class Labels:
    """The words in the figures, in one language."""

    weights: str
    gradients: str
    optimizer: str
    gigabytes: str
    gpu: str
    all_gather: str
    reduce_scatter: str
    before_exchange: str
    after_exchange: str
    part: str
    network: str
    computing: str
    layer: str
    forward: str
    backward: str
    update: str
    whole: str
    time: str


ENGLISH = Labels(
    weights="weights",
    gradients="gradients",
    optimizer="moments",
    gigabytes="GB on each of 8 GPUs",
    gpu="GPU",
    all_gather="all-gather",
    reduce_scatter="reduce-scatter",
    before_exchange="before",
    after_exchange="after",
    part="part of the tensor",
    network="network",
    computing="computing",
    layer="layer",
    forward="forward",
    backward="backward",
    update="update",
    whole="all of its weights in memory",
    time="time",
)
SPANISH = Labels(
    weights="pesos",
    gradients="gradientes",
    optimizer="momentos",
    gigabytes="GB en cada una de las 8 GPU",
    gpu="GPU",
    all_gather="all-gather",
    reduce_scatter="reduce-scatter",
    before_exchange="antes",
    after_exchange="después",
    part="parte del tensor",
    network="red",
    computing="cálculo",
    layer="capa",
    forward="hacia delante",
    backward="hacia atrás",
    update="actualización",
    whole="todos sus pesos en memoria",
    time="tiempo",
)


def bytes_on_gpu(strategy: str, num_parameters: int, num_gpus: int) -> dict[str, float]:
    """Return the bytes of weights, gradients and optimizer states that a GPU holds when it updates the weights."""
    held = {}
    for kind, num_bytes in BYTES_PER_PARAMETER.items():
        num_parts = num_gpus if kind in SHARDED[strategy] else 1
        held[kind] = num_bytes * num_parameters / num_parts
    return held


def memory(labels: Labels) -> dict[str, Any]:
    """Show what each of 8 GPUs holds of Llama-3-8B, with DDP and with the stages of ZeRO, and the limit of 80 GB."""
    num_parameters = plan_table.read_model("8B").num_parameters
    names = {"weights": labels.weights, "gradients": labels.gradients, "optimizer": labels.optimizer}
    values = []
    for strategy in SHARDED:
        for order, (kind, num_bytes) in enumerate(bytes_on_gpu(strategy, num_parameters, NUM_GPUS).items()):
            gigabytes = round(num_bytes / 1e9, 2)
            values.append({"strategy": strategy, "part": names[kind], "order": order, "GB": gigabytes})
    bars = {
        "mark": {"type": "bar"},
        "encoding": {
            "y": {"field": "strategy", "type": "nominal", "sort": None, "title": None},
            "x": {"field": "GB", "type": "quantitative", "title": labels.gigabytes},
            "color": {"field": "part", "title": None, "sort": None, "scale": {"range": list(charts.COLOURS)}},
            "order": {"field": "order", "type": "quantitative"},
        },
    }
    limit = {
        "data": {"values": [{"GB": DEVICE_GB}]},
        "mark": {"type": "rule", "color": charts.TEXT, "strokeDash": [4, 4]},
        "encoding": {"x": {"field": "GB", "type": "quantitative"}},
    }
    return {"width": 460, "height": 130, "data": {"values": values}, "layer": [bars, limit]}


def collectives(labels: Labels) -> dict[str, Any]:
    """Show four GPUs before and after an all-gather of weights and a reduce-scatter of gradients, with numbers."""
    # before an all-gather rank r has part r of the weights; after it, all parts
    weights = np.array([3, 1, 4, 2])
    # before a reduce-scatter each rank has a whole gradient, of its own rows; after it, its part of the mean
    gradients = np.array([[8, 2, 5, 1], [4, 6, 3, 9], [0, 4, 7, 3], [8, 4, 1, 7]])  # [rank, part]
    means = gradients.mean(axis=0)
    panels = {
        f"{labels.all_gather}: {labels.before_exchange}": np.where(np.eye(NUM_RANKS, dtype=bool), weights, np.nan),
        f"{labels.all_gather}: {labels.after_exchange}": np.tile(weights, (NUM_RANKS, 1)),
        f"{labels.reduce_scatter}: {labels.before_exchange}": gradients,
        f"{labels.reduce_scatter}: {labels.after_exchange}": np.where(np.eye(NUM_RANKS, dtype=bool), means, np.nan),
    }
    cells = []
    for panel, numbers in panels.items():
        for (rank, part), number in np.ndenumerate(numbers):
            is_held = not np.isnan(number)
            text = f"{number:g}" if is_held else ""
            cells.append(
                {"panel": panel, "rank": f"{labels.gpu} {rank}", "part": part + 1, "text": text, "held": is_held}
            )
    x = {"field": "part", "type": "ordinal", "title": labels.part, "axis": {"labelAngle": 0}}
    y = {"field": "rank", "type": "ordinal", "title": None}
    colour = {"field": "part", "type": "nominal", "legend": None, "scale": {"range": list(charts.COLOURS[:NUM_RANKS])}}
    opacity = {"condition": {"test": "datum.held", "value": 1}, "value": 0.12}
    rectangles = {
        "mark": {"type": "rect", "stroke": charts.TEXT, "strokeWidth": 0.5},
        "encoding": {"x": x, "y": y, "color": colour, "opacity": opacity},
    }
    numbers_in_cells = {
        "mark": {"type": "text", "color": "white", "fontSize": 12},
        "encoding": {"x": x, "y": y, "text": {"field": "text"}},
    }
    header = {"labelColor": charts.TEXT, "labelFontSize": 11}
    column = {"field": "panel", "title": None, "sort": list(panels), "header": header}
    return {
        "data": {"values": cells},
        "facet": {"column": column},
        "spec": {"width": 120, "height": 120, "layer": [rectangles, numbers_in_cells]},
    }


@dataclass(frozen=True)
class Span:
    """Something that lasts from ``start`` to ``end``."""

    kind: str  # gather, forward, backward, reduce, update or whole
    layer: int  # 0 for the update
    start: float
    end: float


def spans_of_step(num_layers: int) -> list[Span]:
    """Return what one GPU does in a step of one micro-batch with FULL_SHARD, where two layers at most are gathered.

    A layer's weights are gathered while the layer before it computes, and freed when the layer has computed. The
    backward pass goes from the last layer to the first, and a layer's gradients are reduced while the next one
    computes. The network does one thing at a time.
    """
    layers = list(range(1, num_layers + 1))
    passes = [("forward", layer, _FORWARD) for layer in layers]
    passes += [("backward", layer, _BACKWARD) for layer in reversed(layers)]

    # gather and compute
    gathers: list[Span] = []
    computations: list[Span] = []
    for kind, layer, duration in passes:
        gather_start = 0.0
        start = 0.0
        if computations:
            previous = computations[-1]
            # the last layer is freed after its forward pass, and gathered again for its backward pass
            gather_start = previous.end if previous.layer == layer else previous.start
            start = previous.end
        gather = Span("gather", layer, gather_start, gather_start + _GATHER)
        start = max(start, gather.end)
        gathers.append(gather)
        computations.append(Span(kind, layer, start, start + duration))
    whole = [
        Span("whole", computation.layer, gather.start, computation.end)
        for gather, computation in zip(gathers, computations, strict=True)
    ]

    # reduce gradients as soon as the network is free
    reductions: list[Span] = []
    for computation in computations[num_layers:]:
        start = computation.end
        for gather in gathers:
            if gather.start < start + _REDUCE and start < gather.end:
                start = gather.end
        reductions.append(Span("reduce", computation.layer, start, start + _REDUCE))

    end = reductions[-1].end
    return [*gathers, *computations, *reductions, Span("update", 0, end, end + _UPDATE), *whole]


def step(labels: Labels) -> dict[str, Any]:
    """Show a step of a model of four layers on one GPU: what travels, what is computed, which weights are whole."""
    names = {
        "gather": labels.all_gather,
        "forward": labels.forward,
        "backward": labels.backward,
        "reduce": labels.reduce_scatter,
        "update": labels.update,
        "whole": labels.whole,
    }
    values = []
    for span in spans_of_step(NUM_LAYERS):
        if span.kind in ("gather", "reduce"):
            lane = labels.network
        elif span.kind == "whole":
            lane = f"{labels.layer} {span.layer}"
        else:
            lane = labels.computing
        text = str(span.layer) if span.layer and span.kind != "whole" else ""
        values.append(
            {
                "lane": lane,
                "kind": names[span.kind],
                "from": span.start,
                "to": span.end,
                "middle": (span.start + span.end) / 2,
                "text": text,
            }
        )
    lanes = [labels.network, labels.computing, *(f"{labels.layer} {layer}" for layer in range(1, NUM_LAYERS + 1))]
    x = {
        "field": "from",
        "type": "quantitative",
        "title": labels.time,
        "axis": {"ticks": False, "labels": False, "grid": False},
    }
    y = {"field": "lane", "type": "nominal", "sort": lanes, "title": None}
    colour = {
        "field": "kind",
        "title": None,
        "sort": list(names.values()),
        "scale": {"range": list(charts.COLOURS[: len(names)])},
        "legend": {"orient": "bottom", "columns": 3},
    }
    bars = {
        "mark": {"type": "bar", "stroke": charts.TEXT, "strokeWidth": 0.5, "height": {"band": 0.8}},
        "encoding": {"x": x, "x2": {"field": "to"}, "y": y, "color": colour},
    }
    numbers = {
        "mark": {"type": "text", "color": "white", "fontSize": 11},
        "encoding": {"x": {**x, "field": "middle"}, "y": y, "text": {"field": "text"}},
    }
    return {"height": 170, "data": {"values": values}, "layer": [bars, numbers]}
