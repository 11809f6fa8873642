"""Divide the shards and the files of the input among the tasks of ``--shard I/N``, by bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fabric_train.tokenization.reading.sources import Source
from fabric_train.tokenization.shard_files import Shard

_BYTES_HASHED_TOGETHER = 256 << 20


@dataclass(frozen=True)
class InputSlice:
    """Slice ``number`` of ``count``, from 1: what one task reads. 1 of 1 is all of the input."""

    number: int = 1
    count: int = 1

    def of(self, sizes: Sequence[int]) -> list[bool]:
        """Return which of consecutive items of these sizes in bytes are in this slice."""
        return [number == self.number for number in slice_numbers(sizes, self.count)]


def slice_numbers(sizes: Sequence[int], count: int) -> list[int]:
    """Return the slice, from 1 to ``count``, of each of consecutive items: the one that its middle byte is in.

    Slices have as many bytes each as the items allow.

    Args:
        sizes: bytes of each item.
        count: number of slices.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    total = max(1, int(ends[-1])) if len(ends) else 1
    numbers = 1 + ((ends - np.asarray(sizes) / 2) * count / total).astype(np.int64)
    return [min(number, count) for number in numbers.tolist()]


@dataclass(frozen=True)
class FilesToHash:
    """The files ``start`` to ``stop - 1`` of source ``source``, which one process hashes."""

    source: int
    start: int
    stop: int


def files_read_at_once(sources: Sequence[Source], shards: Sequence[Shard]) -> list[np.ndarray]:
    """Return which files of each source are hashed when their shard is read, bool [files] each."""
    are_read = [np.zeros(len(source.files), dtype=bool) for source in sources]
    for shard in shards:
        are_read[shard.source][shard.origins[shard.read_at_once]] = True
    return are_read


def files_to_hash(
    sources: Sequence[Source], input_slice: InputSlice, are_read: Sequence[np.ndarray]
) -> Iterator[FilesToHash]:
    """Yield the files of a slice, in groups of about 256 MiB; the slices of files are not those of shards.

    A file is hashed by one process, so that SHA-256 of it is as for the whole file.

    Args:
        sources: all sources.
        input_slice: the slice.
        are_read: which files of each source are hashed elsewhere, bool [files] each.
    """
    is_in = input_slice.of([size for source in sources for size in source.files.sizes])
    is_in = (np.array(is_in, dtype=bool) & ~np.concatenate([[], *are_read]).astype(bool)).tolist()
    first = 0
    for number, source in enumerate(sources):
        start, num_bytes = 0, 0
        for index, size in enumerate(source.files.sizes):
            num_bytes += size if is_in[first + index] else 0
            if not is_in[first + index]:
                if start < index:
                    yield FilesToHash(number, start, index)
                start, num_bytes = index + 1, 0
            elif num_bytes >= _BYTES_HASHED_TOGETHER:
                yield FilesToHash(number, start, index + 1)
                start, num_bytes = index + 1, 0
        if start < len(source.files):
            yield FilesToHash(number, start, len(source.files))
        first += len(source.files)
