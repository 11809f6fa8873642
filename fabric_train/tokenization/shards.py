"""Divide the input: into shards that are encoded one by one, and shards and files among the tasks of --shard I/N."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fabric_train.tokenization.reading.listing import FilePart
from fabric_train.tokenization.reading.sources import Source

FORMAT = 6  # of a shard's files, see ``shard_files``
_MAX_SHARD_BYTES, _TARGET_NUM_SHARDS = 32 << 20, 64
_MAX_NUM_SHARDS = 8192  # above 256 GiB shards get larger: the file system of a cluster is slow with many files


@dataclass(frozen=True)
class ShardSizes:
    """The least bytes of a shard, and of the finished work that is kept for a restart: less is quickly made again."""

    smallest: int = 1 << 20
    worth_keeping: int = 1 << 20


SIZES = ShardSizes()


@dataclass(frozen=True)
class Shard:
    """Parts of one source that are encoded together; ``key`` names its files, ``source`` is the source's number.

    ``origins`` has the number of each part's file or split, int64 [parts]; ``read_at_once`` whether its reader hashes
    it, bool [parts].
    """

    index: int
    source: int
    parts: Sequence[Any]
    num_bytes: int
    key: str
    origins: np.ndarray
    read_at_once: np.ndarray


def split_into_shards(sources: Sequence[Source], settings: str, sizes: ShardSizes = SIZES) -> list[Shard]:
    """Split the sources, in the order in which they are read, into shards with parts of one source each.

    ``settings`` is everything besides the sources that decides the tokens; it becomes part of each shard's key.
    """
    total = sum(source.num_bytes for source in sources)
    shard_bytes = min(max(total // _TARGET_NUM_SHARDS, sizes.smallest), _MAX_SHARD_BYTES)
    shard_bytes = max(shard_bytes, total // _MAX_NUM_SHARDS)
    shards: list[Shard] = []
    for number, source in enumerate(sources):
        parts: list[Any] = []
        num_bytes = 0
        for part in source.parts(shard_bytes):
            if parts and num_bytes + part.num_bytes > shard_bytes:
                shards.append(_shard(len(shards), number, source, parts, settings))
                parts, num_bytes = [], 0
            parts.append(part)
            num_bytes += part.num_bytes
        if parts:
            shards.append(_shard(len(shards), number, source, parts, settings))
    return shards


def _shard(index: int, number: int, source: Source, parts: list[Any], settings: str) -> Shard:
    identities = [source.identity(part) for part in parts]
    known = all(identity is not None for identity in identities)
    content = "\n".join([f"{FORMAT} {settings}", *map(str, identities)]) if known else os.urandom(16).hex()
    key = hashlib.sha256(content.encode()).hexdigest()[:24]
    return Shard(
        index=index,
        source=number,
        parts=source.pack(parts),
        num_bytes=sum(part.num_bytes for part in parts),
        key=key,
        origins=np.array([part.origin for part in parts], dtype=np.int64),
        read_at_once=np.array([isinstance(part, FilePart) and part.is_read_at_once for part in parts]),
    )


def part_name(source: Source, part: Any) -> str:
    """Return the file of a part, or the name of a dataset that does not consist of files."""
    return part.name if isinstance(part, FilePart) else source.name


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
    sources: Sequence[Source], input_slice: InputSlice, are_read: Sequence[np.ndarray], group_bytes: int = 256 << 20
) -> Iterator[FilesToHash]:
    """Yield the files of a slice, in groups of about ``group_bytes``; the slices of files are not those of shards.

    A file is hashed by one process, so that its SHA-256 is that of the whole file. ``are_read`` are the files of each
    source that are hashed elsewhere, bool [files] each.
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
            elif num_bytes >= group_bytes:
                yield FilesToHash(number, start, index + 1)
                start, num_bytes = index + 1, 0
        if start < len(source.files):
            yield FilesToHash(number, start, len(source.files))
        first += len(source.files)
