"""Open a token dataset on disk and read its rows as batches."""

import abc
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from fabric_train.cli.errors import InputError, RunError
from fabric_train.cli.launcher import global_rank
from fabric_train.data.batch import IGNORED_LABEL, Batch, Pieces, pad_rows
from fabric_train.data.stored_split import LoadedSplit, StoredSplit, is_sound, load_splits
from fabric_train.files.regular_file import check_links
from fabric_train.token_dataset import token_folder
from fabric_train.token_dataset.document_index import DocumentIndex, JoinedIndex, SourceTable, altered_rows, open_index
from fabric_train.token_dataset.joined_split import JoinedSplit, check_joined_splits
from fabric_train.token_dataset.manifest import Manifest, read_manifest
from fabric_train.token_dataset.parts import is_of_parts, open_parts

if TYPE_CHECKING:
    import datasets


StoredRow: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""The ``input_ids`` of a row, its labels, and the starts of its documents; None if documents are not kept apart."""


@dataclass(frozen=True)
class RowPieces:
    """P pieces of documents: the pieces of some rows in order.

    ``rows``, int64 [P], are indices among the rows asked for; ``positions``, int64 [P], where a piece begins in its
    row. ``sources``, int64 [P], are indices of ``IndexedRows.source_names``. ``num_tokens``, int64 [P], includes tokens
    that --overlap repeats. ``num_bytes``, fp64 [P], are the document's UTF-8 bytes, shared by tokens; NaN if not known.
    ``reference``, fp64 [P, 2], are the reference log-probabilities of preference pairs; None without them.
    """

    rows: np.ndarray
    positions: np.ndarray
    sources: np.ndarray
    num_tokens: np.ndarray
    num_bytes: np.ndarray
    reference: np.ndarray | None = None


class IndexedRows(torch.utils.data.Dataset, abc.ABC):
    """Rows that are read as batches of a list of indices. ``source_names`` are the sources of their documents."""

    isolates: bool
    source_names: tuple[str, ...]

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def longest(self) -> int:
        """Return the number of tokens in the longest row."""

    @abc.abstractmethod
    def lengths(self) -> set[int]:
        """Return the distinct row lengths, in tokens."""

    @abc.abstractmethod
    def read(self, indices: Sequence[int]) -> list[StoredRow]:
        """Return the rows in the order of ``indices``."""

    @abc.abstractmethod
    def pieces(self, indices: Sequence[int]) -> RowPieces:
        """Return the pieces of documents in the rows, in their order; an InputError if the index is damaged."""

    @abc.abstractmethod
    def main_sources(self) -> np.ndarray:
        """Return the source that has the most tokens of each row, int64 [rows], as indices of ``source_names``."""

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return the rows as one batch, with shorter rows padded at the end by unsupervised tokens."""
        rows = self.read(indices)
        starts = [borders for *_, borders in rows if borders is not None]
        batch = pad_rows([ids for ids, _, _ in rows], [labels for _, labels, _ in rows], starts)
        if not rows:
            return batch
        pieces = self.pieces(indices)
        reference = None if pieces.reference is None else torch.from_numpy(pieces.reference)
        return replace(batch, pieces=place_pieces(pieces, batch.labels.numpy()), reference=reference)


def place_pieces(pieces: RowPieces, labels: np.ndarray) -> Pieces:
    """Return the targets and the bytes of the pieces in a batch whose labels, int64 [B, T], are given.

    The bytes of a piece are its document's bytes, shared by tokens, times its supervised share. That is
    ``targets / (tokens - 1)``, at most 1: the first token of a piece is no target, unless the documents of a row see
    each other. Tokens that --overlap repeats count among the tokens and not among the targets. So the bytes
    belong to the text whose loss is summed, and the loss divided by them can be compared between tokenizers.
    """
    is_target = labels != IGNORED_LABEL
    is_target[:, 0] = False
    begins = pieces.rows * labels.shape[1] + pieces.positions
    num_targets = np.diff(np.searchsorted(np.flatnonzero(is_target), np.append(begins, labels.size)))
    supervised = np.minimum(num_targets / np.maximum(pieces.num_tokens - 1, 1), 1.0)
    return Pieces(*map(torch.from_numpy, (num_targets, pieces.sources, pieces.num_bytes * supervised)))


class Rows(IndexedRows):
    """The rows of one split.

    With ``isolate_documents``, batches keep documents apart if the split has a column ``document_starts``. Without a
    document index, which ``open_index`` returns, all rows are of the first of ``source_names``, and each is one piece.
    """

    def __init__(
        self,
        split: "datasets.Dataset | JoinedSplit",
        isolate_documents: bool = True,
        source_names: tuple[str, ...] = ("",),
        open_index: Callable[[], DocumentIndex | None] = lambda: None,
    ) -> None:
        self.split: Any = split
        self.source_names = source_names
        self._open_index = open_index
        self._stored: StoredSplit = split if isinstance(split, JoinedSplit) else LoadedSplit(split)
        self.has_labels = "labels" in split.column_names
        self.has_borders = "document_starts" in split.column_names
        self.isolates = isolate_documents and self.has_borders
        self._lengths = self._stored.row_length
        self._reference_file: Path | None = None

    def __len__(self) -> int:
        return len(self.split)

    def longest(self) -> int:
        return max(self.lengths())

    def shortest(self) -> int:
        """Return the number of tokens in the shortest row."""
        return min(self.lengths())

    def lengths(self) -> set[int]:
        return set(np.unique(self._lengths).tolist())  # of all rows, or the one that the column's type gives

    def _lengths_of(self, rows: np.ndarray) -> np.ndarray:
        if isinstance(self._lengths, int):
            return np.full(len(rows), self._lengths)
        return self._lengths[rows].astype(np.int64)

    def chunks(self, column: str, rows: range | None = None) -> Iterator[pa.Array]:
        """Yield a column, of consecutive rows or all, as one array of lists after the other; InputError for damage."""
        first = 0 if rows is None else rows.start
        for chunk in self._stored.chunks(column, range(len(self)) if rows is None else rows):
            if not is_sound(pa.chunked_array([chunk])):
                file, _ = self._stored.place(first)
                raise InputError(f"{file}: damaged, {column} has lists outside of their values; tokenize again")
            first += len(chunk)
            yield chunk

    def id_range(self, column: str = "input_ids") -> tuple[int, int]:
        """Return the lowest and highest token id in a column, without unsupervised labels. Reads the whole column."""
        extremes = []
        for chunk in self.chunks(column):
            tokens = chunk.flatten()
            if column == "labels":
                tokens = tokens.filter(pc.not_equal(tokens, IGNORED_LABEL))
            if len(tokens):
                extremes += pc.min_max(tokens).as_py().values()
        return min(extremes, default=0), max(extremes, default=0)

    def row_with_borders_outside(self) -> int | None:
        """Return the first row whose ``document_starts`` are not ascending or lie outside of the row, or None."""
        if not self.has_borders:
            return None
        first = 0
        for chunk in self._stored.chunks("document_starts", range(len(self))):
            if not is_sound(pa.chunked_array([chunk])):
                return first
            starts = chunk.flatten().to_numpy()
            counts = pc.list_value_length(chunk).to_numpy()
            rows = np.repeat(np.arange(len(counts)), counts)
            wrong = (starts < 0) | (starts >= self._lengths_of(first + rows))
            wrong[1:] |= (np.diff(rows) == 0) & (np.diff(starts) <= 0)
            if wrong.any():
                return int(first + rows[wrong.argmax()])
            first += len(counts)
        return None

    def read(self, indices: Sequence[int]) -> list[StoredRow]:
        """Raise RunError if a row does not have the checksum that it was written with."""
        table = self._stored.take(indices)
        nothing = [None] * len(indices)
        if not is_sound(table):
            unsound = next(row for row in indices if not is_sound(self._stored.take([row])))
            raise RunError(self._describe_altered(unsound))
        ids = _lists(table, "input_ids")
        labels = _lists(table, "labels") if self.has_labels else None
        starts = _lists(table, "document_starts") if self.has_borders else None
        if self.index is not None and self.index.checksums is not None:
            rows = zip(ids, labels or nothing, starts or nothing, strict=True)
            altered = altered_rows(rows, self.index.checksums[list(indices)])
            if len(altered):
                raise RunError(self._describe_altered(indices[altered[0]]))
        return list(zip(ids, labels or ids, (self.isolates and starts) or nothing, strict=True))

    def _describe_altered(self, row: int) -> str:
        file, number = self._stored.place(row)
        place = f"row {number}" if number == row else f"row {number} ({row} of the split)"
        return f"{file}: {place} has changed since it was written; copy a sound file in its place, or tokenize again"

    @functools.cached_property
    def index(self) -> DocumentIndex | None:
        """The document index; None if there is none. For errors see ``open_index``."""
        return self._open_index()

    def use_reference(self, file: Path) -> None:
        """Give the pairs of all batches from now on the log-probabilities in a file of ``training.reference``."""
        self._reference_file = file
        self.__dict__.pop("_reference", None)

    @functools.cached_property
    def _reference(self) -> np.ndarray | None:
        return None if self._reference_file is None else np.load(self._reference_file, mmap_mode="r")

    def __getstate__(self) -> dict[str, Any]:
        """Leave the mapped file out, which would be pickled as a whole."""
        return {name: value for name, value in self.__dict__.items() if name != "_reference"}

    def pieces(self, indices: Sequence[int]) -> RowPieces:
        rows = np.array(indices, dtype=np.int64)
        if self.index is None:
            nothing = np.zeros_like(rows)
            return RowPieces(np.arange(len(rows)), nothing, nothing, self._lengths_of(rows), np.full(len(rows), np.nan))
        found = self.index.pieces(rows)
        documents = self.index.documents[found.documents]
        sources = self.index.source_numbers(found.documents)
        num_bytes = documents["bytes"] * (found.lengths / documents["tokens"])
        # a pair is one document, so it has the number of its document
        reference = None if self._reference is None else np.asarray(self._reference[found.documents])
        return RowPieces(found.rows, found.positions, sources, found.lengths, num_bytes, reference)

    def main_sources(self) -> np.ndarray:
        """Read the index of the whole split, unless a merge has; see ``IndexedRows.main_sources``."""
        if self.index is None or len(self.source_names) == 1:
            return np.zeros(len(self), dtype=np.int64)
        if isinstance(self.split, JoinedSplit) and (known := self.split.main_sources()) is not None:
            return known.astype(np.int64)
        return self.index.main_sources()


@dataclass(frozen=True)
class TokenDataset:
    """A token dataset on disk: ``train``, ``validation`` if there is one, and the ``manifest``, None for an older
    folder.
    """

    folder: Path
    train: Rows
    validation: Rows | None
    manifest: Manifest | None

    @property
    def parts(self) -> tuple["TokenDataset", ...]:
        """This token dataset, as the only part of the training data."""
        return (self,)

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def source_names(self) -> tuple[str, ...]:
        """The sources of the documents; the folder if the dataset has no document index."""
        return self.train.source_names

    @property
    def isolates(self) -> bool:
        """Whether training keeps the documents of a row apart."""
        return self.train.isolates

    @property
    def has_pairs(self) -> bool:
        return self.manifest is not None and self.manifest.has_pairs

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the manifest; for an older folder without one, the fingerprint of ``datasets``."""
        manifest = self.folder / "manifest.json"
        if manifest.is_file():
            return hashlib.sha256(manifest.read_bytes()).hexdigest()
        assert not isinstance(self.train.split, JoinedSplit), "parts have a manifest"
        return str(self.train.split._fingerprint)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end documents, and turns of chats; none for an older folder without a manifest."""
        return self.manifest.tokenizer.stop_token_ids if self.manifest else ()

    @property
    def attachments(self) -> tuple[Path, ...]:
        """The files and folders that each checkpoint copies, so that it can be exported and used on its own."""
        return tuple(path for path in (self.folder / "manifest.json", self.folder / "tokenizer") if path.exists())


def open_dataset(folder: str, isolate_documents: bool = True) -> TokenDataset:
    """Open a folder that ``tokenize_dataset.py`` wrote, or an older one with ``train``/``valid`` splits.

    With ``isolate_documents``, batches keep the documents of a row apart if the dataset has ``document_starts``. An
    InputError if the folder is damaged, has no rows, or has columns that are not tokens.
    """
    path = Path(folder)
    if is_of_parts(path):
        return _open_dataset_of_parts(path, isolate_documents)
    token_folder.check_token_dataset(folder)
    train, validation = load_splits(folder)
    check_links(path / "tokenizer")  # checkpoints copy this folder
    manifest = read_manifest(path)
    names = SourceTable(manifest.sources).names if manifest and manifest.has_index else (folder,)

    def rows(split: "datasets.Dataset", name: str) -> Rows:
        return Rows(split, isolate_documents, names, functools.partial(open_index, path, manifest, name))

    held_out = rows(validation, "validation") if validation is not None and len(validation) else None
    return TokenDataset(path, rows(train, "train"), held_out, manifest)


def _open_dataset_of_parts(folder: Path, isolate_documents: bool) -> TokenDataset:
    """Open a token dataset of parts; a part is opened when one of its rows is read.

    Rank 0 alone looks whether all parts are there, and their files as long as they were.
    """
    parts = open_parts(folder)
    manifest = read_manifest(folder)
    check_links(folder / "tokenizer")
    if manifest is None:
        raise InputError(f"{folder}: no manifest.json; merge the parts again")
    if global_rank() == 0:
        check_joined_splits(parts)
    sources = SourceTable(manifest.sources)

    def rows(name: str) -> Rows:
        index = functools.partial(JoinedIndex, parts, name, sources)
        return Rows(JoinedSplit(parts, name), isolate_documents, sources.names, index)

    if not len(JoinedSplit(parts, "train")):
        raise InputError(f"--train_data_dir {folder}: the train split has no rows; merge parts with more documents")
    held_out = rows("validation") if len(JoinedSplit(parts, "validation")) else None
    return TokenDataset(folder, rows("train"), held_out, manifest)


def _lists(table: pa.Table, column: str) -> list[np.ndarray]:
    return [_numbers(row.values) for row in table.column(column)]


def _numbers(values: pa.Array) -> np.ndarray:
    """Return whole numbers without a copy; ``to_numpy`` would import pandas, 29 MB and a third of a second."""
    if not len(values):
        return np.empty(0, np.int32)
    return np.frombuffer(values.buffers()[1], np.dtype(str(values.type)), values.offset + len(values))[values.offset :]
