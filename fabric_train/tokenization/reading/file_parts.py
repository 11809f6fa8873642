"""A file that is read as a whole or in parts, and very many of them in little memory."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

from fabric_train.tokenization.reading.listing import READ_AT_ONCE, ListedFile, ListedFiles

_TO_THE_END = -1
_FIELDS = 4


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file, or a part of it: bytes ``start`` to ``stop`` of JSON lines, or those row groups of parquet.

    ``num_bytes`` is its size, of row groups uncompressed. A line belongs to the part in which it begins. ``origin`` is
    the number of the file in its source.
    """

    file: ListedFile
    num_bytes: int
    start: int = 0
    stop: int | None = None
    origin: int = 0

    @property
    def name(self) -> str:
        """Path of the file."""
        return self.file.name

    @property
    def is_read_at_once(self) -> bool:
        """Whether it is a whole file, small enough that its reader has all of it in memory and can hash it."""
        return self.stop is None and self.file.size <= READ_AT_ONCE


class PackedParts(Sequence[FilePart]):
    """Parts of some ``files`` in 32 bytes each."""

    def __init__(self, files: ListedFiles, parts: Iterable[FilePart]) -> None:
        self._files, self._numbers = files, array("q")
        for part in parts:
            stop = _TO_THE_END if part.stop is None else part.stop
            self._numbers.extend((part.origin, part.num_bytes, part.start, stop))

    def __len__(self) -> int:
        return len(self._numbers) // _FIELDS

    @overload
    def __getitem__(self, index: int) -> FilePart: ...

    @overload
    def __getitem__(self, index: slice) -> "PackedParts": ...

    def __getitem__(self, index: int | slice) -> "FilePart | PackedParts":
        if isinstance(index, slice):
            return PackedParts(self._files, map(self.__getitem__, range(*index.indices(len(self)))))
        index = range(len(self))[index]
        origin, num_bytes, start, stop = self._numbers[_FIELDS * index : _FIELDS * (index + 1)]
        return FilePart(self._files[origin], num_bytes, start, None if stop == _TO_THE_END else stop, origin)
