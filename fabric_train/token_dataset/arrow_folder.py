"""Write planned rows and their document index as a folder for ``datasets.load_from_disk``.

Nothing here imports ``datasets``, which is slow.
"""

import json
import mmap
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_64

from fabric_train.cli.errors import InputError
from fabric_train.token_dataset.document_index import (
    ARRAYS,
    CHECKSUM,
    CHECKSUMS,
    CONTINUATION,
    ROW,
    SourceTable,
    row_checksums,
)
from fabric_train.token_dataset.document_index import FOLDER as INDEX_FOLDER
from fabric_train.token_dataset.manifest import SourceLedger
from fabric_train.token_dataset.rows import RowPlan, joined_ranges
from fabric_train.workers import ThrottledLog, WorkerPool

if TYPE_CHECKING:
    import pyarrow

_TOKEN_BYTES = 4
_MAX_OPEN_FILES = 128
_Runs = tuple[list[int], list[int], list[int]]  # first positions in the file, lengths, first positions in the target
_IGNORED_LABEL = -100
_TOKENS_PER_BATCH = 1 << 18
_BYTES_PER_FILE = 512 << 20
_TICK_SECONDS = 1.0
_TOKENS_PER_READ = 1 << 22


@dataclass(frozen=True)
class SpooledFile:
    """Files with joined documents: an int32 per token, and a byte, 1 for a target and 0 for others; None if all are."""

    tokens: Path
    supervised: Path | None = None


@dataclass(frozen=True)
class SpooledDocuments:
    """The documents of all files, numbered in order, each in one file; random order is fast for up to 128 files."""

    lengths: np.ndarray  # int64 [documents], tokens in each document; 0 is allowed
    files: tuple[SpooledFile, ...]  # with as many tokens as ``lengths`` adds up to
    rejected_at: np.ndarray | None = None  # of preference pairs: where the rejected sequence begins, int64 [documents]

    @property
    def has_masks(self) -> bool:
        return any(file.supervised is not None for file in self.files)


@dataclass(frozen=True)
class PiecesToCopy:
    """Pieces of documents, at least one, from position ``starts`` on, and where to copy them; int64 [pieces] each."""

    documents: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    targets: np.ndarray


class SpoolReader:
    """Copies pieces of documents from the files, and does not keep them in memory."""

    def __init__(self, documents: SpooledDocuments) -> None:
        self._begins = np.cumsum(documents.lengths) - documents.lengths
        self._files = documents.files
        ends = np.cumsum([0, *(file.tokens.stat().st_size // _TOKEN_BYTES for file in self._files)], dtype=np.int64)
        assert documents.lengths.sum() == ends[-1], "the files hold more or less than the documents"
        self._file_begins = ends[:-1]
        self._map = lru_cache(_MAX_OPEN_FILES)(_map)

    def read(self, pieces: PiecesToCopy, input_ids: np.ndarray, supervised: np.ndarray | None) -> None:
        """Copy the tokens of pieces into ``input_ids``, int32, and masks, if any, into ``supervised``, uint8."""
        for index, runs in self._runs_by_file(pieces):
            file = self._files[index]
            self._copy(file.tokens, runs, input_ids)
            if supervised is not None and file.supervised is not None:
                self._copy(file.supervised, runs, supervised)

    def _runs_by_file(self, pieces: PiecesToCopy) -> Iterator[tuple[int, _Runs]]:
        """Join pieces that are adjacent in a file and in the target, and yield the runs of each file."""
        sources = self._begins[pieces.documents] + pieces.starts
        files = np.searchsorted(self._file_begins, sources, side="right") - 1
        follows = (np.diff(files) == 0) & (np.diff(sources) == pieces.lengths[:-1])
        follows &= np.diff(pieces.targets) == pieces.lengths[:-1]
        firsts = np.flatnonzero(np.concatenate([[True], ~follows]))
        files = files[firsts]
        begins = sources[firsts] - self._file_begins[files]
        lengths = np.add.reduceat(pieces.lengths, firsts)
        targets = pieces.targets[firsts]
        by_file = np.argsort(files, kind="stable")
        for group in np.split(by_file, np.flatnonzero(np.diff(files[by_file])) + 1):
            yield int(files[group[0]]), (begins[group].tolist(), lengths[group].tolist(), targets[group].tolist())

    def _copy(self, file: Path, runs: _Runs, into: np.ndarray) -> None:
        mapped = self._map(file)
        target = into.data
        with memoryview(mapped) as content, content.cast("i" if into.itemsize == _TOKEN_BYTES else "B") as source:
            for begin, length, at in zip(*runs, strict=True):  # slicing memoryviews takes half as long as numpy arrays
                target[at : at + length] = source[begin : begin + length]
        mapped.madvise(mmap.MADV_DONTNEED)  # otherwise the pages of the file count as memory of this process


def _map(file: Path) -> mmap.mmap:
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


def check_disk_space(folder: Path, splits: Sequence[tuple[SpooledDocuments, RowPlan]]) -> None:
    """Raise InputError if the disk of ``folder`` has no room for the tokens and labels of some splits."""
    num_rows = sum(plan.num_rows for _, plan in splits)
    padding = sum(plan.tokens_padding for _, plan in splits)
    max_length = splits[0][1].max_length
    num_bytes = sum(4 * plan.num_rows * max_length * (1 + _has_labels(documents, plan)) for documents, plan in splits)
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise InputError(
            f"{num_rows:,} rows of {max_length:,} tokens, {padding / (num_rows * max_length):.0%} of them padding, "
            f"take {num_bytes / 1e9:,.1f} GB, and {folder} has {free / 1e9:,.1f} GB left; give a smaller --max_length, "
            "--packing best_fit, or an --output_dir on another disk"
        )


def write_split(
    folder: Path, documents: SpooledDocuments, plan: RowPlan, pad_token_id: int, num_proc: int = 1
) -> tuple[int, np.ndarray]:
    """Write the planned rows into the new folder ``folder``, in files of about 512 MiB.

    The columns of a row of ``max_length`` tokens:

    - ``input_ids``: int32 [max_length], with padding at the end of the row.
    - ``document_starts``: list of int32, the positions at which pieces of documents begin. Position 0 is included only
      if a document begins there, not if the row continues one. Any other position is also included if its piece is a
      window of a document that began in another row. So tokens on the two sides of such a position never belong to the
      same document.
      A preference pair has two entries: where its chosen and where its rejected sequence begins.
    - ``labels``: int32 [max_length], ``input_ids`` with -100 for tokens that are not supervised: masked tokens,
      repeated tokens and padding. The column is missing if there are none of these: the documents have no masks, and
      the plan neither repeats tokens nor pads.

    Documents ``B a b E`` and ``B c d e f g E`` (B and E are BOS and EOS, P is padding) in rows of 5, with one token of
    overlap, packed with ``best_fit``; the first ``B a`` is masked::

        input_ids  B a b E P    labels  -100 -100    b    E -100    document_starts  0
        input_ids  B c d e f    labels     B    c    d    e    f    document_starts  0
        input_ids  f g E P P    labels  -100    g    E -100 -100    document_starts

    The folder's name is the name of the split. ``num_proc`` processes write a file at a time.

    Returns:
        The number of tokens whose label is not -100, and the checksums of the rows, CHECKSUM [rows].
    """
    folder.mkdir()
    with_labels = _has_labels(documents, plan)
    features = _features(plan.max_length, with_labels)
    rows_per_file = max(1, _BYTES_PER_FILE // (4 * plan.max_length * (1 + with_labels)))
    num_files = max(1, -(-plan.num_rows // rows_per_file))  # datasets does not load a folder without a file
    names = [f"data-{index:05d}-of-{num_files:05d}.arrow" for index in range(num_files)]
    files = _SplitFiles(
        folder, names, rows_per_file, plan, SpoolReader(documents), pad_token_id, features, documents.rejected_at
    )
    num_supervised = num_written = 0
    checksums = np.empty(plan.num_rows, dtype=CHECKSUM)
    log = ThrottledLog()
    for index, (count, of_rows) in _write_files(files, num_proc):
        num_supervised += count
        num_written += len(of_rows)
        checksums[index * rows_per_file :][: len(of_rows)] = of_rows
        log(f"writing {folder.name}: {num_written:,} of {plan.num_rows:,} rows")
    digest = xxh3_64(json.dumps(features).encode())
    digest.update(checksums.data)
    info = {"description": "", "citation": "", "homepage": "", "license": "", "features": features}
    write_json(folder / "dataset_info.json", info)
    write_json(folder / "state.json", _state(folder.name, names, digest.hexdigest()))
    return num_supervised, checksums


@dataclass(frozen=True)
class _SplitFiles:
    """The files of a split; a process can write each on its own."""

    folder: Path
    names: list[str]
    rows_per_file: int
    plan: RowPlan
    reader: SpoolReader
    pad_token_id: int
    features: dict[str, Any]
    rejected_at: np.ndarray | None

    def write(self, index: int) -> tuple[int, np.ndarray]:
        """Write a file; return the number of supervised tokens, and the checksums of its rows, CHECKSUM [rows]."""
        import pyarrow

        schema = _schema(self.features)
        max_length = self.plan.max_length
        row_list = pyarrow.FixedSizeListArray
        rows = schema.field("input_ids").type
        first = index * self.rows_per_file
        last = min((index + 1) * self.rows_per_file, self.plan.num_rows)
        rows_per_batch = max(1, _TOKENS_PER_BATCH // max_length)
        num_supervised = 0
        checksums = np.empty(last - first, dtype=CHECKSUM)
        path = str(self.folder / self.names[index])
        with pyarrow.OSFile(path, "wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:
            for begin in range(first, last, rows_per_batch):
                end = min(begin + rows_per_batch, last)
                input_ids, labels, document_starts, offsets = self._fill(begin, end)
                columns = [
                    row_list.from_arrays(_int32(input_ids), type=rows),
                    pyarrow.ListArray.from_arrays(_int32(offsets), _int32(document_starts)),
                    *([] if labels is None else [row_list.from_arrays(_int32(labels), type=rows)]),
                ]
                writer.write_batch(pyarrow.RecordBatch.from_arrays(columns, schema=schema))
                checksums[begin - first : end - first] = row_checksums(input_ids, labels, document_starts, offsets)
                num_ignored = 0 if labels is None else int(np.count_nonzero(labels == _IGNORED_LABEL))
                num_supervised += len(input_ids) - num_ignored
        return num_supervised, checksums

    def _fill(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray | None, np.ndarray, np.ndarray]:
        """Return rows ``first`` to ``last - 1``, at least one, as ``row_checksums`` takes them."""
        plan = self.plan
        max_length = self.plan.max_length
        num_rows = last - first
        row_offsets = plan.row_offsets[first : last + 1]
        chosen = slice(row_offsets[0], row_offsets[-1])
        starts = plan.starts[chosen]
        lengths = plan.lengths[chosen].astype(np.int64)
        repeated = plan.repeated[chosen]
        rows = np.repeat(np.arange(num_rows), np.diff(row_offsets))
        filled = np.bincount(rows, weights=lengths).astype(np.int64)
        positions = np.cumsum(lengths) - lengths - (np.cumsum(filled) - filled)[rows]
        pieces = PiecesToCopy(plan.documents(chosen), starts, lengths, targets=rows * max_length + positions)

        input_ids = np.full(num_rows * max_length, self.pad_token_id, dtype=np.int32)
        supervised = np.ones(len(input_ids), dtype=np.uint8) if "labels" in self.features else None
        self.reader.read(pieces, input_ids, supervised)
        labels = None
        if supervised is not None:
            supervised[joined_ranges(pieces.targets, repeated)] = 0
            supervised[joined_ranges(np.arange(num_rows) * max_length + filled, max_length - filled)] = 0
            labels = np.where(supervised, input_ids, np.int32(_IGNORED_LABEL))
        begins = (positions > 0) | (starts + repeated == 0)
        if self.rejected_at is not None:  # each piece is a whole pair
            positions = np.stack([positions, positions + self.rejected_at[pieces.documents]], axis=1).ravel()
            begins = np.ones(len(positions), dtype=bool)
            rows = np.repeat(rows, 2)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(rows[begins], minlength=num_rows))])
        return input_ids, labels, positions[begins].astype(np.int32), offsets.astype(np.int32)

    def describe(self, index: int) -> str:
        """Return what a process reads to write a file."""
        return f"the tokens for {self.names[index]}"


def _write_files(files: _SplitFiles, num_proc: int) -> Iterator[tuple[int, tuple[int, np.ndarray]]]:
    """Write all files of a split, and yield the number of each with what ``write`` returns."""
    num_files = len(files.names)
    if min(num_proc, num_files) == 1 or sys.platform != "linux":  # elsewhere each process would get a copy of the plan
        yield from ((index, files.write(index)) for index in range(num_files))
        return
    with WorkerPool(files.write, min(num_proc, num_files), files.describe) as workers:
        yield from (result for result in workers.run(iter(range(num_files)), _TICK_SECONDS) if result is not None)


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
    continuations["start"] = plan.starts[continued]
    continuations["repeated"] = plan.repeated[continued]
    own_rows = np.searchsorted(plan.row_offsets, continued, side="right") - 1
    continuations["ordinal"] = continued - plan.row_offsets[own_rows]
    (folder / INDEX_FOLDER).mkdir()
    for name, array in zip(ARRAYS, (documents[in_order], rows, continuations), strict=True):
        np.save(folder / INDEX_FOLDER / f"{name}.npy", array, allow_pickle=False)
    np.save(folder / INDEX_FOLDER / CHECKSUMS, checksums, allow_pickle=False)


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


def write_dataset_dict(folder: Path, splits: Iterable[str]) -> None:
    """Write ``dataset_dict.json``, which joins the folders of the splits into a ``DatasetDict``."""
    write_json(folder / "dataset_dict.json", {"splits": list(splits)})


def _has_labels(documents: SpooledDocuments, plan: RowPlan) -> bool:
    return documents.has_masks or plan.tokens_repeated > 0 or plan.tokens_padding > 0


def _int32(values: np.ndarray) -> "pyarrow.Array":
    """Return int32 values without a copy; ``pyarrow.array`` would import pandas, which takes 0.3 s."""
    from pyarrow import Array, int32, py_buffer

    return Array.from_buffers(int32(), len(values), [None, py_buffer(np.ascontiguousarray(values))])


def _features(max_length: int, with_labels: bool) -> dict[str, Any]:
    """Return the columns in the JSON form of ``datasets.Features``."""
    token = {"dtype": "int32", "_type": "Value"}
    row = {"feature": token, "length": max_length, "_type": "List"}
    features = {"input_ids": row, "document_starts": {"feature": token, "_type": "List"}}
    return {**features, "labels": row} if with_labels else features


def _schema(features: dict[str, Any]) -> "pyarrow.Schema":
    import pyarrow

    types = {name: pyarrow.list_(pyarrow.int32(), column.get("length", -1)) for name, column in features.items()}
    return pyarrow.schema(types, metadata={"huggingface": json.dumps({"info": {"features": features}})})


def _state(split: str, names: list[str], fingerprint: str) -> dict[str, Any]:
    return {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": split,
    }


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON object on several lines."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def count_severed_chats(documents: SpooledDocuments, plan: RowPlan, is_chat: np.ndarray) -> int:
    """Return the number of chats with a supervised token in a row without the chat's beginning (only ``concat``).

    The model learns these tokens without the turns before them. ``is_chat`` is bool [documents].
    """
    new = plan.starts + plan.repeated  # the first token of each piece that is not repeated
    pieces = np.flatnonzero(is_chat[plan.order][plan.entries] & (new > 0))
    is_severed = np.zeros(len(is_chat), dtype=bool)
    reader = SpoolReader(documents)
    step = max(1, _TOKENS_PER_READ // plan.max_length)
    for begin in range(0, len(pieces), step):
        batch = pieces[begin : begin + step]
        lengths = (plan.lengths[batch] - plan.repeated[batch]).astype(np.int64)
        targets = np.cumsum(lengths) - lengths
        supervised = np.ones(int(lengths.sum()), dtype=np.uint8)
        tokens = np.empty(len(supervised), dtype=np.int32)
        reader.read(PiecesToCopy(plan.documents(batch), new[batch], lengths, targets), tokens, supervised)
        is_severed[plan.documents(batch)[np.maximum.reduceat(supervised, targets) > 0]] = True
    return int(is_severed.sum())
