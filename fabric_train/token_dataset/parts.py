"""A token dataset of parts: a small folder that joins the rows of other token datasets, which stay where they are.

``python -m fabric_train.tokenization.merge --parts true`` writes it::

    whole/manifest.json            the ledger, the sources and the settings of all parts, as a full merge writes it
          parts.json               ``PartsRecord``: where the parts are, relative to this folder, and their counts
          tokenizer/
          train/batches.npy        BATCH [record batches of all parts]: where each lies in its file
          validation/batches.npy
          validation/sources.npy   uint32 [rows], the main source of each row; only with several sources

Opening it reads ``manifest.json`` and ``parts.json``. A part is opened when one of its rows is read. A process has the
data of at most 64 files and the indexes of at most 64 parts open; the one that was not used for longest is closed.
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

from fabric_train.cli.errors import InputError, first_line, raise_reached_limit
from fabric_train.files.regular_file import check_file_name, read_json

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
    """A split of a part.

    ``placed`` documents begin in its rows, and ``documents`` are in its index, which has so many ``continuations``.
    ``source_rows`` are the rows of each source, as ranges; None if the sources are mixed in the rows.
    """

    rows: int
    tokens: int
    documents: int
    placed: int
    continuations: int
    has_labels: bool
    files: tuple[PartFile, ...]
    source_rows: dict[str, list[tuple[int, int]]] | None


@dataclass(frozen=True)
class Part:
    """A token dataset; ``path`` is relative to the folder of the parts.

    ``num_files`` are the files of its sources. The first one goes on with a file of a part before, and
    ``rows_before`` of that file's rows are in parts before; 0 if it does not.
    """

    path: str
    manifest_sha256: str
    num_files: int
    rows_before: int
    splits: dict[str, PartSplit]


@dataclass(frozen=True)
class PartsRecord:
    """The content of ``parts.json``; all rows have ``max_length`` tokens."""

    max_length: int
    has_borders: bool
    has_checksums: bool
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
        """Return the record of a copy whose parts lie in ``folder`` of it."""
        parts = (replace(part, path=f"{folder}/{number:05d}") for number, part in enumerate(self.record.parts, 1))
        return replace(self.record, parts=tuple(parts))

    def check(self, part: int) -> None:
        """Raise an InputError if a part is missing or has another manifest. ``check_parts.py`` checks all of them."""
        folder = self.folder_of(part)
        wanted = self.record.parts[part].manifest_sha256
        try:
            found = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
        except (OSError, ValueError) as error:  # a ValueError for a path that no file can have
            raise_reached_limit(error)
            reason = f"{folder / 'manifest.json'}: {error.strerror if isinstance(error, OSError) else error}"
            raise InputError(f"{self._name(part)} is missing ({reason}); put it back, or {MERGE_AGAIN}") from None
        if found != wanted:
            raise InputError(
                f"{self._name(part)} has changed since the merge: {folder / 'manifest.json'} is another; put it back "
                f"as it was, or {MERGE_AGAIN}"
            )

    def split_names(self) -> list[str]:
        return list(dict.fromkeys(name for part in self.record.parts for name in part.splits))

    def _name(self, part: int) -> str:
        return f"{self.folder}: part {part + 1} of {len(self.record.parts):,}, {self.record.parts[part].path},"


def is_of_parts(folder: Path) -> bool:
    """Return whether a folder is a token dataset of parts."""
    return (folder / FILE_NAME).is_file()


def open_parts(folder: Path) -> Parts:
    """Read which parts a token dataset has; InputError if ``parts.json`` is damaged."""
    file = folder / FILE_NAME
    record = read_json(file, PartsRecord, MERGE_AGAIN)
    if record.format != _FORMAT:
        raise InputError(f"{file} has format {record.format}, this version reads {_FORMAT}; {MERGE_AGAIN}")
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
        self._split = split
        self._part = part
        self._arrays: dict[str, tuple[np.ndarray, mmap.mmap]] = {}

    def read(self, name: str, dtype: np.dtype, places: np.ndarray) -> np.ndarray:
        """Return a copy of some records, so that no page of the file counts as memory of this process for long."""
        if name not in self._arrays:
            file = self._parts.folder_of(self._part) / self._split / "index" / f"{name}.npy"
            try:
                self._arrays[name] = _map_records(file, dtype, TOKENIZE_AGAIN)
            except InputError:
                self._parts.check(self._part)  # the whole part may be another, or gone
                raise
        array, mapped = self._arrays[name]
        if len(places) and places.max() >= len(array):
            folder = self._parts.folder_of(self._part) / self._split / "index"
            raise InputError(f"{folder}: not the index of this part's rows; {TOKENIZE_AGAIN}")
        records = array[places]
        mapped.madvise(mmap.MADV_DONTNEED)
        return records


@functools.lru_cache(maxsize=MOST_OPEN)
def _map_index(parts: Parts, split: str, part: int) -> _MappedIndex:
    return _MappedIndex(parts, split, part)


def map_file(path: Path) -> mmap.mmap:
    """Return the memory map of a file; InputError if there is none."""
    try:
        with path.open("rb") as opened:
            return mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise_reached_limit(error)
        raise InputError(f"{path}: {first_line(error)}; {TOKENIZE_AGAIN}") from None


def map_array(file: Path, dtype: np.dtype, fix: str = "tokenize again") -> np.ndarray:
    """Return the records in a file of numpy, memory-mapped; InputError if it is missing or damaged."""
    return _map_records(file, dtype, fix)[0]


def _map_records(file: Path, dtype: np.dtype, fix: str) -> tuple[np.ndarray, mmap.mmap]:
    """Map a file of numpy, which is opened once; ``numpy.load`` opens it twice."""
    try:
        with file.open("rb") as opened:
            np.lib.format.read_magic(opened)
            shape, _, found = np.lib.format.read_array_header_1_0(opened)
            begin = opened.tell()
            mapped = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
        if found != dtype or len(shape) != 1:
            raise ValueError("it holds no records of the index")
        records = np.frombuffer(mapped, dtype, shape[0], begin)
        if begin + records.nbytes != len(mapped):
            raise ValueError("it goes on after its last record")
        return records, mapped
    except FileNotFoundError:
        raise InputError(f"{file}: the file is missing; {fix}") from None
    except (OSError, ValueError, EOFError, SyntaxError, TokenError) as error:  # numpy parses a header as Python
        raise_reached_limit(error)
        raise InputError(f"{file}: damaged, {first_line(error)}; {fix}") from None


@dataclass(frozen=True)
class Segment:
    """Records ``begin`` to ``end - 1`` of a part's array, to whose fields numbers are added."""

    part: int
    begin: int
    end: int
    added: dict[str, int]


class JoinedRecords:
    """The records of an array in the document indexes of the parts, which are read like one array when asked for.

    Indices are whole numbers, arrays of them, slices, or the name of a field. The first record of each part may be
    known to be zeros.
    """

    def __init__(
        self,
        parts: Parts,
        split: str,
        name: str,
        dtype: np.dtype,
        segments: Sequence[Segment],
        begins_with_zeros: bool = False,
    ) -> None:
        self._begins_with_zeros = begins_with_zeros
        self.dtype = dtype
        self._parts = parts
        self._split = split
        self._name = name
        self._segments = tuple(segments)
        self._starts = np.array([0, *accumulate(one.end - one.begin for one in segments)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, key: "str | int | slice | Sequence[int] | np.ndarray") -> "np.ndarray | JoinedField":
        return JoinedField(self, key) if isinstance(key, str) else self.at(key)

    def at(self, key: "int | slice | Sequence[int] | np.ndarray") -> np.ndarray:
        if isinstance(key, slice):
            return self._read(np.arange(*key.indices(len(self))))
        indices = np.asarray(key)
        found = self._read(indices.reshape(-1).astype(np.int64))
        whole: np.ndarray = found.reshape(indices.shape) if indices.ndim else found[0]
        return whole

    def _read(self, indices: np.ndarray) -> np.ndarray:
        indices = np.where(indices < 0, indices + len(self), indices)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"record {indices.max()} of {len(self)}")
        found = np.empty(len(indices), self.dtype)
        owners = np.searchsorted(self._starts, indices, side="right") - 1
        for owner in np.unique(owners).tolist():
            own = np.flatnonzero(owners == owner)
            one = self._segments[owner]
            records = self._records_of(one.part, indices[own] - self._starts[owner] + one.begin)
            first = records["file"] == 0 if "file" in one.added else None
            for name, number in one.added.items():
                if name == "row":  # lines of a file that began in a part before
                    records[name][first] += number
                else:
                    records[name] += number
            found[own] = records
        return found

    def _records_of(self, part: int, places: np.ndarray) -> np.ndarray:
        records = np.zeros(len(places), self.dtype)
        unknown = places > 0 if self._begins_with_zeros else np.ones(len(places), bool)
        if unknown.any():  # a row ends where the next one begins, which may be the first one of another part
            own = places[unknown]
            index = _map_index(self._parts, self._split, part)
            records[unknown] = index.read(self._name, self.dtype, own)
        return records


@dataclass(frozen=True)
class JoinedField:
    """A field of joined records."""

    records: JoinedRecords
    name: str

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, key: "int | slice | Sequence[int] | np.ndarray") -> np.ndarray:
        return self.records.at(key)[self.name]
