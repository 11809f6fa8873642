"""The arguments of ``evaluate.py``, and the file that ``--tasks`` names."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fabric_train.cli import yaml_core
from fabric_train.cli.argument_types import (
    NonNegativeInt,
    NonNegativeInt64,
    PositiveInt,
    RowLength,
    WrongValueError,
    convert,
    nearest_name,
)
from fabric_train.cli.errors import InputError

_SETTINGS: dict[str, Any] = {"num_fewshot": NonNegativeInt, "limit": PositiveInt}
_OF_TASK = {"task": str, **_SETTINGS, "metric": str}
_LONGEST_NAME = 1000
_LISTS = ("models", "texts", "pairs", "needle")


@dataclass(frozen=True)
class EvaluateArguments:
    """Compare models by their loss on texts, with confidence intervals; evaluate each checkpoint of a run as it trains

    PROGRAM --models models/llama-3-8b runs/1/best runs/1 --texts es=es.jsonl ca=ca/ --output_dir eval/1
    PROGRAM --models models/llama-3-8b runs/1/all --needle 4k 32k 128k --texts es=books.jsonl --output_dir eval/2
    PROGRAM --watch runs/1 --tasks tasks.yaml --texts es=es.jsonl --models models/llama-3-8b
    """

    models: list[str] | None = None
    """Models: RUN (its newest checkpoint), RUN/best, RUN/latest, RUN/step-500, RUN/all (each of its checkpoints), a
    checkpoint's folder, a Hugging Face folder, one with an adapter of peft, or a hub name. The others are compared with
    the first one. With --watch, they are evaluated too, once.
    """
    output_dir: str | None = None
    """Folder for the results and for finished parts. With the same folder, a stopped evaluation goes on, and further
    models and texts are added to those that are there. Default with --watch: RUN/evaluation.
    """
    texts: list[str] | None = None
    """What the loss is of, by source: es=PLACE, where PLACE is anything with text that fabric-train tokenize reads, or
    a token dataset, whose validation split is meant. Default: the validation split of the first checkpoint in --models.
    """
    pairs: list[str] | None = None
    """Preference pairs, by name: ultra=PLACE, a token dataset of pairs (its validation split, or all if it has none) or
    rows that fabric-train tokenize reads as pairs. How often each model prefers the chosen answer is in pairs.json.
    """
    needle: list[RowLength] | None = None
    """Lengths of texts in tokens, such as 4k 32k 128k. Instead of the loss, test how many facts each model finds that
    are hidden in texts of these lengths, at five depths: of --texts, or of invented English sentences.
    """
    needle_trials: PositiveInt = 3
    """With --needle: texts of each length, with other facts."""
    text_column: str = "text"
    """Column with the text in csv, json, jsonl, parquet and datasets. NAME:SEPARATOR joins lists of texts, such as
    'moves: ' with a space.
    """
    max_length: RowLength = 2048
    """Tokens that a model sees at once; 8k is 8192. Longer documents are read in windows."""
    overlap: RowLength = 1
    """Tokens before a window's first predicted token that the window has at least, so that it has context."""
    batch_tokens: RowLength = 8192
    """Tokens in one forward pass, padding included; fewer take less memory."""
    seed: NonNegativeInt64 = 0
    """Seed of the bootstrap, and of the facts of --needle."""
    watch: str | None = None
    """Evaluate each checkpoint of this run on --texts, on --tasks with lm_eval, or on both."""
    tasks: str | None = None
    """With --watch: YAML file with lm_eval's tasks by language."""
    wait: bool = True
    """With --watch: wait for further checkpoints until the run has ended; false ends after those that are there."""
    batch_size: PositiveInt = 8
    """With --watch: requests of lm_eval in one forward pass."""

    def faults(self) -> list[str]:
        """Return missing names, models given twice, windows that overlap wholly, and arguments of the other mode."""
        faults = [f"--{name} names nothing: give one" for name in _LISTS if getattr(self, name) == []]
        if self.pairs is not None and self.texts is not None:
            faults.append("--pairs and --texts: evaluate one after the other, which may have the same --output_dir")
        if self.needle is not None:
            others = [f"--{name}" for name in ("pairs", "watch") if getattr(self, name) is not None]
            faults += [f"--needle and {other}: give one after the other" for other in others]
        if self.watch is None:
            faults += [f"--{name} is required" for name in ("models", "output_dir") if getattr(self, name) is None]
            faults += ["--tasks needs --watch: give the run"] if self.tasks is not None else []
        else:
            faults += ["--pairs and --watch: give --models instead, such as RUN/all"] if self.pairs is not None else []
            has_none = self.tasks is None and self.texts is None
            faults += ["--watch needs --tasks or --texts: give one of them"] if has_none else []
        models = self.models or []
        twice = {model for model in models if models.count(model) > 1}
        faults += [f"--models {model} is given twice: give it once" for model in sorted(twice)]
        if self.overlap >= self.max_length:
            faults.append(f"--overlap {self.overlap} fills windows of --max_length {self.max_length}: give less")
        return faults


@dataclass(frozen=True)
class TaskSettings:
    """What decides the scores of a task."""

    task: str  # a name of lm_eval, or of a task file without its folder, which may move
    num_fewshot: int | None = None  # examples in a prompt; None: the task's own number
    limit: int | None = None  # documents; None: all
    files: str | None = None  # SHA-256 of a task file and the local files that it names


@dataclass(frozen=True)
class LanguageTask:
    language: str
    source: str  # a name of lm_eval, or the absolute path of a task file
    settings: TaskSettings
    metric: str | None = None  # the one to show; None: the usual one


def read_tasks(path: str) -> list[LanguageTask]:
    """Return the tasks of lm_eval in a file, in its order; an InputError has every fault at once.

    ::

        num_fewshot: 0                   # of every task that has no other number; without it, each task's own
        limit: 500                       # documents of every task; without it, all
        languages:
          es: [xnli_es, quiz_es.yaml]    # names of lm_eval, or task files of its format, relative to this file
          ca:
            - xnli_ca
            - {task: quiz_ca.yaml, num_fewshot: 5, limit: 100, metric: acc}
    """
    content = yaml_core.load_file(path, "--tasks")
    if not isinstance(content, dict) or not isinstance(content.get("languages"), dict) or not content["languages"]:
        raise InputError(f"--tasks {path}: expected 'languages:' with tasks, such as 'languages: {{es: [xnli_es]}}'")
    faults: list[str] = []
    general = _converted({key: content[key] for key in content if key != "languages"}, _SETTINGS, "it", faults)
    tasks = []
    for language, items in content["languages"].items():
        if not isinstance(items, list) or not items:
            faults.append(f"{language}: expected a list of tasks, such as '{language}: [xnli_es, quiz.yaml]'")
            continue
        for number, item in enumerate(items, 1):
            given = {"task": item} if isinstance(item, str) else item
            if not isinstance(given, dict) or "task" not in given:
                faults.append(f"{language}: task {number}: expected a name or {{task: NAME, ...}}, got {item!r}")
                continue
            values = general | _converted(given, _OF_TASK, f"{language}: task {number}", faults)
            tasks += list(_build(str(language), values, Path(path).parent, faults))
    for number, task in enumerate(tasks):
        if any((task.language, task.settings) == (one.language, one.settings) for one in tasks[:number]):
            faults.append(f"{task.language}: {task.settings.task} is given twice: give it once")
    if faults:
        raise InputError(*(f"--tasks {path}: {fault}" for fault in faults))
    return tasks


def is_task_file(task: str) -> bool:
    """Whether a task is a file, and not a name of lm_eval."""
    return task.endswith((".yaml", ".yml"))


def _converted(given: Mapping[Any, Any], kinds: Mapping[str, Any], where: str, faults: list[str]) -> dict[str, Any]:
    values = {}
    for key, value in given.items():
        if key not in kinds:
            known = [*kinds, "languages"] if where == "it" else list(kinds)
            hint = nearest_name(str(key), known) or f"; {where} has {', '.join(known)}"
            faults.append(f"{key!r}: no such value{hint}")
            continue
        try:
            values[key] = convert(kinds[key], value)
        except WrongValueError as error:
            faults.append(f"{where}: {key}: expected {error}, got {value!r}")
    return values


def _build(language: str, values: Mapping[str, Any], folder: Path, faults: list[str]) -> Iterator[LanguageTask]:
    """Yield the task of these values; add a fault if it is a file that cannot be read."""
    name = values.get("task")
    if not name:
        return  # its fault is known
    source = name
    files = None
    if is_task_file(name):
        path = Path(os.path.abspath(folder / name))
        try:
            digests = sorted(hashlib.sha256(file.read_bytes()).digest() for file in files_of(path))
            source = str(path)
            files = hashlib.sha256(b"".join(digests)).hexdigest()
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
            faults.append(f"{language}: {path}: {reason}; give a task file of lm_eval")
            return
    settings = TaskSettings(os.path.basename(source), values.get("num_fewshot"), values.get("limit"), files)
    yield LanguageTask(language, source, settings, values.get("metric"))


class _TaskFileLoader(yaml.SafeLoader):
    """Reads a task file of lm_eval as data: ``!function module.name`` becomes the name of the module's file."""


def _file_of_function(loader: Any, node: Any) -> str:
    return loader.construct_scalar(node).rpartition(".")[0].replace(".", "/") + ".py"


_TaskFileLoader.add_constructor("!function", _file_of_function)


def files_of(task_file: Path) -> list[Path]:
    """Return a task file and the local files that its texts name: those it includes, its functions and its data.

    Data is named relative to the working directory, everything else relative to the task file, as in lm_eval.
    """
    found: list[Path] = []
    unread = [task_file]
    while unread:
        path = unread.pop()
        if path in found:
            continue
        found.append(path)
        if not is_task_file(path.name):
            continue
        for text in _texts_in(yaml.load(path.read_text(encoding="utf-8"), Loader=_TaskFileLoader)):
            places = (path.parent / text, Path(text)) if len(text) < _LONGEST_NAME else ()
            unread += [Path(os.path.abspath(place)) for place in places if text and os.path.isfile(place)]
    return found


def _texts_in(value: Any) -> Iterator[str]:
    """Yield every text in lists and mappings, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(item)
