"""The arguments of ``evaluate.py``, and the file that ``--tasks`` names."""

import hashlib
import json
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

_SETTING_TYPES: dict[str, Any] = {"num_fewshot": NonNegativeInt, "limit": PositiveInt}
_TASK_TYPES = {"task": str, **_SETTING_TYPES, "metric": str, "metadata": str}
_LONGEST_NAME = 1000
_LISTS = ("models", "texts", "pairs")


@dataclass(frozen=True)
class EvaluateArguments:
    """Compare models by their loss on texts, with confidence intervals; evaluate each checkpoint of a run as it trains

    PROGRAM --models models/llama-3-8b runs/1/best runs/1 --texts es=es.jsonl ca=ca/ --output_dir eval/1
    PROGRAM --models models/llama-3-8b runs/1/all --tasks tasks.yaml --output_dir eval/2
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
    """Texts to evaluate the loss on, by source: es=PLACE, where PLACE is anything with text that fabric-train tokenize
    reads, or a token dataset, whose validation split is meant. Default without --watch and --tasks: the validation
    split of the first checkpoint in --models.
    """
    pairs: list[str] | None = None
    """Preference pairs, by name: ultra=PLACE, a token dataset of pairs (its validation split, or all if it has none) or
    rows that fabric-train tokenize reads as pairs. How often each model prefers the chosen answer is in pairs.json.
    """
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
    """Seed of the bootstrap."""
    watch: str | None = None
    """Evaluate each checkpoint of this run on --texts, on --tasks with lm_eval, or on both."""
    tasks: str | None = None
    """YAML file with lm_eval's tasks by language, on which --models, and each checkpoint of --watch, are evaluated."""
    wait: bool = True
    """With --watch: wait for further checkpoints until the run has ended; false ends after those that are there."""
    batch_size: PositiveInt = 8
    """With --tasks: requests of lm_eval in one forward pass."""

    def faults(self) -> list[str]:
        """Return missing names, models given twice, windows that overlap wholly, and arguments of the other mode."""
        faults = [f"--{name} names nothing: give one" for name in _LISTS if getattr(self, name) == []]

        # arguments that exclude each other, or need each other
        if self.pairs is not None and self.texts is not None:
            faults.append("--pairs and --texts: evaluate one after the other, which may have the same --output_dir")
        if self.pairs is not None and self.tasks is not None:
            faults.append("--pairs and --tasks: evaluate one after the other, which may have the same --output_dir")
        if self.watch is None:
            faults += [f"--{name} is required" for name in ("models", "output_dir") if getattr(self, name) is None]
        else:
            if self.pairs is not None:
                faults.append("--pairs and --watch: give --models instead, such as RUN/all")
            if self.tasks is None and self.texts is None:
                faults.append("--watch needs --tasks or --texts: give one of them")

        # values that do not fit together
        models = self.models or []
        repeated_models = {model for model in models if models.count(model) > 1}
        faults += [f"--models {model} is given twice: give it once" for model in sorted(repeated_models)]
        if self.overlap >= self.max_length:
            faults.append(f"--overlap {self.overlap} fills windows of --max_length {self.max_length}: give less")
        return faults


@dataclass(frozen=True)
class TaskSettings:
    """What decides the scores of a task."""

    task: str
    """A name of lm_eval, or of a task file without its folder, which may move."""
    num_fewshot: int | None = None
    """Examples in a prompt; None: the task's own number."""
    limit: int | None = None
    """Documents; None: all."""
    files: str | None = None
    """SHA-256 of a task file and the local files that it names."""
    metadata: str | None = None
    """JSON of what lm_eval passes to the task, such as {"max_seq_lengths": [4096]}."""

    @property
    def max_seq_lengths(self) -> list[int]:
        """Lengths in tokens of the texts that a synthetic task such as RULER generates; empty for other tasks."""
        return json.loads(self.metadata or "{}").get("max_seq_lengths", [])


@dataclass(frozen=True)
class LanguageTask:
    """A task, the language that its score counts for, and the metric to show."""

    language: str
    source: str
    """A name of lm_eval, or the absolute path of a task file."""
    settings: TaskSettings
    metric: str | None = None
    """The metric to show; None: the usual one."""


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
          32k: [{task: niah_single_1, metadata: {max_seq_lengths: [32768]}}]    # what lm_eval passes to the task
    """
    content = yaml_core.load_file(path, "--tasks")
    if not isinstance(content, dict) or not isinstance(content.get("languages"), dict) or not content["languages"]:
        raise InputError(f"--tasks {path}: expected 'languages:' with tasks, such as 'languages: {{es: [xnli_es]}}'")
    faults: list[str] = []

    # the settings of all tasks
    general_content = {key: value for key, value in content.items() if key != "languages"}
    general_settings = _convert_values(general_content, _SETTING_TYPES, "it", [*_SETTING_TYPES, "languages"], faults)

    # the tasks of each language
    tasks: list[LanguageTask] = []
    for language, items in content["languages"].items():
        if not isinstance(items, list) or not items:
            faults.append(f"{language}: expected a list of tasks, such as '{language}: [xnli_es, quiz.yaml]'")
            continue
        for position, item in enumerate(items, 1):
            item_values = {"task": item} if isinstance(item, str) else item
            if not isinstance(item_values, dict) or "task" not in item_values:
                faults.append(f"{language}: task {position}: expected a name or {{task: NAME, ...}}, got {item!r}")
                continue
            item_name = f"{language}: task {position}"
            metadata = item_values.get("metadata")
            if metadata is not None:
                item_values = item_values | {"metadata": _metadata_as_json(metadata, item_name, faults)}
            values = general_settings | _convert_values(item_values, _TASK_TYPES, item_name, list(_TASK_TYPES), faults)
            if values.get("task"):  # else its fault has been found
                task = _open_task(str(language), values, Path(path).parent, faults)
                if task is not None:
                    tasks.append(task)

    # tasks that are given twice
    distinct_tasks = set()
    for task in tasks:
        key = (task.language, task.settings)
        if key in distinct_tasks:
            faults.append(f"{task.language}: {task.settings.task} is given twice: give it once")
        distinct_tasks.add(key)
    if faults:
        raise InputError(*(f"--tasks {path}: {fault}" for fault in faults))
    return tasks


def is_task_file(task: str) -> bool:
    """Return whether a task is a file, and not a name of lm_eval."""
    return task.endswith((".yaml", ".yml"))


def _metadata_as_json(metadata: Any, owner: str, faults: list[str]) -> str:
    """Return ``metadata`` as sorted JSON; add a fault if it is no mapping.

    ``max_seq_lengths``, the lengths in tokens of the texts that RULER's tasks generate, must be a list of them.
    """
    if not isinstance(metadata, dict):
        faults.append(f"{owner}: metadata: expected a mapping such as {{max_seq_lengths: [4096]}}, got {metadata!r}")
        return "{}"
    if "max_seq_lengths" in metadata:
        lengths = metadata["max_seq_lengths"]
        is_list = isinstance(lengths, list) and len(lengths) > 0
        if not is_list or not all(type(length) is int and length > 0 for length in lengths):
            faults.append(f"{owner}: metadata: max_seq_lengths: expected a list such as [4096, 32768], got {lengths!r}")
            return "{}"
    try:
        return json.dumps(metadata, sort_keys=True)
    except TypeError:  # YAML has dates
        faults.append(f"{owner}: metadata: expected texts, numbers, lists and mappings, got {metadata!r}")
        return "{}"


def _convert_values(
    content: Mapping[Any, Any], types: Mapping[str, Any], owner: str, known_keys: list[str], faults: list[str]
) -> dict[str, Any]:
    """Return the values of a mapping as their ``types``; add a fault for each unknown key and wrong value.

    ``owner`` and ``known_keys`` are for messages: what the mapping belongs to, and the keys that it may have.
    """
    values = {}
    for key, value in content.items():
        if key not in types:
            hint = nearest_name(str(key), known_keys) or f"; {owner} has {', '.join(known_keys)}"
            faults.append(f"{key!r}: no such value{hint}")
            continue
        try:
            values[key] = convert(types[key], value)
        except WrongValueError as error:
            faults.append(f"{owner}: {key}: expected {error}, got {value!r}")
    return values


def _open_task(language: str, values: Mapping[str, Any], folder: Path, faults: list[str]) -> LanguageTask | None:
    """Return the task with these values; add a fault and return None if it is a file that cannot be read.

    A task file is named relative to ``folder``.
    """
    source = values["task"]
    files_hash = None
    if is_task_file(source):
        path = Path(os.path.abspath(folder / source))
        source = str(path)
        try:
            digests = sorted(hashlib.sha256(file.read_bytes()).digest() for file in files_of(path))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
            faults.append(f"{language}: {path}: {reason}; give a task file of lm_eval")
            return None
        files_hash = hashlib.sha256(b"".join(digests)).hexdigest()
    settings = TaskSettings(
        task=os.path.basename(source),
        num_fewshot=values.get("num_fewshot"),
        limit=values.get("limit"),
        files=files_hash,
        metadata=values.get("metadata"),
    )
    return LanguageTask(language, source, settings, values.get("metric"))


class _TaskFileLoader(yaml.SafeLoader):
    """Reads a task file of lm_eval as data: ``!function module.name`` becomes the name of the module's file."""


def _file_of_function(loader: Any, node: Any) -> str:
    module, _, _ = loader.construct_scalar(node).rpartition(".")
    return f"{module.replace('.', '/')}.py"


_TaskFileLoader.add_constructor("!function", _file_of_function)


def files_of(task_file: Path) -> list[Path]:
    """Return a task file and the local files that its texts name: those it includes, its functions and its data.

    Data is named relative to the working directory, everything else relative to the task file, as in lm_eval.
    """
    files: list[Path] = []
    unread = [task_file]
    while unread:
        path = unread.pop()
        if path in files:
            continue
        files.append(path)
        if not is_task_file(path.name):
            continue
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_TaskFileLoader)
        for text in _texts_in(content):
            if not text or len(text) >= _LONGEST_NAME:
                continue
            for candidate in (path.parent / text, Path(text)):
                if os.path.isfile(candidate):
                    unread.append(Path(os.path.abspath(candidate)))
    return files


def _texts_in(value: Any) -> Iterator[str]:
    """Yield every text in lists and mappings, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts_in(item)
