"""Draw RUN/loss_curves.png, the losses, rewards and the learning rate of a run."""

import time
from collections.abc import Sequence
from pathlib import Path

from fabric_train.files.regular_file import check_regular_or_absent
from fabric_train.pages.charts import Mark, draw
from fabric_train.training.logger import Logger
from fabric_train.training.metric_charts import metric_charts
from fabric_train.training.metrics import Metrics
from fabric_train.training.metrics_table import MetricsTable, read_metrics_table

PICTURE = "loss_curves.png"
_MAX_TIME_SHARE = 0.01  # of the run's time
_HEIGHTS = {"loss": 260, "sources": 220, "rewards": 220, "learning_rate": 90}
"""The charts in the picture, with their heights in pixels."""


def draw_loss_curves(table: MetricsTable, picture: Path, title: str, branched_after: Sequence[int] = ()) -> None:
    """Draw losses, including those of sources, rewards and the learning rate as a PNG; dotted lines mark branches."""
    marks = [Mark(step, "branch", f"branch after step {step:,}") for step in branched_after]
    charts = [chart for chart in metric_charts([(title, table)], marks) if chart.key in _HEIGHTS]
    heights = [_HEIGHTS[chart.key] for chart in charts]
    draw(charts, picture, heights=heights, title=title)


class LossCurves(Logger):
    """Draws ``RUN/loss_curves.png`` at the end, and after evaluations if drawing takes at most 1 % of the time."""

    def __init__(self, run_dir: Path, branched_after: Sequence[int] = ()) -> None:
        """Draw from metrics.csv in ``run_dir``, to which each row is written before this logger gets it."""
        self._run_dir = run_dir
        self._branched_after = branched_after
        self._is_outdated = False
        self._drawn_at = 0.0
        self._seconds_to_draw = 0.0

    def log(self, metrics: Metrics) -> None:
        if metrics.has_evaluation:
            self._is_outdated = True
        pause = self._seconds_to_draw / _MAX_TIME_SHARE
        if self._is_outdated and time.monotonic() - self._drawn_at >= pause:
            self._draw()

    def close(self) -> None:
        if self._is_outdated:
            self._draw()

    def _draw(self) -> None:
        started = time.monotonic()
        picture = self._run_dir / PICTURE
        check_regular_or_absent(picture)
        table = read_metrics_table(self._run_dir / "metrics.csv")
        draw_loss_curves(table, picture, self._run_dir.name, self._branched_after)
        self._is_outdated = False
        self._drawn_at = time.monotonic()
        self._seconds_to_draw = self._drawn_at - started
