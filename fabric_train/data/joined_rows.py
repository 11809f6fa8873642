"""Read rows of several splits as if they were one split: ranges of rows, one after the other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain

import numpy as np

from fabric_train.data.mixture_sources import SplitRange
from fabric_train.data.teacher_states import StatesReader
from fabric_train.data.token_dataset import IndexedRows, RowPieces, StoredRow


@dataclass(frozen=True)
class RowsOfSplit:
    """The part of a request for rows that goes to one split."""

    split: int
    """The index of the split."""
    positions: list[int]
    """The positions of these rows in the request."""
    rows: list[int]
    """The numbers of these rows in the split."""


class JoinedRows(IndexedRows):
    """The rows of ``ranges`` of several splits, one range after the other; by default all rows of all splits."""

    def __init__(self, splits: Sequence[IndexedRows], ranges: Sequence[SplitRange] | None = None) -> None:
        """Join ranges of rows of several splits.

        Args:
            splits: The splits.
            ranges: Which rows of which split come one after the other; by default all rows of all splits.
        """
        if ranges is None:
            ranges = [SplitRange(index, range(len(split))) for index, split in enumerate(splits)]
        self._splits = tuple(splits)
        self._ranges = tuple(ranges)
        self._starts = np.array([0, *accumulate(len(split_range.rows) for split_range in self._ranges)])
        self.isolates = splits[0].isolates
        # sources of one name are one source, also in several splits
        names = chain.from_iterable(split.source_names for split in splits)
        self.source_names = tuple(dict.fromkeys(names))
        # for each split, the index in self.source_names of each of the split's own sources
        self._joined_sources: list[np.ndarray] = []
        for split in splits:
            joined_indices = [self.source_names.index(name) for name in split.source_names]
            self._joined_sources.append(np.array(joined_indices))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def longest(self) -> int:
        return max(split.longest() for split in self._splits)

    def lengths(self) -> set[int]:
        return set[int]().union(*(split.lengths() for split in self._splits))

    def locate(self, row: int) -> tuple[int, int]:
        """Return the index of the split that has a row, and the row's number in the split."""
        range_index = int(np.searchsorted(self._starts, row, side="right")) - 1
        split_range = self._ranges[range_index]
        return split_range.split, split_range.rows[row - int(self._starts[range_index])]

    def row_at(self, split: int, row_of_split: int) -> int:
        """Return the row that is row ``row_of_split`` of a split: the inverse of ``locate``.

        Raises:
            ValueError: no range has that row.
        """
        for start, split_range in zip(self._starts.tolist(), self._ranges, strict=False):
            if split_range.split == split and row_of_split in split_range.rows:
                return start + split_range.rows.index(row_of_split)
        raise ValueError(f"no range has row {row_of_split} of split {split}")

    def read(self, indices: Sequence[int]) -> list[StoredRow]:
        rows_by_position: dict[int, StoredRow] = {}
        for request in self._requests(indices):
            stored_rows = self._splits[request.split].read(request.rows)
            rows_by_position |= zip(request.positions, stored_rows, strict=True)
        return [rows_by_position[position] for position in range(len(indices))]

    def pieces(self, indices: Sequence[int]) -> RowPieces:
        """Return the pieces of the rows in their order, with sources as indices of this object's ``source_names``."""
        # ask each split for the pieces of its rows
        pieces_of_splits = []
        for request in self._requests(indices):
            pieces = self._splits[request.split].pieces(request.rows)
            positions = np.array(request.positions)[pieces.rows]
            sources = self._joined_sources[request.split][pieces.sources]
            pieces_of_splits.append(replace(pieces, rows=positions, sources=sources))

        # join each field, and sort the pieces by row
        joined = {}
        for field in fields(RowPieces):
            values = [getattr(pieces, field.name) for pieces in pieces_of_splits]
            if values[0] is not None:  # all splits have it, or none
                joined[field.name] = np.concatenate(values)
        in_order = np.argsort(joined["rows"], kind="stable")
        return RowPieces(**{name: values[in_order] for name, values in joined.items()})

    def states_reader_of(self, row: int) -> tuple[StatesReader, int] | None:
        split, row_of_split = self.locate(row)
        return self._splits[split].states_reader_of(row_of_split)

    def main_sources(self) -> np.ndarray:
        sources_of_splits = []
        for joined_sources, split in zip(self._joined_sources, self._splits, strict=True):
            sources_of_splits.append(joined_sources[split.main_sources()])
        sources_of_ranges = []
        for split_range in self._ranges:
            sources = sources_of_splits[split_range.split]
            sources_of_ranges.append(sources[split_range.rows.start : split_range.rows.stop])
        return np.concatenate(sources_of_ranges)

    def _requests(self, indices: Sequence[int]) -> Iterator[RowsOfSplit]:
        """Yield the part of the request for each split that has some of the rows."""
        requests: dict[int, RowsOfSplit] = {}
        for position, index in enumerate(indices):
            split, row = self.locate(index)
            request = requests.setdefault(split, RowsOfSplit(split, [], []))
            request.positions.append(position)
            request.rows.append(row)
        yield from requests.values()
