"""Write this rank's part of a checkpoint's files, with their hashes, and join the hashes into checksums.json.

The ranks hash the pieces of each file with XXH3-128 while they write them.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from fabric_train.checkpoint.files import (
    CHECKSUMS,
    CHUNK_BYTES,
    ChecksumsJson,
    FilePiece,
    ListedFile,
    PieceHasher,
    hash_file,
)
from fabric_train.files.atomic_folder import fsync
from fabric_train.model.weight_files import Entry, write_shard_index

_PART = ".checksums-"
_ALIGNMENT = 16  # of tensors in the staging buffers; a multiple of every dtype's size
_MIN_PINNED = 2**20  # bytes


@dataclass(frozen=True)
class Write:
    """A flat tensor on any device, and the file and byte offset to write it to."""

    file: str
    offset: int
    data: torch.Tensor


class Staging:
    """Host buffers, reused by all saves, for copies of the tensors before training changes them; pinned for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[torch.Tensor] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready: Any = None

    def mark(self) -> None:
        """Record an event on the GPU; the save contains the state at this point."""
        if self._stream is not None:
            self._ready = torch.cuda.current_stream(self._device).record_event()

    def copy(self, writes: list[Write]) -> tuple[list[Write], Any]:
        """Copy the tensors; after the returned GPU event, None on a CPU, they may change and copies are complete."""
        pins = self._stream is not None
        num_bytes = sum(_align(write.data.nbytes) for write in writes)
        if sum(map(len, self._buffers)) < num_bytes:
            self._buffers = []  # frees the old buffers before new ones are allocated
            sizes = pinned_sizes(num_bytes) if pins else [num_bytes]
            self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=pins) for size in sizes]
        copies = []
        with torch.cuda.stream(self._stream):
            if self._stream is not None:
                self._stream.wait_event(self._ready)
            for write, place in _place(writes, self._buffers):
                place.copy_(write.data, non_blocking=True)
                copies.append(Write(write.file, write.offset, place))
            return copies, self._stream.record_event() if self._stream is not None else None


def pinned_sizes(num_bytes: int) -> list[int]:
    """Return sizes of buffers for ``num_bytes`` of pinned memory: powers of two, as torch rounds, the largest first."""
    sizes = []
    while num_bytes > 0:
        sizes.append(max(1 << (num_bytes.bit_length() - 1), _MIN_PINNED))
        num_bytes -= sizes[-1]
    return sizes


def _place(writes: list[Write], buffers: list[torch.Tensor]) -> Iterator[tuple[Write, torch.Tensor]]:
    """Yield the writes, split where a buffer ends, each with its place in the buffers."""
    unused = iter(buffers)
    room = torch.empty(0, dtype=torch.uint8)
    for write in writes:
        data = write.data
        offset = write.offset
        while len(data):
            if not len(room):
                room = next(unused)
            part = data[: len(room) // data.itemsize]
            yield Write(write.file, offset, part), room[: part.nbytes].view(part.dtype)
            data = data[len(part) :]
            offset = offset + part.nbytes
            room = room[_align(part.nbytes) :]


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class BackgroundTask:
    """A function that runs in a thread, with this rank's device. ``error`` is the exception that ended it, if any."""

    def __init__(self, function: Callable[[], None], device: torch.device) -> None:
        self.error: Exception | None = None
        self._function = function
        self._device = device
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the function has ended."""
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread has GPU 0, and would make a context there
            self._function()
        except Exception as error:  # noqa: BLE001 - all ranks raise it together
            self.error = error


class RankWriter:
    """Writes one rank's part of one checkpoint."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        writes: list[Write],
        staging: Staging | None,
        write_texts: Callable[[Path], None],
        first_rows: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Prepare to write into ``folder``, the same on all ranks; ``write_texts`` is for rank 0.

        For ``first_rows`` see :func:`write_part`.
        """
        self._folder = folder
        self._rank = rank
        self._staging = staging
        self._write_texts = write_texts
        self._first_rows = first_rows
        self._writes = sorted(writes, key=lambda write: (write.file, write.offset))
        self._is_abandoned = False
        self._is_copied = threading.Event()
        self._copy_event: Any = None
        if staging is not None:
            staging.mark()

    def wait_until_copied(self) -> None:
        """Wait until the tensors may change. On a GPU, the current stream waits for the copies, not this thread."""
        self._is_copied.wait()
        if self._copy_event is not None:
            torch.cuda.current_stream().wait_event(self._copy_event)

    def abandon(self) -> None:
        """Make ``run`` end soon with an error."""
        self._is_abandoned = True

    def run(self) -> None:
        """Copy, write and sync this rank's part; an OSError if that failed or the save was abandoned."""
        try:
            writes = self._copy()
        finally:
            self._writes = []
            self._is_copied.set()
        hashes: dict[str, list[FilePiece]] = {}
        for name, of_file in groupby(writes, key=lambda write: write.file):
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            hashes[name] = self._write_file(path, list(of_file))
        self._folder.mkdir(parents=True, exist_ok=True)  # a rank without tensors has not made it yet
        if self._rank == 0:
            self._write_texts(self._folder)
            for path in self._folder.rglob("*"):
                if path.is_file() and path.suffix != ".safetensors" and not path.name.startswith(_PART):
                    hashes[path.relative_to(self._folder).as_posix()] = hash_file(path)
        fsync(write_part(self._folder, self._rank, hashes, self._first_rows))

    def _copy(self) -> list[Write]:
        if self._staging is None:
            return self._writes
        copies, self._copy_event = self._staging.copy(self._writes)
        self._is_copied.set()
        if self._copy_event is not None:
            self._copy_event.synchronize()
        return copies

    def _write_file(self, path: Path, writes: list[Write]) -> list[FilePiece]:
        """Write the tensors of one file in order of their offsets, and return their hashes."""
        hasher = PieceHasher()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            for write in writes:
                offset = write.offset
                for part in write.data.view(torch.uint8).split(CHUNK_BYTES):
                    if self._is_abandoned:
                        raise OSError("the save was abandoned")
                    chunk = memoryview(part.cpu().numpy())
                    hasher.update(offset, chunk)
                    while chunk:
                        written = os.pwrite(descriptor, chunk, offset)
                        chunk = chunk[written:]
                        offset = offset + written
            os.fsync(descriptor)
        except OSError as error:
            if error.errno is None or error.filename:
                raise
            raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            os.close(descriptor)
        return hasher.pieces()


def write_part(
    folder: Path,
    rank: int,
    files: dict[str, list[FilePiece]],
    first_rows: Mapping[str, Sequence[int]] | None = None,
) -> Path:
    """Write one rank's hashes into an unfinished checkpoint, and return the file.

    ``first_rows`` are what ``tensors.first_rows`` returns, by the sharded part of the checkpoint.
    """
    path = folder / f"{_PART}{rank:05d}.json"
    path.write_text(json.dumps({"files": files, "first_rows": first_rows or {}}), encoding="utf-8")
    return path


def join_parts(folder: Path, sharded: Mapping[str, Sequence[Entry]] | None = None) -> Path:
    """Join the ranks' hashes into checksums.json, and their rows into an index of each sharded part.

    Args:
        folder: an unfinished checkpoint, in which every rank has called :func:`write_part`.
        sharded: the tensors of each sharded part.

    Raises:
        OSError: a byte was written by no rank, or by two.
    """
    pieces: dict[str, list[FilePiece]] = {}
    first_rows: dict[str, dict[int, list[int]]] = {}
    parts = sorted(folder.glob(f"{_PART}*.json"))
    for part in parts:
        rank = int(part.stem.removeprefix(_PART))
        content = json.loads(part.read_text(encoding="utf-8"))
        for name, of_rank in content["files"].items():
            pieces.setdefault(name, []).extend(FilePiece(*piece) for piece in of_rank)
        for name, rows in content["first_rows"].items():
            first_rows.setdefault(name, {})[rank] = rows
    for name, entries in (sharded or {}).items():
        if entries:
            index = write_shard_index(folder / name, entries, first_rows[name])
            pieces[index.relative_to(folder).as_posix()] = hash_file(index)
    files = {name: ListedFile((folder / name).stat().st_size, sorted(of)) for name, of in sorted(pieces.items())}
    for name, file in files.items():
        if not file.is_tiled:
            raise OSError(f"{folder.name}/{name}: not every byte was written once")
    target = folder / CHECKSUMS
    target.write_text(json.dumps({"hash": "xxh3_128", **asdict(ChecksumsJson(files))}) + "\n", encoding="utf-8")
    for part in parts:
        part.unlink()
    return target
