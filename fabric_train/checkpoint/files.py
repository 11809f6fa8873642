"""Hash the files of a checkpoint in pieces with XXH3-128, and check them against checksums.json.

checksums.json has the size and the hashes of every file. So a truncated file is found immediately, and all ranks can
check the contents in parallel. ``rank_writer.py`` writes it. This module does not import torch, which is slow: a run is
checked before that.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from fabric_train.cli.errors import InputError, raise_if_limit_reached
from fabric_train.files.typed_json import read_json

CHECKSUMS = "checksums.json"
CHUNK_BYTES = 4 << 20
"""A chunk is hashed and then written while it is in the processor's cache."""
_CHUNKS_PER_PIECE = 16


class FilePiece(NamedTuple):
    """The XXH3-128 hash of the bytes ``begin`` to ``end`` of a file."""

    begin: int
    end: int
    hash: str

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self.end - self.begin


@dataclass(frozen=True)
class ListedFile:
    """The size of a file in bytes, and the hashes of its pieces."""

    size: int
    pieces: list[FilePiece]

    @property
    def is_tiled(self) -> bool:
        """Whether the sorted pieces cover the file without gaps and overlaps."""
        position = 0
        for piece in self.pieces:
            if piece.begin != position:
                return False
            position = piece.end
        return position == self.size


@dataclass(frozen=True)
class ChecksumsJson:
    """The content of checksums.json: the files by their path in the checkpoint."""

    files: dict[str, ListedFile]


class PieceHasher:
    """Hash the chunks that a rank writes to one file, in ascending order of their offsets.

    Consecutive chunks are joined to pieces of up to 64 MiB, each with one hash.
    """

    def __init__(self) -> None:
        self._pieces: list[FilePiece] = []
        # the piece in progress
        self._begin = 0
        self._end = 0
        self._hasher = xxhash.xxh3_128()

    def update(self, begin: int, chunk: Any) -> None:
        """Hash the next chunk, any buffer of bytes, at offset ``begin`` of the file."""
        is_consecutive = begin == self._end
        is_full = self._end - self._begin >= _CHUNKS_PER_PIECE * CHUNK_BYTES
        if not is_consecutive or is_full:
            self._end_piece()
            self._begin = begin
            self._end = begin
        self._hasher.update(chunk)
        self._end += len(chunk)

    def pieces(self) -> list[FilePiece]:
        """Return the hashes of all chunks so far."""
        self._end_piece()
        return self._pieces

    def _end_piece(self) -> None:
        if self._end > self._begin:
            self._pieces.append(FilePiece(self._begin, self._end, self._hasher.hexdigest()))
        self._hasher = xxhash.xxh3_128()
        self._begin = self._end


def hash_file(path: Path) -> list[FilePiece]:
    """Return the hashes of the pieces of a file on disk."""
    hasher = PieceHasher()
    for begin, chunk in _read_chunks(path, 0, path.stat().st_size):
        hasher.update(begin, chunk)
    return hasher.pieces()


def find_damage(checkpoint: Path) -> str | None:
    """Check a checkpoint quickly: the size of every file, and the content of files without tensors.

    Returns:
        Which file is missing or damaged, or None.
    """
    try:
        files = _read_checksums(checkpoint)
        for name, file in files.items():
            path = _resolve(checkpoint, name)
            # exists, with its size
            if not os.path.isfile(path):  # faster than a method of Path
                return f"{name} is {'not a file' if path.exists() else 'missing'}"
            size = os.path.getsize(path)
            if size != file.size:
                return f"{name} has {size:,} bytes instead of {file.size:,}"
            # contents of small files; tensors take long, see find_wrong_content
            if name.endswith(".safetensors"):
                continue
            for piece in file.pieces:
                fault = _find_piece_fault(path, name, piece)
                if fault:
                    return fault
        if "trainer.json" not in files:
            return "trainer.json is missing"
    except OSError as error:
        raise_if_limit_reached(error)  # too many open files: this is no damage
        return f"{Path(error.filename or checkpoint).name} cannot be read ({error.strerror or error})"
    except ValueError as error:
        return str(error)
    return None


def find_wrong_content(checkpoint: Path, *, rank: int = 0, num_ranks: int = 1, optimizer: bool = True) -> str | None:
    """Check the contents of a checkpoint's files against their hashes.

    Args:
        checkpoint: Folder of the checkpoint.
        rank: Number of this process among ``num_ranks`` processes, which each check a share of the bytes.
        num_ranks: Number of processes that check this checkpoint together.
        optimizer: Also check the states of the optimizer.

    Returns:
        Which file's content differs from what was written, or None.
    """
    pieces: list[tuple[str, FilePiece]] = []
    for name, file in _read_checksums(checkpoint).items():
        if optimizer or not name.startswith("optimizer/"):
            pieces += [(name, piece) for piece in file.pieces]
    # the largest first, so that the shares are even
    pieces.sort(key=lambda item: item[1].size, reverse=True)

    def find_fault(item: tuple[str, FilePiece]) -> str | None:
        name, piece = item
        return _find_piece_fault(_resolve(checkpoint, name), name, piece)

    num_threads = os.cpu_count() if num_ranks == 1 else 1  # several ranks of a machine share its processors
    with ThreadPoolExecutor(num_threads) as threads:
        faults = threads.map(find_fault, pieces[rank::num_ranks])
        return next((fault for fault in faults if fault), None)


def _find_piece_fault(path: Path, name: str, piece: FilePiece) -> str | None:
    """Return why a piece of the file ``name`` cannot be read or differs from what was written, or None."""
    hasher = xxhash.xxh3_128()
    try:
        for _, chunk in _read_chunks(path, piece.begin, piece.end):
            hasher.update(chunk)
    except OSError as error:
        raise_if_limit_reached(error)
        return f"{name} cannot be read ({error.strerror})"
    if hasher.hexdigest() != piece.hash:
        return f"bytes {piece.begin:,} to {piece.end:,} of {name} have changed since they were written"
    return None


def _read_chunks(path: Path, begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
    """Yield the offset and the bytes of each chunk in a range of a file. A chunk is valid until the next one."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        offset = begin
        while offset < end:
            num_bytes = file.readinto(buffer[: min(CHUNK_BYTES, end - offset)])
            if not num_bytes:  # the file has become shorter
                return
            yield offset, buffer[:num_bytes]
            offset += num_bytes


def _read_checksums(checkpoint: Path) -> dict[str, ListedFile]:
    """Return the size and the pieces of each file; a ValueError if checksums.json is missing or damaged."""
    path = checkpoint / CHECKSUMS
    # every file must be listed, and every byte of it have a hash
    if not path.is_file():
        raise ValueError(f"{CHECKSUMS} is {'not a file' if path.exists() else 'missing'}")
    try:
        files = read_json(path, ChecksumsJson, "use another checkpoint").files
    except InputError:
        raise ValueError(f"{CHECKSUMS} is damaged") from None
    if not all(file.is_tiled for file in files.values()):
        raise ValueError(f"{CHECKSUMS} is damaged")
    return files


def _resolve(checkpoint: Path, name: str) -> Path:
    """Return the path of a file that checksums.json names; a ValueError if it is outside the checkpoint."""
    if os.path.isabs(name) or ".." in name.split(os.sep):
        raise ValueError(f"{CHECKSUMS} names a file outside the checkpoint: {name}")
    return checkpoint / name
