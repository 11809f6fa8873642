"""Draw the loss curve of a run, and those of its sources."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed
import matplotlib.pyplot as plt

_BLUE, _ORANGE, _GREY = "#7ea3d4", "#d9782d", "#555555"


def draw_loss_curve(metrics: Path, picture: Path, title: str, loss_before: float) -> None:
    """Draw train and validation loss (nats per token) over the optimizer steps as a PNG.

    Args:
        metrics: the run's metrics.csv.
        picture: the PNG to write.
        title: the title of the picture.
        loss_before: validation loss before training, drawn at step 0.
    """
    rows = _read(metrics)
    train = [(int(row["step"]), float(row["train_loss"])) for row in rows if row["train_loss"]]
    validation = [(0, loss_before)] + [(int(row["step"]), float(row["val_loss"])) for row in rows if row["val_loss"]]
    figure, axes = plt.subplots(figsize=(8, 4.8), dpi=150, layout="constrained")
    axes.plot(*zip(*train, strict=True), "o-", color=_BLUE, linewidth=1, markersize=3, label="train, each step")
    axes.plot(
        *zip(*validation, strict=True), "o-", color=_ORANGE, linewidth=2, markersize=6, label="validation, held out"
    )
    for step, loss in (validation[0], validation[-1]):
        axes.annotate(
            f"{loss:.3f}",
            (step, loss),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
            color=_ORANGE,
            weight="bold",
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        )
    axes.set_ylabel("loss (nats per token)")
    _finish(figure, axes, title, picture)


def draw_source_losses(tables: Sequence[Path], sources: Sequence[str], picture: Path, title: str) -> None:
    """Draw the validation loss of each source in bits per byte over the optimizer steps as a PNG.

    Args:
        tables: the metrics.csv of a run, and those of its branches, which are drawn dashed.
        sources: their names, at most three.
        picture: the PNG to write.
        title: the title of the picture.
    """
    figure, axes = plt.subplots(figsize=(8, 4.8), dpi=150, layout="constrained")
    for source, colour in zip(sources, (_BLUE, _ORANGE, _GREY), strict=False):
        before: list[tuple[int, float]] = []
        for table in tables:
            column = f"val_bits_per_byte/{source}"
            points = [(int(row["step"]), float(row[column])) for row in _read(table) if row[column]]
            style: Any = {"linestyle": "--"} if before else {"label": source}
            axes.plot(*zip(*before[-1:], *points, strict=True), marker="o", color=colour, linewidth=2, **style)
            before += points
    axes.set_ylabel("validation loss (bits per byte)")
    _finish(figure, axes, title, picture)


def _read(metrics: Path) -> list[dict[str, str]]:
    with metrics.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _finish(figure: Any, axes: Any, title: str, picture: Path) -> None:
    axes.set_title(title, loc="left", weight="bold")
    axes.set_xlabel("optimizer step")
    axes.margins(x=0.04, y=0.12)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_GREY)
    axes.legend(frameon=False)
    figure.savefig(picture)
    plt.close(figure)
