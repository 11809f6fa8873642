"""List the documents that share words with evaluation tasks, in ``contamination.jsonl``."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fabric_train.tokenization.packing.document_index import SourceTable

FILE_NAME = "contamination.jsonl"


@dataclass(frozen=True)
class TaskHit:
    """What a document shares with an item of a task.

    Args:
        task: the task's name.
        item: the item's ``id``, or its line in the file of the task.
        num_shared: n-grams that both have.
        words: the longest stretch of shared words, normalized, and cut after some words.
    """

    task: str
    item: str
    num_shared: int
    words: str


@dataclass(frozen=True)
class ContaminatedDocument:
    """A hit and the document's place: number of its file as in the document index, and its row there, from 1."""

    hit: TaskHit
    file: int
    row: int


def count_by_task(hits: Sequence[ContaminatedDocument]) -> dict[str, int]:
    """Return the number of documents that share words with each task."""
    return dict(Counter(task for task, _, _ in sorted({(one.hit.task, one.file, one.row) for one in hits})))


def write_hits(folder: Path, hits: Sequence[ContaminatedDocument], sources: SourceTable) -> None:
    """Write a line for each hit, in the order of the documents; no file if there are none.

    A line is ``{"task": ..., "item": ..., "place": "SOURCE: FILE:ROW", "num_shared": ..., "words": ...}``.
    """
    lines = []
    for one in hits:
        place = sources.place(one.file, one.row)
        hit = one.hit
        content = {"task": hit.task, "item": hit.item, "place": place, "num_shared": hit.num_shared, "words": hit.words}
        lines.append(json.dumps(content, ensure_ascii=False) + "\n")
    if lines:
        (folder / FILE_NAME).write_text("".join(lines), encoding="utf-8")
