"""Find the steps and checkpoints that read a document, by its file and line."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fabric_train.cli.errors import InputError
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.tokenization.manifest import Manifest
from fabric_train.tokenization.packing.document_index import DocumentIndex, SourceTable, open_index
from fabric_train.tokenization.packing.document_search import files_named, find_documents, find_rows, num_records
from fabric_train.trace.run_history import RunHistory, Stretch

_LISTED_FILES = 6

ShowProgress = Callable[[int, int], None]  # records of the indexes searched, and all of them


@dataclass(frozen=True)
class DocumentRow:
    """A row that holds tokens of the document, of which ``repeated`` are in another row too."""

    row: int
    tokens: int
    repeated: int


@dataclass(frozen=True)
class IndexedDocument:
    """The document in a split of a token dataset: ``copies`` of it, each of ``tokens`` and ``bytes``, in ``rows``."""

    dataset: str
    split: str
    source: str
    file: str
    line: int
    copies: int
    tokens: int
    bytes: int
    rows: list[DocumentRow]


@dataclass(frozen=True)
class DocumentRead:
    """A step of a run that reads a row with the document."""

    step: int
    epoch: int
    run: str
    dataset: str
    row: int
    tokens: int


@dataclass(frozen=True)
class DocumentSteps:
    """The steps that have read a document, up to ``num_done``, and those that will if the run goes on to its end.

    ``checkpoints`` are those that have read it, and ``last_without`` is the newest that has not; None if there is none.
    """

    found: list[IndexedDocument]
    num_done: int
    read: list[DocumentRead]
    to_come: list[DocumentRead]
    checkpoints: list[str]
    last_without: str | None
    notes: list[str]


def find_steps(history: RunHistory, document: str, show: ShowProgress) -> DocumentSteps:
    """Return the steps and checkpoints that read the document ``FILE:LINE``.

    Raises:
        InputError: the token datasets have no such document or no document index, or are not there.
    """
    file, _, line = document.rpartition(":")
    opened = {stretch: history.data_of(stretch) for stretch in history.stretches}
    datasets = {part.folder: part for data in opened.values() for part in data.datasets.parts}
    splits = [split for dataset in datasets.values() for split in _open_splits(dataset)]
    chosen = _choose_files(splits, file)
    found = list(_search(splits, chosen, int(line), show))
    if not found:
        raise InputError(_why_missing(document, splits, chosen))
    reads = [read for stretch in opened for read in _reads(history, stretch, found)]
    saved = {step: path for stretch in opened for step, path in stretch.checkpoints().items()}
    read = [one for one in reads if one.step <= history.num_done]
    first = min((one.step for one in read), default=history.num_done + 1)
    without = [path for step, path in saved.items() if step < first]
    return DocumentSteps(
        found=found,
        num_done=history.num_done,
        read=read,
        to_come=[one for one in reads if one.step > history.num_done],
        checkpoints=[str(path) for step, path in saved.items() if step >= first],
        last_without=str(without[-1]) if without else None,
        notes=history.notes(),
    )


@dataclass(frozen=True)
class _IndexedSplit:
    dataset: TokenDataset
    manifest: Manifest
    name: str
    index: DocumentIndex


def _open_splits(dataset: TokenDataset) -> Iterator[_IndexedSplit]:
    manifest = dataset.manifest
    for name in manifest.ledger.splits if manifest else ("train",):
        index = open_index(dataset.folder, manifest, name) if manifest else None
        if manifest is None or index is None:
            raise InputError(
                f"{dataset.folder} has no document index, so its rows cannot be traced to documents: an older version "
                "wrote it; --step names the rows that a step read"
            )
        yield _IndexedSplit(dataset, manifest, name, index)


def _choose_files(splits: list[_IndexedSplit], name: str) -> dict[Path, tuple[str, list[int]]]:
    """Return by token dataset the whole name and the numbers of the file that ``name`` means.

    Raises:
        InputError: there is no such file, or there are several.
    """
    tables = {split.dataset.folder: split.index.sources for split in splits}
    matching = {folder: files_named(table, name) for folder, table in tables.items()}
    names = sorted({whole for files in matching.values() for whole in files})
    names = [name] if name in names else names
    if not names:
        raise InputError(f"--document: no token dataset of the run has a file {name}; {_files_of(tables)}")
    if len(names) > 1:
        raise InputError(f"--document: {name} is the end of several names, give one of them: {_listed(names)}")
    return {folder: (names[0], files[names[0]]) for folder, files in matching.items() if names[0] in files}


def _files_of(tables: dict[Path, SourceTable]) -> str:
    names = [table.file_name(number) for table in tables.values() for number in range(table.num_files)]
    return f"they have {_listed(sorted(set(names)))}"


def _listed(names: list[str]) -> str:
    more = len(names) - _LISTED_FILES
    return ", ".join(names[:_LISTED_FILES]) + (f" and {more} more" if more > 0 else "")


def _search(
    splits: list[_IndexedSplit], chosen: dict[Path, tuple[str, list[int]]], line: int, show: ShowProgress
) -> Iterator[IndexedDocument]:
    splits = [split for split in splits if split.dataset.folder in chosen]
    total, done = sum(num_records(split.index) for split in splits), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        show(done, total)

    for split in splits:
        _, files = chosen[split.dataset.folder]
        numbers = find_documents(split.index, files, line, advance)
        if numbers:
            origin = split.index.origin(numbers[0])
            rows = find_rows(split.index, numbers, advance)
            yield IndexedDocument(
                dataset=str(split.dataset.folder),
                split=split.name,
                source=origin.source,
                file=origin.file,
                line=origin.row,
                copies=len(numbers),
                tokens=origin.num_tokens,
                bytes=origin.num_bytes,
                rows=[DocumentRow(row, *counts) for row, counts in rows.items()],
            )


def _reads(history: RunHistory, stretch: Stretch, found: list[IndexedDocument]) -> Iterator[DocumentRead]:
    """Yield the steps of a stretch that read the document."""
    data = history.data_of(stretch)
    last = int(min(stretch.last, history.num_planned))
    trained = [document for document in found if document.split == "train"]
    places = [(data.row_at(document.dataset, one.row), one.tokens) for document in trained for one in document.rows]
    tokens = {row: number for row, number in places if row is not None}
    for read in data.order.reads_of(np.array(list(tokens), dtype=np.int64), last - stretch.starts_after):
        step = read.step + stretch.starts_after
        if step >= stretch.first:
            part, row = data.place(read.row)
            yield DocumentRead(step, read.epoch, str(stretch.run), str(part.folder), row, tokens[read.row])


def _why_missing(document: str, splits: list[_IndexedSplit], chosen: dict[Path, tuple[str, list[int]]]) -> str:
    manifests = {split.dataset.folder: split.manifest for split in splits if split.dataset.folder in chosen}
    skipped = [reason for one in manifests.values() for reason in one.ledger.documents_skipped]
    reasons = f"it was left out ({', '.join(dict.fromkeys(skipped))}), " if skipped else "it "
    return (
        f"--document {document}: no such document in {', '.join(map(str, manifests))}, so no step read it: {reasons}"
        "is blank, or is beyond the end of the file or a limit such as --max_documents"
    )
