"""Draw the losses and the learning rate of a run over the optimizer steps, from the rows of its metrics.csv."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fabric_train.files.regular_file import check_regular_or_absent
from fabric_train.training.loggers import Logger
from fabric_train.training.metrics import Metrics, read_metrics

_TEXT = "#767676"  # can be read on white and on black; the background is transparent
_BLUE, _ORANGE = "#3d7fc4", "#d9782d"
_COLOURS = ("#2a9d6f", "#a05fb4", "#c8504f", "#8c6d46", "#1f93a8", "#b08a1e")
_SMOOTHED_FROM = 200  # points
_FIGURES = {"val_bits_per_byte": "validation loss\n(bits per byte)", "val_loss": "validation loss\n(nats per token)"}

Points = list[tuple[int, float]]

PICTURE = "loss_curves.png"
_MAX_SHARE = 0.01  # of the run's time


class LossCurves(Logger):
    """``RUN/loss_curves.png`` after the evaluations, as long as drawing takes at most 1 % of the time, and at the end."""

    def __init__(self, folder: Path, branched_after: Sequence[int] = ()) -> None:
        """``folder`` is RUN, whose metrics.csv has every row before this logger gets it."""
        self._folder, self._branched_after = folder, branched_after
        self._last_step = -1
        self._is_behind = False
        self._drawn_at, self._seconds = 0.0, 0.0

    def log(self, metrics: Metrics) -> None:
        self._last_step = metrics.step
        self._is_behind |= metrics.val_loss is not None
        if self._is_behind and time.monotonic() - self._drawn_at >= self._seconds / _MAX_SHARE:
            self._draw()

    def close(self) -> None:
        if self._is_behind:
            self._draw()

    def _draw(self) -> None:
        started = time.monotonic()
        picture = self._folder / PICTURE
        temporary = picture.with_name(f".{PICTURE}")
        check_regular_or_absent(picture)
        temporary.unlink(missing_ok=True)  # of a killed run, or a planted link
        rows = read_metrics(self._folder / "metrics.csv", self._last_step)
        draw_loss_curves(rows, temporary, self._folder.name, self._branched_after)
        temporary.replace(picture)
        self._is_behind, self._drawn_at = False, time.monotonic()
        self._seconds = self._drawn_at - started


def draw_loss_curves(rows: Sequence[Metrics], picture: Path, title: str, branched_after: Sequence[int] = ()) -> None:
    """Draw the training and validation loss, those of each source if there are several, and the learning rate.

    ``rows`` of metrics.csv are in the order of their steps, and ``picture`` is the PNG to write. A dotted line marks
    each step after which the run branched off another.
    """
    import matplotlib  # slow

    matplotlib.use("Agg")  # no display is needed
    import matplotlib.pyplot as plt

    figure_of_sources, of_sources = _losses_of_sources(rows)
    rates = _points(rows, "learning_rate")
    heights = [4.0, *([3.0] if of_sources else []), *([1.3] if rates else [])]
    with plt.rc_context({"text.color": _TEXT, "axes.labelcolor": _TEXT, "axes.edgecolor": _TEXT}):
        shape: dict[str, Any] = {"figsize": (8, sum(heights) + 0.6), "height_ratios": heights, "layout": "constrained"}
        figure, panels = plt.subplots(len(heights), dpi=150, sharex=True, squeeze=False, **shape)
        axes = list(panels[:, 0])
        _draw_whole(axes[0], rows)
        for number, (name, points) in enumerate(of_sources.items()):
            style = ("-", "--", ":")[number // 6 % 3]
            _draw_validation(axes[1], points, _COLOURS[number % len(_COLOURS)], name, style)
            axes[1].set_ylabel(_FIGURES[figure_of_sources])
        if rates:
            axes[-1].plot(*zip(*rates, strict=True), color=_TEXT, linewidth=1.5)
            axes[-1].set_ylabel("learning rate")
            axes[-1].set_ylim(bottom=0)
            axes[-1].ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        for panel in axes:
            _finish(panel, branched_after)
        axes[0].set_title(title, loc="left", weight="bold")
        axes[-1].set_xlabel("optimizer step")
        figure.savefig(picture, transparent=True, metadata={"Software": None})
        plt.close(figure)


def _losses_of_sources(rows: Sequence[Metrics]) -> tuple[str, dict[str, Points]]:
    """Return which figure is known of all sources, and its values for each; none if there are fewer than two."""
    columns = dict.fromkeys(name for row in rows for name in row.by_source)
    found: dict[str, Points] = {}
    for figure in _FIGURES:
        names = [column.partition("/")[2] for column in columns if column.startswith(f"{figure}/")]
        if len(names) > max(1, len(found)):
            found = {name: _points(rows, f"{figure}/{name}") for name in names}
            known = figure
    return (known, found) if found else ("", {})


def _points(rows: Sequence[Metrics], column: str) -> Points:
    """Return step and value of each row that has a finite one in a column."""
    pairs = ((row.step, row.by_source.get(column) if "/" in column else getattr(row, column)) for row in rows)
    return [(step, number) for step, number in pairs if number is not None and math.isfinite(number)]


def _draw_whole(axes: Any, rows: Sequence[Metrics]) -> None:
    train, validation = _points(rows, "train_loss"), _points(rows, "val_loss")
    if train:
        many = len(train) > _SMOOTHED_FROM
        axes.plot(*zip(*train, strict=True), color=_BLUE, linewidth=1, alpha=0.35 if many else 1, label="training")
        if many:
            width = len(train) // 50
            label = f"training, mean of {width} logged steps"
            axes.plot(*zip(*_smooth(train, width), strict=True), color=_BLUE, linewidth=1.5, label=label)
    _draw_validation(axes, validation, _ORANGE, "validation")
    axes.set_ylabel("loss\n(nats per token)")


def _draw_validation(axes: Any, points: Points, colour: str, label: str, style: str = "-") -> None:
    """Draw a curve with a mark at each evaluation; the legend has its first and last value."""
    if not points:
        return
    first, last = points[0][1], points[-1][1]
    label = f"{label}: {first:.3f} → {last:.3f}" if len(points) > 1 else f"{label}: {last:.3f}"
    marker = "o" if len(points) <= _SMOOTHED_FROM else None
    axes.plot(
        *zip(*points, strict=True), color=colour, linewidth=2, marker=marker, markersize=5, linestyle=style, label=label
    )


def _smooth(points: Points, width: int) -> Points:
    """Return the mean of every ``width`` points that follow each other, at the last one's step."""
    ends = range(width, len(points) + 1)
    total = [0.0]
    for _, value in points:
        total.append(total[-1] + value)
    return [(points[end - 1][0], (total[end] - total[end - width]) / width) for end in ends]


def _finish(axes: Any, branched_after: Sequence[int]) -> None:
    lines = [axes.axvline(step, color=_TEXT, linewidth=1, linestyle=":") for step in branched_after]
    curves, labels = axes.get_legend_handles_labels()
    if curves:
        handles = {**dict(zip(labels, curves, strict=True)), **({"branch": lines[0]} if lines else {})}
        axes.legend(handles.values(), handles, frameon=False, ncols=1 + len(handles) // 8)
    axes.margins(x=0.05, y=0.15)
    axes.grid(color=_TEXT, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_TEXT)
