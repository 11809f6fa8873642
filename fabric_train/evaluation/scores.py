"""Store the scores of models on tasks in a JSON file for each model; write a table of means by language, a picture."""

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric_train.cli.errors import InputError
from fabric_train.evaluation.task_file import LanguageTask, TaskSettings
from fabric_train.files.regular_file import write_atomically
from fabric_train.files.typed_json import read_json
from fabric_train.pages import markdown
from fabric_train.pages.charts import Chart, Series, draw

if TYPE_CHECKING:
    from rich.table import Table

_ACCURACIES = ("acc_norm", "acc", "exact_match", "f1")  # shares of right answers, whose mean has a meaning
_USUAL_METRICS = (*_ACCURACIES, "bits_per_byte", "byte_perplexity", "word_perplexity", "perplexity")
"""The metrics in order of preference: the first one that a task has is shown."""
_PANELS_PER_ROW = 3
_CSV_COLUMNS = (
    *("model", "step", "language", "task", "metric", "value", "stderr", "num_documents", "num_fewshot"),
    "higher_is_better",
)


@dataclass(frozen=True)
class MetricScore:
    """The value and the standard error of one of lm_eval's metrics; None if it has none, or if it is not finite."""

    value: float | None
    stderr: float | None
    higher_is_better: bool

    def __str__(self) -> str:
        if self.value is None:
            return "not finite"
        if self.stderr is None:
            return f"{self.value:.4f}"
        return f"{self.value:.4f} ± {self.stderr:.4f}"


@dataclass(frozen=True)
class TaskScore:
    """The scores of a task by metric and filter, such as ``acc,none``."""

    settings: TaskSettings
    metrics: dict[str, MetricScore]
    num_documents: int
    num_fewshot: int
    """The number of examples in each prompt; a task may allow none."""
    seconds: float
    lm_eval: str


@dataclass(frozen=True)
class ModelScores:
    """The scores of a model. ``identity`` changes with its weights; ``step`` is None for a model in ``--models``."""

    name: str
    step: int | None
    identity: str
    scores: list[TaskScore]

    def of(self, settings: TaskSettings) -> TaskScore | None:
        """Return the scores on a task with these settings; None if the model has not been evaluated on it."""
        return next((score for score in self.scores if score.settings == settings), None)

    def missing(self, settings: Sequence[TaskSettings]) -> list[TaskSettings]:
        """Return the tasks on which the model has not been evaluated, each once."""
        return [task_settings for task_settings in dict.fromkeys(settings) if self.of(task_settings) is None]


def read_scores(path: Path, unscored: ModelScores) -> ModelScores:
    """Return a model's scores so far, except scores of other weights; ``path`` need not exist."""
    if not path.exists():
        return unscored
    scores = read_score_file(path)
    if scores.identity != unscored.identity:
        return unscored
    return replace(scores, name=unscored.name)


def read_score_file(path: Path) -> ModelScores:
    """Return the content of a file of scores; raise an InputError if it is damaged."""
    return read_json(path, ModelScores, "remove it to evaluate the model again")


def add_score(path: Path, scores: ModelScores, score: TaskScore) -> ModelScores:
    """Add the scores on a task, write all scores, and return them."""
    extended = replace(scores, scores=[*scores.scores, score])
    write_atomically(path, json.dumps(asdict(extended), indent=1, allow_nan=False) + "\n")
    return extended


def finite(value: float) -> float | None:
    """Return the number, or None if it is infinite or NaN."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Column:
    """A language, and the metric that is averaged over its tasks, which may be accuracy or another one."""

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
        """Return a mean score; None if it is not complete."""
        return self.cells.get((model.name, column))


def build_table(tasks: Sequence[LanguageTask], models: Iterable[ModelScores]) -> ScoreTable:
    """Return the table: first the models without a step, in their order, then the checkpoints by step."""
    rows = sorted(models, key=lambda model: -1 if model.step is None else model.step)
    columns: list[Column] = []
    cells = {}
    for language in dict.fromkeys(task.language for task in tasks):
        language_tasks = [task for task in tasks if task.language == language]
        for model in rows:
            for column, scores in _scores_by_column(language_tasks, model).items():
                if column not in columns:
                    columns.append(column)
                cells[model.name, column] = mean_score(scores)
    return ScoreTable(columns, rows, cells)


def _scores_by_column(tasks: Sequence[LanguageTask], model: ModelScores) -> dict[Column, list[MetricScore]]:
    """Return a model's scores on a language's tasks that are averaged together; none unless it has all of them."""
    scores_by_column: dict[Column, list[MetricScore]] = {}
    for task in tasks:
        task_score = model.of(task.settings)
        if task_score is None:
            return {}
        key = main_metric(task_score, task.metric)
        metric = key.partition(",")[0]  # without the filter
        quantity = "accuracy" if metric in _ACCURACIES else metric
        score = task_score.metrics[key]
        column = Column(task.language, quantity, score.higher_is_better)
        scores_by_column.setdefault(column, []).append(score)
    return scores_by_column


def main_metric(score: TaskScore, requested_metric: str | None = None) -> str:
    """Return the key of the requested metric, or of the usual one; if it has several filters, the first.

    A requested metric may have a filter, as in ``exact_match,strict``.
    """
    names = (requested_metric,) if requested_metric else _USUAL_METRICS
    for name in names:
        for key in score.metrics:
            if name in (key, key.partition(",")[0]):
                return key
    return next(iter(score.metrics))


def mean_score(scores: Sequence[MetricScore]) -> MetricScore:
    """Return the mean of independent scores, each with the same weight, and its standard error."""
    values = [score.value for score in scores if score.value is not None]
    errors = [score.stderr for score in scores if score.stderr is not None]
    value = None
    if len(values) == len(scores):
        value = sum(values) / len(values)
    stderr = None
    if len(errors) == len(scores):
        stderr = math.sqrt(sum(error**2 for error in errors)) / len(errors)
    return MetricScore(value, stderr, scores[0].higher_is_better)


def to_csv(table: ScoreTable, tasks: Sequence[LanguageTask]) -> str:
    """Return a row for each task and metric of each model, and for each mean over a language's tasks."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for model in table.models:
        for task in tasks:
            task_score = model.of(task.settings)
            if task_score is None:
                continue
            for key, score in task_score.metrics.items():
                writer.writerow(
                    {
                        **_csv_cells(model, task.language, score),
                        "task": task.settings.task,
                        "metric": key.removesuffix(",none"),
                        "num_documents": task_score.num_documents,
                        "num_fewshot": task_score.num_fewshot,
                    }
                )
        for column in table.columns:
            mean = table.cell(model, column)
            if mean is not None:
                writer.writerow({**_csv_cells(model, column.language, mean), "task": "mean", "metric": column.quantity})
    return text.getvalue()


def _csv_cells(model: ModelScores, language: str, score: MetricScore) -> dict[str, Any]:
    """Return the cells that rows of tasks and of means have in common."""
    return {
        "model": model.name,
        "step": model.step,
        "language": language,
        "value": score.value,
        "stderr": score.stderr,
        "higher_is_better": score.higher_is_better,
    }


def read_means(file: Path) -> ScoreTable:
    """Return the means in a file of :func:`to_csv`; an InputError if it is damaged or from an earlier version."""
    models: dict[str, ModelScores] = {}
    columns: dict[Column, None] = {}
    cells: dict[tuple[str, Column], MetricScore] = {}
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                if row["task"] != "mean":
                    continue
                name = row["model"]
                step = int(row["step"]) if row["step"] else None
                value = float(row["value"]) if row["value"] else None
                stderr = float(row["stderr"]) if row["stderr"] else None
                higher_is_better = {"True": True, "False": False}[row["higher_is_better"]]
                column = Column(row["language"], row["metric"], higher_is_better)
                models[name] = ModelScores(name, step, "", [])
                columns[column] = None
                cells[name, column] = MetricScore(value, stderr, higher_is_better)
    except (ValueError, KeyError, TypeError, csv.Error):
        raise InputError(f"{file}: damaged, or written by an earlier version; evaluate again") from None
    return ScoreTable(list(columns), list(models.values()), cells)


def to_markdown(table: ScoreTable) -> str:
    """Return the table of scores as Markdown, a row for each model."""
    head = ["model", *(column.title for column in table.columns)]
    rows = [(model.name, *_cells(table, model)) for model in table.models]
    return markdown.table(head, rows, len(table.columns)) + "\n"


def to_rich(table: ScoreTable) -> "Table":
    """Return the table of scores for the terminal, a row for each model."""
    from rich.table import Table
    from rich.text import Text

    rich_table = Table("model", title="mean score over the tasks of each language, ± standard error")
    for column in table.columns:
        rich_table.add_column(Text(column.title), justify="right")
    for model in table.models:
        rich_table.add_row(Text(model.name), *_cells(table, model))
    return rich_table


def _cells(table: ScoreTable, model: ModelScores) -> Iterator[str]:
    for column in table.columns:
        score = table.cell(model, column)
        yield "–" if score is None else str(score)


def write_picture(table: ScoreTable, path: Path) -> None:
    """Write a PNG, complete or unchanged: a line with errors for the checkpoints, a level line for each other model."""
    num_columns = min(len(table.columns), _PANELS_PER_ROW)
    charts = score_charts(table)
    draw(charts, path, title="Mean scores of each language", heights=[200] * len(charts), columns=num_columns)


def score_charts(table: ScoreTable) -> list[Chart]:
    """Return a chart for each column: the checkpoints by step with one standard error, the other models as levels."""
    charts = []
    for index, column in enumerate(table.columns):
        series = []
        points = points_of(table, column)
        if points:
            steps, values, errors = np.array(points, dtype=np.float64).T
            series.append(
                Series("checkpoints", steps, values, low=values - errors, high=values + errors, kind="points")
            )
        for model, value in levels_of(table, column):
            series.append(Series(model.name, np.zeros(1), np.array([value]), kind="level"))
        better = "higher" if column.higher_is_better else "lower"
        y_title = f"{column.quantity} ({better} is better)"
        charts.append(Chart(f"score-{index}", column.title, y_title, tuple(series)))
    return charts


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
