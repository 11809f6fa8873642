"""The scores of models on tasks: one JSON file for each model, the table of means by language, and its picture."""

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fabric_train.cli.errors import InputError
from fabric_train.evaluation.arguments import LanguageTask, TaskSettings
from fabric_train.files.regular_file import read_json, write_atomically
from fabric_train.pages import markdown
from fabric_train.pages.charts import Chart, Series, draw

if TYPE_CHECKING:
    from rich.table import Table

_ACCURACIES = ("acc_norm", "acc", "exact_match", "f1")  # shares of right answers, whose mean has a meaning
_USUAL_METRICS = (*_ACCURACIES, "bits_per_byte", "byte_perplexity", "word_perplexity", "perplexity")
"""Of a task's metrics, the first of these is shown."""
_PANELS_PER_ROW = 3
_CSV_COLUMNS = (
    *("model", "step", "language", "task", "metric", "value", "stderr", "num_documents", "num_fewshot"),
    "higher_is_better",
)


@dataclass(frozen=True)
class MetricScore:
    """The value of a metric of lm_eval and its standard error; None if it has none, or is not finite."""

    value: float | None
    stderr: float | None
    higher_is_better: bool

    def __str__(self) -> str:
        stderr = "" if self.stderr is None else f" ± {self.stderr:.4f}"
        return "not finite" if self.value is None else f"{self.value:.4f}{stderr}"


@dataclass(frozen=True)
class TaskScore:
    """The scores of a task by metric and filter, such as ``acc,none``."""

    settings: TaskSettings
    metrics: dict[str, MetricScore]
    num_documents: int
    num_fewshot: int  # examples in each prompt; a task may allow none
    seconds: float
    lm_eval: str


@dataclass(frozen=True)
class ModelScores:
    """The scores of a model. ``identity`` changes with its weights; ``step`` is None for a model of ``--models``."""

    name: str
    step: int | None
    identity: str
    scores: list[TaskScore]

    def of(self, settings: TaskSettings) -> TaskScore | None:
        """Return the scores of a task with these settings, None if it has not been evaluated."""
        return next((score for score in self.scores if score.settings == settings), None)

    def missing(self, settings: Sequence[TaskSettings]) -> list[TaskSettings]:
        """Return the tasks that have not been evaluated, each once."""
        return [one for one in dict.fromkeys(settings) if self.of(one) is None]


def read_scores(path: Path, unscored: ModelScores) -> ModelScores:
    """Return the scores of a model so far; scores of other weights do not count, and ``path`` need not exist."""
    if not path.exists():
        return unscored
    found = read_score_file(path)
    return replace(found, name=unscored.name) if found.identity == unscored.identity else unscored


def read_score_file(path: Path) -> ModelScores:
    """Return the content of a file of scores; raise an InputError if it is damaged."""
    return read_json(path, ModelScores, "remove it to evaluate the model again")


def add_score(path: Path, scores: ModelScores, score: TaskScore) -> ModelScores:
    """Return the scores with a further task's, after writing them."""
    extended = replace(scores, scores=[*scores.scores, score])
    write_atomically(path, json.dumps(asdict(extended), indent=1, allow_nan=False) + "\n")
    return extended


def finite(value: float) -> float | None:
    """Return the number, None if it is infinite or NaN."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Column:
    """A language, and the metric that is averaged over its tasks: accuracy, or another one."""

    language: str
    quantity: str
    higher_is_better: bool

    @property
    def title(self) -> str:
        return f"{self.language} {self.quantity}"


@dataclass(frozen=True)
class ScoreTable:
    """The mean score of each model in each column, once it has been evaluated on all tasks of the language."""

    columns: list[Column]
    models: list[ModelScores]
    cells: Mapping[tuple[str, Column], MetricScore]

    def cell(self, model: ModelScores, column: Column) -> MetricScore | None:
        """Return a mean score, None if it is not complete."""
        return self.cells.get((model.name, column))


def build_table(tasks: Sequence[LanguageTask], models: Iterable[ModelScores]) -> ScoreTable:
    """Return the table: first the models without a step, in their order, then the checkpoints by step."""
    rows = sorted(models, key=lambda model: -1 if model.step is None else model.step)
    columns: list[Column] = []
    cells = {}
    for language in dict.fromkeys(task.language for task in tasks):
        own = [task for task in tasks if task.language == language]
        for model in rows:
            found = [(task, score) for task in own if (score := model.of(task.settings))]
            if len(found) < len(own):
                continue
            parts_of: dict[Column, list[MetricScore]] = {}  # scores that are averaged together
            for task, score in found:
                key = main_metric(score, task.metric)
                metric = key.partition(",")[0]
                shown = score.metrics[key]
                quantity = "accuracy" if metric in _ACCURACIES else metric
                parts_of.setdefault(Column(language, quantity, shown.higher_is_better), []).append(shown)
            for column, parts in parts_of.items():
                if column not in columns:
                    columns.append(column)
                cells[model.name, column] = mean_score(parts)
    return ScoreTable(columns, rows, cells)


def main_metric(score: TaskScore, wanted: str | None = None) -> str:
    """Return the key of the wanted metric, or the usual one; of several filters the first, if none is wanted."""
    for name in (wanted,) if wanted else _USUAL_METRICS:
        for key in score.metrics:
            if name in (key, key.partition(",")[0]):
                return key
    return next(iter(score.metrics))


def mean_score(parts: Sequence[MetricScore]) -> MetricScore:
    """Return the mean of independent scores, each with the same weight, and its standard error."""
    values = [part.value for part in parts if part.value is not None]
    errors = [part.stderr for part in parts if part.stderr is not None]
    value = sum(values) / len(values) if len(values) == len(parts) else None
    stderr = math.sqrt(sum(error**2 for error in errors)) / len(errors) if len(errors) == len(parts) else None
    return MetricScore(value, stderr, parts[0].higher_is_better)


def to_csv(table: ScoreTable, tasks: Sequence[LanguageTask]) -> str:
    """Return a row for each task and metric of each model, and for each mean over a language's tasks."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(_CSV_COLUMNS)
    for model in table.models:
        start = [model.name, model.step]
        for task in tasks:
            score = model.of(task.settings)
            for name, metric in score.metrics.items() if score else ():
                assert score is not None
                numbers = [metric.value, metric.stderr, score.num_documents, score.num_fewshot, metric.higher_is_better]
                lines.writerow([*start, task.language, task.settings.task, name.removesuffix(",none"), *numbers])
        for column in table.columns:
            if mean := table.cell(model, column):
                numbers = [mean.value, mean.stderr, None, None, mean.higher_is_better]
                lines.writerow([*start, column.language, "mean", column.quantity, *numbers])
    return text.getvalue()


def read_means(file: Path) -> ScoreTable:
    """Return the means of a file that :func:`to_csv` wrote; an InputError if it is damaged or of an earlier version."""
    models: dict[str, ModelScores] = {}
    columns: dict[Column, None] = {}
    cells: dict[tuple[str, Column], MetricScore] = {}
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            for row in (row for row in csv.DictReader(lines) if row["task"] == "mean"):
                is_higher = {"True": True, "False": False}[row["higher_is_better"]]
                value, stderr = (float(row[name]) if row[name] else None for name in ("value", "stderr"))
                column = Column(row["language"], row["metric"], is_higher)
                models[row["model"]] = ModelScores(row["model"], int(row["step"]) if row["step"] else None, "", [])
                columns[column] = None
                cells[row["model"], column] = MetricScore(value, stderr, is_higher)
    except (ValueError, KeyError, TypeError, csv.Error):
        raise InputError(f"{file}: damaged, or of an earlier version; evaluate again") from None
    return ScoreTable([*columns], [*models.values()], cells)


def to_markdown(table: ScoreTable) -> str:
    """Return the table of scores as Markdown, a row for each model."""
    head = ["model", *(column.title for column in table.columns)]
    return markdown.table(head, [(model.name, *_cells(table, model)) for model in table.models], len(head) - 1) + "\n"


def to_rich(table: ScoreTable) -> "Table":
    """Return the table of scores for the terminal, a row for each model."""
    from rich.table import Table
    from rich.text import Text

    shown = Table("model", title="mean score over the tasks of each language, ± its standard error")
    for column in table.columns:
        shown.add_column(Text(column.title), justify="right")
    for model in table.models:
        shown.add_row(Text(model.name), *_cells(table, model))
    return shown


def _cells(table: ScoreTable, model: ModelScores) -> Iterator[str]:
    yield from (str(table.cell(model, column) or "–") for column in table.columns)


def write_picture(table: ScoreTable, path: Path) -> None:
    """Write a PNG, complete or unchanged: a line with errors for the checkpoints, a level one for each other model."""
    columns = min(len(table.columns), _PANELS_PER_ROW)
    charts = score_charts(table)
    draw(charts, path, title="Mean scores of each language", heights=[200] * len(charts), columns=columns)


def score_charts(table: ScoreTable) -> list[Chart]:
    """Return a chart for each column: the checkpoints by step with one standard error, the other models as levels."""
    charts = []
    for number, column in enumerate(table.columns):
        points = np.array(points_of(table, column), dtype=np.float64).reshape(-1, 3)
        steps, values, errors = points.T
        curve = Series("checkpoints", steps, values, low=values - errors, high=values + errors, kind="points")
        others = ((model.name, np.zeros(1), np.array([value])) for model, value in levels_of(table, column))
        levels = [Series(*other, kind="level") for other in others]
        better = "higher" if column.higher_is_better else "lower"
        y_title = f"{column.quantity} ({better} is better)"
        charts.append(Chart(f"score-{number}", column.title, y_title, (*([curve] if len(points) else []), *levels)))
    return charts


def points_of(table: ScoreTable, column: Column) -> list[tuple[int, float, float]]:
    """Return step, value and standard error (0 if it has none) of each checkpoint that has the score."""
    scores = ((model.step, table.cell(model, column)) for model in table.models)
    return [
        (step, score.value, score.stderr or 0.0)
        for step, score in scores
        if step is not None and score is not None and score.value is not None
    ]


def levels_of(table: ScoreTable, column: Column) -> list[tuple[ModelScores, float]]:
    """Return the value of each model without a step that has the score."""
    scores = ((model, table.cell(model, column)) for model in table.models if model.step is None)
    return [(model, score.value) for model, score in scores if score is not None and score.value is not None]
