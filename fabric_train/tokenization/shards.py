"""Divide the input into shards, and into the slices of --shard I/N.

The files of a shard (``shard_files``) are named by its key, a hash of everything that decides their content: the source
file with its size and time, the range that was read, and the settings. So a restarted run reuses the finished shards
that are still valid.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fabric_train.reading.listing import FilePart
from fabric_train.reading.sources import Source

FORMAT = 9  # of a shard's files
_MAX_SHARD_BYTES = 32 << 20
_TARGET_NUM_SHARDS = 64
_MAX_NUM_SHARDS = 8192  # above 256 GiB shards get larger: the file system of a cluster is slow with many files


@dataclass(frozen=True)
class ShardSizes:
    """The fewest bytes of a shard, and of finished work that is kept for a restart: less is quickly done again."""

    smallest: int = 1 << 20
    worth_keeping: int = 1 << 20


SIZES = ShardSizes()


@dataclass(frozen=True)
class Shard:
    """Parts of one source that are encoded together, into one set of files."""

    index: int  # among the shards of all sources
    source: int  # the number of its source
    parts: Sequence[Any]
    num_bytes: int
    key: str  # names its files
    origins: np.ndarray  # int64 [parts], the number of each part's file or split in the source
    read_at_once: np.ndarray  # bool [parts], whether the reader of the part hashes its file


def split_into_shards(sources: Sequence[Source], settings: str, sizes: ShardSizes = SIZES) -> list[Shard]:
    """Split the sources, in order, into shards with parts of one source; ``settings`` enter their keys."""
    total_bytes = sum(source.num_bytes for source in sources)
    shard_bytes = max(total_bytes // _TARGET_NUM_SHARDS, sizes.smallest)
    shard_bytes = min(shard_bytes, _MAX_SHARD_BYTES)
    shard_bytes = max(shard_bytes, total_bytes // _MAX_NUM_SHARDS)
    shards: list[Shard] = []
    for source_number, source in enumerate(sources):
        # fill a shard with parts until the next part would make it too large
        parts: list[Any] = []
        num_bytes = 0
        for part in source.parts(shard_bytes):
            if parts and num_bytes + part.num_bytes > shard_bytes:
                shards.append(_build_shard(len(shards), source_number, source, parts, settings))
                parts = []
                num_bytes = 0
            parts.append(part)
            num_bytes += part.num_bytes
        if parts:
            shards.append(_build_shard(len(shards), source_number, source, parts, settings))
    return shards


def _build_shard(index: int, source_number: int, source: Source, parts: list[Any], settings: str) -> Shard:
    identities = [source.identity(part) for part in parts]
    if None in identities:
        # the content of a part cannot be recognized again: a random key, so that no later run reuses the shard
        content = os.urandom(16).hex()
    else:
        content = "\n".join([f"{FORMAT} {settings}", *map(str, identities)])
    key = hashlib.sha256(content.encode()).hexdigest()[:24]
    read_at_once = [isinstance(part, FilePart) and part.is_read_at_once for part in parts]
    return Shard(
        index=index,
        source=source_number,
        parts=source.pack(parts),
        num_bytes=sum(part.num_bytes for part in parts),
        key=key,
        origins=np.array([part.origin for part in parts], dtype=np.int64),
        read_at_once=np.array(read_at_once),
    )


def part_name(source: Source, part: Any) -> str:
    """Return the file of a part, or the name of a dataset without files."""
    if isinstance(part, FilePart):
        return part.name
    return source.name


@dataclass(frozen=True)
class InputSlice:
    """Slice ``number`` of ``count``, counted from 1, which one task reads. 1 of 1 is the entire input."""

    number: int = 1
    count: int = 1

    def select(self, sizes: Sequence[int]) -> list[bool]:
        """Return whether each of consecutive items, given by their sizes in bytes, is in this slice."""
        return [number == self.number for number in slice_numbers(sizes, self.count)]


def slice_numbers(sizes: Sequence[int], count: int) -> list[int]:
    """Return the slice, 1 to ``count``, with the middle byte of each of consecutive items; ``sizes`` are in bytes."""
    if not sizes:
        return []
    ends = np.cumsum(sizes, dtype=np.int64)
    middles = ends - np.asarray(sizes) / 2
    total_bytes = max(1, int(ends[-1]))
    numbers = 1 + (middles * count / total_bytes).astype(np.int64)
    return [min(number, count) for number in numbers.tolist()]


@dataclass(frozen=True)
class FilesToHash:
    """The files ``start`` to ``stop - 1`` of source ``source``, which one process hashes."""

    source: int
    start: int
    stop: int


def files_to_hash(
    sources: Sequence[Source], input_slice: InputSlice, are_read: Sequence[np.ndarray], group_bytes: int = 256 << 20
) -> Iterator[FilesToHash]:
    """Yield the files of a slice, in groups of about ``group_bytes``; slices of files are not slices of shards.

    A file is hashed by one process, because its SHA-256 covers the full file. ``are_read`` are the files of each
    source that are hashed elsewhere, bool [files] each.
    """
    sizes: list[int] = []
    for source in sources:
        sizes += source.files.sizes
    is_in_slice = np.array(input_slice.select(sizes), dtype=bool)
    is_read = np.concatenate([[], *are_read]).astype(bool)
    is_hashed = (is_in_slice & ~is_read).tolist()  # [files of all sources]

    first_file = 0  # of the source, among the files of all sources
    for source_number, source in enumerate(sources):
        start = 0  # of the current group, in the source
        num_bytes = 0
        for index, size in enumerate(source.files.sizes):
            if is_hashed[first_file + index]:
                num_bytes += size
                stop = index + 1
                is_complete = num_bytes >= group_bytes
            else:  # a group has consecutive files, so it ends before a file that is not hashed
                stop = index
                is_complete = True
            if is_complete:
                if start < stop:
                    yield FilesToHash(source_number, start, stop)
                start = index + 1
                num_bytes = 0
        if start < len(source.files):
            yield FilesToHash(source_number, start, len(source.files))
        first_file += len(source.files)
