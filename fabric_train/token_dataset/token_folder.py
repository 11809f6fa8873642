"""Read the rows of a token dataset, in one folder or of parts, without importing ``datasets``.

``Split`` reads all rows of a split in batches of flat arrays, ``JoinedSplit`` some rows of parts.
"""

import functools
import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fabric_train.cli.errors import InputError, first_line, missing_folder, raise_reached_limit
from fabric_train.files.regular_file import check_file_name, read_json
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
    is_of_parts,
    map_array,
    map_file,
    open_parts,
)

_TOKENS_PER_BATCH = 1 << 20  # bounds memory, however large the record batches in the files are


@contextmanager
def without_read_ahead() -> Iterator[None]:
    """Let ``datasets`` map files by :func:`map_table` here, and the kernel read ahead again afterwards.

    pyarrow's own memory map tells the kernel that it will need every batch (``madvise``), so a dataset of 1 TB would be
    read as a whole when it is opened. ``datasets`` offers no other way to open a file.
    """
    from datasets import table as tables  # slow, and not needed for ``map_table``

    maps: list[mmap.mmap] = []

    def map_file(file: str) -> pa.Table:
        table, mapped = map_table(file)
        maps.append(mapped)
        return table

    theirs = tables._memory_mapped_arrow_table_from_file
    tables._memory_mapped_arrow_table_from_file = map_file
    try:
        yield
    finally:
        tables._memory_mapped_arrow_table_from_file = theirs
        for mapped in maps:
            mapped.madvise(mmap.MADV_NORMAL)


def map_table(file: str | Path) -> tuple[pa.Table, mmap.mmap]:
    """Return the table of an Arrow stream file, OSError or ValueError if it is damaged, and its memory map."""
    with open(file, "rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
    mapped.madvise(mmap.MADV_RANDOM)
    return pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(mapped))).read_all(), mapped


@dataclass(frozen=True)
class RowBatch:
    """Consecutive rows of a split, joined; row i is ``input_ids[offsets[i] : offsets[i + 1]]``.

    ``labels``, ``document_starts`` and ``start_rows`` are None if the split has no such column. Without labels each
    token is its own label.
    """

    first_row: int
    input_ids: np.ndarray  # integers [N]
    offsets: np.ndarray  # int64 [rows + 1], from 0 to N
    labels: np.ndarray | None  # integers [N]
    document_starts: np.ndarray | None  # integers [S], positions within a row at which documents begin
    start_rows: np.ndarray | None  # int64 [S], the row of each position, counted from 0 in this batch


@dataclass(frozen=True)
class Split:
    """One split of a token dataset, with its arrow files in order."""

    name: str
    files: tuple[Path, ...]
    schema: pa.Schema
    num_rows: int

    def batches(self) -> Iterator[RowBatch]:
        """Yield the rows in batches of about a million tokens; InputError if a file is damaged."""
        columns = [name for name in ("input_ids", "labels", "document_starts") if name in self.schema.names]
        row = 0
        for file in self.files:
            for stored in read_arrow(file):
                there = stored.schema.names  # a part may lack labels
                batch = stored.select([name for name in columns if name in there])
                tokens_per_row = max(1, len(batch.column("input_ids").flatten()) // max(1, batch.num_rows))
                step = max(1, _TOKENS_PER_BATCH // tokens_per_row)
                for start in range(0, batch.num_rows, step):
                    part = _row_batch(batch.slice(start, step), row, file)
                    row += len(part.offsets) - 1
                    yield part

    def read_rows(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the ``input_ids`` of some rows, whose numbers ascend; the others are not read."""
        first = 0
        for file in self.files:
            with _naming(file):
                table, _ = map_table(file)
            for batch in table.select(["input_ids"]).to_batches():
                with _naming(file):
                    batch.validate(full=True)
                inside = rows[slice(*np.searchsorted(rows, (first, first + batch.num_rows)))] - first
                if len(inside):
                    ids, offsets = _flat(batch.take(pa.array(inside)), "input_ids", file)
                    yield from np.split(ids, offsets[1:-1])
                first += batch.num_rows


def open_splits(folder: Path) -> dict[str, Split]:
    """Return the splits of a token dataset in the order of ``dataset_dict.json``; InputError if it is damaged.

    The splits of a token dataset of parts have the files of all parts.
    """
    listing = folder / "dataset_dict.json"
    if is_of_parts(folder):
        parts = open_parts(folder)
        joined = check_joined_splits(parts)
        return {name: Split(name, split.files, split.schema(), len(split)) for name, split in joined.items()}
    if not folder.is_dir():
        raise InputError(f"{folder}: {missing_folder(folder)}; give the --output_dir of fabric-train tokenize")
    if not listing.is_file():
        fault = "no dataset_dict.json in it"
        fix = "give the --output_dir of fabric-train tokenize"
        if (folder / "state.json").is_file():
            fault = "only one split of it"
            fix = "give the folder above it"
        raise InputError(f"{folder}: not a token dataset: {fault}; {fix}")
    names = _read_list(listing, "splits")
    if not names:
        raise InputError(f"{listing}: damaged, it lists no split; tokenize again")
    return {check_file_name(name, listing): _open_split(folder, name) for name in names}


def check_token_dataset(folder: str) -> None:
    """Raise an InputError if a folder of ``--train_data_dir`` is no token dataset, or lists files outside it."""
    path = Path(folder)
    if is_of_parts(path):
        return
    if not (path / "dataset_dict.json").is_file():
        cause = "the folder has no dataset_dict.json" if path.is_dir() else missing_folder(path)
        raise InputError(
            f"--train_data_dir {folder}: {cause}; make one with fabric-train tokenize --output_dir {folder}"
        )
    check_listed_files(path, "tokenize again")


def check_listed_files(folder: Path, fix: str) -> None:
    """Raise an InputError, ending with ``fix``, if the JSON files of a save_to_disk folder list files outside it."""
    listing = folder / "dataset_dict.json"
    splits = [folder]
    if listing.is_file():
        splits = [folder / check_file_name(name, listing) for name in _read_list(listing, "splits", fix)]
    for split in splits:
        read_json(split / "dataset_info.json", dict, fix)
        for file in _read_list(split / "state.json", "_data_files", fix):
            check_file_name(file.get("filename") if isinstance(file, dict) else file, split / "state.json")


def read_arrow(file: Path) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of an arrow file, memory-mapped; InputError if the file is missing or damaged."""
    with _naming(file), pa.memory_map(str(file)) as mapped, pa.ipc.open_stream(mapped) as reader:
        for batch in reader:
            batch.validate(full=True)  # pyarrow would abort the process at a list that lies outside of its values
            yield batch


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Turn errors of reading an arrow file into an InputError that names it."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{file}: the file is missing; tokenize again") from None
    except (ValueError, OSError) as error:  # pyarrow's errors are ValueErrors
        raise_reached_limit(error)
        raise InputError(f"{file}: damaged, {first_line(error)}; tokenize again") from None


def _open_split(folder: Path, name: str) -> Split:
    listing = folder / name / "state.json"
    _read_json(folder / name / "dataset_info.json", "features")
    _read_json(listing, "_fingerprint")
    listed = _read_list(listing, "_data_files")
    try:
        files = tuple(folder / name / check_file_name(file["filename"], listing) for file in listed)
    except (TypeError, KeyError):
        raise InputError(f"{listing}: damaged, it lists no files; tokenize again") from None
    schema = pa.schema([])
    num_rows = 0
    for file in files:
        with _naming(file):
            table, _ = map_table(file)
        schema = table.schema
        num_rows = num_rows + table.num_rows
    if not num_rows:
        raise InputError(f"{folder / name}: no rows; leave the split out or tokenize again")
    _check_columns(schema, folder / name)
    return Split(name, files, schema, num_rows)


def _check_columns(schema: pa.Schema, folder: Path) -> None:
    """Raise InputError if a split has no ``input_ids``, or if a column does not hold lists of integers."""
    if "input_ids" not in schema.names:
        columns = ", ".join(schema.names)
        raise InputError(f"{folder}: no column input_ids, only {columns}; tokenize with fabric-train tokenize")
    for name in ("input_ids", "labels", "document_starts"):
        if name in schema.names:
            kind = schema.field(name).type
            is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
            if not is_list or not pa.types.is_integer(kind.value_type):
                raise InputError(
                    f"{folder}: column {name} holds {kind}, not lists of integers; tokenize with fabric-train tokenize"
                )


def _row_batch(batch: pa.RecordBatch, first_row: int, file: Path) -> RowBatch:
    input_ids, offsets = _flat(batch, "input_ids", file)
    labels = starts = start_rows = None
    if "labels" in batch.schema.names:
        labels, label_offsets = _flat(batch, "labels", file)
        if not np.array_equal(label_offsets, offsets):
            row = first_row + int((label_offsets != offsets).argmax()) - 1
            raise InputError(f"{file}: row {row} has more or fewer labels than input_ids; tokenize again")
    if "document_starts" in batch.schema.names:
        starts, start_offsets = _flat(batch, "document_starts", file)
        start_rows = np.repeat(np.arange(batch.num_rows), np.diff(start_offsets))
    return RowBatch(first_row, input_ids, offsets, labels, starts, start_rows)


def _flat(batch: pa.RecordBatch, name: str, file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return a column of lists as one joined array, and int64 [rows + 1], where each list begins and the last ends."""
    column = batch.column(name)
    values = column.flatten()
    if column.null_count or values.null_count:
        raise InputError(f"{file}: damaged, its {name} contain nulls; tokenize again")
    if pa.types.is_fixed_size_list(column.type):
        offsets = np.arange(len(column) + 1, dtype=np.int64) * column.type.list_size
    else:
        offsets = column.offsets.to_numpy().astype(np.int64)
        offsets = offsets - offsets[0]
    return values.to_numpy(zero_copy_only=False), offsets


def _read_list(file: Path, key: str, fix: str = "tokenize again") -> list[Any]:
    content = _read_json(file, key, fix)
    if not isinstance(content, list):
        raise InputError(f"{file}: damaged, {key} is not a list; {fix}")
    return content


def _read_json(file: Path, key: str, fix: str = "tokenize again") -> Any:
    content = read_json(file, dict, fix)
    if key not in content:
        raise InputError(f"{file}: damaged (no {key}); {fix}")
    return content[key]


def check_joined_splits(parts: Parts) -> "dict[str, JoinedSplit]":
    """Return the splits of a token dataset of parts; InputError if a file is missing, damaged or of another length."""
    check_parts(parts)
    joined = {name: JoinedSplit(parts, name) for name in parts.split_names()}
    for split in joined.values():
        split.check()
    return joined


class JoinedSplit:
    """The rows of a split of all parts, one part after the other."""

    def __init__(self, parts: Parts, name: str) -> None:
        self.parts = parts
        self.name = name
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

    def check(self) -> None:
        """Raise an InputError if the list of record batches, or of main sources, is not that of the parts' files."""
        batches = self._batches
        files = batches["file"].astype(np.int64)
        if (np.diff(files) < 0).any():  # the last one is the last of the files, see ``_batches``
            raise self._damaged()
        sizes = np.array([listed.bytes for _, listed in self._files], np.uint64)
        rows = batches["row"]
        rows_are_right = (rows[1:] >= rows[:-1]).all() and rows[-1] <= len(self)
        if not rows_are_right or (batches["offset"] >= sizes[files]).any():
            raise self._damaged()
        sources = self.main_sources()
        if sources is not None and len(sources) != len(self):
            file = self.parts.folder / self.name / MAIN_SOURCES
            raise InputError(f"{file}: {len(sources):,} records instead of {len(self):,}; {MERGE_AGAIN}")

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

    def main_sources(self) -> np.ndarray | None:
        """Return the main source of each row, uint32 [rows]; None if the merge has not written it."""
        file = self.parts.folder / self.name / MAIN_SOURCES
        return map_array(file, np.dtype("<u4"), MERGE_AGAIN) if file.is_file() else None

    def source_rows(self) -> dict[str, list[range]] | None:
        """Return the rows of each source, as ranges in their order; None if some part has its sources mixed."""
        found: dict[str, list[range]] = {}
        for start, (_, split) in zip(self._starts, self._splits, strict=False):
            if split.source_rows is None:
                return None
            for name, ranges in split.source_rows.items():
                found.setdefault(name, []).extend(range(start + begin, start + end) for begin, end in ranges)
        return found

    def take(self, rows: Sequence[int]) -> pa.Table:
        """Return some rows in their order; InputError if a part is missing or has changed, or a file is damaged."""
        columns = self.column_names
        taken: list[pa.RecordBatch] = []
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
