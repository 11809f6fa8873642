"""Read a token dataset of parts: a small folder that joins other token datasets, which stay where they are.

``python -m fabric_train.tokenization.merge --parts true`` writes it::

    whole/manifest.json            the ledger, the sources and the settings of all parts, as a full merge writes it
          parts.json               ``PartsRecord``: where the parts are, relative to this folder, and their counts
          tokenizer/
          train/batches.npy        BATCH [record batches of all parts]: where each is in its file
          validation/batches.npy
          validation/sources.npy   uint32 [rows], the main source of each row; only with several sources

Opening it reads ``manifest.json`` and ``parts.json``. A part is opened when one of its rows is read. A process keeps
the data of at most 64 files and the indexes of at most 64 parts open, and closes the least recently used one.
"""

import functools
import hashlib
import json
import mmap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from tokenize import TokenError

import numpy as np

from fabric_train.cli.errors import InputError, first_line, raise_if_limit_reached
from fabric_train.files.regular_file import check_file_name
from fabric_train.files.typed_json import read_json

FILE_NAME = "parts.json"
BATCHES = "batches.npy"
MAIN_SOURCES = "sources.npy"
# row: the first row of the batch in the joined split; file: number of its file among the split's; offset: in the file
BATCH = np.dtype([("row", "<u8"), ("offset", "<u8"), ("file", "<u4")])
MOST_OPEN = 64
_FORMAT = 1
MERGE_AGAIN = "merge the parts again"
TOKENIZE_AGAIN = "tokenize this part again"


@dataclass(frozen=True)
class PartFile:
    """A file of rows in a split of a part, and its size in bytes."""

    name: str
    bytes: int


@dataclass(frozen=True)
class PartSplit:
    """A split of a part."""

    rows: int
    tokens: int
    documents: int  # in its index
    placed: int  # documents that begin in its rows
    continuations: int  # in its index
    has_labels: bool
    files: tuple[PartFile, ...]
    source_rows: dict[str, list[tuple[int, int]]] | None
    """The rows of each source, as ranges; None if the sources are mixed in the rows."""


@dataclass(frozen=True)
class Part:
    """A token dataset that is a part of another one."""

    path: str  # relative to the folder of the parts
    manifest_sha256: str
    num_files: int  # of its sources
    rows_before: int
    """The number of rows of its first file that are in earlier parts: 0 unless an earlier part has the file's
    beginning."""
    splits: dict[str, PartSplit]


@dataclass(frozen=True)
class PartsRecord:
    """The content of ``parts.json``."""

    max_length: int  # tokens of each row
    has_borders: bool  # whether rows have ``document_starts``
    has_checksums: bool  # whether the indexes of all parts have checksums
    parts: tuple[Part, ...]
    format: int = _FORMAT


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a token dataset, in the order of their rows."""

    folder: Path
    record: PartsRecord

    def folder_of(self, part: int) -> Path:
        return self.folder / self.record.parts[part].path

    def moved_to(self, folder: str) -> PartsRecord:
        """Return the record for a copy whose parts are in its folder ``folder``."""
        moved_parts = []
        for number, part in enumerate(self.record.parts, start=1):
            moved_parts.append(replace(part, path=f"{folder}/{number:05d}"))
        return replace(self.record, parts=tuple(moved_parts))

    def check(self, part: int) -> None:
        """Raise an InputError if a part is missing or its manifest has changed. ``check_parts.py`` checks all parts."""
        file = self.folder_of(part) / "manifest.json"
        try:
            manifest_sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        except (OSError, ValueError) as error:  # a ValueError for a path that no file can have
            raise_if_limit_reached(error)
            reason = error.strerror if isinstance(error, OSError) else error
            raise InputError(
                f"{self._describe(part)} is missing ({file}: {reason}); restore it, or {MERGE_AGAIN}"
            ) from None
        if manifest_sha256 != self.record.parts[part].manifest_sha256:
            raise InputError(
                f"{self._describe(part)} has changed since the merge: {file} differs; restore it, or {MERGE_AGAIN}"
            )

    def split_names(self) -> list[str]:
        """Return the names of all splits, in the order in which they first occur."""
        names: dict[str, None] = {}
        for part in self.record.parts:
            names |= dict.fromkeys(part.splits)
        return list(names)

    def _describe(self, part: int) -> str:
        return f"{self.folder}: part {part + 1} of {len(self.record.parts):,}, {self.record.parts[part].path},"


def is_of_parts(folder: Path) -> bool:
    """Return whether a folder is a token dataset of parts."""
    return (folder / FILE_NAME).is_file()


def open_parts(folder: Path) -> Parts:
    """Read the list of a token dataset's parts; InputError if ``parts.json`` is damaged."""
    file = folder / FILE_NAME
    record = read_json(file, PartsRecord, MERGE_AGAIN)
    if record.format != _FORMAT:
        raise InputError(f"{file} has format {record.format}, but this version reads {_FORMAT}; {MERGE_AGAIN}")
    for part in record.parts:
        for name, split in part.splits.items():
            for listed in split.files:
                check_file_name(listed.name, file)
            check_file_name(name, file)
    return Parts(folder, record)


def write_record(folder: Path, record: PartsRecord) -> None:
    """Write ``parts.json``."""
    (folder / FILE_NAME).write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")


class _MappedIndex:
    """The arrays of a part's document index, mapped when they are first used."""

    def __init__(self, parts: Parts, split: str, part: int) -> None:
        self._parts = parts
        self._part = part
        self._folder = parts.folder_of(part) / split / "index"
        self._arrays: dict[str, _MappedArray] = {}

    def read(self, name: str, dtype: np.dtype, positions: np.ndarray) -> np.ndarray:
        """Return a copy of some records, so that pages of the file do not stay in this process's memory."""
        if name not in self._arrays:
            try:
                self._arrays[name] = _map_records(self._folder / f"{name}.npy", dtype, TOKENIZE_AGAIN)
            except InputError:
                self._parts.check(self._part)  # the whole part may be another, or gone
                raise
        array = self._arrays[name]
        if len(positions) and positions.max() >= len(array.records):
            raise InputError(f"{self._folder}: does not match this part's rows; {TOKENIZE_AGAIN}")
        records = array.records[positions]
        array.mapped.madvise(mmap.MADV_DONTNEED)
        return records


@functools.lru_cache(maxsize=MOST_OPEN)
def _map_index(parts: Parts, split: str, part: int) -> _MappedIndex:
    return _MappedIndex(parts, split, part)


def map_file(path: Path) -> mmap.mmap:
    """Return the memory map of a file; InputError if there is no file."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise_if_limit_reached(error)
        raise InputError(f"{path}: {first_line(error)}; {TOKENIZE_AGAIN}") from None


def map_array(file: Path, dtype: np.dtype, fix: str = "tokenize again") -> np.ndarray:
    """Map the records in a numpy file.

    Raises:
        InputError: the file is missing or damaged; the message ends with ``fix``.
    """
    return _map_records(file, dtype, fix).records


@dataclass(frozen=True)
class _MappedArray:
    """A mapped numpy file."""

    records: np.ndarray  # a view of the mapped file
    mapped: mmap.mmap


def _map_records(path: Path, dtype: np.dtype, fix: str) -> _MappedArray:
    """Map a numpy file, which is opened only once; ``numpy.load`` opens it twice."""
    try:
        with path.open("rb") as file:
            np.lib.format.read_magic(file)
            shape, _, stored_dtype = np.lib.format.read_array_header_1_0(file)
            header_length = file.tell()
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        if stored_dtype != dtype or len(shape) != 1:
            raise ValueError("it has no index records")
        records = np.frombuffer(mapped, dtype, shape[0], header_length)
        if header_length + records.nbytes != len(mapped):
            raise ValueError("it has data after its last record")
        return _MappedArray(records, mapped)
    except FileNotFoundError:
        raise InputError(f"{path}: the file is missing; {fix}") from None
    except (OSError, ValueError, EOFError, SyntaxError, TokenError) as error:  # numpy parses a header as Python
        raise_if_limit_reached(error)
        raise InputError(f"{path}: damaged, {first_line(error)}; {fix}") from None


@dataclass(frozen=True)
class Segment:
    """The records ``begin`` to ``end - 1`` of a part's array."""

    part: int
    begin: int
    end: int
    offsets: dict[str, int]  # added to the fields of the records, by name


class JoinedRecords:
    """The records of an array in the parts' document indexes, which are read on request like one array.

    Indices are integers, arrays of them, slices, or the name of a field.
    """

    def __init__(
        self,
        parts: Parts,
        split: str,
        name: str,
        dtype: np.dtype,
        segments: Sequence[Segment],
        *,
        begins_with_zeros: bool = False,
    ) -> None:
        """Join the arrays of all parts.

        Args:
            parts: the parts.
            split: the name of the split.
            name: the name of the array.
            dtype: the type of its records.
            segments: the records of the parts, in order.
            begins_with_zeros: whether the first record of each part is known to be zero and need not be read.
        """
        self.dtype = dtype
        self._parts = parts
        self._split = split
        self._name = name
        self._segments = tuple(segments)
        self._begins_with_zeros = begins_with_zeros
        self._segment_starts = np.array([0, *accumulate(segment.end - segment.begin for segment in segments)])

    def __len__(self) -> int:
        return int(self._segment_starts[-1])

    def __getitem__(self, key: "str | int | slice | Sequence[int] | np.ndarray") -> "np.ndarray | JoinedField":
        return JoinedField(self, key) if isinstance(key, str) else self.at(key)

    def at(self, key: "int | slice | Sequence[int] | np.ndarray") -> np.ndarray:
        """Return the records at some indices, in the shape of the indices."""
        if isinstance(key, slice):
            return self._read(np.arange(*key.indices(len(self))))
        indices = np.asarray(key)
        records = self._read(indices.reshape(-1).astype(np.int64))
        if indices.ndim == 0:
            record: np.ndarray = records[0]
            return record
        return records.reshape(indices.shape)

    def _read(self, indices: np.ndarray) -> np.ndarray:
        """Return the records at ``indices``, int64 [n]."""
        indices = np.where(indices < 0, indices + len(self), indices)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"record {indices.max()} of {len(self)}")
        all_records = np.empty(len(indices), self.dtype)
        segment_indices = np.searchsorted(self._segment_starts, indices, side="right") - 1
        for segment_index in np.unique(segment_indices).tolist():
            segment = self._segments[segment_index]
            positions = np.flatnonzero(segment_indices == segment_index)  # in the result
            positions_in_segment = indices[positions] - self._segment_starts[segment_index]
            records = self._read_part(segment.part, segment.begin + positions_in_segment)
            _add_offsets(records, segment.offsets)
            all_records[positions] = records
        return all_records

    def _read_part(self, part: int, positions: np.ndarray) -> np.ndarray:
        """Return the records of a part's array at ``positions``, int64 [n]."""
        if not self._begins_with_zeros:
            return _map_index(self._parts, self._split, part).read(self._name, self.dtype, positions)
        records = np.zeros(len(positions), self.dtype)
        is_unknown = positions > 0
        if is_unknown.any():  # a row ends where the next one begins, which may be the first one of another part
            index = _map_index(self._parts, self._split, part)
            records[is_unknown] = index.read(self._name, self.dtype, positions[is_unknown])
        return records


def _add_offsets(records: np.ndarray, offsets: dict[str, int]) -> None:
    """Add the offsets of a segment to its records.

    The offset of ``row`` only applies to documents of the part's first file, which may continue an earlier part's file.
    """
    if "row" in offsets:  # first, because ``file`` changes below
        is_in_first_file = records["file"] == 0
        records["row"][is_in_first_file] += offsets["row"]
    for name, offset in offsets.items():
        if name != "row":
            records[name] += offset


@dataclass(frozen=True)
class JoinedField:
    """A field of joined records."""

    records: JoinedRecords
    name: str

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, key: "int | slice | Sequence[int] | np.ndarray") -> np.ndarray:
        return self.records.at(key)[self.name]
