"""The picture of a run shows its losses, those of its sources and its learning rate, on any background."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from fabric_train.training.loss_curves import draw_loss_curves
from fabric_train.training.metrics import Metrics

BLUE, ORANGE, GREEN, PURPLE, GREY = "3d7fc4", "d9782d", "2a9d6f", "a05fb4", "767676"


def rows_of(num_steps: int, sources: tuple[str, ...] = ("es", "ca")) -> Iterator[Metrics]:
    """Yield rows of which every second one has an evaluation; the third step has no finite loss."""
    for step in range(num_steps + 1):
        loss = 4 / (1 + step)
        bits = {f"val_bits_per_byte/{name}": loss + number for number, name in enumerate(sources)}
        yield Metrics(
            step=step,
            epoch=0,
            train_loss=math.inf if step == 3 else loss + 0.5 * (step % 2) if step else None,
            val_loss=None if step % 2 else loss,
            learning_rate=1e-3 * step or None,
            by_source={} if step % 2 else bits,
        )


def opaque(picture: Path, colour: str) -> int:
    """Return the number of pixels that have a colour and cover what is behind them."""
    pixels = (imread(picture) * 255).round()
    wanted = [int(colour[at : at + 2], 16) for at in (0, 2, 4)] + [255]
    return int((np.abs(pixels - wanted).max(axis=-1) < 2).sum())


def test_every_curve_is_drawn_and_the_background_is_transparent(tmp_path: Path) -> None:
    draw_loss_curves(list(rows_of(8)), tmp_path / "whole.png", "a title", [4])
    for colour in (BLUE, ORANGE, GREEN, PURPLE, GREY):
        assert opaque(tmp_path / "whole.png", colour) > 200
    assert imread(tmp_path / "whole.png")[[0, -1], :, 3].max() == 0
    draw_loss_curves(list(rows_of(8, sources=("es",))), tmp_path / "one.png", "a title")
    assert opaque(tmp_path / "one.png", ORANGE) > 200
    assert opaque(tmp_path / "one.png", GREEN) == 0


@pytest.mark.parametrize("rows", [[], [Metrics(step=0, epoch=0)], list(rows_of(300))])
def test_any_number_of_steps_is_drawn(tmp_path: Path, rows: list[Metrics]) -> None:
    draw_loss_curves(rows, tmp_path / "picture.png", "a title")
    assert (opaque(tmp_path / "picture.png", BLUE) > 200) == (len(rows) > 1)
