"""The rows of a split of a token dataset of parts, read from the files of the parts."""

import functools
import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa

from fabric_train.cli.errors import InputError, first_line, raise_reached_limit
from fabric_train.tokenization.packing.parts import (
    BATCH,
    BATCHES,
    FILE_NAME,
    MAIN_SOURCES,
    MERGE_AGAIN,
    MOST_OPEN,
    TOKENIZE_AGAIN,
    Parts,
    map_array,
)


class JoinedSplit:
    """The rows of a split of all parts, one part after the other."""

    def __init__(self, parts: Parts, name: str) -> None:
        self.parts, self.name = parts, name
        self._splits = [
            (number, part.splits[name]) for number, part in enumerate(parts.record.parts) if name in part.splits
        ]
        self._files = [(number, listed) for number, split in self._splits for listed in split.files]
        self._starts = [0, *accumulate(split.rows for _, split in self._splits)]
        self.row_length: np.ndarray | int = parts.record.max_length
        labels = ["labels"] * any(split.has_labels for _, split in self._splits)
        self.column_names = ["input_ids", *(["document_starts"] * parts.record.has_borders), *labels]

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of the rows, in the order of the rows."""
        return tuple(self.path(number) for number in range(len(self._files)))

    def path(self, file: int) -> Path:
        part, listed = self._files[file]
        return self.parts.folder_of(part) / self.name / listed.name

    def schema(self) -> pa.Schema:
        """Return the schema of the first file that has all columns."""
        has_labels = (split.has_labels for _, split in self._splits for _ in split.files)
        chosen = next(file for file, has in enumerate(has_labels) if has == ("labels" in self.column_names))
        return _map_rows(self, chosen).schema

    def place(self, row: int) -> tuple[Path, int]:
        """Return the file that has a row, and the row's number in it."""
        batch = self._batch_of(row)
        file = int(self._batches["file"][batch])
        first = batch
        while first and self._batches["file"][first - 1] == file:
            first -= 1
        return self.path(file), row - int(self._batches["row"][first])

    def place_in_part(self, row: int) -> tuple[Path, int]:
        """Return the folder of the part that has a row, and the row's number in its split."""
        place = bisect_right(self._starts, row) - 1
        return self.parts.folder_of(self._splits[place][0]), row - self._starts[place]

    def main_sources(self) -> np.ndarray | None:
        """Return the main source of each row, uint32 [rows]; None if the merge has not written it."""
        file = self.parts.folder / self.name / MAIN_SOURCES
        return map_array(file, np.dtype("<u4"), MERGE_AGAIN) if file.is_file() else None

    def source_rows(self) -> dict[str, list[range]] | None:
        """Return the rows of each source, as ranges in their order; None if some part has its sources mixed."""
        found = dict[str, list[range]]()
        for start, (_, split) in zip(self._starts, self._splits, strict=False):
            if split.source_rows is None:
                return None
            for name, ranges in split.source_rows.items():
                found.setdefault(name, []).extend(range(start + begin, start + end) for begin, end in ranges)
        return found

    def take(self, rows: Sequence[int]) -> pa.Table:
        """Return some rows in their order; InputError if a part is missing or has changed, or a file is damaged."""
        columns, taken = self.column_names, list[pa.RecordBatch]()
        for row in rows:
            number = self._batch_of(row)
            first, offset, file = self._batch(number)
            taken.append(_map_rows(self, file).batch(offset, columns).slice(row - first, 1))
        return pa.Table.from_batches(taken) if taken else self.schema().empty_table().select(columns)

    def chunks(self, column: str, rows: range) -> Iterator[pa.Array]:
        """Yield a column of consecutive rows as one array after the other."""
        for number in range(self._batch_of(rows.start), self._batch_of(rows[-1]) + 1) if rows else ():
            first, offset, file = self._batch(number)
            whole = _map_rows(self, file).batch(offset, [column]).column(0)
            yield whole[max(rows.start - first, 0) : rows.stop - first]

    def _batch(self, number: int) -> tuple[int, int, int]:
        """Return the first row of a record batch, its place in its file, and the number of the file."""
        first, offset, file = (int(value) for value in self._batches[number])
        if file >= len(self._files):
            raise self._damaged()
        return first, offset, file

    def _damaged(self) -> InputError:
        file = self.parts.folder / self.name / BATCHES
        return InputError(f"{file}: damaged, it has not the batches of the files in {FILE_NAME}; {MERGE_AGAIN}")

    def _batch_of(self, row: int) -> int:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return bisect_right(self._batches["row"], row) - 1  # reads only a few records

    @functools.cached_property
    def _batches(self) -> np.ndarray:
        batches = map_array(self.parts.folder / self.name / BATCHES, BATCH, MERGE_AGAIN)
        if not len(batches) or batches["row"][0] or batches["file"][-1] != len(self._files) - 1:
            raise self._damaged()
        return batches

    def __getstate__(self) -> dict[str, object]:
        """Leave the mapped file out, which would be pickled as a whole."""
        return {name: value for name, value in self.__dict__.items() if name != "_batches"}


@dataclass(frozen=True)
class _MappedRows:
    """A mapped file of rows."""

    path: Path
    mapped: mmap.mmap
    buffer: pa.Buffer
    schema: pa.Schema

    def batch(self, offset: int, columns: Sequence[str]) -> pa.RecordBatch:
        """Return columns of the record batch at a place in the file; a part without labels learns all tokens."""
        if offset >= self.buffer.size:
            raise InputError(f"{self.path} ends before byte {offset:,}, where rows should begin; {MERGE_AGAIN}")
        self.mapped.madvise(mmap.MADV_DONTNEED)  # pages of rows read before would count as memory of this process
        try:
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(self.buffer.slice(offset)), self.schema)
        except (ValueError, OSError, EOFError) as error:
            raise InputError(f"{self.path}: damaged, {first_line(error)}; {TOKENIZE_AGAIN}") from None
        there = [name if name in batch.schema.names else "input_ids" for name in columns]
        return pa.RecordBatch.from_arrays([batch.column(name) for name in there], names=list(columns))


@functools.lru_cache(maxsize=MOST_OPEN)
def _map_rows(split: JoinedSplit, file: int) -> _MappedRows:
    part, listed = split._files[file]
    path = split.path(file)
    try:
        mapped = map_file(path)
    except InputError:
        split.parts.check(part)  # the whole part may be gone
        raise
    if len(mapped) != listed.bytes:
        split.parts.check(part)
        raise InputError(f"{path} has {len(mapped):,} bytes instead of {listed.bytes:,}; {TOKENIZE_AGAIN}")
    try:
        buffer = pa.py_buffer(mapped)
        return _MappedRows(path, mapped, buffer, pa.ipc.open_stream(buffer).schema)
    except (ValueError, OSError) as error:
        raise InputError(f"{path}: damaged, {first_line(error)}; {TOKENIZE_AGAIN}") from None


def map_file(path: Path) -> mmap.mmap:
    """Return the memory map of a file; InputError if there is none."""
    try:
        with path.open("rb") as opened:
            return mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise_reached_limit(error)
        raise InputError(f"{path}: {first_line(error)}; {TOKENIZE_AGAIN}") from None
