"""Open a token dataset and read all rows of a split in batches of flat arrays, without importing ``datasets``."""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fabric_train.cli.errors import InputError, first_line, missing_folder, raise_if_limit_reached
from fabric_train.files.regular_file import check_file_name
from fabric_train.files.typed_json import read_json
from fabric_train.token_dataset.joined_split import check_joined_splits
from fabric_train.token_dataset.parts import is_of_parts, open_parts

_TOKENS_PER_BATCH = 1 << 20  # bounds memory, however large the record batches in the files are


@contextmanager
def without_read_ahead() -> Iterator[None]:
    """Make ``datasets`` map files with :func:`map_table` within the block, so that the kernel does not read ahead.

    pyarrow's own memory map tells the kernel that it will need every batch (``madvise``), so a dataset of 1 TB would be
    read in full when it is opened. ``datasets`` offers no other way to open a file, so its function is replaced.
    """
    from datasets import table as tables  # slow, and not needed for ``map_table``

    maps: list[mmap.mmap] = []

    def map_without_read_ahead(path: str) -> pa.Table:
        table, mapped = map_table(path)
        maps.append(mapped)
        return table

    original_function = tables._memory_mapped_arrow_table_from_file
    tables._memory_mapped_arrow_table_from_file = map_without_read_ahead
    try:
        yield
    finally:
        tables._memory_mapped_arrow_table_from_file = original_function
        for mapped in maps:  # from here on, the kernel may read ahead again
            mapped.madvise(mmap.MADV_NORMAL)


def map_table(path: str | Path) -> tuple[pa.Table, mmap.mmap]:
    """Return the table of an Arrow stream file, and its memory map; OSError or ValueError if it is damaged."""
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    mapped.madvise(mmap.MADV_RANDOM)  # the kernel reads nothing ahead
    reader = pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(mapped)))
    return reader.read_all(), mapped


@dataclass(frozen=True)
class RowBatch:
    """Consecutive rows of a split, joined; row i is ``input_ids[offsets[i] : offsets[i + 1]]``.

    Columns that the split does not have are None. Without labels, each token is its own label.
    """

    first_row: int  # the number of the first row in the split
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
        first_row = 0
        for file in self.files:
            for record_batch in read_arrow(file):
                # a part may lack labels
                stored_columns = [name for name in columns if name in record_batch.schema.names]
                record_batch = record_batch.select(stored_columns)
                num_tokens = len(record_batch.column("input_ids").flatten())
                tokens_per_row = max(1, num_tokens // max(1, record_batch.num_rows))
                rows_per_batch = max(1, _TOKENS_PER_BATCH // tokens_per_row)
                for start in range(0, record_batch.num_rows, rows_per_batch):
                    row_batch = _row_batch(record_batch.slice(start, rows_per_batch), first_row, file)
                    first_row += len(row_batch.offsets) - 1
                    yield row_batch

    def read_rows(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the ``input_ids`` of some rows, given in ascending order; other rows are not read."""
        first_row = 0  # of the record batch
        for file in self.files:
            with _naming_damaged_file(file):
                table, _ = map_table(file)
            for record_batch in table.select(["input_ids"]).to_batches():
                with _naming_damaged_file(file):
                    record_batch.validate(full=True)
                end_row = first_row + record_batch.num_rows
                start, end = np.searchsorted(rows, (first_row, end_row))
                if start < end:
                    rows_in_batch = pa.array(rows[start:end] - first_row)
                    token_ids, offsets = _flatten(record_batch.take(rows_in_batch), "input_ids", file)
                    yield from np.split(token_ids, offsets[1:-1])
                first_row = end_row


def open_splits(folder: Path) -> dict[str, Split]:
    """Return the splits of a token dataset in the order of ``dataset_dict.json``; InputError if it is damaged.

    The splits of a token dataset of parts have the files of all parts.
    """
    if is_of_parts(folder):
        splits = {}
        for name, joined_split in check_joined_splits(open_parts(folder)).items():
            splits[name] = Split(name, joined_split.files, joined_split.schema(), len(joined_split))
        return splits
    if not folder.is_dir():
        raise InputError(f"{folder}: {missing_folder(folder)}; give the --output_dir of fabric-train tokenize")
    listing = folder / "dataset_dict.json"
    if not listing.is_file():
        fault = "it has no dataset_dict.json"
        fix = "give the --output_dir of fabric-train tokenize"
        if (folder / "state.json").is_file():
            fault = "it is only one split of a token dataset"
            fix = "give its parent folder"
        raise InputError(f"{folder}: not a token dataset: {fault}; {fix}")
    names = _read_list(listing, "splits")
    if not names:
        raise InputError(f"{listing}: damaged (it lists no split); tokenize again")
    return {check_file_name(name, listing): _open_split(folder, name) for name in names}


def check_token_dataset(folder: str) -> None:
    """Raise an InputError if a folder in ``--train_data_dir`` is not a token dataset, or lists files outside of it."""
    path = Path(folder)
    if is_of_parts(path):
        return
    if not (path / "dataset_dict.json").is_file():
        cause = "the folder has no dataset_dict.json" if path.is_dir() else missing_folder(path)
        raise InputError(
            f"--train_data_dir {folder}: {cause}; write a token dataset with fabric-train tokenize --output_dir "
            f"{folder}"
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
        state = split / "state.json"
        for file in _read_list(state, "_data_files", fix):
            name = file.get("filename") if isinstance(file, dict) else file
            check_file_name(name, state)


def read_arrow(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of an arrow file, memory-mapped; InputError if the file is missing or damaged."""
    with _naming_damaged_file(path), pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as reader:
        for batch in reader:
            batch.validate(full=True)  # pyarrow would abort the process at a list that is outside of its values
            yield batch


@contextmanager
def _naming_damaged_file(file: Path) -> Iterator[None]:
    """Turn errors of reading an arrow file into an InputError that names it."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{file}: the file is missing; tokenize again") from None
    except (ValueError, OSError) as error:  # pyarrow's errors are ValueErrors
        raise_if_limit_reached(error)
        raise InputError(f"{file}: damaged, {first_line(error)}; tokenize again") from None


def _open_split(folder: Path, name: str) -> Split:
    """Open a split of a token dataset; InputError if a file is missing or damaged, or has different columns."""
    # also the files that the datasets library reads
    state = folder / name / "state.json"
    _read_key(folder / name / "dataset_info.json", "features")
    _read_key(state, "_fingerprint")
    listed_files = _read_list(state, "_data_files")
    try:
        files = tuple(folder / name / check_file_name(file["filename"], state) for file in listed_files)
    except (TypeError, KeyError):
        raise InputError(f"{state}: damaged (it lists no files); tokenize again") from None
    # the files of rows
    schema = pa.schema([])
    num_rows = 0
    for file in files:
        with _naming_damaged_file(file):
            table, _ = map_table(file)
        schema = table.schema
        num_rows += table.num_rows
    if not num_rows:
        raise InputError(f"{folder / name}: it has no rows; remove the split or tokenize again")
    _check_columns(schema, folder / name)
    return Split(name, files, schema, num_rows)


def _check_columns(schema: pa.Schema, folder: Path) -> None:
    """Raise an InputError if a split has no ``input_ids``, or if a column does not hold lists of integers."""
    if "input_ids" not in schema.names:
        columns = ", ".join(schema.names)
        raise InputError(f"{folder}: no column input_ids, only {columns}; tokenize with fabric-train tokenize")
    for name in ("input_ids", "labels", "document_starts"):
        if name not in schema.names:
            continue
        column_type = schema.field(name).type
        is_list = (
            pa.types.is_list(column_type)
            or pa.types.is_large_list(column_type)
            or pa.types.is_fixed_size_list(column_type)
        )
        if not is_list or not pa.types.is_integer(column_type.value_type):
            fault = f"column {name} holds {column_type}, not lists of integers"
            raise InputError(f"{folder}: {fault}; tokenize with fabric-train tokenize")


def _row_batch(batch: pa.RecordBatch, first_row: int, file: Path) -> RowBatch:
    """Return a record batch as flat arrays.

    Args:
        batch: rows of a split.
        first_row: the number of its first row in the split.
        file: the file that the batch was read from, for errors.
    """
    input_ids, offsets = _flatten(batch, "input_ids", file)
    labels = None
    if "labels" in batch.schema.names:
        labels, label_offsets = _flatten(batch, "labels", file)
        differs = label_offsets != offsets
        if differs.any():
            row = first_row + int(differs.argmax()) - 1  # offset i + 1 is the end of row i
            raise InputError(f"{file}: row {row} has more or fewer labels than input_ids; tokenize again")
    document_starts = None
    start_rows = None
    if "document_starts" in batch.schema.names:
        document_starts, start_offsets = _flatten(batch, "document_starts", file)
        start_rows = np.repeat(np.arange(batch.num_rows), np.diff(start_offsets))
    return RowBatch(
        first_row, input_ids, offsets, labels=labels, document_starts=document_starts, start_rows=start_rows
    )


def _flatten(batch: pa.RecordBatch, name: str, file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return a column of lists as one joined array, and the borders of the lists, int64 [rows + 1]."""
    column = batch.column(name)
    values = column.flatten()
    if column.null_count or values.null_count:
        raise InputError(f"{file}: damaged, its {name} contain nulls; tokenize again")
    if pa.types.is_fixed_size_list(column.type):
        offsets = np.arange(len(column) + 1, dtype=np.int64) * column.type.list_size
    else:
        offsets = column.offsets.to_numpy().astype(np.int64)
        offsets = offsets - offsets[0]  # a slice begins in the middle of the values
    return values.to_numpy(zero_copy_only=False), offsets


def _read_list(file: Path, key: str, fix: str = "tokenize again") -> list[Any]:
    """Return the list under ``key`` in a JSON file; an InputError that ends with ``fix`` if there is none."""
    content = _read_key(file, key, fix)
    if not isinstance(content, list):
        raise InputError(f"{file}: damaged, {key} is not a list; {fix}")
    return content


def _read_key(file: Path, key: str, fix: str = "tokenize again") -> Any:
    """Return the value under ``key`` in a JSON file; an InputError that ends with ``fix`` if there is none."""
    content = read_json(file, dict, fix)
    if key not in content:
        raise InputError(f"{file}: damaged (no {key}); {fix}")
    return content[key]
