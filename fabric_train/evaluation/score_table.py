"""The scores of all models by language, as a table for the terminal, CSV and markdown."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabric_train.evaluation.score_files import MetricScore, ModelScores, TaskScore
from fabric_train.evaluation.tasks_file import LanguageTask

if TYPE_CHECKING:
    from rich.table import Table

_ACCURACIES = ("acc_norm", "acc", "exact_match", "f1")
"""Shares of right answers, whose mean over tasks has a meaning."""
_USUAL_METRICS = (*_ACCURACIES, "bits_per_byte", "byte_perplexity", "word_perplexity", "perplexity")
"""Of a task's metrics, the first of these is shown."""


@dataclass(frozen=True)
class Column:
    """A language and what is averaged over its tasks: accuracy, or one other metric."""

    language: str
    quantity: str
    higher_is_better: bool

    @property
    def title(self) -> str:
        """The words above the column."""
        return f"{self.language} {self.quantity}"


@dataclass(frozen=True)
class ScoreTable:
    """The mean score of each model in each column.

    A cell is None until the model has been evaluated on all tasks of the language. ``models`` are the rows.
    """

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
        for model in rows:
            found = _metrics_of(model, [task for task in tasks if task.language == language])
            if found is None:
                continue
            for column, parts in _by_column(language, found).items():
                if column not in columns:
                    columns.append(column)
                cells[model.name, column] = mean_score(parts)
    return ScoreTable(columns, rows, cells)


def main_metric(score: TaskScore, wanted: str | None = None) -> str:
    """Return the key of the metric to show: the wanted one, or the usual one of such a task.

    A task with several filters has each metric more than once; the first counts, unless ``wanted`` has the filter too.
    """
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
    lines.writerow(["model", "step", "language", "task", "metric", "value", "stderr", "num_documents", "num_fewshot"])
    for model in table.models:
        start = [model.name, model.step]
        for task in tasks:
            score = model.of(task.settings)
            for name, metric in score.metrics.items() if score else ():
                assert score is not None
                numbers = [metric.value, metric.stderr, score.num_documents, score.num_fewshot]
                lines.writerow([*start, task.language, task.settings.task, name.removesuffix(",none"), *numbers])
        for column in table.columns:
            if mean := table.cell(model, column):
                row = [column.language, "mean", column.quantity, mean.value, mean.stderr, None, None]
                lines.writerow([*start, *row])
    return text.getvalue()


def to_markdown(table: ScoreTable) -> str:
    """Return the table of means as markdown."""
    head = ["model", *(column.title for column in table.columns)]
    lines = [head, ["---", *("---:" for _ in table.columns)]]
    lines += [[model.name, *_texts(table, model)] for model in table.models]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


def to_rich(table: ScoreTable) -> "Table":
    """Return the table of means for the terminal."""
    from rich.table import Table
    from rich.text import Text

    shown = Table("model", title="mean score over the tasks of each language, ± its standard error")
    for column in table.columns:
        shown.add_column(Text(column.title), justify="right")
    for model in table.models:
        shown.add_row(Text(model.name), *_texts(table, model))
    return shown


def _metrics_of(model: ModelScores, tasks: Iterable[LanguageTask]) -> list[tuple[str, MetricScore]] | None:
    """Return the main metric of each task; None if one has not been evaluated."""
    found = []
    for task in tasks:
        score = model.of(task.settings)
        if score is None:
            return None
        key = main_metric(score, task.metric)
        found.append((key.partition(",")[0], score.metrics[key]))
    return found


def _by_column(language: str, found: Iterable[tuple[str, MetricScore]]) -> dict[Column, list[MetricScore]]:
    """Return the scores that are averaged together."""
    parts: dict[Column, list[MetricScore]] = {}
    for metric, score in found:
        quantity = "accuracy" if metric in _ACCURACIES else metric
        parts.setdefault(Column(language, quantity, score.higher_is_better), []).append(score)
    return parts


def _texts(table: ScoreTable, model: ModelScores) -> list[str]:
    return [_text(table.cell(model, column)) for column in table.columns]


def _text(score: MetricScore | None) -> str:
    if score is None:
        return "–"
    if score.value is None:
        return "not finite"
    return f"{score.value:.4f}" + ("" if score.stderr is None else f" ± {score.stderr:.4f}")
