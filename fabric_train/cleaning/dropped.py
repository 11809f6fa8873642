"""Write and read the files of a token dataset that show the documents that cleaning has dropped or marked.

``dropped.jsonl`` has up to 20 dropped documents for each reason, so that a user sees what a rule drops.
``contamination.jsonl`` has every document that shares words with an evaluation task.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fabric_train.cleaning.results import TaskHit
from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import open_regular
from fabric_train.files.typed_json import parse_json
from fabric_train.token_dataset.document_index import SourceTable

DROPPED_FILE = "dropped.jsonl"
CONTAMINATION_FILE = "contamination.jsonl"
TEXT_CHARACTERS = 500
PER_SHARD = 3  # documents that a shard keeps for each reason
PER_REASON = 20  # that are shown
Location = tuple[int, int]  # the index of a document's file in the document index, and its row in the file, from 1
_MOST_BYTES = 64 << 20  # some hundred reasons with 20 texts of 500 characters are less


@dataclass(frozen=True)
class DroppedText:
    """A dropped document for the sample: the reason, and its first 500 characters."""

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
    """Return up to 20 of the integers from 0 to ``count`` - 1, evenly spaced."""
    num_chosen = min(count, PER_REASON)
    return [index * count // num_chosen for index in range(num_chosen)]


def write_sample(folder: Path, dropped: Sequence[tuple[DroppedText, Location]], sources: SourceTable) -> None:
    """Write ``dropped.jsonl`` with at most 20 documents for each reason, spread evenly over their order."""
    lines_by_reason: dict[str, list[str]] = defaultdict(list)
    for document, location in dropped:
        sampled = SampledDrop(document.reason, document.detail, sources.location(*location), document.text)
        lines_by_reason[document.reason].append(json.dumps(asdict(sampled), ensure_ascii=False))
    _write_lines(folder, lines_by_reason)


def join_samples(folders: Sequence[Path], target: Path) -> None:
    """Join the samples of several token datasets in ``target``, again with at most 20 documents for each reason.

    Raises:
        InputError: a line of a sample is damaged.
    """
    lines_by_reason: dict[str, list[str]] = defaultdict(list)
    for folder in folders:
        file = folder / DROPPED_FILE
        if not file.exists():  # cleaning dropped nothing
            continue
        for line_number, line in enumerate(file.read_bytes().splitlines(), start=1):
            try:
                reason = json.loads(line)["reason"]
                lines_by_reason[reason].append(line.decode())
            except (ValueError, TypeError, KeyError) as error:
                fault = f"line {line_number:,} is damaged; remove the file, or tokenize again"
                raise InputError(f"{file}: {fault}") from error
    _write_lines(target, lines_by_reason)


def _write_lines(folder: Path, lines_by_reason: Mapping[str, Sequence[str]]) -> None:
    """Write up to 20 lines for each reason, in the order of the reasons; write no file if there is no line."""
    sampled_lines: list[str] = []
    for reason in sorted(lines_by_reason):
        lines = lines_by_reason[reason]
        sampled_lines += [lines[index] + "\n" for index in evenly_spaced(len(lines))]
    if sampled_lines:
        (folder / DROPPED_FILE).write_text("".join(sampled_lines), encoding="utf-8")


def read_sample(folder: Path, num_skipped: Mapping[str, int]) -> tuple[dict[str, list[SampledDrop]], list[str]]:
    """Read the sample of a token dataset, if it has one.

    Args:
        folder: the token dataset.
        num_skipped: the number of skipped documents by reason, from the ledger.

    Returns:
        The sampled documents by reason, and the faults of the file. A fault does not raise, so that the rest is shown.
    """
    file = folder / DROPPED_FILE
    if not file.exists():
        return {}, []
    try:
        with open_regular(file, "tokenize again") as opened_file:
            content = opened_file.read(_MOST_BYTES + 1)
    except (InputError, OSError) as error:
        return {}, [f"cannot be read: {error}"]
    if len(content) > _MOST_BYTES:
        return {}, [f"larger than {_MOST_BYTES >> 20} MiB, so it is not what its name says"]

    documents_by_reason: dict[str, list[SampledDrop]] = {}
    faults = []
    for line_number, line in enumerate(content.splitlines(), start=1):
        try:
            document = parse_json(line, SampledDrop)
        except ValueError as error:
            faults.append(f"line {line_number:,} is damaged: {error}")
            break
        documents_by_reason.setdefault(document.reason, []).append(document)

    # a sample cannot have more documents than were skipped
    for reason, documents in documents_by_reason.items():
        num_in_ledger = num_skipped.get(reason, 0)
        if len(documents) > num_in_ledger:
            faults.append(
                f"{len(documents):,} documents are listed as skipped ({reason}), but the ledger has {num_in_ledger:,}"
            )
    return documents_by_reason, faults


def count_by_task(hits: Sequence[tuple[TaskHit, Location]]) -> dict[str, int]:
    """Return the number of documents that share words with each task; a document counts once per task."""
    documents_by_task: dict[str, set[Location]] = defaultdict(set)
    for hit, location in hits:
        documents_by_task[hit.task].add(location)
    return {task: len(documents_by_task[task]) for task in sorted(documents_by_task)}


def write_hits(folder: Path, hits: Sequence[tuple[TaskHit, Location]], sources: SourceTable) -> None:
    """Write ``contamination.jsonl`` with a line for each hit, in the order of the documents.

    A line is ``{"task": ..., "item": ..., "place": "SOURCE: FILE:ROW", "num_shared": ..., "words": ...}``.
    """
    with (folder / CONTAMINATION_FILE).open("w", encoding="utf-8") as file:
        for hit, location in hits:
            content = {
                "task": hit.task,
                "item": hit.item,
                "place": sources.location(*location),
                "num_shared": hit.num_shared,
                "words": hit.words,
            }
            file.write(json.dumps(content, ensure_ascii=False) + "\n")
