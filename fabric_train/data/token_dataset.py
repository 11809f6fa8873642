"""Open a token dataset on disk and read its rows as batches."""

import abc
import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from fabric_train.cli.errors import InputError, RunError, first_line, missing_folder, raise_reached_limit
from fabric_train.data.batch import IGNORED_LABEL, Batch, Pieces, pad_rows
from fabric_train.files.regular_file import check_links
from fabric_train.tokenization.manifest import Manifest, read_manifest
from fabric_train.tokenization.packing import token_folder
from fabric_train.tokenization.packing.document_index import DocumentIndex, SourceTable, altered_rows, open_index

if TYPE_CHECKING:
    import datasets

VALIDATION_NAMES = ("validation", "valid")
_ROWS_AT_ONCE = 1 << 16

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
        split: "datasets.Dataset",
        isolate_documents: bool = True,
        source_names: tuple[str, ...] = ("",),
        open_index: Callable[[], DocumentIndex | None] = lambda: None,
    ) -> None:
        self.split, self.source_names, self._open_index = split, source_names, open_index
        self.has_labels = "labels" in split.column_names
        self.has_borders = "document_starts" in split.column_names
        self.isolates = isolate_documents and self.has_borders
        columns = ["input_ids", *(["labels"] * self.has_labels), *(["document_starts"] * self.has_borders)]
        self._table = split.select_columns(columns).with_format("arrow")
        self._lengths = _row_lengths(split, "input_ids")
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

    def id_range(self, column: str = "input_ids") -> tuple[int, int]:
        """Return the lowest and highest token id in a column, without unsupervised labels. Reads the whole column."""
        extremes = []
        for chunk in self.split.data.column(column).chunks:
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
        for chunk in self.split.data.column("document_starts").chunks:
            if not _is_sound(pa.chunked_array([chunk])):
                return first
            starts, counts = chunk.flatten().to_numpy(), pc.list_value_length(chunk).to_numpy()
            rows = np.repeat(np.arange(len(counts)), counts)
            wrong = (starts < 0) | (starts >= self._lengths_of(first + rows))
            wrong[1:] |= (np.diff(rows) == 0) & (np.diff(starts) <= 0)
            if wrong.any():
                return int(first + rows[wrong.argmax()])
            first += len(counts)
        return None

    def read(self, indices: Sequence[int]) -> list[StoredRow]:
        """Raise RunError if a row does not have the checksum that it was written with."""
        table, nothing = self._table[list(indices)], [None] * len(indices)
        if not _is_sound(table):
            raise RunError(self._describe_altered(next(row for row in indices if not _is_sound(self._table[[row]]))))
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
        first, file, number = 0, "", row
        for file in (entry["filename"] for entry in self.split.cache_files):
            number, first = row - first, first + token_folder.map_table(file)[0].num_rows
            if row < first:
                break
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
        documents, sources = self.index.documents[found.documents], self.index.source_numbers(found.documents)
        num_bytes = documents["bytes"] * (found.lengths / documents["tokens"])
        # a pair is one document, so it has the number of its document
        reference = None if self._reference is None else np.asarray(self._reference[found.documents])
        return RowPieces(found.rows, found.positions, sources, found.lengths, num_bytes, reference)

    def main_sources(self) -> np.ndarray:
        """Read the index of the whole split; see ``IndexedRows.main_sources``."""
        if self.index is None or len(self.source_names) == 1:
            return np.zeros(len(self), dtype=np.int64)
        rows = np.arange(len(self))
        parts = (rows[begin : begin + _ROWS_AT_ONCE] for begin in range(0, len(rows), _ROWS_AT_ONCE))
        return np.concatenate([self.index.count_by_source(part)[0].argmax(axis=1) for part in parts])


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
        return self.train.split._fingerprint

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
    if not (path / "dataset_dict.json").is_file():
        cause = "the folder has no dataset_dict.json" if path.is_dir() else missing_folder(path)
        raise InputError(f"--train_data_dir {folder}: {cause}; make one with tokenize_dataset.py --output_dir {folder}")
    token_folder.check_listed_files(path, "tokenize again")
    with token_folder.without_read_ahead():
        train, validation = _open_splits(folder)
    check_links(path / "tokenizer")  # checkpoints copy this folder
    manifest = read_manifest(path)
    names = SourceTable(manifest.sources).names if manifest and manifest.has_index else (folder,)

    def rows(split: "datasets.Dataset", name: str) -> Rows:
        return Rows(split, isolate_documents, names, functools.partial(open_index, path, manifest, name))

    held_out = rows(validation, "validation") if validation is not None and len(validation) else None
    return TokenDataset(path, rows(train, "train"), held_out, manifest)


def _open_splits(folder: str) -> "tuple[datasets.Dataset, datasets.Dataset | None]":
    import datasets  # slow, and not needed to describe the data of a run

    try:
        splits = datasets.load_from_disk(folder)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise_reached_limit(error)
        raise InputError(f"--train_data_dir {folder}: damaged, {first_line(error)}; tokenize again") from error
    except (ArithmeticError, AttributeError, KeyError, TypeError) as error:  # raised by datasets for unexpected JSON
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"--train_data_dir {folder}: damaged, {reason}; tokenize again") from error
    except IndexError as error:  # raised by datasets for a split without rows, which has no file
        raise InputError(f"--train_data_dir {folder}: a split has no rows; leave it out or tokenize again") from error
    if "train" not in splits:
        raise InputError(
            f"--train_data_dir {folder}: no train split, only {', '.join(splits)}; make one with tokenize_dataset.py"
        )
    validation = next((splits[name] for name in VALIDATION_NAMES if name in splits), None)
    for name, split in (("train", splits["train"]), ("validation", validation)):
        fault = _fault_of_columns(split) if split is not None else None
        if fault:
            raise InputError(f"--train_data_dir {folder}: {name} has {fault}; tokenize again with tokenize_dataset.py")
    if len(splits["train"]) == 0:
        raise InputError(f"--train_data_dir {folder}: the train split has no rows; tokenize again with more documents")
    return splits["train"], validation


def _fault_of_columns(split: "datasets.Dataset") -> str | None:
    """Return the fault of a split's columns of tokens, labels and document starts; None if they are right."""
    if "input_ids" not in split.column_names:
        return f"no column input_ids, only {', '.join(split.column_names)}"
    columns = [name for name in ("input_ids", "labels", "document_starts") if name in split.column_names]
    for name in columns:
        kind = split.data.column(name).type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not is_list or not pa.types.is_integer(kind.value_type):
            return f"a column {name} of {kind}, not of lists of {'positions' if 'start' in name else 'token ids'}"
        if not _is_sound(split.data.column(name), full=False):
            return f"a damaged column {name}: lists outside of their values"
        if any(chunk.null_count or chunk.flatten().null_count for chunk in split.data.column(name).chunks):
            return f"gaps (nulls) in its column {name}"
    lengths = [_row_lengths(split, name) for name in columns if "start" not in name]
    if len(lengths) == 2 and np.any(lengths[0] != lengths[1]):
        first = int(np.argmax(lengths[0] != lengths[1]))
        return f"rows whose labels are not as many as their input_ids, row {first} first"
    return None


def _is_sound(lists: pa.Table | pa.ChunkedArray, full: bool = True) -> bool:
    """Return whether lists lie inside of their values, or only the first and last; else pyarrow aborts the process."""
    try:
        lists.validate(full=full)
    except pa.ArrowInvalid:
        return False
    return True


def _row_lengths(split: "datasets.Dataset", column: str) -> np.ndarray | int:
    """Return the values in each row of a column of lists, integers [rows].

    Rows that ``tokenize_dataset.py`` writes have lists of one length, which is in the column's type: it is returned
    alone, so that opening a dataset takes no longer if it has more rows.
    """
    values = split.data.column(column)
    if pa.types.is_fixed_size_list(values.type):
        return int(values.type.list_size)
    return pc.list_value_length(values).to_numpy()


def _lists(table: pa.Table, column: str) -> list[np.ndarray]:
    return [row.values.to_numpy(zero_copy_only=False) for row in table.column(column)]
