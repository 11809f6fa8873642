"""The splits of a token dataset that ``datasets`` opens, and the checks of their columns."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fabric_train.cli.errors import InputError, first_line, raise_reached_limit
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

    def place(self, row: int) -> tuple[Path, int]:
        """Return the file that has a row, and the row's number in it."""


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

    def place(self, row: int) -> tuple[Path, int]:
        first = 0
        file = ""
        number = row
        for file in (entry["filename"] for entry in self.split.cache_files):
            number = row - first
            first = first + token_folder.map_table(file)[0].num_rows
            if row < first:
                break
        return Path(file), number


def load_splits(folder: str) -> "tuple[datasets.Dataset, datasets.Dataset | None]":
    """Open the train split and, if there is one, the validation split of a folder; InputError if it is damaged."""
    import datasets  # slow, and not needed to describe the data of a run

    try:
        with token_folder.without_read_ahead():
            splits = datasets.load_from_disk(folder)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise_reached_limit(error)
        raise InputError(f"--train_data_dir {folder}: damaged, {first_line(error)}; tokenize again") from error
    except (ArithmeticError, AttributeError, KeyError, TypeError) as error:  # raised by datasets for unexpected JSON
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"--train_data_dir {folder}: damaged, {reason}; tokenize again") from error
    except IndexError as error:  # raised by datasets for a split without rows, which has no file
        raise InputError(f"--train_data_dir {folder}: a split has no rows; leave it out or tokenize again") from error
    if "train" not in splits:
        raise InputError(
            f"--train_data_dir {folder}: no train split, only {', '.join(splits)}; make one with fabric-train tokenize"
        )
    validation = next((splits[name] for name in VALIDATION_NAMES if name in splits), None)
    for name, split in (("train", splits["train"]), ("validation", validation)):
        fault = _fault_of_columns(split) if split is not None else None
        if fault:
            raise InputError(
                f"--train_data_dir {folder}: {name} has {fault}; tokenize again with fabric-train tokenize"
            )
    if len(splits["train"]) == 0:
        raise InputError(f"--train_data_dir {folder}: the train split has no rows; tokenize again with more documents")
    return splits["train"], validation


def _fault_of_columns(split: "datasets.Dataset") -> str | None:
    """Return the fault of a split's columns of tokens, labels and document starts; None if they are right."""
    if "input_ids" not in split.column_names:
        return f"no column input_ids, only {', '.join(split.column_names)}"
    columns = [name for name in ("input_ids", "labels", "document_starts") if name in split.column_names]
    for name in columns:
        kind = split.data.column(name).type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not is_list or not pa.types.is_integer(kind.value_type):
            return f"a column {name} of {kind}, not of lists of {'positions' if 'start' in name else 'token ids'}"
        if not is_sound(split.data.column(name), full=False):
            return f"a damaged column {name}: lists outside of their values"
        if any(chunk.null_count or chunk.flatten().null_count for chunk in split.data.column(name).chunks):
            return f"gaps (nulls) in its column {name}"
    lengths = [_row_lengths(split, name) for name in columns if "start" not in name]
    if len(lengths) == 2 and np.any(lengths[0] != lengths[1]):
        first = int(np.argmax(lengths[0] != lengths[1]))
        return f"rows whose labels are not as many as their input_ids, row {first} first"
    return None


def is_sound(lists: pa.Table | pa.ChunkedArray, full: bool = True) -> bool:
    """Return whether lists lie inside of their values, or only the first and last; else pyarrow aborts the process."""
    try:
        lists.validate(full=full)
    except pa.ArrowInvalid:
        return False
    return True


def _row_lengths(split: "datasets.Dataset", column: str) -> np.ndarray | int:
    """Return the values in each row of a column of lists, integers [rows].

    Rows that ``tokenize_dataset.py`` writes have lists of one length, which is in the column's type: it is returned
    alone, so that opening a dataset takes no longer if it has more rows.
    """
    values = split.data.column(column)
    if pa.types.is_fixed_size_list(values.type):
        return int(values.type.list_size)
    return pc.list_value_length(values).to_numpy()
