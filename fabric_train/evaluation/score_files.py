"""The scores of a model on tasks: one JSON file for each model, which gains a task at a time."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fabric_train.evaluation.tasks_file import TaskSettings
from fabric_train.files.regular_file import write_atomically
from fabric_train.files.typed_json import read_json


@dataclass(frozen=True)
class MetricScore:
    """The value of a metric of lm_eval and its standard error; None if it has none, or is not finite."""

    value: float | None
    stderr: float | None
    higher_is_better: bool


@dataclass(frozen=True)
class TaskScore:
    """The scores of a task by metric, such as ``acc,none``: metric and filter.

    ``num_fewshot`` is the number of examples in each prompt, of which a task may allow none.
    """

    settings: TaskSettings
    metrics: dict[str, MetricScore]
    num_documents: int
    num_fewshot: int
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
        """Return those that have not been evaluated, each once."""
        return [one for one in dict.fromkeys(settings) if self.of(one) is None]


def read_scores(path: Path, unscored: ModelScores) -> ModelScores:
    """Return the scores of a model so far; those of a file with other weights do not count.

    Args:
        path: its file, which need not exist.
        unscored: the model without scores.

    Raises:
        InputError: the file is damaged.
    """
    if not path.exists():
        return unscored
    found = read_score_file(path)
    return replace(found, name=unscored.name) if found.identity == unscored.identity else unscored


def read_score_file(path: Path) -> ModelScores:
    """Return the content of a file of scores.

    Raises:
        InputError: it is damaged.
    """
    return read_json(path, ModelScores, "remove it to evaluate the model again")


def add_score(path: Path, scores: ModelScores, score: TaskScore) -> ModelScores:
    """Return the scores with those of a further task, after writing them."""
    extended = replace(scores, scores=[*scores.scores, score])
    write_atomically(path, json.dumps(asdict(extended), indent=1, allow_nan=False) + "\n")
    return extended


def finite(value: float) -> float | None:
    """Return the number, None if it is infinite or no number."""
    return value if math.isfinite(value) else None
