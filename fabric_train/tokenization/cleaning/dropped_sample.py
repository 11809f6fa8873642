"""Write ``dropped.jsonl``: some of the documents that were left out, so that a user sees what a rule drops."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fabric_train.tokenization.packing.document_index import SourceTable

FILE_NAME = "dropped.jsonl"
TEXT_CHARACTERS = 500
PER_SHARD = 3
"""Documents that a shard keeps for each reason."""
PER_REASON = 20


@dataclass(frozen=True)
class DroppedDocument:
    """A document that was left out.

    Args:
        reason: the key in the ledger's ``documents_skipped``.
        detail: what was found in this document.
        file: number of its file, as in the document index.
        row: its row there, from 1.
        text: its first 500 characters.
    """

    reason: str
    detail: str
    file: int
    row: int
    text: str


def write_sample(folder: Path, dropped: Sequence[DroppedDocument], sources: SourceTable) -> None:
    """Write at most 20 documents for each reason, spread evenly; no file if there are none.

    A line is ``{"reason": ..., "detail": ..., "place": "SOURCE: FILE:ROW", "text": ...}``.

    Args:
        folder: the token dataset.
        dropped: in the order of the sources.
        sources: those of the token dataset.
    """
    by_reason: dict[str, list[DroppedDocument]] = defaultdict(list)
    for document in dropped:
        by_reason[document.reason].append(document)
    lines = []
    for reason in sorted(by_reason):
        found = by_reason[reason]
        count = min(len(found), PER_REASON)
        for document in (found[number * len(found) // count] for number in range(count)):
            place = sources.place(document.file, document.row)
            content = {"reason": reason, "detail": document.detail, "place": place, "text": document.text}
            lines.append(json.dumps(content, ensure_ascii=False) + "\n")
    if lines:
        (folder / FILE_NAME).write_text("".join(lines), encoding="utf-8")
