"""The picture of the scores: a panel for each language and quantity, over the steps of the run."""

from pathlib import Path
from typing import Any

from fabric_train.evaluation.score_files import ModelScores
from fabric_train.evaluation.score_table import Column, ScoreTable

_PANELS_PER_ROW = 3
_LINE_STYLES = ("--", ":", "-.", (0, (5, 1)), (0, (1, 1)))


def write_picture(table: ScoreTable, path: Path) -> None:
    """Write a PNG, complete or unchanged: a line with errors for the checkpoints, a level one for each other model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow
    from matplotlib.figure import Figure

    num_rows = -(-len(table.columns) // _PANELS_PER_ROW)
    num_columns = min(len(table.columns), _PANELS_PER_ROW)
    figure = Figure(figsize=(4.2 * num_columns, 3.2 * num_rows + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for panel, column in zip(panels, table.columns, strict=False):
        _draw(panel, table, column)
    for panel in panels[len(table.columns) :]:
        panel.set_visible(False)
    entries = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    legend = figure.legend(
        entries.values(), entries, loc="outside lower center", ncols=min(len(entries), 4), frameon=False
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name may have a dollar sign
    temporary = path.with_name(f".{path.stem}.new.png")
    figure.savefig(temporary, dpi=120)
    temporary.replace(path)


def points_of(table: ScoreTable, column: Column) -> list[tuple[int, float, float]]:
    """Return step, value and standard error (0 if it has none) of each checkpoint that has the score."""
    points = []
    for model in table.models:
        score = table.cell(model, column)
        if model.step is not None and score is not None and score.value is not None:
            points.append((model.step, score.value, score.stderr or 0.0))
    return points


def levels_of(table: ScoreTable, column: Column) -> list[tuple[ModelScores, float]]:
    """Return the value of each model without a step that has the score."""
    levels = []
    for model in table.models:
        score = table.cell(model, column)
        if model.step is None and score is not None and score.value is not None:
            levels.append((model, score.value))
    return levels


def _draw(panel: Any, table: ScoreTable, column: Column) -> None:
    steps, values, errors = zip(*points_of(table, column), strict=True) if points_of(table, column) else ((), (), ())
    panel.errorbar(steps, values, yerr=errors, marker="o", markersize=4, capsize=2, label="checkpoints")
    for number, (model, value) in enumerate(levels_of(table, column)):
        style = _LINE_STYLES[number % len(_LINE_STYLES)]
        panel.axhline(value, color=f"C{number + 1}", linestyle=style, label=model.name)
    better = "higher" if column.higher_is_better else "lower"
    panel.set_title(column.title, parse_math=False)
    panel.set_ylabel(f"{column.quantity} ({better} is better)")
    panel.set_xlabel("step")
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.grid(alpha=0.3)
