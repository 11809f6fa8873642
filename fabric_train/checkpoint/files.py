"""Hash the files of a checkpoint in pieces with XXH3-128, and check them against checksums.json.

checksums.json has size and hashes of every file. So a truncated file is found at once, and all ranks can check the
contents in parallel. ``rank_writer.py`` writes it. This module needs no torch: a run is checked before it is imported.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from fabric_train.cli.errors import InputError, raise_reached_limit
from fabric_train.files.regular_file import read_json

CHECKSUMS = "checksums.json"
CHUNK_BYTES = 4 << 20
"""A chunk is hashed and then written while it is in the processor's cache."""
_PIECE_CHUNKS = 16  # chunks per hash


class FilePiece(NamedTuple):
    """The XXH3-128 hash of the bytes ``begin`` to ``end`` of a file."""

    begin: int
    end: int
    hash: str


@dataclass(frozen=True)
class ListedFile:
    """The size of a file in bytes, and the hashes of its pieces."""

    size: int
    pieces: list[FilePiece]

    @property
    def is_tiled(self) -> bool:
        """Whether the sorted pieces cover the file without gaps and overlaps."""
        ends = [0, *(piece.end for piece in self.pieces)]
        return ends[:-1] == [piece.begin for piece in self.pieces] and ends[-1] == self.size


@dataclass(frozen=True)
class ChecksumsJson:
    """The content of checksums.json: the files by their path in the checkpoint."""

    files: dict[str, ListedFile]


class PieceHasher:
    """Hash the chunks that a rank writes to one file, in ascending order of their offsets."""

    def __init__(self) -> None:
        self._pieces: list[FilePiece] = []
        self._begin = self._end = 0
        self._hash = xxhash.xxh3_128()

    def update(self, begin: int, chunk: Any) -> None:
        """Hash the next chunk, any buffer of bytes, at offset ``begin`` of the file."""
        if begin != self._end or self._end - self._begin >= _PIECE_CHUNKS * CHUNK_BYTES:
            self._close()
            self._begin = self._end = begin
        self._hash.update(chunk)
        self._end += len(chunk)

    def pieces(self) -> list[FilePiece]:
        """Return the hashes of all chunks so far."""
        self._close()
        return self._pieces

    def _close(self) -> None:
        if self._end > self._begin:
            self._pieces.append(FilePiece(self._begin, self._end, self._hash.hexdigest()))
        self._hash = xxhash.xxh3_128()
        self._begin = self._end


def hash_file(path: Path) -> list[FilePiece]:
    """Return the hashes of the pieces of a file on disk."""
    hasher = PieceHasher()
    for begin, chunk in _read_chunks(path, 0, path.stat().st_size):
        hasher.update(begin, chunk)
    return hasher.pieces()


def find_damage(checkpoint: Path) -> str | None:
    """Return which file is missing or has a wrong size or, unless it has tensors, a wrong content; None if none."""
    try:
        files = _read(checkpoint)
        for name, file in files.items():
            path = _path(checkpoint, name)
            if not os.path.isfile(path):  # faster than a method of Path
                return f"{name} is {'not a file' if path.exists() else 'missing'}"
            if (size := os.path.getsize(path)) != file.size:
                return f"{name} has {size:,} bytes instead of {file.size:,}"
            faults = () if name.endswith(".safetensors") else (_fault(path, name, piece) for piece in file.pieces)
            if fault := next(filter(None, faults), None):
                return fault
        if "trainer.json" not in files:
            return "trainer.json is missing"
    except OSError as error:
        raise_reached_limit(error)
        return f"{Path(error.filename or checkpoint).name} cannot be read ({error.strerror or error})"
    except ValueError as error:
        return str(error)
    return None


def find_wrong_content(checkpoint: Path, *, rank: int = 0, num_ranks: int = 1, optimizer: bool = True) -> str | None:
    """Return which file does not have the written content, or None; each of ``num_ranks`` processes reads its share."""
    pieces = [
        (name, piece)
        for name, file in _read(checkpoint).items()
        if optimizer or not name.startswith("optimizer/")
        for piece in file.pieces
    ]
    pieces.sort(key=lambda item: item[1].begin - item[1].end)  # the largest first, so that the shares are even
    with ThreadPoolExecutor(os.cpu_count() if num_ranks == 1 else 1) as threads:
        faults = threads.map(lambda item: _fault(_path(checkpoint, item[0]), *item), pieces[rank::num_ranks])
        return next(filter(None, faults), None)


def _fault(path: Path, name: str, piece: FilePiece) -> str | None:
    digest = xxhash.xxh3_128()
    try:
        for _, chunk in _read_chunks(path, piece.begin, piece.end):
            digest.update(chunk)
    except OSError as error:
        raise_reached_limit(error)
        return f"{name} cannot be read ({error.strerror})"
    if digest.hexdigest() != piece.hash:
        return f"the bytes {piece.begin:,} to {piece.end:,} of {name} are not those that were written"
    return None


def _read_chunks(path: Path, begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
    """Yield the offset and the bytes of each chunk in a range of a file. A chunk is valid until the next one."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while begin < end:
            num_bytes = file.readinto(buffer[: min(CHUNK_BYTES, end - begin)])
            if not num_bytes:
                return
            yield begin, buffer[:num_bytes]
            begin += num_bytes


def _read(checkpoint: Path) -> dict[str, ListedFile]:
    """Return the size and the pieces of each file; a ValueError if checksums.json is missing or damaged."""
    path = checkpoint / CHECKSUMS
    if not path.is_file():
        raise ValueError(f"{CHECKSUMS} is {'not a file' if path.exists() else 'missing'}")
    try:
        files = read_json(path, ChecksumsJson, "use another checkpoint").files
    except InputError:
        raise ValueError(f"{CHECKSUMS} is damaged") from None
    if not all(file.is_tiled for file in files.values()):
        raise ValueError(f"{CHECKSUMS} is damaged")
    return files


def _path(checkpoint: Path, name: str) -> Path:
    """Return the path of a file that checksums.json names; a ValueError if it is outside of the checkpoint."""
    if os.path.isabs(name) or ".." in name.split(os.sep):
        raise ValueError(f"{CHECKSUMS} names a file outside the checkpoint: {name}")
    return checkpoint / name
