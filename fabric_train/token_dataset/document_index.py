"""Read the document index of a split: which documents are in which row, and where each comes from.

Up to five arrays are stored next to the rows, in numpy files, which are memory-mapped and never read in full::

    train/index/documents.npy      DOCUMENT [documents], in the order in which they begin in the rows, then the others
                rows.npy           ROW [rows + 1], the documents and continuations before each row
                continuations.npy  CONTINUATION [any number], the pieces that do not begin a document
                checksums.npy      CHECKSUM [rows], of the content of each row (``row_checksums``)
                desirable.npy      LABEL [documents], only of unpaired answers: whether each is desirable

So row r has the documents ``rows["documents"][r] : rows["documents"][r + 1]`` from their beginning on, and the
continuations of the same range of ``rows["continuations"]``; ``ordinal`` is the number of the piece in its row. The
names of files and sources are in ``manifest.json``: ``file`` counts the files (for a dataset, the splits) of all its
``sources`` in order. A document takes 16 bytes, a row 24 and a continuation 20. Indexes of older versions have no
checksums.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
# start: position of the piece's first token in the document; ``repeated`` tokens from there are in an earlier row too
CONTINUATION = np.dtype([("document", "<u8"), ("start", "<u4"), ("repeated", "<u4"), ("ordinal", "<u4")])
CHECKSUM = np.dtype("<u8")  # of a row
ARRAYS = {"documents": DOCUMENT, "rows": ROW, "continuations": CONTINUATION}
CHECKSUMS = "checksums.npy"
LABEL = np.dtype("?")  # of an unpaired answer
LABELS = "desirable.npy"
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
    repeated: np.ndarray  # tokens at its start that are in an earlier row as well
    num_bytes: np.ndarray  # UTF-8 bytes of the tokens that are not repeated: the document's bytes, shared by tokens


@dataclass(frozen=True)
class DocumentOrigin:
    """Where a document comes from, and its size."""

    source: str
    file: str  # of a dataset, a split
    row: int  # in the file, from 1
    num_tokens: int
    num_bytes: int  # of the text in UTF-8

    def __str__(self) -> str:
        return f"{self.source}: {self.file}:{self.row}"


class SourceTable:
    """All sources of a manifest by name, including --validation_dataset, and their files, numbered as in the index."""

    def __init__(self, records: Sequence[SourceRecord]) -> None:
        self.names = tuple(dict.fromkeys(record.name for record in records))
        self._records = tuple(records)
        indices = {name: index for index, name in enumerate(self.names)}
        self._source_of_record = np.array([indices[record.name] for record in records], dtype=np.int64)
        self._first_files = np.cumsum([0, *(record.num_files for record in records)])

    @property
    def num_files(self) -> int:
        return int(self._first_files[-1])

    def sources_of(self, files: np.ndarray) -> np.ndarray:
        """Return the sources of some files, int64, as indices of ``names``; InputError if there is no such file."""
        if (files >= self.num_files).any():
            raise InputError("the document index has a file that manifest.json does not list; tokenize again")
        records = np.searchsorted(self._first_files, files, side="right") - 1
        return self._source_of_record[records]

    def source_name(self, file: int) -> str:
        """Return the name of the source that a file belongs to."""
        (source,) = self.sources_of(np.array([file]))
        return self.names[int(source)]

    def file_name(self, file: int) -> str:
        """Return the name of a file, with its folder as it was given."""
        record = int(np.searchsorted(self._first_files, file, side="right")) - 1
        file_of_record = file - int(self._first_files[record])
        return self._records[record].file_name(file_of_record)

    def location(self, file: int, row: int) -> str:
        """Return where a document comes from, as SOURCE: FILE:ROW."""
        return f"{self.source_name(file)}: {self.file_name(file)}:{row}"


class DocumentIndex:
    """The index of one split, which is read from disk on request; opening it takes the same time for any size."""

    documents: Any  # DOCUMENT [documents], as an array or as joined records, like the other two
    rows: Any  # ROW [rows + 1]
    continuations: Any  # CONTINUATION [any number]
    checksums: Any  # CHECKSUM [rows]; None if an older version wrote the index
    is_desirable: Any  # LABEL [documents]; None if the documents are no unpaired answers

    def __init__(self, folder: Path, sources: SourceTable, max_length: int, num_documents: int, num_rows: int) -> None:
        """Open the index of the split ``folder``.

        Args:
            folder: the folder of the split.
            sources: the names of sources and files.
            max_length: the number of tokens in a row.
            num_documents: the number of documents in the ledger.
            num_rows: the number of rows in the ledger.

        Raises:
            InputError: a file is missing or damaged, or not as long as the manifest says.
        """
        self.sources = sources
        self._folder = folder
        self._max_length = max_length
        index_folder = folder / FOLDER
        self.documents = map_array(index_folder / "documents.npy", DOCUMENT)
        self.rows = map_array(index_folder / "rows.npy", ROW)
        self.continuations = map_array(index_folder / "continuations.npy", CONTINUATION)
        checksums_file = index_folder / CHECKSUMS
        self.checksums = map_array(checksums_file, CHECKSUM) if checksums_file.exists() else None
        labels_file = index_folder / LABELS
        self.is_desirable = map_array(labels_file, LABEL) if labels_file.exists() else None

        lengths_match = len(self.documents) == num_documents and len(self.rows) == num_rows + 1
        if self.checksums is not None:
            lengths_match = lengths_match and len(self.checksums) == num_rows
        if self.is_desirable is not None:
            lengths_match = lengths_match and len(self.is_desirable) == num_documents
        end = self.rows[-1] if len(self.rows) else np.zeros((), ROW)
        ends_match = end["continuations"] == len(self.continuations) and end["documents"] <= num_documents
        if not lengths_match or not ends_match:
            raise InputError(f"{index_folder}: does not match the rows and manifest.json; tokenize again")

    @property
    def num_rows(self) -> int:
        """The number of rows; ``rows`` has one more record, at which the last row ends."""
        return len(self.rows) - 1

    @property
    def num_documents_in_rows(self) -> int:
        """The number of documents that begin in the rows; they come before all others in ``documents``."""
        return int(self.rows["documents"][-1])

    def pieces(self, rows: np.ndarray) -> IndexedPieces:
        """Return the pieces of documents in some rows, integers [R]; InputError if the index is damaged."""
        # how many documents begin in each row, and how many are continued
        self._check((rows >= 0) & (rows + 1 < len(self.rows)))  # a file of rows may be another's
        starts_of_rows = self.rows[rows]
        ends_of_rows = self.rows[rows + 1]
        first_documents, num_begun = self._ranges(starts_of_rows, ends_of_rows, "documents")
        first_continuations, num_continued = self._ranges(starts_of_rows, ends_of_rows, "continuations")
        num_pieces = num_begun + num_continued
        rows_of_pieces = np.repeat(np.arange(len(rows)), num_pieces)
        first_pieces = np.cumsum(num_pieces) - num_pieces

        # put each continuation at its ordinal in its row, and the documents that begin between them
        continuations = self.continuations[joined_ranges(first_continuations, num_continued)]
        self._check(continuations["ordinal"] < np.repeat(num_pieces, num_continued))
        self._check(continuations["document"] < len(self.documents))
        continuing_pieces = np.repeat(first_pieces, num_continued) + continuations["ordinal"].astype(np.int64)
        is_begun = np.ones(len(rows_of_pieces), dtype=bool)
        is_begun[continuing_pieces] = False
        self._check(is_begun.sum() == num_begun.sum())
        documents = np.zeros(len(rows_of_pieces), dtype=np.int64)
        starts = np.zeros(len(rows_of_pieces), dtype=np.int64)
        repeated = np.zeros(len(rows_of_pieces), dtype=np.int64)
        documents[is_begun] = joined_ranges(first_documents, num_begun)
        documents[continuing_pieces] = continuations["document"]
        starts[continuing_pieces] = continuations["start"]
        repeated[continuing_pieces] = continuations["repeated"]

        # A piece reaches to the end of its document, or to the end of the row, where concat cuts documents. Only the
        # last piece of a row can be cut, so the positions follow from the lengths before the cut.
        records = self.documents[documents]
        self._check(starts < records["tokens"])
        uncut_lengths = np.minimum(records["tokens"] - starts, self._max_length)
        tokens_before = np.cumsum(uncut_lengths) - uncut_lengths  # in all of these rows
        first_piece_of_row = first_pieces[rows_of_pieces]  # for each piece
        positions = tokens_before - tokens_before[first_piece_of_row]
        lengths = np.minimum(uncut_lengths, self._max_length - positions)

        # the bytes up to a token are in proportion to its position
        tokens_up_to_start = (starts + repeated).astype(np.uint64)
        tokens_up_to_end = (starts + lengths).astype(np.uint64)
        document_bytes = records["bytes"].astype(np.uint64)
        bytes_up_to_start = document_bytes * tokens_up_to_start // records["tokens"]
        bytes_up_to_end = document_bytes * tokens_up_to_end // records["tokens"]
        num_bytes = (bytes_up_to_end - bytes_up_to_start).astype(np.int64)
        return IndexedPieces(
            rows=rows_of_pieces,
            positions=positions,
            documents=documents,
            starts=starts,
            lengths=lengths,
            repeated=repeated,
            num_bytes=num_bytes,
        )

    def _ranges(self, starts_of_rows: np.ndarray, ends_of_rows: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the first document or continuation of each row, and how many it has, int64 [R] each.

        Args:
            starts_of_rows: ROW [R].
            ends_of_rows: ROW [R], the records of the rows after these.
            name: "documents" or "continuations".
        """
        starts = starts_of_rows[name]
        ends = ends_of_rows[name]
        records = self.documents if name == "documents" else self.continuations
        self._check((starts <= ends) & (ends <= len(records)))
        return starts.astype(np.int64), ends.astype(np.int64) - starts.astype(np.int64)

    def _check(self, is_right: np.ndarray) -> None:
        if not np.all(is_right):
            raise InputError(f"{self._folder}: the document index is damaged; tokenize again")

    def source_numbers(self, documents: np.ndarray) -> np.ndarray:
        """Return the sources of some documents, int64, as indices of ``sources.names``."""
        return self.sources.sources_of(self.documents["file"][documents])

    def count_by_source(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and the bytes of each source in some rows, int64 [R, sources], without repeated tokens."""
        pieces = self.pieces(rows)
        num_sources = len(self.sources.names)
        # a cell of the result as one number, so that one bincount fills it
        cells = pieces.rows * num_sources + self.source_numbers(pieces.documents)
        num_cells = len(rows) * num_sources
        num_tokens = np.bincount(cells, weights=pieces.lengths - pieces.repeated, minlength=num_cells)
        num_bytes = np.bincount(cells, weights=pieces.num_bytes, minlength=num_cells)
        shape = (len(rows), num_sources)
        return num_tokens.astype(np.int64).reshape(shape), num_bytes.astype(np.int64).reshape(shape)

    def main_sources(self) -> np.ndarray:
        """Return the source with the most tokens in each row, int64 [rows]; reads the index of the entire split."""
        main_sources = [np.empty(0, int)]
        for start in range(0, self.num_rows, _ROWS_AT_ONCE):
            rows = np.arange(start, min(start + _ROWS_AT_ONCE, self.num_rows))
            num_tokens, _ = self.count_by_source(rows)
            main_sources.append(num_tokens.argmax(axis=1))
        return np.concatenate(main_sources)

    def origin(self, document: int) -> DocumentOrigin:
        """Return where a document comes from."""
        record = self.documents[document]
        file = int(record["file"])
        return DocumentOrigin(
            source=self.sources.source_name(file),
            file=self.sources.file_name(file),
            row=int(record["row"]),
            num_tokens=int(record["tokens"]),
            num_bytes=int(record["bytes"]),
        )


class JoinedIndex(DocumentIndex):
    """The index of a split of a token dataset of parts, as a full merge of the parts would have written it.

    Records are only read on request, and only from the parts that have them.
    """

    def __init__(self, parts: Parts, split: str, sources: SourceTable, *, has_labels: bool) -> None:
        self.sources = sources
        self._folder = parts.folder / split
        self._max_length = parts.record.max_length

        # the segments of each array: a part's records, whose numbers continue those of earlier parts
        documents_in_rows: list[Segment] = []  # their labels are at the same places
        documents_in_no_row: list[Segment] = []
        rows: list[Segment] = []
        continuations: list[Segment] = []
        checksums: list[Segment] = []
        num_files = 0  # of earlier parts, as the next two
        num_documents = 0
        num_continuations = 0
        for part_index, part in enumerate(parts.record.parts):
            if split in part.splits:
                part_split = part.splits[split]
                num_in_rows = part_split.placed
                file_offsets = {"file": num_files, "row": part.rows_before}
                row_offsets = {"documents": num_documents, "continuations": num_continuations}
                document_offsets = {"document": num_documents}
                num_pieces = part_split.continuations
                documents_in_rows.append(Segment(part_index, begin=0, end=num_in_rows, offsets=file_offsets))
                documents_in_no_row.append(
                    Segment(part_index, begin=num_in_rows, end=part_split.documents, offsets=file_offsets)
                )
                rows.append(Segment(part_index, begin=0, end=part_split.rows, offsets=row_offsets))
                continuations.append(Segment(part_index, begin=0, end=num_pieces, offsets=document_offsets))
                checksums.append(Segment(part_index, begin=0, end=part_split.rows, offsets={}))
                num_documents += num_in_rows
                num_continuations += num_pieces
            num_files += part.num_files
        # the array has one record more than there are rows, which says where the last row ends
        rows[-1] = replace(rows[-1], end=rows[-1].end + 1)

        self.documents = JoinedRecords(parts, split, "documents", DOCUMENT, [*documents_in_rows, *documents_in_no_row])
        self.rows = JoinedRecords(parts, split, "rows", ROW, rows, begins_with_zeros=True)
        self.continuations = JoinedRecords(parts, split, "continuations", CONTINUATION, continuations)
        self.checksums = None
        if parts.record.has_checksums:
            self.checksums = JoinedRecords(parts, split, "checksums", CHECKSUM, checksums)
        self.is_desirable = None
        if has_labels:
            labels = [replace(segment, offsets={}) for segment in (*documents_in_rows, *documents_in_no_row)]
            self.is_desirable = JoinedRecords(parts, split, "desirable", LABEL, labels)


def open_index(folder: Path, manifest: Manifest | None, split: str) -> DocumentIndex | None:
    """Open the document index of a split of ``folder``; None in older versions, InputError if it is damaged."""
    if manifest is None or not manifest.has_index or split not in manifest.ledger.splits:
        return None
    ledger = manifest.ledger.splits[split]
    sources = SourceTable(manifest.sources)
    if is_of_parts(folder):
        return JoinedIndex(open_parts(folder), split, sources, has_labels=manifest.has_unpaired)
    index = DocumentIndex(folder / split, sources, manifest.settings.max_length, ledger.documents, ledger.rows)
    if manifest.has_unpaired and index.is_desirable is None:
        raise InputError(f"{folder / split / FOLDER / LABELS}: the file is missing; tokenize again")
    return index


def row_checksum(input_ids: np.ndarray, labels: np.ndarray | None, document_starts: np.ndarray | None) -> int:
    """Return the XXH3-64 hash of a row's tokens, its labels and the positions at which its documents begin.

    Labels only count if some differ from ``input_ids``. So a split whose tokens are all supervised has the same
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
    """Return the indices of the rows, given as for :func:`row_checksum`, that do not have these CHECKSUM [rows]."""
    current_checksums = np.array([row_checksum(*row) for row in rows], dtype=CHECKSUM)
    return np.flatnonzero(current_checksums != checksums)


def row_checksums(
    input_ids: np.ndarray, labels: np.ndarray | None, document_starts: np.ndarray, offsets: np.ndarray
) -> np.ndarray:
    """Return the checksums of R joined rows of T tokens, CHECKSUM [R]; for the arguments see :func:`row_checksum`.

    ``offsets`` are integers [R + 1]; row r has ``document_starts[offsets[r] : offsets[r + 1]]``.
    """
    num_rows = len(offsets) - 1
    input_ids_of_rows = input_ids.reshape(num_rows, -1)
    labels_of_rows = None if labels is None else labels.reshape(num_rows, -1)
    checksums = np.empty(num_rows, dtype=CHECKSUM)
    for row in range(num_rows):
        row_labels = None if labels_of_rows is None else labels_of_rows[row]
        row_starts = document_starts[offsets[row] : offsets[row + 1]]
        checksums[row] = row_checksum(input_ids_of_rows[row], row_labels, row_starts)
    return checksums


def chunks(records: np.ndarray, show: ShowSearched) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the records of an array chunk by chunk, each with the number of its first record.

    ``show`` is called with the length of each chunk after it was used.
    """
    for start in range(0, len(records), _RECORDS_PER_CHUNK):
        chunk = records[start : start + _RECORDS_PER_CHUNK]
        yield start, chunk
        show(len(chunk))
