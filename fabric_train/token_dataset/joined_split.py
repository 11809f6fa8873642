"""Read rows of a split of a token dataset of parts, which stay in the files of the parts."""

import functools
import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa

from fabric_train.cli.errors import InputError, first_line
from fabric_train.token_dataset.check_parts import check_parts
from fabric_train.token_dataset.parts import (
    BATCH,
    BATCHES,
    FILE_NAME,
    MAIN_SOURCES,
    MERGE_AGAIN,
    MOST_OPEN,
    TOKENIZE_AGAIN,
    Parts,
    PartSplit,
    map_array,
    map_file,
)


def check_joined_splits(parts: Parts) -> "dict[str, JoinedSplit]":
    """Return the splits of a token dataset of parts; InputError if a file is missing, damaged or of a wrong length."""
    check_parts(parts)
    splits = {name: JoinedSplit(parts, name) for name in parts.split_names()}
    for split in splits.values():
        split.check()
    return splits


@dataclass(frozen=True)
class _RowFile:
    """A file with rows of a part."""

    part: int  # the index of the part
    path: Path
    num_bytes: int  # when the parts were merged
    has_labels: bool


@dataclass(frozen=True)
class _BatchLocation:
    """The location of a record batch."""

    first_row: int  # in the joined split
    offset: int  # in the file, in bytes
    file: int  # the index of the file among those of the split


class JoinedSplit:
    """The rows of a split from all parts, one part after the other."""

    def __init__(self, parts: Parts, name: str) -> None:
        self.parts = parts
        self.name = name
        self._splits: list[PartSplit] = []
        self._files: list[_RowFile] = []
        for part_index, part in enumerate(parts.record.parts):
            if name not in part.splits:
                continue
            split = part.splits[name]
            folder = parts.folder_of(part_index) / name
            self._splits.append(split)
            for file in split.files:
                self._files.append(_RowFile(part_index, folder / file.name, file.bytes, split.has_labels))
        self._first_rows = [0, *accumulate(split.rows for split in self._splits)]  # of each part, and the end
        self.row_length: np.ndarray | int = parts.record.max_length
        self.column_names = ["input_ids"]
        if parts.record.has_borders:
            self.column_names.append("document_starts")
        if any(split.has_labels for split in self._splits):
            self.column_names.append("labels")

    def __len__(self) -> int:
        return self._first_rows[-1]

    @property
    def files(self) -> tuple[Path, ...]:
        """The files with the rows, in the order of the rows."""
        return tuple(file.path for file in self._files)

    def check(self) -> None:
        """Raise an InputError if the list of record batches, or of main sources, does not fit the parts' files."""
        batches = self._batches
        files = batches["file"].astype(np.int64)
        if (np.diff(files) < 0).any():  # the last one is the last of the files, see ``_batches``
            raise self._damaged()
        rows = batches["row"]
        rows_ascend = (rows[1:] >= rows[:-1]).all() and rows[-1] <= len(self)
        file_sizes = np.array([file.num_bytes for file in self._files], np.uint64)
        is_behind_end = batches["offset"] >= file_sizes[files]
        if not rows_ascend or is_behind_end.any():
            raise self._damaged()
        sources = self.main_sources()
        if sources is not None and len(sources) != len(self):
            path = self.parts.folder / self.name / MAIN_SOURCES
            raise InputError(f"{path}: {len(sources):,} records instead of {len(self):,}; {MERGE_AGAIN}")

    def schema(self) -> pa.Schema:
        """Return the schema of the first file that has all columns."""
        needs_labels = "labels" in self.column_names
        for file_index, file in enumerate(self._files):
            if file.has_labels == needs_labels:
                return self.map_rows(file_index).schema
        raise self._damaged()

    def locate(self, row: int) -> tuple[Path, int]:
        """Return the file that has a row, and the row's number in it."""
        batch = self._find_batch(row)
        file = int(self._batches["file"][batch])
        first_batch = batch
        while first_batch and self._batches["file"][first_batch - 1] == file:
            first_batch -= 1
        return self._files[file].path, row - int(self._batches["row"][first_batch])

    def main_sources(self) -> np.ndarray | None:
        """Return the main source of each row, uint32 [rows]; None if the merge has not written it."""
        path = self.parts.folder / self.name / MAIN_SOURCES
        return map_array(path, np.dtype("<u4"), MERGE_AGAIN) if path.is_file() else None

    def source_rows(self) -> dict[str, list[range]] | None:
        """Return the rows of each source, as ranges in their order; None if a part has its sources mixed."""
        ranges_by_source: dict[str, list[range]] = {}
        for first_row, split in zip(self._first_rows, self._splits, strict=False):
            if split.source_rows is None:
                return None
            for name, ranges in split.source_rows.items():
                for start, end in ranges:
                    ranges_by_source.setdefault(name, []).append(range(first_row + start, first_row + end))
        return ranges_by_source

    def take(self, rows: Sequence[int]) -> pa.Table:
        """Return some rows in order; InputError if a part is missing or has changed, or if a file is damaged."""
        columns = self.column_names
        if not len(rows):
            return self.schema().empty_table().select(columns)
        batches: list[pa.RecordBatch] = []  # of one row each
        for row in rows:
            location = self._location(self._find_batch(row))
            batch = self.map_rows(location.file).batch(location.offset, columns)
            batches.append(batch.slice(row - location.first_row, 1))
        return pa.Table.from_batches(batches)

    def chunks(self, column: str, rows: range) -> Iterator[pa.Array]:
        """Yield a column of consecutive rows as one array after the other."""
        if not rows:
            return
        for batch in range(self._find_batch(rows.start), self._find_batch(rows[-1]) + 1):
            location = self._location(batch)
            values = self.map_rows(location.file).batch(location.offset, [column]).column(0)
            start = max(rows.start - location.first_row, 0)
            yield values[start : rows.stop - location.first_row]

    def map_rows(self, file_index: int) -> "_MappedRows":
        """Map a file of rows; InputError if it is missing, damaged or of a different size."""
        return _map_rows(self, file_index)

    def _location(self, batch: int) -> _BatchLocation:
        record = self._batches[batch]
        location = _BatchLocation(int(record["row"]), int(record["offset"]), int(record["file"]))
        if location.file >= len(self._files):
            raise self._damaged()
        return location

    def _damaged(self) -> InputError:
        path = self.parts.folder / self.name / BATCHES
        return InputError(f"{path}: damaged (its batches are not those of the files in {FILE_NAME}); {MERGE_AGAIN}")

    def _find_batch(self, row: int) -> int:
        """Return the index of the record batch that has a row."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return bisect_right(self._batches["row"], row) - 1  # reads only a few records

    @functools.cached_property
    def _batches(self) -> np.ndarray:
        """BATCH [record batches of all files]: the first one begins with row 0, the last one is in the last file."""
        batches = map_array(self.parts.folder / self.name / BATCHES, BATCH, MERGE_AGAIN)
        if not len(batches) or batches["row"][0] or batches["file"][-1] != len(self._files) - 1:
            raise self._damaged()
        return batches

    def __getstate__(self) -> dict[str, object]:
        """Leave out the mapped file, of which pickle would copy everything."""
        return {name: value for name, value in self.__dict__.items() if name != "_batches"}


@dataclass(frozen=True)
class _MappedRows:
    """A mapped file of rows."""

    path: Path
    mapped: mmap.mmap
    buffer: pa.Buffer
    schema: pa.Schema

    def batch(self, offset: int, columns: Sequence[str]) -> pa.RecordBatch:
        """Return columns of the record batch at a byte of the file; a part without labels has the tokens as labels."""
        if offset >= self.buffer.size:
            raise InputError(
                f"{self.path} is truncated: it ends before byte {offset:,}, where rows should begin; {MERGE_AGAIN}"
            )
        self.mapped.madvise(mmap.MADV_DONTNEED)  # pages of rows read before would count as memory of this process
        try:
            message = pa.ipc.read_message(self.buffer.slice(offset))
            batch = pa.ipc.read_record_batch(message, self.schema)
        except (ValueError, OSError, EOFError) as error:
            raise InputError(f"{self.path}: damaged, {first_line(error)}; {TOKENIZE_AGAIN}") from None
        arrays = []
        for name in columns:
            stored_name = name if name in batch.schema.names else "input_ids"
            arrays.append(batch.column(stored_name))
        return pa.RecordBatch.from_arrays(arrays, names=list(columns))


@functools.lru_cache(maxsize=MOST_OPEN)
def _map_rows(split: JoinedSplit, file_index: int) -> _MappedRows:
    """Map a file of rows; a process maps at most 64 of them, and closes the least recently used one."""
    file = split._files[file_index]
    try:
        mapped = map_file(file.path)
    except InputError:
        split.parts.check(file.part)  # the whole part may be gone
        raise
    if len(mapped) != file.num_bytes:
        split.parts.check(file.part)
        raise InputError(f"{file.path} has {len(mapped):,} bytes instead of {file.num_bytes:,}; {TOKENIZE_AGAIN}")
    try:
        buffer = pa.py_buffer(mapped)
        return _MappedRows(file.path, mapped, buffer, pa.ipc.open_stream(buffer).schema)
    except (ValueError, OSError) as error:
        raise InputError(f"{file.path}: damaged, {first_line(error)}; {TOKENIZE_AGAIN}") from None
