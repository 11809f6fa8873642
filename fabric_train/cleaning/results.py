"""The results of a cleaning step for a document: kept as it is now, dropped, or marked."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

Content = TypeVar("Content")


@dataclass(frozen=True)
class TaskHit:
    """The words that a document shares with an item of an evaluation task."""

    task: str
    item: str  # the item's ``id``, or its line in the file of the task
    num_shared: int  # n-grams that both have
    words: str  # the longest sequence of shared words, normalized, and cut after 40 words


@dataclass(frozen=True)
class Cleaned(Generic[Content]):
    """A text or chat that is kept, after the changes of the cleaning steps."""

    content: Content
    edits: dict[str, int]  # the number of changes by kind, such as ``redacted email``
    signature: np.ndarray | None  # MinHash signature, uint32 [112]; None without --near_duplicates
    hits: tuple[TaskHit, ...]  # what it shares with evaluation tasks


@dataclass(frozen=True)
class Dropped:
    """The result of a cleaning step that drops a document."""

    reason: str  # the key in the ledger's ``documents_skipped``, such as ``other_language``
    detail: str  # the finding in this document, such as ``ca 0.91``
    hits: tuple[TaskHit, ...] = ()


@dataclass(frozen=True)
class Marked:
    """The result of a cleaning step that keeps a document although it shares words with evaluation tasks."""

    text: str
    hits: tuple[TaskHit, ...]
