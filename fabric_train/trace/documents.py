"""List the documents that a step read, and the steps and checkpoints that read a document; print both."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fabric_train.cli.argument_types import counted
from fabric_train.cli.errors import InputError
from fabric_train.cli.output import open_console, visible
from fabric_train.data.row_documents import documents_in
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.token_dataset import document_search
from fabric_train.token_dataset.document_index import DocumentIndex, open_index
from fabric_train.token_dataset.manifest import Manifest
from fabric_train.tokenization.tokenizers.vocabulary import load_vocabulary
from fabric_train.trace.run_history import RunHistory, Stretch

_LISTED_FILES = 6
_WIDTH_OF_FILES = 1000  # a line of a file or pipe is not broken


@dataclass(frozen=True)
class DocumentInStep:
    """A document, or the part of one, in a row of a step; the whole row without a document index."""

    ranks: list[int]  # that read the row
    dataset: str
    row: int  # of the token dataset's train split
    source: str | None
    file: str | None
    line: int | None
    first_token: int  # position in the document of the first token that is in the row
    tokens: int  # of the document in the row
    text: str


@dataclass(frozen=True)
class StepDocuments:
    """The documents of a step, in the order of its rows, and the checkpoint that says how many ranks took it."""

    step: int
    epoch: int
    is_taken: bool  # whether a checkpoint has the step; otherwise it is one that the run would take
    run: str
    checkpoint: str
    num_ranks: int
    num_rows: int
    documents: list[DocumentInStep]


def list_documents(history: RunHistory, step: int, rank: int | None) -> StepDocuments:
    """Return the documents that a step read, on all ranks or one."""
    stretch = history.stretch_of(step)
    data = history.data_of(stretch)
    ranks, checkpoint = history.ranks_of(step)
    if rank is not None and rank >= ranks.number:
        raise InputError(f"--rank {rank}: step {step} has the ranks 0 to {ranks.number - 1}, as {checkpoint} says")
    rows = data.order.rows_of(step - stretch.starts_after).tolist()
    places = [(ranks.at(position), *data.place(row)) for position, row in enumerate(rows)]
    wanted = [place for place in places if rank is None or rank in place[0]]
    vocabularies = {part.folder: load_vocabulary(part.folder / "tokenizer") for part in data.datasets.parts}
    documents = []
    for own, dataset, row in wanted:
        for one in documents_in(dataset, row, vocabularies[dataset.folder]):
            origin = one.origin
            folder = str(dataset.folder)
            source, file, line = (origin.source, origin.file, origin.row) if origin else (None, None, None)
            place = (list(own), folder, row, source, file, line)
            documents.append(DocumentInStep(*place, one.start, one.num_tokens, one.text))
    return StepDocuments(
        step=step,
        epoch=data.order.epoch_of(step - stretch.starts_after),
        is_taken=step <= history.num_done,
        run=str(stretch.run),
        checkpoint=str(checkpoint),
        num_ranks=ranks.number,
        num_rows=len(rows),
        documents=documents,
    )


@dataclass(frozen=True)
class DocumentRow:
    """A row that holds tokens of the document; ``repeated`` of them are in another row too."""

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
    step: int
    epoch: int
    run: str
    dataset: str
    row: int
    tokens: int


@dataclass(frozen=True)
class DocumentSteps:
    found: list[IndexedDocument]
    num_done: int
    read: list[DocumentRead]  # up to ``num_done``
    to_come: list[DocumentRead]  # if the run goes on to its end
    checkpoints: list[str]  # that have read it
    last_without: str | None  # the newest that has not
    notes: list[str]


def find_steps(history: RunHistory, document: str) -> DocumentSteps:
    """Return the steps and checkpoints that read the document ``FILE:LINE``."""
    file, _, line = document.rpartition(":")
    opened = {stretch: history.data_of(stretch) for stretch in history.stretches}
    datasets = {part.folder: part for data in opened.values() for part in data.datasets.parts}
    splits = [split for dataset in datasets.values() for split in _open_splits(dataset)]
    chosen = _choose_files(splits, file)
    console = open_console(stderr=True)
    columns = (TextColumn("searching the index"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        found = list(_search(splits, chosen, int(line), progress))
    if not found:
        manifests = {split.dataset.folder: split.manifest for split in splits if split.dataset.folder in chosen}
        skipped = dict.fromkeys(reason for one in manifests.values() for reason in one.ledger.documents_skipped)
        reasons = f"it was left out ({', '.join(skipped)}), " if skipped else "it "
        raise InputError(
            f"--document {document}: no such document in {', '.join(map(str, manifests))}, so no step read it: "
            f"{reasons}is blank, or is beyond the end of the file or a limit such as --max_documents"
        )
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
    """Return by token dataset the whole name and the numbers of the file that ``name`` means."""
    tables = {split.dataset.folder: split.index.sources for split in splits}
    matching = {folder: document_search.files_named(table, name) for folder, table in tables.items()}
    names = sorted({whole for files in matching.values() for whole in files})
    names = [name] if name in names else names
    if not names:
        there = {table.file_name(number) for table in tables.values() for number in range(table.num_files)}
        raise InputError(
            f"--document: no token dataset of the run has a file {name}; they have {_listed(sorted(there))}"
        )
    if len(names) > 1:
        raise InputError(f"--document: {name} is the end of several names, give one of them: {_listed(names)}")
    return {folder: (names[0], files[names[0]]) for folder, files in matching.items() if names[0] in files}


def _listed(names: list[str]) -> str:
    more = len(names) - _LISTED_FILES
    return ", ".join(names[:_LISTED_FILES]) + (f" and {more} more" if more > 0 else "")


def _search(
    splits: list[_IndexedSplit], chosen: dict[Path, tuple[str, list[int]]], line: int, progress: Progress
) -> Iterator[IndexedDocument]:
    splits = [split for split in splits if split.dataset.folder in chosen]
    task = progress.add_task("", total=sum(document_search.num_records(split.index) for split in splits))
    advance = partial(progress.advance, task)
    for split in splits:
        _, files = chosen[split.dataset.folder]
        numbers = document_search.find_documents(split.index, files, line, advance)
        if numbers:
            origin = split.index.origin(numbers[0])
            rows = document_search.find_rows(split.index, numbers, advance)
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


def print_step(listed: StepDocuments) -> None:
    """Print the documents of a step by rank and row."""
    console = _console()
    taken = "" if listed.is_taken else ", which no checkpoint has yet"
    _line(console, f"step {listed.step:,} of {_short(listed.run)}{taken}: epoch {listed.epoch}, {listed.num_rows} rows")
    _line(console, f"{counted(listed.num_ranks, 'rank')}, as {_short(listed.checkpoint)} says")
    table = _table(("rank", "row", "source", "document", "tokens", "first words"), numbers=("tokens",))
    for one in listed.documents:
        ranks = str(one.ranks[0]) if len(one.ranks) == 1 else f"{one.ranks[0]}-{one.ranks[-1]}"
        cells = (ranks, f"{one.dataset}:{one.row}", one.source or "", _place(one), f"{one.tokens:,}", one.text)
        table.add_row(*(Text(visible(cell)) for cell in cells))
    console.print(table)


def _place(one: DocumentInStep) -> str:
    if one.file is None:
        return "not known: no document index"
    return f"{one.file}:{one.line}" + (f", from token {one.first_token:,}" if one.first_token else "")


def print_document(found: DocumentSteps) -> None:
    """Print where a document is, the steps that read it, and the checkpoints with and without it."""
    console = _console()
    for one in found.found:
        _line(console, _describe(one))
    if found.read:
        _line(console, f"read by {_steps(found.read)}, up to step {found.num_done:,}, the newest checkpoint:")
        console.print(_table_of(found.read))
    else:
        _line(console, f"read by no step up to {found.num_done:,}, the newest checkpoint")
    if found.to_come:
        _line(console, f"will be read by {_steps(found.to_come)} if the run goes on:")
        console.print(_table_of(found.to_come))
    for checkpoint in found.checkpoints if found.read else []:
        _line(console, f"has read it       {_short(checkpoint)}")
    none = "none is left: start from the weights that the first run began with"
    _line(console, f"newest without it {_short(found.last_without) if found.last_without else none}")
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)


def _describe(one: IndexedDocument) -> str:
    placed = sum(row.tokens - row.repeated for row in one.rows)
    copies = "" if one.copies == 1 else f", {one.copies} times"
    rows = f"{placed:,} of {one.tokens * one.copies:,} tokens in {counted(len(one.rows), 'row')}"
    trained = ", which is not trained on" if one.split != "train" else ""
    where = f"{one.dataset}, {one.split} split{trained}{copies}: {rows}" if one.rows else f"{one.dataset}: in no row"
    return f"{one.source}: {one.file}:{one.line}, {one.tokens:,} tokens, {one.bytes:,} bytes; {where}"


def _steps(reads: list[DocumentRead]) -> str:
    return counted(len({read.step for read in reads}), "step")


def _table_of(reads: list[DocumentRead]) -> Table:
    has_runs = len({read.run for read in reads}) > 1
    table = _table(("step", "epoch", "row", "tokens", *["run"] * has_runs), numbers=("step", "epoch", "tokens"))
    for read in reads:
        cells = [f"{read.step:,}", f"{read.epoch}", f"{read.dataset}:{read.row}", f"{read.tokens:,}"]
        table.add_row(*(Text(visible(cell)) for cell in (*cells, *[_short(read.run)] * has_runs)))
    return table


def _table(columns: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    table = Table(box=box.SIMPLE)
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold", header_style="dim")
    return table


def _short(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative


def _console() -> Console:
    return open_console() if sys.stdout.isatty() else open_console(width=_WIDTH_OF_FILES)


def _line(console: Console, text: str) -> None:
    console.print(Text(visible(text)), soft_wrap=True)
