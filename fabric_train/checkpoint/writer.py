"""Write a rank's part of a checkpoint: copy it if training continues meanwhile, hash it, write it and sync it."""

import os
import threading
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from fabric_train.checkpoint.checksums import CHUNK_BYTES, FilePiece, PieceHasher, hash_file, is_part, write_part
from fabric_train.checkpoint.tensors import Write
from fabric_train.files.atomic_folder import fsync

_ALIGNMENT = 16  # of tensors in the staging buffers; a multiple of every dtype's size
_MIN_PINNED = 2**20  # bytes


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
        """Copy the tensors, and return the writes of the copies and a GPU event, None on a CPU.

        After the event, the copies may be read and the tensors may change.
        """
        pins, num_bytes = self._stream is not None, sum(_align(write.data.nbytes) for write in writes)
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
    """Return the sizes of buffers for ``num_bytes`` of pinned memory, powers of two, largest first.

    torch rounds each allocation of pinned memory up to a power of two: one of 5 GB would take 8.
    """
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
        data, offset = write.data, write.offset
        while len(data):
            if not len(room):
                room = next(unused)
            part = data[: len(room) // data.itemsize]
            yield Write(write.file, offset, part), room[: part.nbytes].view(part.dtype)
            data, offset, room = data[len(part) :], offset + part.nbytes, room[_align(part.nbytes) :]


def _align(num_bytes: int) -> int:
    """Return the number of bytes that a tensor takes in a buffer."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class BackgroundTask:
    """A function that runs in a thread, with this rank's device. ``error`` is the exception that ended it, if any."""

    def __init__(self, function: Callable[[], None], device: torch.device) -> None:
        self.error: Exception | None = None
        self._function, self._device = function, device
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the function has not returned."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the function has returned or failed."""
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread has GPU 0, and would make a context there
            self._function()
        except Exception as error:  # noqa: BLE001 - all ranks raise it together
            self.error = error


class RankWriter:
    """A writer of one rank's part of one checkpoint."""

    def __init__(
        self, folder: Path, rank: int, writes: list[Write], staging: Staging | None, write_texts: Callable[[Path], None]
    ) -> None:
        """Prepare to write into ``folder``, which need not exist.

        Args:
            folder: The unfinished checkpoint, the same on all ranks.
            rank: This rank.
            writes: The tensors to write.
            staging: The buffer to copy the tensors into first; None if they will not change during the save.
            write_texts: A function that writes the small files, called on rank 0.
        """
        self._folder, self._rank, self._staging, self._write_texts = folder, rank, staging, write_texts
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
        """Copy, write and sync this rank's part.

        Raises:
            OSError: Writing failed, or the save was abandoned.
        """
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
                if path.is_file() and path.suffix != ".safetensors" and not is_part(path):
                    hashes[path.relative_to(self._folder).as_posix()] = hash_file(path)
        fsync(write_part(self._folder, self._rank, hashes))

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
                for offset, chunk in _chunks(write):
                    if self._is_abandoned:
                        raise OSError("the save was abandoned")
                    hasher.update(offset, chunk)
                    while chunk:
                        written = os.pwrite(descriptor, chunk, offset)
                        chunk, offset = chunk[written:], offset + written
            os.fsync(descriptor)
        except OSError as error:
            if error.errno is None or error.filename:
                raise
            raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            os.close(descriptor)
        return hasher.pieces()


def _chunks(write: Write) -> Iterator[tuple[int, memoryview]]:
    """Yield the offset and bytes of each chunk of a write. A GPU's tensor is copied to the CPU chunk by chunk."""
    offset = write.offset
    for chunk in write.data.view(torch.uint8).split(CHUNK_BYTES):
        yield offset, memoryview(chunk.cpu().numpy())
        offset += chunk.numel()
