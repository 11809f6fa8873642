"""List the documents that a step read, and the steps and checkpoints that read a document."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from fabric_train.cli.errors import InputError
from fabric_train.cli.output import open_console
from fabric_train.data.row_documents import documents_in
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.token_dataset import document_search
from fabric_train.token_dataset.document_index import DocumentIndex, open_index
from fabric_train.token_dataset.manifest import Manifest
from fabric_train.tokenization.tokenizers.vocabulary import load_vocabulary
from fabric_train.trace.run_history import RunHistory, RunSegment

_MAX_LISTED_FILES = 6


@dataclass(frozen=True)
class DocumentInStep:
    """A document, or a part of one, in a row of a step; without a document index, the full row."""

    ranks: list[int]
    """The ranks that read the row."""
    dataset: str
    row: int
    """The index of the row in the token dataset's train split."""
    source: str | None
    file: str | None
    line: int | None
    first_token: int
    """The position in the document of its first token in the row."""
    tokens: int
    """The number of the document's tokens in the row."""
    text: str
    """The first words of the document in the row."""


@dataclass(frozen=True)
class StepDocuments:
    """The documents of a step, in the order of its rows."""

    step: int
    epoch: int
    is_taken: bool
    """Whether the run has taken the step, up to its newest checkpoint; otherwise it would take it."""
    run: str
    checkpoint: str
    """The checkpoint that records how many ranks took the step."""
    num_ranks: int
    num_rows: int
    documents: list[DocumentInStep]


def list_documents(history: RunHistory, step: int, rank: int | None) -> StepDocuments:
    """Return the documents that a step read, on all ranks or on one.

    Raises:
        InputError: there is no such step or rank.
    """
    # who took the step, and what it read
    segment = history.segment_of(step)
    data = history.data_of(segment)
    ranks, checkpoint = history.ranks_of(step)
    if rank is not None and rank >= ranks.num_ranks:
        raise InputError(f"--rank {rank}: step {step} has ranks 0 to {ranks.num_ranks - 1}, according to {checkpoint}")

    # the rows of the step, in the order of the window
    data_step = step - segment.data_starts_after  # counted from the beginning of the data order
    rows = data.order.rows_of(data_step).tolist()
    datasets = data.datasets.parts
    vocabularies = {dataset.folder: load_vocabulary(dataset.folder / "tokenizer") for dataset in datasets}
    documents = []
    for position, row in enumerate(rows):
        row_ranks = ranks.at(position)
        if rank is not None and rank not in row_ranks:
            continue
        dataset, dataset_row = data.locate(row)
        for document in documents_in(dataset, dataset_row, vocabularies[dataset.folder]):
            origin = document.origin  # None without a document index
            documents.append(
                DocumentInStep(
                    ranks=list(row_ranks),
                    dataset=str(dataset.folder),
                    row=dataset_row,
                    source=origin.source if origin else None,
                    file=origin.file if origin else None,
                    line=origin.row if origin else None,
                    first_token=document.start,
                    tokens=document.num_tokens,
                    text=document.text,
                )
            )
    return StepDocuments(
        step=step,
        epoch=data.order.epoch_of(data_step),
        is_taken=step <= history.num_done,
        run=str(segment.run.folder),
        checkpoint=str(checkpoint),
        num_ranks=ranks.num_ranks,
        num_rows=len(rows),
        documents=documents,
    )


@dataclass(frozen=True)
class DocumentRow:
    """A row that holds tokens of the document."""

    row: int
    tokens: int
    repeated: int
    """The number of these tokens that are in an earlier row too."""


@dataclass(frozen=True)
class IndexedDocument:
    """A document in a split of a token dataset: its size, the number of its copies, and the rows that hold them."""

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
    """A step that reads a row with tokens of the document."""

    step: int
    epoch: int
    run: str
    dataset: str
    row: int
    tokens: int


@dataclass(frozen=True)
class DocumentSteps:
    """The steps and checkpoints that read a document; the fields have the names of the JSON output."""

    found: list[IndexedDocument]
    num_done: int
    """The step of the newest checkpoint."""
    read: list[DocumentRead]
    """The steps up to ``num_done`` that read the document."""
    to_come: list[DocumentRead]
    """The later steps that will read it if the run continues to its end."""
    checkpoints: list[str]
    """The checkpoints that have read the document."""
    last_without: str | None
    """The newest checkpoint that has not read it."""
    notes: list[str]


def find_steps(history: RunHistory, document: str) -> DocumentSteps:
    """Return the steps and checkpoints that read the document ``FILE:LINE``.

    Raises:
        InputError: no token dataset of the run has the document.
    """
    name, _, line = document.rpartition(":")

    # find the document in the indexes of the token datasets
    datasets: dict[Path, TokenDataset] = {}
    for segment in history.segments:
        for dataset in history.data_of(segment).datasets.parts:
            datasets[dataset.folder] = dataset
    splits: list[_IndexedSplit] = []
    for dataset in datasets.values():
        splits += _open_splits(dataset)
    file_indices = _find_file(splits, name)
    searched_splits = [split for split in splits if split.dataset.folder in file_indices]
    console = open_console(stderr=True)
    columns = (TextColumn("searching the index"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        indexed_documents = list(_search_splits(searched_splits, file_indices, int(line), progress))
    if not indexed_documents:
        raise _not_found_error(document, searched_splits)

    # find the steps that read its rows
    reads: list[DocumentRead] = []
    checkpoints: dict[int, Path] = {}
    for segment in history.segments:
        reads += _find_reads(history, segment, indexed_documents)
        checkpoints |= segment.checkpoints()
    past_reads = [read for read in reads if read.step <= history.num_done]
    future_reads = [read for read in reads if read.step > history.num_done]

    # separate the checkpoints at the first of these steps
    first_step = min((read.step for read in past_reads), default=history.num_done + 1)
    checkpoints_without = [path for step, path in checkpoints.items() if step < first_step]
    return DocumentSteps(
        found=indexed_documents,
        num_done=history.num_done,
        read=past_reads,
        to_come=future_reads,
        checkpoints=[str(path) for step, path in checkpoints.items() if step >= first_step],
        last_without=str(checkpoints_without[-1]) if checkpoints_without else None,
        notes=history.notes(),
    )


def _not_found_error(document: str, splits: list["_IndexedSplit"]) -> InputError:
    """Return the error for a document that no token dataset with its file has, and say why it may be absent."""
    manifests = {split.dataset.folder: split.manifest for split in splits}
    skip_reasons: dict[str, None] = {}  # in order, each once
    for manifest in manifests.values():
        skip_reasons |= dict.fromkeys(manifest.ledger.documents_skipped)
    reasons = f"it was left out ({', '.join(skip_reasons)}), " if skip_reasons else "it "
    folders = ", ".join(str(folder) for folder in manifests)
    return InputError(
        f"--document {document}: no such document in {folders}, so no step read it: "
        f"{reasons}is blank, or is beyond the end of the file or a limit such as --max_documents"
    )


@dataclass(frozen=True)
class _IndexedSplit:
    """A split of a token dataset, and its document index."""

    dataset: TokenDataset
    manifest: Manifest
    name: str
    index: DocumentIndex


def _open_splits(dataset: TokenDataset) -> Iterator[_IndexedSplit]:
    """Open the splits of a token dataset; an InputError if it has no document index."""
    manifest = dataset.manifest
    split_names = manifest.ledger.splits if manifest else ("train",)
    for name in split_names:
        index = open_index(dataset.folder, manifest, name) if manifest else None
        if manifest is None or index is None:
            raise InputError(
                f"{dataset.folder} has no document index because an older version wrote it, so its rows cannot be "
                "traced to documents; --step lists the rows that a step read"
            )
        yield _IndexedSplit(dataset, manifest, name, index)


def _find_file(splits: list[_IndexedSplit], name: str) -> dict[Path, list[int]]:
    """Find the file with a name, which may also be the end of a path.

    Returns:
        The indices of the file in the document index of each token dataset that has it, by the token dataset's folder.
        The same file may occur several times in a document index.

    Raises:
        InputError: there is no such file, or several.
    """
    source_tables = {split.dataset.folder: split.index.sources for split in splits}
    # by the token dataset's folder: the full names of the files that match, each with the file's indices
    matches = {folder: document_search.files_named(table, name) for folder, table in source_tables.items()}
    full_names = sorted(set(chain.from_iterable(matches.values())))
    if name in full_names:  # a token dataset without this file may have others whose paths end with the name
        full_names = [name]
    if not full_names:
        all_names = set()
        for table in source_tables.values():
            all_names |= {table.file_name(file_index) for file_index in range(table.num_files)}
        raise InputError(
            f"--document: no token dataset of the run has a file {name}; they have {_list_names(sorted(all_names))}"
        )
    if len(full_names) > 1:
        raise InputError(f"--document: {name} matches several files; give one of them: {_list_names(full_names)}")
    full_name = full_names[0]
    return {folder: file_indices[full_name] for folder, file_indices in matches.items() if full_name in file_indices}


def _list_names(names: list[str]) -> str:
    text = ", ".join(names[:_MAX_LISTED_FILES])
    num_unlisted = len(names) - _MAX_LISTED_FILES
    return f"{text} and {num_unlisted} more" if num_unlisted > 0 else text


def _search_splits(
    splits: list[_IndexedSplit], file_indices: dict[Path, list[int]], line: int, progress: Progress
) -> Iterator[IndexedDocument]:
    """Yield the document at a line of a file in each split that has it; ``file_indices``: see :func:`_find_file`."""
    num_records = sum(document_search.num_records(split.index) for split in splits)
    task = progress.add_task("", total=num_records)
    advance = partial(progress.advance, task)
    for split in splits:
        documents = document_search.find_documents(split.index, file_indices[split.dataset.folder], line, advance)
        if not documents:
            continue
        origin = split.index.origin(documents[0])  # copies have the same origin
        rows = []
        for row, tokens_in_row in document_search.find_rows(split.index, documents, advance).items():
            rows.append(DocumentRow(row, tokens_in_row.num_tokens, tokens_in_row.num_repeated))
        yield IndexedDocument(
            dataset=str(split.dataset.folder),
            split=split.name,
            source=origin.source,
            file=origin.file,
            line=origin.row,
            copies=len(documents),
            tokens=origin.num_tokens,
            bytes=origin.num_bytes,
            rows=rows,
        )


def _find_reads(history: RunHistory, segment: RunSegment, documents: list[IndexedDocument]) -> Iterator[DocumentRead]:
    """Yield the steps of a segment that read a row of the documents, up to the planned end of the run."""
    # A row has an index in its dataset, and another one in the mixture of datasets that the run reads.
    data = history.data_of(segment)
    tokens_by_mixture_row = {}
    for document in documents:
        if document.split != "train":
            continue
        for document_row in document.rows:
            mixture_row = data.row_at(document.dataset, document_row.row)
            if mixture_row is not None:
                tokens_by_mixture_row[mixture_row] = document_row.tokens

    # The data order counts its steps from the step after which it begins.
    last_step = int(min(segment.last_step, history.num_planned))  # a run's last segment has no last step: inf
    mixture_rows = np.array(list(tokens_by_mixture_row), dtype=np.int64)
    for read in data.order.reads_of(mixture_rows, last_step - segment.data_starts_after):
        step = read.step + segment.data_starts_after
        if step >= segment.first_step:
            dataset, dataset_row = data.locate(read.row)
            yield DocumentRead(
                step=step,
                epoch=read.epoch,
                run=str(segment.run.folder),
                dataset=str(dataset.folder),
                row=dataset_row,
                tokens=tokens_by_mixture_row[read.row],
            )
