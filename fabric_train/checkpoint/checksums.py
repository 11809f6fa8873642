"""Write and check checksums.json, which has the size and the hashes of every file of a checkpoint.

The ranks hash the pieces of each file with XXH3-128 while they write them. So a lost or truncated file is found at
once, and all ranks can check the contents in parallel.
"""

import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import xxhash

from fabric_train.cli.errors import InputError, raise_reached_limit
from fabric_train.files.typed_json import read_json

CHECKSUMS = "checksums.json"
CHUNK_BYTES = 4 << 20  # a chunk is hashed and then written while it is in the processor's cache
_PART = ".checksums-"
_PIECE_CHUNKS = 16  # chunks per hash


@dataclass(frozen=True)
class FilePiece:
    """The XXH3-128 hash of the bytes ``begin`` to ``end`` of a file."""

    begin: int
    end: int
    hash: str


@dataclass(frozen=True)
class _ListedFile:
    size: int
    pieces: list[tuple[int, int, str]]


@dataclass(frozen=True)
class _ChecksumsJson:
    files: dict[str, _ListedFile]


class PieceHasher:
    """A hasher of the chunks that a rank writes to one file, in ascending order of their offsets."""

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
        """Return the pieces of all chunks."""
        self._close()
        return self._pieces

    def _close(self) -> None:
        if self._end > self._begin:
            self._pieces.append(FilePiece(self._begin, self._end, self._hash.hexdigest()))
        self._hash, self._begin = xxhash.xxh3_128(), self._end


def hash_file(path: Path) -> list[FilePiece]:
    """Return the hashed pieces of a file on disk."""
    hasher = PieceHasher()
    for begin, chunk in _chunks(path, 0, path.stat().st_size):
        hasher.update(begin, chunk)
    return hasher.pieces()


def write_part(folder: Path, rank: int, files: dict[str, list[FilePiece]]) -> Path:
    """Write one rank's hashes into an unfinished checkpoint, and return the file."""
    path = folder / f"{_PART}{rank:05d}.json"
    content = {name: [astuple(piece) for piece in pieces] for name, pieces in files.items()}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def is_part(path: Path) -> bool:
    """Return whether ``write_part`` wrote this file of an unfinished checkpoint."""
    return path.name.startswith(_PART)


def join_parts(folder: Path) -> Path:
    """Join the ranks' hashes into checksums.json, and return that file.

    Raises:
        OSError: Some bytes of a file were written by no rank, or by two.
    """
    pieces: dict[str, list[FilePiece]] = {}
    parts = sorted(folder.glob(f"{_PART}*.json"))
    for part in parts:
        for name, of_rank in json.loads(part.read_text(encoding="utf-8")).items():
            pieces.setdefault(name, []).extend(FilePiece(*piece) for piece in of_rank)
    files = {}
    for name, of_file in sorted(pieces.items()):
        of_file.sort(key=lambda piece: piece.begin)
        size = (folder / name).stat().st_size
        if not _is_tiling(of_file, size):
            raise OSError(f"{folder.name}/{name}: not every byte was written once")
        files[name] = {"size": size, "pieces": [astuple(piece) for piece in of_file]}
    target = folder / CHECKSUMS
    target.write_text(json.dumps({"hash": "xxh3_128", "files": files}) + "\n", encoding="utf-8")
    for part in parts:
        part.unlink()
    return target


def find_damage(checkpoint: Path) -> str | None:
    """Return what is wrong with the files of a checkpoint, or None: one is missing or has a wrong size or content.

    This is fast, because it does not check the content of tensors; see ``find_wrong_content``.
    """
    try:
        files = _read(checkpoint)
        for name, (size, pieces) in files.items():
            path = _path(checkpoint, name)
            if not path.is_file():
                return f"{name} is {'not a file' if path.exists() else 'missing'}"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
            if not name.endswith(".safetensors") and (fault := _first_fault(path, name, pieces)):
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
    """Return which file of a checkpoint does not have the written content, or None.

    Args:
        checkpoint: A checkpoint without damage by ``find_damage``.
        rank: This process's number; each process reads its share of the bytes.
        num_ranks: The number of processes that read.
        optimizer: Whether to check the optimizer state too.
    """
    pieces = [
        (name, piece)
        for name, (_, of_file) in _read(checkpoint).items()
        if optimizer or not name.startswith("optimizer/")
        for piece in of_file
    ]
    pieces.sort(key=lambda item: item[1].begin - item[1].end)  # the largest first, so that the shares are even
    with ThreadPoolExecutor(os.cpu_count() if num_ranks == 1 else 1) as threads:
        faults = threads.map(lambda item: _fault(_path(checkpoint, item[0]), *item), pieces[rank::num_ranks])
        return next(filter(None, faults), None)


def _first_fault(path: Path, name: str, pieces: list[FilePiece]) -> str | None:
    return next(filter(None, (_fault(path, name, piece) for piece in pieces)), None)


def _fault(path: Path, name: str, piece: FilePiece) -> str | None:
    digest = xxhash.xxh3_128()
    try:
        for _, chunk in _chunks(path, piece.begin, piece.end):
            digest.update(chunk)
    except OSError as error:
        raise_reached_limit(error)
        return f"{name} cannot be read ({error.strerror})"
    if digest.hexdigest() != piece.hash:
        return f"the bytes {piece.begin:,} to {piece.end:,} of {name} are not those that were written"
    return None


def _chunks(path: Path, begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
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


def _read(checkpoint: Path) -> dict[str, tuple[int, list[FilePiece]]]:
    """Return the size and the pieces of each file.

    Raises:
        ValueError: checksums.json is missing or damaged.
    """
    path = checkpoint / CHECKSUMS
    if not path.is_file():
        raise ValueError(f"{CHECKSUMS} is {'not a file' if path.exists() else 'missing'}")
    try:
        listed = read_json(path, _ChecksumsJson, "use another checkpoint").files
    except InputError:
        raise ValueError(f"{CHECKSUMS} is damaged") from None
    files = {name: (file.size, [FilePiece(*piece) for piece in file.pieces]) for name, file in listed.items()}
    if not all(_is_tiling(pieces, size) for size, pieces in files.values()):
        raise ValueError(f"{CHECKSUMS} is damaged")
    return files


def _is_tiling(pieces: Iterable[FilePiece], size: int) -> bool:
    """Return whether sorted pieces cover a file without gaps and overlaps."""
    covered = 0
    for piece in pieces:
        if piece.begin != covered:
            return False
        covered = piece.end
    return covered == size


def _path(checkpoint: Path, name: str) -> Path:
    """Return the path of a file that checksums.json names.

    Raises:
        ValueError: The file is outside of the checkpoint.
    """
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{CHECKSUMS} names a file outside the checkpoint: {name}")
    return checkpoint / name
