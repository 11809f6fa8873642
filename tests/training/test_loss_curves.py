"""The picture of a run shows its losses, its sources' losses and its learning rate, on any background."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fabric_train.training.loggers import CSVLogger
from fabric_train.training.loss_curves import PICTURE, LossCurves, draw_loss_curves
from fabric_train.training.metrics import Metrics, extra_columns
from fabric_train.training.metrics_table import MetricsTable, read_metrics_table

BLUE = "3d7fc4"
ORANGE = "d9782d"
GREEN = "2a9d6f"
GREY = "767676"


def rows_of(num_steps: int, sources: tuple[str, ...] = ("es", "ca", "gl")) -> Iterator[Metrics]:
    """Yield rows; every second one has an evaluation, the third step has no finite loss."""
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


def pixels_of(picture: Path) -> np.ndarray:
    with Image.open(picture) as image:
        return np.asarray(image.convert("RGBA"), dtype=np.int64)


def table_of(rows: Iterable[Metrics], folder: Path) -> MetricsTable:
    table = CSVLogger(folder / "metrics.csv", -1, extra_columns([], [], ["es", "ca", "gl"]))
    for row in rows:
        table.log(row)
    return read_metrics_table(folder / "metrics.csv")


def opaque(picture: Path, colour: str) -> int:
    """Return the number of pixels that have a colour and cover the background."""
    pixels = pixels_of(picture)
    wanted = [int(colour[at : at + 2], 16) for at in (0, 2, 4)] + [255]
    return int((np.abs(pixels - wanted).max(axis=-1) < 2).sum())


def test_every_curve_is_drawn_and_the_background_is_transparent(tmp_path: Path) -> None:
    draw_loss_curves(table_of(rows_of(8), tmp_path), tmp_path / "whole.png", "a title", [4])
    for colour in (BLUE, ORANGE, GREEN, GREY):
        assert opaque(tmp_path / "whole.png", colour) > 200
    assert pixels_of(tmp_path / "whole.png")[[0, -1], :, 3].max() == 0
    (tmp_path / "metrics.csv").unlink()
    draw_loss_curves(table_of(rows_of(8, sources=("es",)), tmp_path), tmp_path / "one.png", "a title")
    assert opaque(tmp_path / "one.png", ORANGE) > 200
    assert opaque(tmp_path / "one.png", GREEN) == 0


@pytest.mark.parametrize("rows", [[], [Metrics(step=0, epoch=0)], list(rows_of(300))])
def test_any_number_of_steps_is_drawn(tmp_path: Path, rows: list[Metrics]) -> None:
    draw_loss_curves(table_of(rows, tmp_path), tmp_path / "picture.png", "a title")
    assert (opaque(tmp_path / "picture.png", BLUE) > 200) == (len(rows) > 1)


def test_loss_curves_take_a_hundredth_of_the_time_and_have_the_last_loss(tmp_path: Path) -> None:
    table = CSVLogger(tmp_path / "metrics.csv", -1, extra_columns([], [], ["es", "ca", "gl"]))
    curves = LossCurves(tmp_path)
    picture = tmp_path / PICTURE
    sizes: list[int] = []
    for row in list(rows_of(4))[1:]:  # the steps 2 and 4 have evaluations; drawing one takes more than a millisecond
        table.log(row)
        curves.log(row)
        sizes.append(opaque(picture, ORANGE) if picture.exists() else 0)
    assert sizes[0] == 0
    assert sizes[1] == sizes[2] == sizes[3] > 0
    curves.close()
    assert opaque(picture, ORANGE) != sizes[3]
    assert [path.name for path in sorted(tmp_path.iterdir())] == [PICTURE, "metrics.csv"]
