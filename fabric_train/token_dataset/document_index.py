"""The document index of a split: which documents are in which row, where each comes from, and how to find one.

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

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64

from fabric_train.cli.errors import InputError
from fabric_train.token_dataset.manifest import Manifest, SourceRecord
from fabric_train.token_dataset.parts import JoinedRecords, Parts, Segment, is_of_parts, map_array, open_parts
from fabric_train.token_dataset.rows import joined_ranges

FOLDER = "index"
# row: from 1, a line of JSON lines, a record of json, csv and parquet, a row of a split; 1 for a txt or md file.
# bytes: of its text in UTF-8; of a chat, of the content of its messages
DOCUMENT = np.dtype([("file", "<u4"), ("row", "<u4"), ("tokens", "<u4"), ("bytes", "<u4")])
ROW = np.dtype([("documents", "<u8"), ("continuations", "<u8")])
# start: position of the piece's first token in the document; the first ``repeated`` tokens are in a row before as well
CONTINUATION = np.dtype([("document", "<u8"), ("start", "<u4"), ("repeated", "<u4"), ("ordinal", "<u4")])
CHECKSUM = np.dtype("<u8")  # of a row
ARRAYS = {"documents": DOCUMENT, "rows": ROW, "continuations": CONTINUATION}
CHECKSUMS = "checksums.npy"
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

    def location(self, file: int, row: int) -> str:
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
            map_array(folder / FOLDER / f"{name}.npy", dtype) for name, dtype in ARRAYS.items()
        )
        self._folder = folder
        self._max_length = max_length
        file = folder / FOLDER / CHECKSUMS
        self.checksums = map_array(file, CHECKSUM) if file.exists() else None
        num_sums = num_rows if self.checksums is None else len(self.checksums)
        found = (len(self.documents), len(self.rows), num_sums)
        expected = (num_documents, num_rows + 1, num_rows)
        last = self.rows[-1] if len(self.rows) else np.zeros((), ROW)
        if found != expected or last["continuations"] != len(self.continuations) or last["documents"] > num_documents:
            raise InputError(f"{folder / FOLDER}: not the index of these rows and this manifest.json; tokenize again")

    def pieces(self, rows: np.ndarray) -> IndexedPieces:
        """Return the pieces of documents in some rows, integers [R]; InputError if the index is damaged."""
        self._check((rows >= 0) & (rows + 1 < len(self.rows)))  # a file of rows may be another's
        first = self.rows[rows]
        last = self.rows[rows + 1]
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
        documents[at] = found["document"]
        starts[at] = found["start"]
        repeated[at] = found["repeated"]
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
        self.sources = sources
        self._folder = parts.folder / split
        self._max_length = parts.record.max_length
        placed: list[Segment] = []
        left: list[Segment] = []
        rows = []
        continuations = []
        checksums = []
        file = document = continuation = 0
        for number, part in enumerate(parts.record.parts):
            if split in part.splits:
                own = part.splits[split]
                to_files = {"file": file, "row": part.rows_before}
                placed.append(Segment(number, 0, own.placed, to_files))
                left.append(Segment(number, own.placed, own.documents, to_files))
                rows.append(Segment(number, 0, own.rows, {"documents": document, "continuations": continuation}))
                continuations.append(Segment(number, 0, own.continuations, {"document": document}))
                checksums.append(Segment(number, 0, own.rows, {}))
                document = document + own.placed
                continuation = continuation + own.continuations
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


def chunks(records: np.ndarray, show: ShowSearched) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number of the first record and the records of one part of an array after another."""
    for first in range(0, len(records), _RECORDS_PER_CHUNK):
        part = records[first : first + _RECORDS_PER_CHUNK]
        yield first, part
        show(len(part))


def num_records(index: DocumentIndex) -> int:
    """Return how many records a search for a document and for its rows reads."""
    return len(index.documents) + len(index.continuations)


def files_named(sources: SourceTable, name: str) -> dict[str, list[int]]:
    """Return, by whole name, the numbers of files called ``name`` or else ending with ``/name``; one may come again."""
    exact: dict[str, list[int]] = {}
    ending: dict[str, list[int]] = {}
    for file in range(sources.num_files):
        whole = sources.file_name(file)
        if whole == name or whole.endswith(f"/{name.removeprefix('./')}"):
            (exact if whole == name else ending).setdefault(whole, []).append(file)
    return exact or ending


def find_documents(index: DocumentIndex, files: Sequence[int], row: int, show: ShowSearched) -> list[int]:
    """Return the numbers of the documents at a row, from 1, of some files: several if it is packed several times."""
    found: list[int] = []
    for first, part in chunks(index.documents, show):
        places = np.flatnonzero(part["row"] == row)
        found += (first + places[np.isin(part["file"][places], files)]).tolist()
    return found


def find_rows(index: DocumentIndex, documents: Sequence[int], show: ShowSearched) -> dict[int, tuple[int, int]]:
    """Return the rows that hold tokens of some documents, each with the number of these tokens and of repeated ones."""
    rows = {_row_with(index.rows["documents"], document) for document in documents}
    for first, part in chunks(index.continuations, show):
        places = np.flatnonzero(np.isin(part["document"], np.array(documents, dtype=np.uint64)))
        rows |= {_row_with(index.rows["continuations"], place) for place in (first + places).tolist()}
    chosen = np.array(sorted(rows - {len(index.rows) - 1}), dtype=np.int64)  # those in no row follow the last one
    pieces = index.pieces(chosen)
    own = np.isin(pieces.documents, documents)
    tokens, repeated = (
        np.bincount(pieces.rows[own], weights=values[own], minlength=len(chosen)).astype(int).tolist()
        for values in (pieces.lengths, pieces.repeated)
    )
    return dict(zip(chosen.tolist(), zip(tokens, repeated, strict=True), strict=True))


def _row_with(first_of_rows: np.ndarray, number: int) -> int:
    return bisect_right(first_of_rows, number) - 1  # reads only a few records; numpy's search may copy all


def rows_of_sources(index: DocumentIndex, manifest: Manifest) -> dict[str, list[range]] | None:
    """Return the rows that each source has, as ranges in their order; None if ``--weights`` mixed the sources.

    A row is one of the source of its first token. Documents are in the order of the sources and their files, so the
    file of a row's first document never decreases, and binary search finds where each source begins.
    """
    settings = [part.settings for part in manifest.parts] or [manifest.settings]
    if any(one.weights for one in settings):
        return None
    rows: dict[str, list[range]] = {name: [] for name in index.sources.names}
    first_files = np.cumsum([0, *(record.num_files for record in manifest.sources)])
    for record, borders in zip(manifest.sources, pairwise(_first_rows(index, first_files)), strict=True):
        if borders[0] < borders[1]:
            rows[record.name].append(range(*borders))
    return {name: ranges for name, ranges in rows.items() if ranges}


def _first_rows(index: DocumentIndex, files: np.ndarray) -> list[int]:
    """Return the first row whose first document is in a file or one after it, for each of some files [n]."""
    low = np.zeros(len(files), np.int64)
    high = np.full(len(files), len(index.rows) - 1)
    while (open_ := low < high).any():
        middle = (low + high)[open_] // 2
        pieces = index.pieces(middle)
        is_before = index.documents["file"][pieces.documents[pieces.positions == 0]] < files[open_]
        low[open_] = np.where(is_before, middle + 1, low[open_])
        high[open_] = np.where(is_before, high[open_], middle)
    return low.tolist()
