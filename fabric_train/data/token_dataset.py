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
from fabric_train.data.batch import IGNORED_LABEL, Batch, Pieces, hash_row, pad_rows
from fabric_train.data.stored_split import LoadedSplit, StoredSplit, is_sound, load_splits
from fabric_train.data.teacher_states import StatesReader, TeacherStates, join_states
from fabric_train.files.regular_file import check_links
from fabric_train.token_dataset import token_folder
from fabric_train.token_dataset.document_index import DocumentIndex, JoinedIndex, SourceTable, altered_rows, open_index
from fabric_train.token_dataset.joined_split import JoinedSplit, check_joined_splits
from fabric_train.token_dataset.manifest import Manifest, read_manifest
from fabric_train.token_dataset.parts import is_of_parts, open_parts

if TYPE_CHECKING:
    import datasets


StoredRow: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""A row's ``input_ids``, its labels, and the starts of its documents, which are None if documents are not kept
apart."""


@dataclass(frozen=True)
class RowPieces:
    """P pieces of documents: the pieces of some rows in order."""

    rows: np.ndarray
    """The row of each piece, int64 [P], as an index of the requested rows."""
    positions: np.ndarray
    """The position in its row at which each piece begins, int64 [P]."""
    sources: np.ndarray
    """The source of each piece, int64 [P], as an index of ``IndexedRows.source_names``."""
    num_tokens: np.ndarray
    """The number of tokens in each piece, int64 [P], including those that --overlap repeats."""
    num_bytes: np.ndarray
    """The UTF-8 bytes of each piece, fp64 [P]: its document's bytes, shared by tokens; NaN if they are not known."""
    reference: np.ndarray | None = None
    """The log-probabilities of both sequences under the reference model, fp64 [P, 2]; None without them."""
    is_desirable: np.ndarray | None = None
    """The labels of unpaired answers, bool [P]; None for other documents."""


class IndexedRows(torch.utils.data.Dataset, abc.ABC):
    """Rows that are read as batches of a list of indices. ``source_names`` are the sources of their documents.

    If ``predicts_all`` is set, batches have all tokens as targets, see ``Batch.is_supervised``.
    """

    isolates: bool
    predicts_all: bool = False
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

    def states_reader_of(self, row: int) -> tuple[StatesReader, int] | None:
        """Return the reader of a teacher's values for a row, and the row's number there; None without such values."""
        return None

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return the rows as one batch, with shorter rows padded at the end by unsupervised tokens."""
        rows = self.read(indices)
        document_starts = [starts for _, _, starts in rows if starts is not None]
        batch = pad_rows(
            [ids for ids, _, _ in rows],
            [labels for _, labels, _ in rows],
            document_starts,
            predicts_all=self.predicts_all,
        )
        if not rows:
            return batch
        row_pieces = self.pieces(indices)
        reference = None if row_pieces.reference is None else torch.from_numpy(row_pieces.reference)
        is_desirable = None if row_pieces.is_desirable is None else torch.from_numpy(row_pieces.is_desirable)
        return replace(
            batch,
            pieces=place_pieces(row_pieces, batch.labels.numpy()),
            reference=reference,
            is_desirable=is_desirable,
            teacher=self._read_teacher(indices, batch),
        )

    def _read_teacher(self, indices: Sequence[int], batch: Batch) -> TeacherStates | None:
        """Return the stored values of a teacher for the targets of a batch; None if there are none."""
        states_of_rows = []
        labels = batch.labels.numpy()
        for index, row_ids, row_labels in zip(indices, batch.input_ids.numpy(), labels, strict=True):
            source = self.states_reader_of(index)
            if source is None:
                return None
            reader, row = source
            states_of_rows.append(reader.read(row, hash_row(row_ids, row_labels)))
        return join_states(states_of_rows)


def place_pieces(row_pieces: RowPieces, labels: np.ndarray) -> Pieces:
    """Return the targets and the bytes of the pieces in a batch.

    The bytes of a piece are its document's bytes, shared by tokens, times its supervised share. That is
    ``targets / (tokens - 1)``, at most 1: the first token of a piece is no target, unless the documents of a row see
    each other. Tokens that --overlap repeats count among the tokens and not among the targets. So the bytes
    belong to the text whose loss is summed, and the loss divided by them can be compared between tokenizers.

    Args:
        row_pieces: The pieces of the rows of the batch.
        labels: The labels of the batch, int64 [B, T].
    """
    is_target = labels != IGNORED_LABEL
    is_target[:, 0] = False  # nothing predicts the first token of a row
    target_positions = np.flatnonzero(is_target)  # in the flattened batch, ascending

    # the number of targets before each piece, and before the end of the batch
    begins = row_pieces.rows * labels.shape[1] + row_pieces.positions
    num_targets_before = np.searchsorted(target_positions, np.append(begins, labels.size))
    num_targets = np.diff(num_targets_before)

    supervised_share = np.minimum(num_targets / np.maximum(row_pieces.num_tokens - 1, 1), 1.0)
    return Pieces(
        num_targets=torch.from_numpy(num_targets),
        sources=torch.from_numpy(row_pieces.sources),
        num_bytes=torch.from_numpy(row_pieces.num_bytes * supervised_share),
    )


class Rows(IndexedRows):
    """The rows of one split.

    With ``isolate_documents``, batches keep documents apart if the split has a column ``document_starts``. Without a
    document index, which ``open_index`` returns, each row is one piece, and belongs to the first of ``source_names``.
    """

    def __init__(
        self,
        split: "datasets.Dataset | JoinedSplit",
        isolate_documents: bool = True,
        source_names: tuple[str, ...] = ("",),
        open_index: Callable[[], DocumentIndex | None] = lambda: None,
    ) -> None:
        """Open the rows of a split.

        Args:
            split: The split, of ``datasets`` or of a token dataset of parts.
            isolate_documents: Whether batches keep the documents of a row apart, if their starts are stored.
            source_names: The names of the sources in the document index.
            open_index: Opens the document index, when it is needed; it returns None if there is none.
        """
        self.split: Any = split
        self.source_names = source_names
        self._open_index = open_index
        self._stored: StoredSplit = split if isinstance(split, JoinedSplit) else LoadedSplit(split)
        self.has_labels = "labels" in split.column_names
        self.has_borders = "document_starts" in split.column_names
        self.isolates = isolate_documents and self.has_borders
        self._lengths = self._stored.row_length  # of each row, or of all
        self._reference_file: Path | None = None
        self._states_reader: StatesReader | None = None

    def __len__(self) -> int:
        return len(self.split)

    def longest(self) -> int:
        return max(self.lengths())

    def shortest(self) -> int:
        """Return the number of tokens in the shortest row."""
        return min(self.lengths())

    def lengths(self) -> set[int]:
        return set(np.unique(self._lengths).tolist())

    def _lengths_of(self, rows: np.ndarray) -> np.ndarray:
        if isinstance(self._lengths, int):
            return np.full(len(rows), self._lengths)
        return self._lengths[rows].astype(np.int64)

    def chunks(self, column: str, rows: range | None = None) -> Iterator[pa.Array]:
        """Yield a column of consecutive rows, or of all rows, as one array of lists after the other.

        Raises:
            InputError: an array is damaged.
        """
        if rows is None:
            rows = range(len(self))
        first_row = rows.start
        for chunk in self._stored.chunks(column, rows):
            if not is_sound(pa.chunked_array([chunk])):
                file, _ = self._stored.locate(first_row)
                raise InputError(f"{file}: damaged ({column} has lists outside their values); tokenize again")
            first_row += len(chunk)
            yield chunk

    def id_range(self, column: str = "input_ids") -> tuple[int, int]:
        """Return the lowest and highest token id in a column, without unsupervised labels. Reads the whole column."""
        extremes: list[int] = []
        for chunk in self.chunks(column):
            tokens = chunk.flatten()
            if column == "labels":
                tokens = tokens.filter(pc.not_equal(tokens, IGNORED_LABEL))
            if len(tokens):
                extremes += pc.min_max(tokens).as_py().values()
        return min(extremes, default=0), max(extremes, default=0)

    def find_row_with_wrong_borders(self) -> int | None:
        """Return the first row whose ``document_starts`` are not ascending or outside of the row, or None."""
        if not self.has_borders:
            return None
        first_row = 0  # of the chunk
        for chunk in self._stored.chunks("document_starts", range(len(self))):
            if not is_sound(pa.chunked_array([chunk])):
                return first_row  # no row of a damaged chunk can be read, so its first row stands for all
            starts = chunk.flatten().to_numpy()
            num_starts = pc.list_value_length(chunk).to_numpy()
            row_of_start = np.repeat(np.arange(len(num_starts)), num_starts)  # in the chunk
            is_wrong = (starts < 0) | (starts >= self._lengths_of(first_row + row_of_start))
            # within a row, each start is above the one before it
            is_same_row = np.diff(row_of_start) == 0
            is_wrong[1:] |= is_same_row & (np.diff(starts) <= 0)
            if is_wrong.any():
                first_wrong_start = is_wrong.argmax()
                return int(first_row + row_of_start[first_wrong_start])
            first_row += len(num_starts)
        return None

    def read(self, indices: Sequence[int]) -> list[StoredRow]:
        """Return the rows in the order of ``indices``.

        Raises:
            RunError: a row's checksum differs from the one that was written with it.
        """
        # columns of lists, which pyarrow must not read if they are damaged
        table = self._stored.take(indices)
        if not is_sound(table):
            unsound_row = next(row for row in indices if not is_sound(self._stored.take([row])))
            raise RunError(self._describe_altered(unsound_row))

        no_values: list[None] = [None] * len(indices)
        ids = _lists(table, "input_ids")
        labels = ids  # rows without labels train on all tokens
        if self.has_labels:
            labels = _lists(table, "labels")
        document_starts: Sequence[np.ndarray | None] = no_values
        if self.has_borders:
            document_starts = _lists(table, "document_starts")

        # checksums were computed over the columns that are stored
        if self.index is not None and self.index.checksums is not None:
            stored_labels = labels if self.has_labels else no_values
            stored_rows = zip(ids, stored_labels, document_starts, strict=True)
            altered_indices = altered_rows(stored_rows, self.index.checksums[list(indices)])
            if len(altered_indices):
                raise RunError(self._describe_altered(indices[altered_indices[0]]))
        return list(zip(ids, labels, document_starts if self.isolates else no_values, strict=True))

    def _describe_altered(self, row: int) -> str:
        file, row_of_file = self._stored.locate(row)
        name = f"row {row}" if row_of_file == row else f"row {row_of_file} ({row} of the split)"
        return f"{file}: {name} has changed since it was written; replace it with an intact copy, or tokenize again"

    @functools.cached_property
    def index(self) -> DocumentIndex | None:
        """The document index; None if there is none. For errors see ``open_index``."""
        return self._open_index()

    def use_reference(self, file: Path) -> None:
        """From now on, give the pairs of all batches the log-probabilities in a file of ``training.reference``."""
        self._reference_file = file
        self.__dict__.pop("_reference", None)

    def use_teacher(self, reader: StatesReader) -> None:
        """From now on, give all batches the stored values of a teacher."""
        self._states_reader = reader

    def states_reader_of(self, row: int) -> tuple[StatesReader, int] | None:
        """Return the reader of the split's stored values of a teacher, see ``IndexedRows.states_reader_of``."""
        return None if self._states_reader is None else (self._states_reader, row)

    @functools.cached_property
    def _reference(self) -> np.ndarray | None:
        return None if self._reference_file is None else np.load(self._reference_file, mmap_mode="r")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the mapped file, of which pickle would copy everything."""
        return {name: value for name, value in self.__dict__.items() if name != "_reference"}

    def pieces(self, indices: Sequence[int]) -> RowPieces:
        """Return the pieces of documents in the rows, in their order; an InputError if the index is damaged."""
        rows = np.array(indices, dtype=np.int64)
        if self.index is None:
            # without a document index, each row is one piece
            return RowPieces(
                rows=np.arange(len(rows)),
                positions=np.zeros_like(rows),
                sources=np.zeros_like(rows),
                num_tokens=self._lengths_of(rows),
                num_bytes=np.full(len(rows), np.nan),
            )
        indexed = self.index.pieces(rows)
        documents = self.index.documents[indexed.documents]
        reference = None
        if self._reference is not None:
            # a pair is one document, so it has the number of its document
            reference = np.asarray(self._reference[indexed.documents])
        is_desirable = None
        if self.index.is_desirable is not None:
            is_desirable = np.asarray(self.index.is_desirable[indexed.documents])
        return RowPieces(
            rows=indexed.rows,
            positions=indexed.positions,
            sources=self.index.source_numbers(indexed.documents),
            num_tokens=indexed.lengths,
            num_bytes=documents["bytes"] * (indexed.lengths / documents["tokens"]),
            reference=reference,
            is_desirable=is_desirable,
        )

    def main_sources(self) -> np.ndarray:
        """Return the source that has the most tokens of each row, see ``IndexedRows.main_sources``.

        Reads the index of the whole split, unless a merge has stored the answer.
        """
        if self.index is None or len(self.source_names) == 1:
            return np.zeros(len(self), dtype=np.int64)
        if isinstance(self.split, JoinedSplit):
            stored_sources = self.split.main_sources()
            if stored_sources is not None:
                return stored_sources.astype(np.int64)
        return self.index.main_sources()


@dataclass(frozen=True)
class TokenDataset:
    """A token dataset on disk: ``train``, ``validation`` if there is one, and ``manifest``, which is None for an older
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
    def has_unpaired(self) -> bool:
        return self.manifest is not None and self.manifest.has_unpaired

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
        """The files and folders that are copied to each checkpoint, so that it can be exported and used on its own."""
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
    if manifest and manifest.has_index:
        source_names = SourceTable(manifest.sources).names
    else:
        source_names = (folder,)

    def rows(split: "datasets.Dataset", name: str) -> Rows:
        return Rows(split, isolate_documents, source_names, functools.partial(open_index, path, manifest, name))

    held_out = None
    if validation is not None and len(validation):
        held_out = rows(validation, "validation")
    return TokenDataset(path, rows(train, "train"), held_out, manifest)


def _open_dataset_of_parts(folder: Path, isolate_documents: bool) -> TokenDataset:
    """Open a token dataset of parts; a part is opened when one of its rows is read.

    Only rank 0 checks that all parts exist and that their files have the sizes that the merge recorded.
    """
    parts = open_parts(folder)
    manifest = read_manifest(folder)
    check_links(folder / "tokenizer")  # checkpoints copy this folder
    if manifest is None:
        raise InputError(f"{folder}: no manifest.json; merge the parts again")
    if global_rank() == 0:
        check_joined_splits(parts)
    sources = SourceTable(manifest.sources)

    def rows(split: JoinedSplit, name: str) -> Rows:
        index = functools.partial(JoinedIndex, parts, name, sources, has_labels=manifest.has_unpaired)
        return Rows(split, isolate_documents, sources.names, index)

    train = JoinedSplit(parts, "train")
    validation = JoinedSplit(parts, "validation")
    if not len(train):
        raise InputError(f"--train_data_dir {folder}: the train split has no rows; merge parts with more documents")
    held_out = rows(validation, "validation") if len(validation) else None
    return TokenDataset(folder, rows(train, "train"), held_out, manifest)


def _lists(table: pa.Table, column: str) -> list[np.ndarray]:
    """Return the integers of each row of a column, without a copy."""
    return [_as_array(row.values) for row in table.column(column)]


def _as_array(values: pa.Array) -> np.ndarray:
    """Return integers without a copy; ``to_numpy`` would import pandas, 29 MB and a third of a second."""
    if not len(values):
        return np.empty(0, np.int32)
    # the array may be a slice of its buffer
    buffer = values.buffers()[1]
    return np.frombuffer(buffer, np.dtype(str(values.type)), count=values.offset + len(values))[values.offset :]
