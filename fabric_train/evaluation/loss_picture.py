"""Draw the losses of the compared models, with their intervals."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fabric_train.evaluation.bootstrap import LEVEL, ModelLoss

_PANELS_IN_A_ROW = 3


def draw_losses(file: Path, models: Sequence[str], results: Mapping[str, Mapping[str, ModelLoss]]) -> None:
    """Write a PNG with a panel for each source: bits per byte of each model, or nats per token if bytes are not known.

    Panels have scales of their own, so that the differences within a source can be seen.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    num_columns = min(_PANELS_IN_A_ROW, len(results))
    num_rows = -(-len(results) // num_columns)
    size = (1.5 + 3.6 * num_columns, num_rows * (1.1 + 0.34 * len(models)))
    figure, grid = pyplot.subplots(num_rows, num_columns, figsize=size, squeeze=False, layout="constrained")
    for panel in grid.flat:
        panel.axis("off")
    for number, (panel, (source, of_models)) in enumerate(zip(grid.flat, results.items(), strict=False)):
        _draw_panel(panel, [of_models.get(model) for model in models])
        panel.set_title(source, loc="left", fontsize=10, parse_math=False)
        labels = [_short(model) for model in models] if number % num_columns == 0 else [""] * len(models)
        panel.set_yticks(range(len(models)), labels, parse_math=False)
    title = f"Loss with {LEVEL} % intervals; lower is better"
    if len(models) > 1:
        title += "\ngreen, red: the interval of the difference to the first model excludes 0"
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def _draw_panel(panel: Any, of_models: Sequence[ModelLoss | None]) -> None:
    panel.axis("on")
    evaluated = [(row, found) for row, found in enumerate(of_models) if found is not None]
    in_bits = all(found.total.bits_per_byte is not None for _, found in evaluated)
    first = _value(evaluated[0][1], in_bits)
    panel.axvline(first, color="0.8", linewidth=1, zorder=0)
    for row, found in evaluated:
        value, interval = _value(found, in_bits), found.bits_per_byte if in_bits else found.loss
        is_known = found.difference is not None and found.difference.excludes_0
        colour = "0.35" if not is_known else "#2a7f46" if value < first else "#b3402e"
        if interval is not None:
            panel.plot(interval, [row, row], color=colour, linewidth=2)
        panel.plot([value], [row], "o", color=colour, markersize=5)
        panel.annotate(f"{value:.3f}", (value, row), (0, 5), textcoords="offset points", ha="center", fontsize=8)
    panel.set_ylim(len(of_models) - 0.5, -0.7)
    panel.margins(x=0.12)
    panel.set_xlabel("bits per byte" if in_bits else "nats per token", fontsize=9)
    panel.tick_params(labelsize=8, left=False)
    panel.spines[["top", "right", "left"]].set_visible(False)


def _value(found: ModelLoss, in_bits: bool) -> float:
    bits = found.total.bits_per_byte
    return bits if in_bits and bits is not None else found.total.loss


def _short(model: str) -> str:
    return model if len(model) <= 32 else f"…{model[-31:]}"
