"""Read the items of evaluation tasks from files of JSON lines, such as those that lm_eval writes with --log_samples."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric_train.cli.errors import InputError
from fabric_train.tokenization.documents import BadRowError, Row
from fabric_train.tokenization.reading.files import FileReader
from fabric_train.tokenization.reading.listing import FilePart, file_suffix, list_file, sha256

_OF_LM_EVAL = re.compile(r"samples_(.+)_[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9.-]+")
_SUFFIXES = (".jsonl", ".json")
_NAMES = ("task", "id", "doc_id")  # columns that are not part of an item's text


@dataclass(frozen=True)
class TaskItem:
    """An item of a task: its ``id`` or ``doc_id`` in the file or its line, and its texts."""

    task: str
    name: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class TaskFile:
    """A file of tasks: its name without folders, its SHA-256 in hexadecimal, and its items, each once."""

    name: str
    sha256: str
    items: tuple[TaskItem, ...]


def read_task_files(places: Sequence[str]) -> list[TaskFile]:
    """Return the files in the order given.

    A line is an object. Its texts are ``text`` if there is one, else ``doc`` and ``target`` of lm_eval, else all
    strings in it with more than one word, also in lists and objects. ``task`` names the task; by default it has the
    name of the file.

    Raises:
        InputError: one line for each file that is missing, no file of JSON lines, or has a bad line or no text.
    """
    files: list[TaskFile] = []
    faults: list[str] = []
    for place in places:
        try:
            files.append(_read_task_file(Path(place).expanduser()))
        except InputError as error:
            faults += error.faults
    if faults:
        raise InputError(*(f"--decontaminate: {fault}" for fault in faults))
    return files


def _read_task_file(path: Path) -> TaskFile:
    if not path.exists():
        raise InputError(f"{path}: no such file; give a file with an evaluation task's items as JSON lines")
    if file_suffix(path) not in _SUFFIXES:
        raise InputError(
            f"{path}: expected {' or '.join(_SUFFIXES)}, also with .gz or .zst; write the items as JSON lines"
        )
    listed = list_file(path)
    items = tuple(dict.fromkeys(_items(FileReader(FilePart(listed, listed.size), ("text",)), _task_name(path))))
    if not items:
        raise InputError(f"{path}: no text in it; give a file with an evaluation task's items as JSON lines")
    return TaskFile(path.name, sha256(path), items)


def _task_name(path: Path) -> str:
    """Return the name of a file without suffixes, of lm_eval's files the task in it."""
    name = path.name[: path.name.lower().rindex(file_suffix(path))]
    of_lm_eval = _OF_LM_EVAL.fullmatch(name)
    return of_lm_eval[1] if of_lm_eval else name


def _items(reader: FileReader, default_task: str) -> Iterator[TaskItem]:
    for number, row in reader:
        if isinstance(row, BadRowError):
            raise InputError(f"{row}; fix the line, or remove it")
        given = [row[name] for name in ("id", "doc_id") if isinstance(row.get(name), str | int)]
        texts = tuple(dict.fromkeys(_texts(_content(row))))
        if texts:
            yield TaskItem(str(row.get("task") or default_task), str(given[0] if given else number), texts)


def _content(row: Row) -> Any:
    """Return the part of a row that holds the item; lm_eval's has the model's answers, too."""
    if isinstance(row.get("text"), str):
        return row["text"]
    if isinstance(row.get("doc"), dict | str):
        return [row["doc"], row.get("target")]
    return {name: value for name, value in row.items() if name not in _NAMES}


def _texts(content: Any) -> Iterator[str]:
    """Yield all strings with white space in them: names, addresses and single words are no text."""
    if isinstance(content, str) and len(content.split(maxsplit=1)) > 1:
        yield content
    elif isinstance(content, dict | list):
        for part in content.values() if isinstance(content, dict) else content:
            yield from _texts(part)
