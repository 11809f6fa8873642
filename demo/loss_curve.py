"""Draw the loss curve of a run."""

import csv
from pathlib import Path

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
    with metrics.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
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
    axes.set_title(title, loc="left", weight="bold")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.margins(x=0.04, y=0.12)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_GREY)
    axes.legend(frameon=False)
    figure.savefig(picture)
    plt.close(figure)
