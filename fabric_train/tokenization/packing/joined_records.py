"""Read the document indexes of parts as the one array that a full merge would write."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from fabric_train.tokenization.packing.parts import Parts


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
        self._parts, self._split, self._name, self._segments = parts, split, name, tuple(segments)
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
            own, one = np.flatnonzero(owners == owner), self._segments[owner]
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
            records[unknown] = self._parts.read_index(self._split, part, self._name, self.dtype, own)
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
