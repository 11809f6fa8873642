"""Token dataset → the micro-batches of each window, the rows that one optimizer step consumes over all ranks.

The order of the rows is a function of (seed, epoch) and the window a function of the step, both without regard to the
ranks.
A window of 5 rows, micro-batches of 1 row, 2 ranks:

    rows in order   17 4 23 8 11
    rank 0          [17] [23] [11]
    rank 1          [4]  [8]  []      an empty micro-batch: the rank takes part, and counts nothing
"""

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch.utils.data import DataLoader

from fabric_train.corpus.manifest import Manifest, read_manifest
from fabric_train.corpus.packing.token_folder import refuse_foreign_files
from fabric_train.documents import Documents
from fabric_train.errors import InputError, absent_folder, first_line
from fabric_train.loss import IGNORED_LABEL, Targets, find_targets
from fabric_train.names_in_data import refuse_foreign_links
from fabric_train.ranks.signals import leave_signals_to_rank
from fabric_train.rows_hash import hash_of
from fabric_train.sent_as_arrays import SentAsArrays

VALIDATION_NAMES = ("validation", "valid")


@dataclass(frozen=True)
class Batch(SentAsArrays):
    """Rows of one forward pass on one rank.

    ``input_ids`` and ``labels`` are [B, T] int64. ``documents`` keeps documents apart that share a row; None where no
    row holds more than one, or all shall see each other. A rank that has no row left in a window gets a row without
    supervised tokens. ``targets``, those of the labels, are found before the batch goes to a device. ``lengths`` are
    how many tokens see each other: of each document, or of each row where they are not kept apart, without padding.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    documents: Documents | None = None
    targets: Targets | None = None
    lengths: tuple[int, ...] = ()

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory (the DataLoader calls this)."""
        documents = self.documents and self.documents.pin_memory()
        targets = (self.targets or find_targets(self.labels)).pin_memory()
        return Batch(self.input_ids.pin_memory(), self.labels.pin_memory(), documents, targets, self.lengths)

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        input_ids, labels = (part.to(device, non_blocking=True) for part in (self.input_ids, self.labels))
        targets = (self.targets or find_targets(self.labels)).to(device)
        return Batch(input_ids, labels, self.documents and self.documents.to(device), targets, self.lengths)


@dataclass(frozen=True)
class Window:
    """What one rank computes in one optimizer step.

    ``step`` counts from 1, ``epoch`` from 0. ``rows``, int64 [rows of all
    ranks], are the window's rows in their order: indices into the train split, or a stream's lanes. ``cursors`` are
    where a stream goes on, see ``stream.StreamBatch``; None where the step alone tells. ``rows_hash`` is that of the
    order after this window; None for a stream.
    """

    step: int
    epoch: int
    ends_epoch: bool
    rows: np.ndarray
    micro_batch_size: int
    batches: list[Batch]
    cursors: np.ndarray | None = None
    rows_hash: str | None = None

    @property
    def num_rows(self) -> int:
        """Rows of all ranks."""
        return len(self.rows)

    def rows_of(self, batch: int, world_size: int, rank: int) -> list[int]:
        """Return which of ``rows`` are micro-batch number ``batch`` of a rank."""
        place = positions(batch, self.micro_batch_size, world_size, rank)
        return self.rows[place.start : place.stop].tolist()


class WindowSource(Protocol):
    """Where the loop gets its windows from."""

    def windows(self, after_step: int, last_step: int) -> Iterator[Window]:
        """Yield the windows of the steps ``after_step + 1`` to ``last_step``."""


class Rows(torch.utils.data.Dataset):
    """One split of a token dataset: its rows by index, an index list at a time.

    With ``isolate_documents``, and where the split has ``document_starts``, the batches keep its documents apart.
    """

    def __init__(self, split: datasets.Dataset, isolate_documents: bool = True) -> None:
        self.split = split
        self.has_labels = "labels" in split.column_names
        self.has_borders = "document_starts" in split.column_names
        self.isolates = isolate_documents and self.has_borders
        columns = ["input_ids", *(["labels"] * self.has_labels), *(["document_starts"] * self.isolates)]
        self._table = split.select_columns(columns).with_format("arrow")
        self._lengths = pc.list_value_length(split.data.column("input_ids")).to_numpy()

    def __len__(self) -> int:
        return len(self.split)

    def longest(self) -> int:
        """Tokens in the longest row."""
        return int(self._lengths.max())

    def shortest(self) -> int:
        """Tokens in the shortest row."""
        return int(self._lengths.min())

    def lengths(self) -> set[int]:
        """The different numbers of tokens that rows have."""
        return set(np.unique(self._lengths).tolist())

    def id_range(self, column: str = "input_ids") -> tuple[int, int]:
        """Lowest and highest token id there is in a column, unsupervised labels left out; reads the whole split."""
        extremes = []
        for chunk in self.split.data.column(column).chunks:
            tokens = chunk.flatten()
            if column == "labels":
                tokens = tokens.filter(pc.not_equal(tokens, IGNORED_LABEL))
            if len(tokens):
                extremes += pc.min_max(tokens).as_py().values()
        return min(extremes, default=0), max(extremes, default=0)

    def row_with_borders_outside(self) -> int | None:
        """The first row in which documents begin elsewhere than at its tokens, in order; reads all their beginnings."""
        if not self.has_borders:
            return None
        first = 0
        for chunk in self.split.data.column("document_starts").chunks:
            starts, counts = chunk.flatten().to_numpy(), pc.list_value_length(chunk).to_numpy()
            rows = np.repeat(np.arange(len(counts)), counts)
            wrong = (starts < 0) | (starts >= self._lengths[first + rows])
            wrong[1:] |= (np.diff(rows) == 0) & (np.diff(starts) <= 0)
            if wrong.any():
                return int(first + rows[wrong.argmax()])
            first += len(counts)
        return None

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return the rows as one batch, shorter rows padded at the end with unsupervised tokens."""
        table = self._table[list(indices)]
        labels = _lists(table, "labels" if self.has_labels else "input_ids")
        starts = _lists(table, "document_starts") if self.isolates else []
        return pad_rows(_lists(table, "input_ids"), labels, starts)


def pad_rows(
    input_ids: Sequence[np.ndarray], labels: Sequence[np.ndarray], document_starts: Sequence[np.ndarray]
) -> Batch:
    """Make a batch of rows, shorter ones padded at the end with unsupervised tokens; of none, that of a rank which has
    no row left. See ``isolate`` for ``document_starts``; without any, a row is one document.
    """
    if not input_ids:
        nothing = torch.zeros(1, 2, dtype=torch.int64)
        return Batch(nothing, torch.full_like(nothing, IGNORED_LABEL))
    ends = list(map(content_end, input_ids, labels))
    return make_batch(_padded(input_ids, 0), _padded(labels, IGNORED_LABEL), document_starts, ends)


def make_batch(
    input_ids: np.ndarray, labels: np.ndarray, document_starts: Sequence[np.ndarray], ends: Sequence[int]
) -> Batch:
    """Make a batch that keeps documents apart where a row holds more than one; see ``isolate`` for the arguments.

    ``ends`` [B] are where each row's padding begins.
    """
    lengths = document_lengths(document_starts, ends)
    if any(start for row in document_starts for start in row[:2]):  # the first may be 0, the second is above
        return replace(isolate(input_ids, labels, document_starts), lengths=lengths)
    return Batch(torch.from_numpy(input_ids), torch.from_numpy(labels), lengths=lengths)


def content_end(input_ids: np.ndarray, labels: np.ndarray) -> int:
    """Return where a row's padding begins: with its last run of one unsupervised token, of two tokens or more.

    A single one may as well be a token that is not supervised, and counts as content.
    """
    differ = np.flatnonzero((labels != IGNORED_LABEL) | (input_ids != input_ids[-1:]))
    end = int(differ[-1]) + 1 if len(differ) else 0
    return end if len(input_ids) - end > 1 else len(input_ids)


def document_lengths(document_starts: Sequence[np.ndarray], ends: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of each piece that documents cut rows of ``ends`` [B] tokens into, or of the rows where there
    are no ``document_starts``.
    """
    if not len(document_starts):
        return tuple(ends)
    lengths = []
    for starts, end in zip(document_starts, ends, strict=True):
        lengths += np.diff([0, *starts[(starts > 0) & (starts < end)], end]).tolist()
    return tuple(lengths)


def isolate(input_ids: np.ndarray, labels: np.ndarray, document_starts: Sequence[np.ndarray]) -> Batch:
    """Make a batch in which no document sees another, and none's first token is predicted from another's last.

    Rows of 5 in which documents begin at 3, and at 0, 1 and 4::

        position_ids  0 1 2 0 1    borders  0 3 5 6 9 10    labels  . . . -100 .
                      0 0 1 2 0                                     . -100 . . -100

    Args:
        input_ids: int64 [B, T].
        labels: int64 [B, T]; those at the documents' starts are overwritten.
        document_starts: integers [any number] for each row, ascending: the positions at which documents begin.
    """
    num_rows, length = input_ids.shape
    rows = np.repeat(np.arange(num_rows), [len(starts) for starts in document_starts])
    columns = np.concatenate(document_starts)
    begins = np.zeros((num_rows, length), dtype=np.int64)
    begins[rows, columns] = columns  # the largest one up to a token is where its document begins
    position_ids = np.arange(length) - np.maximum.accumulate(begins, axis=1)
    labels[rows[columns > 0], columns[columns > 0]] = IGNORED_LABEL
    borders = np.append(np.flatnonzero(position_ids == 0), num_rows * length).astype(np.int32)
    documents = Documents(torch.from_numpy(position_ids), torch.from_numpy(borders), int(np.diff(borders).max()))
    return Batch(torch.from_numpy(input_ids), torch.from_numpy(labels), documents)


@dataclass(frozen=True)
class TokenDataset:
    """A token dataset on disk: ``train`` and, where it was split, ``validation``."""

    folder: Path
    train: Rows
    validation: Rows | None

    @functools.cached_property
    def manifest(self) -> Manifest | None:
        """What ``manifest.json`` says; None for an older folder without one. See ``read_manifest`` for the errors."""
        return read_manifest(self.folder)

    @property
    def isolates(self) -> bool:
        """Whether training keeps the documents of a row apart."""
        return self.train.isolates

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the manifest, or for an older folder without one the train split's fingerprint in ``datasets``."""
        manifest = self.folder / "manifest.json"
        if manifest.is_file():
            return hashlib.sha256(manifest.read_bytes()).hexdigest()
        return self.train.split._fingerprint

    @property
    def attachments(self) -> tuple[Path, ...]:
        """What a checkpoint copies, so that it can be exported and used on its own."""
        return tuple(path for path in (self.folder / "manifest.json", self.folder / "tokenizer") if path.exists())


def open_dataset(folder: str, isolate_documents: bool = True) -> TokenDataset:
    """Open the folder that ``tokenize_dataset.py`` wrote, or an older one with ``train``/``valid`` splits.

    Args:
        folder: of the token dataset.
        isolate_documents: whether batches keep the documents of a row apart, where the folder says where they begin.

    Raises:
        InputError: where it is no such folder, has no rows or columns that hold no tokens.
    """
    path = Path(folder)
    if not (path / "dataset_dict.json").is_file():
        there = "the folder holds no dataset_dict.json" if path.is_dir() else absent_folder(path)
        raise InputError(f"--train_data_dir {folder}: {there}; make one with tokenize_dataset.py --output_dir {folder}")
    refuse_foreign_files(path, "tokenize again")
    try:
        splits = datasets.load_from_disk(folder)
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise InputError(f"--train_data_dir {folder}: damaged, {first_line(error)}; tokenize again") from error
    except (
        ArithmeticError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:  # what datasets raises for JSON of another shape
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"--train_data_dir {folder}: damaged, {reason}; tokenize again") from error
    except IndexError as error:  # what datasets raises for a split that it saved without rows, and so without a file
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
    has_validation = validation is not None and len(validation) > 0
    held_out = Rows(validation, isolate_documents) if has_validation else None
    refuse_foreign_links(path / "tokenizer")  # checkpoints get a copy
    return TokenDataset(path, Rows(splits["train"], isolate_documents), held_out)


def _fault_of_columns(split: datasets.Dataset) -> str | None:
    """Name what keeps a split's columns from being tokens and, where there are any, their labels."""
    if "input_ids" not in split.column_names:
        return f"no column input_ids, only {', '.join(split.column_names)}"
    columns = [name for name in ("input_ids", "labels", "document_starts") if name in split.column_names]
    for name in columns:
        kind = split.data.column(name).type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not is_list or not pa.types.is_integer(kind.value_type):
            return f"a column {name} of {kind}, not of lists of {'positions' if 'start' in name else 'token ids'}"
        if any(chunk.null_count or chunk.flatten().null_count for chunk in split.data.column(name).chunks):
            return f"gaps (nulls) in its column {name}"
    lengths = [pc.list_value_length(split.data.column(name)).to_numpy() for name in columns if "start" not in name]
    if len(lengths) == 2 and (lengths[0] != lengths[1]).any():
        first = int((lengths[0] != lengths[1]).argmax())
        return f"rows whose labels are not as many as their input_ids, row {first} first"
    return None


def positions(batch: int, micro_batch_size: int, world_size: int, rank: int) -> range:
    """Return which rows of a full window are micro-batch number ``batch`` of a rank."""
    begin = (batch * world_size + rank) * micro_batch_size
    return range(begin, begin + micro_batch_size)


@dataclass(frozen=True)
class WindowOrder:
    """Which rows every rank takes at every step."""

    num_rows: int
    rows_per_window: int
    micro_batch_size: int
    world_size: int
    rank: int
    seed: int

    @property
    def windows_per_epoch(self) -> int:
        """The last window of an epoch holds what is left."""
        return math.ceil(self.num_rows / self.rows_per_window)

    def epoch_order(self, epoch: int) -> np.ndarray:
        """Return the rows [num_rows] of an epoch in their order, each once: a function of seed and epoch alone."""
        return _permutation(self.num_rows, self.seed, epoch)

    def num_rows_in(self, window: int) -> int:
        """Rows of the epoch's window ``window``, over all ranks."""
        return min(self.rows_per_window, self.num_rows - window * self.rows_per_window)

    def rows_in(self, epoch: int, window: int) -> np.ndarray:
        """The rows of a window, over all ranks."""
        start = window * self.rows_per_window
        return self.epoch_order(epoch)[start : start + self.rows_per_window]

    def rows_hash(self, step: int) -> str:
        """Hash the rows of all windows up to a step, in their order: the same whatever the ranks and micro-batches."""
        rows_hash = ""
        for done in range(step):
            rows_hash = hash_of(self.rows_in(*divmod(done, self.windows_per_epoch)), rows_hash)
        return rows_hash

    def num_batches_in(self, window: int) -> int:
        """Micro-batches of the window on each rank, the same on all since they compute together."""
        return math.ceil(self.num_rows_in(window) / (self.micro_batch_size * self.world_size))

    def batches(self, epoch: int, first_window: int) -> Iterator[list[int]]:
        """Yield this rank's micro-batches, as row indices, from a window of an epoch to the epoch's end."""
        for window in range(first_window, self.windows_per_epoch):
            rows = self.rows_in(epoch, window)
            for batch in range(self.num_batches_in(window)):
                place = positions(batch, self.micro_batch_size, self.world_size, self.rank)
                yield rows[place.start : place.stop].tolist()


@dataclass(frozen=True)
class TrainBatches:
    """The windows of a run on this rank, read ahead by ``num_workers`` processes."""

    rows: Rows
    order: WindowOrder
    num_workers: int
    pin_memory: bool

    def windows(self, after_step: int, last_step: int) -> Iterator[Window]:
        """Yield the windows of the steps ``after_step + 1`` to ``last_step``."""
        per_epoch = self.order.windows_per_epoch
        step, rows_hash = after_step, self.order.rows_hash(after_step)
        while step < last_step:
            epoch, first = divmod(step, per_epoch)
            stop = min(per_epoch, first + last_step - step)
            batches = iter(_loader(self.rows, _Epoch(self.order, epoch, first), self.num_workers, self.pin_memory))
            for window in range(first, stop):
                step += 1
                rows = self.order.rows_in(epoch, window)
                rows_hash = hash_of(rows, rows_hash)
                yield Window(
                    step=step,
                    epoch=epoch,
                    ends_epoch=window == per_epoch - 1,
                    rows=rows,
                    micro_batch_size=self.order.micro_batch_size,
                    batches=[next(batches) for _ in range(self.order.num_batches_in(window))],
                    rows_hash=rows_hash,
                )


def validation_batches(
    rows: Rows, batch_size: int, world_size: int, rank: int, limit: int | None, num_workers: int
) -> DataLoader:
    """Return this rank's share of a split, each row once over all ranks; as many batches on every rank, at most
    ``limit``.
    """
    num_batches = math.ceil(len(rows) / (batch_size * world_size))
    starts = [(batch * world_size + rank) * batch_size for batch in range(min(num_batches, limit or num_batches))]
    indices = [list(range(start, min(start + batch_size, len(rows)))) for start in starts]
    return _loader(rows, indices, num_workers, pin_memory=False)


@dataclass(frozen=True)
class _Epoch:
    order: WindowOrder
    epoch: int
    first_window: int

    def __iter__(self) -> Iterator[list[int]]:
        return self.order.batches(self.epoch, self.first_window)


def _loader(rows: Rows, indices: Sequence[list[int]] | _Epoch, num_workers: int, pin_memory: bool) -> DataLoader:
    return DataLoader(
        rows,
        batch_sampler=indices,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        pin_memory=pin_memory,
        prefetch_factor=8 if num_workers else None,
        worker_init_fn=leave_signals_to_rank,
    )


def _as_it_is(batch: Any) -> Any:
    """``Rows.__getitems__`` has made the batch already."""
    return batch


@functools.lru_cache(maxsize=2)
def _permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def _lists(table: pa.Table, column: str) -> list[np.ndarray]:
    return [row.values.to_numpy(zero_copy_only=False) for row in table.column(column)]


def _padded(rows: Sequence[np.ndarray], filler: int) -> np.ndarray:
    longest = max(1, *(len(row) for row in rows))
    padded = np.full((len(rows), longest), filler, dtype=np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded
