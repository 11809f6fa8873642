"""Open the splits of a token dataset with ``datasets``, and check their columns."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fabric_train.cli.errors import InputError, first_line, raise_if_limit_reached
from fabric_train.token_dataset import token_folder

if TYPE_CHECKING:
    import datasets

VALIDATION_NAMES = ("validation", "valid")
_COLUMNS = ("input_ids", "labels", "document_starts")


class StoredSplit(Protocol):
    """The rows of a split on disk; ``row_length`` has the tokens of each row, or of all."""

    row_length: np.ndarray | int
    column_names: list[str]

    def __len__(self) -> int: ...

    def take(self, rows: Sequence[int]) -> pa.Table:
        """Return the columns of tokens, labels and document starts of some rows, in their order."""

    def chunks(self, column: str, rows: range) -> Iterator[pa.Array]:
        """Yield a column of consecutive rows as one array after the other."""

    def locate(self, row: int) -> tuple[Path, int]:
        """Return the file that has a row, and the row's number in the file."""


class LoadedSplit:
    """A split that ``datasets`` has opened."""

    def __init__(self, split: "datasets.Dataset") -> None:
        self.split = split
        self.column_names = [name for name in _COLUMNS if name in split.column_names]
        self.row_length = _row_lengths(split, "input_ids")
        self._table = split.select_columns(self.column_names).with_format("arrow")

    def __len__(self) -> int:
        return len(self.split)

    def take(self, rows: Sequence[int]) -> pa.Table:
        return self._table[list(rows)]

    def chunks(self, column: str, rows: range) -> Iterator[pa.Array]:
        yield from self.split.data.column(column).slice(rows.start, len(rows)).chunks

    def locate(self, row: int) -> tuple[Path, int]:
        """Return the file that has a row, and the row's number in the file."""
        file = ""
        row_of_file = row
        first_row = 0
        for cache_file in self.split.cache_files:
            file = cache_file["filename"]
            row_of_file = row - first_row
            table, _ = token_folder.map_table(file)
            first_row += table.num_rows
            if row < first_row:
                break
        return Path(file), row_of_file


def load_splits(folder: str) -> "tuple[datasets.Dataset, datasets.Dataset | None]":
    """Open the train split and, if there is one, the validation split of a folder; InputError if it is damaged."""
    import datasets  # slow, and not needed to describe the data of a run

    try:
        with token_folder.without_read_ahead():
            splits = datasets.load_from_disk(folder)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise_if_limit_reached(error)
        raise InputError(f"--train_data_dir {folder}: damaged, {first_line(error)}; tokenize again") from error
    except (ArithmeticError, AttributeError, KeyError, TypeError) as error:  # raised by datasets for unexpected JSON
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"--train_data_dir {folder}: damaged, {reason}; tokenize again") from error
    except IndexError as error:  # raised by datasets for a split without rows, which has no file
        raise InputError(
            f"--train_data_dir {folder}: a split has no rows; remove the split or tokenize again"
        ) from error
    if "train" not in splits:
        raise InputError(
            f"--train_data_dir {folder}: no train split, only {', '.join(splits)}; write one with fabric-train tokenize"
        )
    train = splits["train"]
    validation: datasets.Dataset | None = None
    for name in VALIDATION_NAMES:
        if name in splits:
            validation = splits[name]
            break
    for name, split in (("train", train), ("validation", validation)):
        if split is None:
            continue
        fault = _fault_of_columns(split)
        if fault:
            raise InputError(
                f"--train_data_dir {folder}: {name} has {fault}; tokenize again with fabric-train tokenize"
            )
    if len(train) == 0:
        raise InputError(f"--train_data_dir {folder}: the train split has no rows; tokenize more documents")
    return train, validation


def _fault_of_columns(split: "datasets.Dataset") -> str | None:
    """Return what is wrong with a split's columns of tokens, labels and document starts; None if nothing is."""
    if "input_ids" not in split.column_names:
        return f"no column input_ids, only {', '.join(split.column_names)}"
    column_names = [name for name in _COLUMNS if name in split.column_names]
    for name in column_names:
        column = split.data.column(name)
        if not _is_list_of_integers(column.type):
            contents = "positions" if name == "document_starts" else "token ids"
            return f"a column {name} of {column.type}, not of lists of {contents}"
        if not is_sound(column, full=False):
            return f"a damaged column {name} (lists outside their values)"
        if any(chunk.null_count or chunk.flatten().null_count for chunk in column.chunks):
            return f"nulls in its column {name}"

    if "labels" in column_names:
        differs = np.atleast_1d(_row_lengths(split, "labels") != _row_lengths(split, "input_ids"))
        if differs.any():
            return f"rows with a different number of labels than input_ids, first in row {int(differs.argmax())}"
    return None


def _is_list_of_integers(column_type: pa.DataType) -> bool:
    is_list = (
        pa.types.is_list(column_type) or pa.types.is_large_list(column_type) or pa.types.is_fixed_size_list(column_type)
    )
    return is_list and pa.types.is_integer(column_type.value_type)


def is_sound(lists: pa.Table | pa.ChunkedArray, *, full: bool = True) -> bool:
    """Return whether all lists are within their values; without ``full``, check only the first and the last list.

    Reading a list that is not would make pyarrow abort the process.
    """
    try:
        lists.validate(full=full)
    except pa.ArrowInvalid:
        return False
    return True


def _row_lengths(split: "datasets.Dataset", column: str) -> np.ndarray | int:
    """Return the length of each list in a column, integers [rows], or the length of all lists.

    Rows that ``tokenize_dataset.py`` writes all have the same length, which is in the column's type. So opening a
    dataset does not take longer if it has more rows.
    """
    lists = split.data.column(column)
    if pa.types.is_fixed_size_list(lists.type):
        return int(lists.type.list_size)
    return pc.list_value_length(lists).to_numpy()
