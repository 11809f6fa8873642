"""Documents that cleaning drops or marks, and the files of a token dataset that show some of them.

``dropped.jsonl`` has up to 20 dropped documents for each reason, so that a user sees what a rule drops.
``contamination.jsonl`` has every document that shares words with an evaluation task.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import open_regular, parse_json
from fabric_train.token_dataset.document_index import SourceTable

Content = TypeVar("Content")
DROPPED_FILE = "dropped.jsonl"
CONTAMINATION_FILE = "contamination.jsonl"
TEXT_CHARACTERS = 500
PER_SHARD = 3  # documents that a shard keeps for each reason
PER_REASON = 20  # that are shown
Place = tuple[int, int]  # the number of a document's file as in the document index, and its row there, from 1
_MOST_BYTES = 64 << 20  # some hundred reasons with 20 texts of 500 characters are less


@dataclass(frozen=True)
class TaskHit:
    """What a document shares with an item of an evaluation task."""

    task: str
    item: str  # the item's ``id``, or its line in the file of the task
    num_shared: int  # n-grams that both have
    words: str  # the longest stretch of shared words, normalized, and cut after some words


@dataclass(frozen=True)
class Cleaned(Generic[Content]):
    """A text or a chat that is kept, as the cleaning steps have left it."""

    content: Content
    edits: dict[str, int]  # the number of changes by kind, such as ``redacted email``
    signature: np.ndarray | None  # of MinHash, uint32 [112]; None without --near_duplicates
    hits: tuple[TaskHit, ...]  # what it shares with evaluation tasks


@dataclass(frozen=True)
class Dropped:
    """What a cleaning step returns for a document that is left out."""

    reason: str  # the key in the ledger's ``documents_skipped``, such as ``other_language``
    detail: str  # the finding in this document, such as ``ca 0.91``
    hits: tuple[TaskHit, ...] = ()


@dataclass(frozen=True)
class Marked:
    """What a cleaning step returns for a document that is kept although it shares words with evaluation tasks."""

    text: str
    hits: tuple[TaskHit, ...]


@dataclass(frozen=True)
class DroppedText:
    """A document that was left out, for the sample: why, and its first 500 characters."""

    reason: str
    detail: str
    text: str


@dataclass(frozen=True)
class SampledDrop:
    """A line of ``dropped.jsonl``; ``place`` is SOURCE: FILE:ROW."""

    reason: str
    detail: str
    place: str
    text: str


def evenly_spaced(count: int) -> list[int]:
    """Return up to 20 of the numbers below ``count``."""
    number = min(count, PER_REASON)
    return [place * count // number for place in range(number)]


def write_sample(folder: Path, dropped: Sequence[tuple[DroppedText, Place]], sources: SourceTable) -> None:
    """Write at most 20 documents for each reason, spread evenly over their order."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for one, place in dropped:
        content = asdict(SampledDrop(one.reason, one.detail, sources.place(*place), one.text))
        by_reason[one.reason].append(json.dumps(content, ensure_ascii=False))
    _write(folder, by_reason)


def join_samples(folders: Sequence[Path], target: Path) -> None:
    """Write the sample of several token datasets together: again at most 20 documents for each reason."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for file in (folder / DROPPED_FILE for folder in folders):
        lines = file.read_bytes().splitlines() if file.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                by_reason[json.loads(line)["reason"]].append(line.decode())
            except (ValueError, TypeError, KeyError) as error:
                raise InputError(f"{file}: line {number:,} is damaged; remove the file, or tokenize again") from error
    _write(target, by_reason)


def _write(folder: Path, by_reason: Mapping[str, Sequence[str]]) -> None:
    found = [by_reason[reason] for reason in sorted(by_reason)]
    if chosen := [of_reason[number] + "\n" for of_reason in found for number in evenly_spaced(len(of_reason))]:
        (folder / DROPPED_FILE).write_text("".join(chosen), encoding="utf-8")


def read_sample(folder: Path, num_skipped: Mapping[str, int]) -> tuple[dict[str, list[SampledDrop]], list[str]]:
    """Return the sample of a token dataset by reason, and its faults; a dataset may have none.

    ``num_skipped`` has the number of documents by reason in the ledger.
    """
    file = folder / DROPPED_FILE
    if not file.exists():
        return {}, []
    try:
        with open_regular(file, "tokenize again") as opened:
            content = opened.read(_MOST_BYTES + 1)
    except (InputError, OSError) as error:
        return {}, [f"cannot be read: {error}"]
    if len(content) > _MOST_BYTES:
        return {}, [f"larger than {_MOST_BYTES >> 20} MiB, so it is not what its name says"]
    by_reason: dict[str, list[SampledDrop]] = {}
    faults = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            document = parse_json(line, SampledDrop)
        except ValueError as error:
            faults.append(f"line {number:,} is damaged: {error}")
            break
        by_reason.setdefault(document.reason, []).append(document)
    for reason, documents in by_reason.items():
        if len(documents) > num_skipped.get(reason, 0):
            in_ledger = num_skipped.get(reason, 0)
            faults.append(f"{len(documents):,} documents are skipped as {reason}, in the ledger {in_ledger:,}")
    return by_reason, faults


def count_by_task(hits: Sequence[tuple[TaskHit, Place]]) -> dict[str, int]:
    """Return the number of documents that share words with each task."""
    return dict(Counter(task for task, _, _ in sorted({(hit.task, *place) for hit, place in hits})))


def write_hits(folder: Path, hits: Sequence[tuple[TaskHit, Place]], sources: SourceTable) -> None:
    """Write a line for each hit, in the order of the documents.

    A line is ``{"task": ..., "item": ..., "place": "SOURCE: FILE:ROW", "num_shared": ..., "words": ...}``.
    """
    with (folder / CONTAMINATION_FILE).open("w", encoding="utf-8") as file:
        for hit, place in hits:
            about = {"task": hit.task, "item": hit.item}
            shared = {"num_shared": hit.num_shared, "words": hit.words}
            content = about | {"place": sources.place(*place)} | shared
            file.write(json.dumps(content, ensure_ascii=False) + "\n")
