"""Read the file that ``--tasks`` names: tasks of lm_eval by language, and their settings."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fabric_train.cli import yaml_core
from fabric_train.cli.argument_types import NonNegativeInt, PositiveInt, WrongValueError, convert, nearest_name
from fabric_train.cli.errors import InputError

_SETTING_TYPES: dict[str, Any] = {"num_fewshot": NonNegativeInt, "limit": PositiveInt}
_TASK_TYPES = {"task": str, **_SETTING_TYPES, "metric": str, "metadata": str}
_LONGEST_NAME = 1000


@dataclass(frozen=True)
class TaskSettings:
    """The settings that decide the scores on a task."""

    task: str
    """lm_eval's name of the task, or the name of a task file without its folder, which may move."""
    num_fewshot: int | None = None
    """The number of examples in a prompt; None means the task's own number."""
    limit: int | None = None
    """The most documents; None means all."""
    files: str | None = None
    """The SHA-256 of a task file and the local files that it names."""
    metadata: str | None = None
    """The metadata that lm_eval passes to the task, as JSON such as {"max_seq_lengths": [4096]}."""

    @property
    def max_seq_lengths(self) -> list[int]:
        """The lengths in tokens of the texts that a synthetic task such as RULER generates; empty for other tasks."""
        return json.loads(self.metadata or "{}").get("max_seq_lengths", [])


@dataclass(frozen=True)
class LanguageTask:
    """A task, the language that its score counts for, and the metric to show."""

    language: str
    source: str
    """lm_eval's name of the task, or the absolute path of a task file."""
    settings: TaskSettings
    metric: str | None = None
    """The metric to show; None means the usual one."""


def read_tasks(path: str) -> list[LanguageTask]:
    """Return the tasks of lm_eval in a file, in order; raise an InputError that lists all faults.

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
            own_values = _read_item(item, f"{language}: task {position}", faults)
            values = general_settings | own_values
            if values.get("task"):  # if not, its fault has been found
                task = _open_task(str(language), values, Path(path).parent, faults)
                if task is not None:
                    tasks.append(task)

    # tasks that are given twice
    distinct_tasks = set()
    for task in tasks:
        key = (task.language, task.settings)
        if key in distinct_tasks:
            faults.append(f"{task.language}: {task.settings.task} is given twice; give it once")
        distinct_tasks.add(key)
    if faults:
        raise InputError(*(f"--tasks {path}: {fault}" for fault in faults))
    return tasks


def is_task_file(task: str) -> bool:
    """Return whether a task is a file, and not a name of lm_eval."""
    return task.endswith((".yaml", ".yml"))


def _read_item(item: Any, item_name: str, faults: list[str]) -> dict[str, Any]:
    """Return the values of an item of a language: the name of a task, or a mapping with its values.

    Faults are added to ``faults``, and the faulty values left out; ``item_name`` is for their messages.
    """
    content = {"task": item} if isinstance(item, str) else item
    if not isinstance(content, dict) or "task" not in content:
        faults.append(f"{item_name}: expected a name or {{task: NAME, ...}}, got {item!r}")
        return {}
    metadata = content.get("metadata")
    if metadata is not None:
        content = content | {"metadata": _metadata_as_json(metadata, item_name, faults)}
    return _convert_values(content, _TASK_TYPES, item_name, list(_TASK_TYPES), faults)


def _metadata_as_json(metadata: Any, owner: str, faults: list[str]) -> str:
    """Return ``metadata`` as sorted JSON; add a fault if it is not a mapping.

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
    """Convert the values of a mapping to their ``types``; add a fault for each unknown key and wrong value.

    ``owner``, to which the mapping belongs, and ``known_keys``, which it may have, are for messages.
    """
    values = {}
    for key, value in content.items():
        if key not in types:
            hint = nearest_name(str(key), known_keys) or f"; {owner} has {', '.join(known_keys)}"
            faults.append(f"{key!r}: unknown name{hint}")
            continue
        try:
            values[key] = convert(types[key], value)
        except WrongValueError as error:
            faults.append(f"{owner}: {key}: expected {error}, got {value!r}")
    return values


def _open_task(language: str, values: Mapping[str, Any], folder: Path, faults: list[str]) -> LanguageTask | None:
    """Return the task with these values; if it is a file that cannot be read, add a fault and return None.

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
