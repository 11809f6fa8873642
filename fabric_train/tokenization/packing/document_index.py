"""The document index of a split: which documents are in which row, and where each document comes from.

Four arrays lie beside the rows, in numpy's files, which are memory-mapped and never read as a whole::

    train/index/documents.npy      DOCUMENT [documents], in the order in which they begin in the rows, then the others
                rows.npy           ROW [rows + 1], the documents and continuations before each row
                continuations.npy  CONTINUATION [any number], the pieces that do not begin a document
                checksums.npy      CHECKSUM [rows], of the content of each row (``row_checksums``)

So row r has the documents ``rows["documents"][r] : rows["documents"][r + 1]`` from their beginning on, and the
continuations of the same range of ``rows["continuations"]``; ``ordinal`` is the number of the piece in its row.
The names of files and sources are in ``manifest.json``: ``file`` counts the files (of a dataset, the splits) of all its
``sources`` in order. A document takes 16 bytes, a row 24 and a continuation 20. Indexes of older versions have no
checksums.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64

from fabric_train.cli.errors import InputError
from fabric_train.tokenization.manifest import Manifest, SourceLedger, SourceRecord
from fabric_train.tokenization.packing.joined_records import JoinedRecords, Segment
from fabric_train.tokenization.packing.parts import Parts, is_of_parts, map_array, open_parts
from fabric_train.tokenization.packing.rows import RowPlan, joined_ranges

FOLDER = "index"
# row: from 1, a line of JSON lines, a record of json, csv and parquet, a row of a split; 1 for a txt or md file.
# bytes: of its text in UTF-8; of a chat, of the content of its messages
DOCUMENT = np.dtype([("file", "<u4"), ("row", "<u4"), ("tokens", "<u4"), ("bytes", "<u4")])
ROW = np.dtype([("documents", "<u8"), ("continuations", "<u8")])
# start: position of the piece's first token in the document; the first ``repeated`` tokens are in a row before as well
CONTINUATION = np.dtype([("document", "<u8"), ("start", "<u4"), ("repeated", "<u4"), ("ordinal", "<u4")])
CHECKSUM = np.dtype("<u8")  # of a row
_FILES = {"documents": DOCUMENT, "rows": ROW, "continuations": CONTINUATION}
_CHECKSUMS = "checksums.npy"
_ROWS_AT_ONCE = 1 << 16
_RECORDS_PER_CHUNK = 1 << 20  # bounds memory, however large the index is
ShowSearched = Callable[[int], None]  # further records searched


@dataclass(frozen=True)
class IndexedPieces:
    """P pieces of documents: the pieces of some rows in order, int64 [P] each."""

    rows: np.ndarray  # the index of the piece's row among the rows asked for
    positions: np.ndarray  # where the piece begins in its row
    documents: np.ndarray
    starts: np.ndarray  # position of its first token in the document
    lengths: np.ndarray
    repeated: np.ndarray  # tokens at its start that are in a row before as well
    num_bytes: np.ndarray  # UTF-8 bytes of the tokens that are not repeated: the document's bytes, shared by tokens


@dataclass(frozen=True)
class DocumentOrigin:
    """A document: the name of its source, its file (or split), the row there from 1, its tokens and UTF-8 bytes."""

    source: str
    file: str
    row: int
    num_tokens: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.source}: {self.file}:{self.row}"


class SourceTable:
    """All sources of a manifest by name, also of --validation_dataset, and their files, numbered as in the index."""

    def __init__(self, records: Sequence[SourceRecord]) -> None:
        self.names = tuple(dict.fromkeys(record.name for record in records))
        self._records = tuple(records)
        numbers = {name: number for number, name in enumerate(self.names)}
        self._sources = np.array([numbers[record.name] for record in records], dtype=np.int64)
        self._first_files = np.cumsum([0, *(record.num_files for record in records)])

    @property
    def num_files(self) -> int:
        return int(self._first_files[-1])

    def sources_of(self, files: np.ndarray) -> np.ndarray:
        """Return the sources of some files, int64, as indices of ``names``; InputError if there is no such file."""
        if (files >= self.num_files).any():
            raise InputError("the document index has a file that manifest.json does not list; tokenize again")
        return self._sources[np.searchsorted(self._first_files, files, side="right") - 1]

    def file_name(self, file: int) -> str:
        """Return the name of a file, with its folder as it was given."""
        record = int(np.searchsorted(self._first_files, file, side="right")) - 1
        return self._records[record].file_name(file - int(self._first_files[record]))

    def place(self, file: int, row: int) -> str:
        """Return where a document comes from, as SOURCE: FILE:ROW."""
        return f"{self.names[int(self.sources_of(np.array([file]))[0])]}: {self.file_name(file)}:{row}"


class DocumentIndex:
    """The index of one split, read from disk as it is asked for; opening it takes the same time for any size.

    ``checksums``, CHECKSUM [rows], are None if an older version wrote the index. ``num_documents`` is from the ledger.
    InputError if a file is missing or damaged, or not as long as the manifest says.
    """

    documents: Any  # DOCUMENT [documents], ROW [rows + 1] and CONTINUATION [any number], arrays or joined ones
    rows: Any
    continuations: Any
    checksums: Any

    def __init__(self, folder: Path, sources: SourceTable, max_length: int, num_documents: int, num_rows: int) -> None:
        self.sources = sources
        self.documents, self.rows, self.continuations = (
            map_array(folder / FOLDER / f"{name}.npy", dtype) for name, dtype in _FILES.items()
        )
        self._folder, self._max_length = folder, max_length
        file = folder / FOLDER / _CHECKSUMS
        self.checksums = map_array(file, CHECKSUM) if file.exists() else None
        num_sums = num_rows if self.checksums is None else len(self.checksums)
        found, expected = (len(self.documents), len(self.rows), num_sums), (num_documents, num_rows + 1, num_rows)
        last = self.rows[-1] if len(self.rows) else np.zeros((), ROW)
        if found != expected or last["continuations"] != len(self.continuations) or last["documents"] > num_documents:
            raise InputError(f"{folder / FOLDER}: not the index of these rows and this manifest.json; tokenize again")

    def pieces(self, rows: np.ndarray) -> IndexedPieces:
        """Return the pieces of documents in some rows, integers [R]; InputError if the index is damaged."""
        first, last = self.rows[rows], self.rows[rows + 1]
        for name, array in (("documents", self.documents), ("continuations", self.continuations)):
            self._check((first[name] <= last[name]) & (last[name] <= len(array)))
        num_begun, num_continued = (
            last[name].astype(np.int64) - first[name].astype(np.int64) for name in ("documents", "continuations")
        )
        num_pieces = num_begun + num_continued
        owners = np.repeat(np.arange(len(rows)), num_pieces)
        first_pieces = np.cumsum(num_pieces) - num_pieces
        found = self.continuations[joined_ranges(first["continuations"].astype(np.int64), num_continued)]
        self._check(found["ordinal"] < np.repeat(num_pieces, num_continued))
        self._check(found["document"] < len(self.documents))
        at = np.repeat(first_pieces, num_continued) + found["ordinal"].astype(np.int64)
        documents, starts, repeated = np.zeros((3, len(owners)), dtype=np.int64)
        begins = np.ones(len(owners), dtype=bool)
        begins[at] = False
        self._check(begins.sum() == num_begun.sum())
        documents[begins] = joined_ranges(first["documents"].astype(np.int64), num_begun)
        documents[at], starts[at], repeated[at] = found["document"], found["start"], found["repeated"]
        stored = self.documents[documents]
        self._check(starts < stored["tokens"])
        lengths = np.minimum(stored["tokens"] - starts, self._max_length)
        before = np.cumsum(lengths) - lengths
        positions = before - before[first_pieces][owners] if len(owners) else before
        lengths = np.minimum(lengths, self._max_length - positions)  # concat cuts documents at the end of the row
        ends = [position.astype(np.uint64) for position in (starts + repeated, starts + lengths)]
        shares = [stored["bytes"].astype(np.uint64) * end // stored["tokens"] for end in ends]
        num_bytes = (shares[1] - shares[0]).astype(np.int64)
        return IndexedPieces(owners, positions, documents, starts, lengths, repeated, num_bytes)

    def _check(self, are_right: np.ndarray) -> None:
        if not np.all(are_right):
            raise InputError(f"{self._folder}: the document index is damaged; tokenize again")

    def source_numbers(self, documents: np.ndarray) -> np.ndarray:
        """Return the sources of some documents, int64, as indices of ``sources.names``."""
        return self.sources.sources_of(self.documents["file"][documents])

    def count_by_source(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and the bytes of each source in some rows, int64 [R, sources], without repeated tokens."""
        pieces = self.pieces(rows)
        shape = (len(rows), len(self.sources.names))
        cells = pieces.rows * shape[1] + self.source_numbers(pieces.documents)
        tokens, num_bytes = (
            np.bincount(cells, weights=values, minlength=shape[0] * shape[1]).astype(np.int64).reshape(shape)
            for values in (pieces.lengths - pieces.repeated, pieces.num_bytes)
        )
        return tokens, num_bytes

    def main_sources(self) -> np.ndarray:
        """Return the source that has the most tokens of each row, int64 [rows]; reads the index of the whole split."""
        rows = np.arange(len(self.rows) - 1)
        parts = (rows[begin : begin + _ROWS_AT_ONCE] for begin in range(0, len(rows), _ROWS_AT_ONCE))
        return np.concatenate([np.empty(0, int), *(self.count_by_source(part)[0].argmax(axis=1) for part in parts)])

    def origin(self, document: int) -> DocumentOrigin:
        file, row, num_tokens, num_bytes = (int(value) for value in self.documents[document])
        source = self.sources.names[int(self.sources.sources_of(np.array([file]))[0])]
        return DocumentOrigin(source, self.sources.file_name(file), row, num_tokens, num_bytes)


class JoinedIndex(DocumentIndex):
    """The index of a split of a token dataset of parts, as a full merge of the parts would have written it.

    Nothing is read until it is asked for, and then only from the parts that have it.
    """

    def __init__(self, parts: Parts, split: str, sources: SourceTable) -> None:
        self.sources, self._folder, self._max_length = sources, parts.folder / split, parts.record.max_length
        placed, left, rows, continuations, checksums = list[Segment](), list[Segment](), [], [], []
        file = document = continuation = 0
        for number, part in enumerate(parts.record.parts):
            if split in part.splits:
                own, to_files = part.splits[split], {"file": file, "row": part.rows_before}
                placed.append(Segment(number, 0, own.placed, to_files))
                left.append(Segment(number, own.placed, own.documents, to_files))
                rows.append(Segment(number, 0, own.rows, {"documents": document, "continuations": continuation}))
                continuations.append(Segment(number, 0, own.continuations, {"document": document}))
                checksums.append(Segment(number, 0, own.rows, {}))
                document, continuation = document + own.placed, continuation + own.continuations
            file += part.num_files
        rows[-1] = replace(rows[-1], end=rows[-1].end + 1)  # what comes before the end
        self.documents = JoinedRecords(parts, split, "documents", DOCUMENT, [*placed, *left])
        self.rows = JoinedRecords(parts, split, "rows", ROW, rows, begins_with_zeros=True)
        self.continuations = JoinedRecords(parts, split, "continuations", CONTINUATION, continuations)
        self.checksums = None
        if parts.record.has_checksums:
            self.checksums = JoinedRecords(parts, split, "checksums", CHECKSUM, checksums)


def open_index(folder: Path, manifest: Manifest | None, split: str) -> DocumentIndex | None:
    """Open the document index of a split of ``folder``, None in older versions; InputError if it is damaged."""
    if manifest is None or not manifest.has_index or split not in manifest.ledger.splits:
        return None
    ledger = manifest.ledger.splits[split]
    sources = SourceTable(manifest.sources)
    if is_of_parts(folder):
        return JoinedIndex(open_parts(folder), split, sources)
    return DocumentIndex(folder / split, sources, manifest.settings.max_length, ledger.documents, ledger.rows)


def row_checksum(input_ids: np.ndarray, labels: np.ndarray | None, document_starts: np.ndarray | None) -> int:
    """Return the XXH3-64 hash of a row's tokens, its labels and the positions at which its documents begin.

    Labels count only if some differ from ``input_ids``. So a split whose tokens are all supervised has the same
    checksums with and without the column, which a merge may add. ``input_ids`` and ``labels`` are int32 [T],
    ``document_starts`` int32 [any number]; None for a column that the split does not have.
    """
    digest = xxh3_64(np.ascontiguousarray(input_ids).data)
    if labels is not None and not np.array_equal(input_ids, labels):
        digest.update(np.ascontiguousarray(labels).data)
    if document_starts is not None:
        digest.update(np.ascontiguousarray(document_starts).data)
    return digest.intdigest()


def altered_rows(
    rows: Iterable[tuple[np.ndarray, np.ndarray | None, np.ndarray | None]], checksums: np.ndarray
) -> np.ndarray:
    """Return the indices of the rows, as :func:`row_checksum` takes them, that do not have these CHECKSUM [rows]."""
    return np.flatnonzero(np.array([row_checksum(*row) for row in rows], dtype=CHECKSUM) != checksums)


def row_checksums(
    input_ids: np.ndarray, labels: np.ndarray | None, document_starts: np.ndarray, offsets: np.ndarray
) -> np.ndarray:
    """Return the checksums of R rows of T tokens, joined, CHECKSUM [R]; arguments as for :func:`row_checksum`.

    ``offsets`` are integers [R + 1]; row r has ``document_starts[offsets[r] : offsets[r + 1]]``.
    """
    num_rows = len(offsets) - 1
    rows = input_ids.reshape(num_rows, -1)
    of_labels = [None] * num_rows if labels is None else labels.reshape(num_rows, -1)
    starts = (document_starts[begin:end] for begin, end in pairwise(offsets))
    return np.array([row_checksum(*row) for row in zip(rows, of_labels, starts, strict=True)], dtype=CHECKSUM)


def write_index(folder: Path, plan: RowPlan, documents: np.ndarray, checksums: np.ndarray) -> None:
    """Write the index of the split ``folder``; ``documents`` are DOCUMENT [entries of ``plan.order``]."""
    begins = plan.begins
    begun = plan.entries[begins]
    is_left = np.ones(len(documents), dtype=bool)
    is_left[begun] = False
    in_order = np.concatenate([begun, np.flatnonzero(is_left)])
    numbers = np.empty(len(documents), dtype=np.int64)
    numbers[in_order] = np.arange(len(documents))

    rows = np.empty(plan.num_rows + 1, dtype=ROW)
    rows["documents"] = np.concatenate([[0], np.cumsum(begins)])[plan.row_offsets]
    rows["continuations"] = plan.row_offsets - rows["documents"].astype(np.int64)
    continued = np.flatnonzero(~begins)
    continuations = np.empty(len(continued), dtype=CONTINUATION)
    continuations["document"] = numbers[plan.entries[continued]]
    continuations["start"], continuations["repeated"] = plan.starts[continued], plan.repeated[continued]
    own_rows = np.searchsorted(plan.row_offsets, continued, side="right") - 1
    continuations["ordinal"] = continued - plan.row_offsets[own_rows]
    (folder / FOLDER).mkdir()
    for name, array in zip(_FILES, (documents[in_order], rows, continuations), strict=True):
        np.save(folder / FOLDER / f"{name}.npy", array, allow_pickle=False)
    np.save(folder / FOLDER / _CHECKSUMS, checksums, allow_pickle=False)


def join_indexes(
    folder: Path, indexes: Sequence[DocumentIndex], first_files: Sequence[int], rows_before: Sequence[int]
) -> None:
    """Write the index of the split ``folder``, whose rows come from several splits, joined in order.

    ``first_files`` has the number of each one's first file in the new manifest, and ``rows_before`` how many rows of
    this file are in the splits before.
    """
    (folder / FOLDER).mkdir()
    num_placed = [int(index.rows["documents"][-1]) for index in indexes]
    sizes = (
        sum(len(index.documents) for index in indexes),
        sum(len(index.rows) - 1 for index in indexes) + 1,
        sum(len(index.continuations) for index in indexes),
    )
    documents, rows, continuations = (
        np.lib.format.open_memmap(folder / FOLDER / f"{name}.npy", "w+", dtype, (size,))
        for (name, dtype), size in zip(_FILES.items(), sizes, strict=True)
    )
    row = document = continuation = 0
    left = sum(num_placed)
    for index, first_file, before, placed in zip(indexes, first_files, rows_before, num_placed, strict=True):
        _copy(index.documents[:placed], documents[document:], {"file": first_file}, before)
        _copy(index.documents[placed:], documents[left:], {"file": first_file}, before)
        _copy(index.rows[:-1], rows[row:], {"documents": document, "continuations": continuation})
        _copy(index.continuations, continuations[continuation:], {"document": document})
        row += len(index.rows) - 1
        document += placed
        left += len(index.documents) - placed
        continuation += len(index.continuations)
    rows[-1] = (document, continuation)
    for array in (documents, rows, continuations):
        array.flush()
    checksums = [index.checksums for index in indexes if index.checksums is not None]
    if len(checksums) == len(indexes):
        np.save(folder / FOLDER / _CHECKSUMS, np.concatenate(checksums), allow_pickle=False)


def _copy(records: np.ndarray, target: np.ndarray, added: dict[str, int], rows_before: int = 0) -> None:
    """Copy records to the beginning of ``target``, with numbers added to some of their fields.

    ``rows_before`` are added to the rows of file 0.
    """
    for begin, mapped in chunks(records, lambda _: None):
        part = np.array(mapped)
        if rows_before:
            part["row"][part["file"] == 0] += rows_before
        for name, number in added.items():
            part[name] += number
        target[begin : begin + len(part)] = part


def count_sources(plan: RowPlan, documents: np.ndarray, sources: SourceTable) -> dict[str, SourceLedger]:
    """Return the ledger of each source in the plan, by name; ``documents`` are DOCUMENT [entries of ``plan.order``]."""
    numbers = sources.sources_of(documents["file"])

    def total(of: np.ndarray, values: np.ndarray | None = None) -> list[int]:
        return np.bincount(of, weights=values, minlength=len(sources.names)).astype(np.int64).tolist()

    of_pieces = numbers[plan.entries]
    counts = zip(
        sources.names,
        total(numbers),
        total(numbers, documents["bytes"]),
        total(numbers, documents["tokens"]),
        total(of_pieces, plan.repeated),
        total(of_pieces, plan.lengths),
        strict=True,
    )
    return {
        name: SourceLedger(num, num_bytes, tokens_in, repeated, in_rows, tokens_in + repeated - in_rows)
        for name, num, num_bytes, tokens_in, repeated, in_rows in counts
        if num
    }


def chunks(records: np.ndarray, show: ShowSearched) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number of the first record and the records of one part of an array after another."""
    for first in range(0, len(records), _RECORDS_PER_CHUNK):
        part = records[first : first + _RECORDS_PER_CHUNK]
        yield first, part
        show(len(part))
