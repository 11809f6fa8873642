"""A rank's part of a checkpoint on its way to the disk: copied aside if the run goes on meanwhile, hashed, written,
synced.
"""

import os
import threading
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from fabric_train.checkpoint.checksums import CHUNK_BYTES, Piece, PieceHasher, hash_file, is_part, write_part
from fabric_train.checkpoint.file_layout import Write
from fabric_train.files.atomic_folder import fsync

_ALIGNMENT = 16  # of tensors in the buffer, a multiple of every element's size


class Staging:
    """Memory, kept from save to save, that tensors are copied into before the run changes them; pinned for a GPU's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready: Any = None

    def mark(self) -> None:
        """Take what the GPU has been given to do so far as what is to be saved."""
        if self._stream is not None:
            self._ready = torch.cuda.current_stream(self._device).record_event()

    def copy(self, writes: list[Write]) -> tuple[list[Write], Any]:
        """Copy, and return the same writes from here and a GPU's event: once it has come, the copies may be read and
        the tensors change.
        """
        sizes = [-(-write.data.nbytes // _ALIGNMENT) * _ALIGNMENT for write in writes]
        if self._buffer.numel() < sum(sizes):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one's memory may be had for the new one
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self._stream is not None)
        copies, begin = [], 0
        with torch.cuda.stream(self._stream):
            if self._stream is not None:
                self._stream.wait_event(self._ready)
            for write, size in zip(writes, sizes, strict=True):
                place = self._buffer[begin : begin + write.data.nbytes].view(write.data.dtype)
                place.copy_(write.data, non_blocking=True)
                copies.append(Write(write.file, write.offset, place))
                begin += size
            return copies, self._stream.record_event() if self._stream is not None else None


class Background:
    """A function that runs in a thread; its error is kept for who waits for it."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.error: Exception | None = None
        self._function = function
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it has not come to its end."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait until it has come to its end, be that an error."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._function()
        except Exception as error:  # noqa: BLE001 - it is raised by the ranks together
            self.error = error


class Writing:
    """One rank's share in one save."""

    def __init__(
        self, folder: Path, rank: int, writes: list[Write], staging: Staging | None, describe: Callable[[Path], None]
    ) -> None:
        """Prepare to write into ``folder``, which need not exist.

        Args:
            folder: the unfinished checkpoint, the same for all ranks.
            rank: this one's number.
            writes: what it writes.
            staging: where the tensors are copied first; None where they will not change meanwhile.
            describe: writes the small files, on rank 0.
        """
        self._folder, self._rank, self._staging, self._describe = folder, rank, staging, describe
        self._writes = sorted(writes, key=lambda write: (write.file, write.offset))
        self._is_abandoned = False
        self._are_copied = threading.Event()
        self._copied: Any = None
        if staging is not None:
            staging.mark()

    def wait_until_copied(self) -> None:
        """Wait until the tensors may change; a GPU's stream waits instead of this thread."""
        self._are_copied.wait()
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def abandon(self) -> None:
        """Let ``run`` come to its end soon, with an error."""
        self._is_abandoned = True

    def run(self) -> None:
        """Copy, write, sync.

        Raises:
            OSError: the system refused it, or it was abandoned.
        """
        try:
            writes = self._copy()
        finally:
            self._writes = []
            self._are_copied.set()
        hashes: dict[str, list[Piece]] = {}
        for name, of_file in groupby(writes, key=lambda write: write.file):
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            hashes[name] = self._write_file(path, list(of_file))
        self._folder.mkdir(parents=True, exist_ok=True)  # by a rank that has no tensor to write
        if self._rank == 0:
            self._describe(self._folder)
            for path in self._folder.rglob("*"):
                if path.is_file() and path.suffix != ".safetensors" and not is_part(path):
                    hashes[path.relative_to(self._folder).as_posix()] = hash_file(path)
        fsync(write_part(self._folder, self._rank, hashes))

    def _copy(self) -> list[Write]:
        if self._staging is None:
            return self._writes
        copies, self._copied = self._staging.copy(self._writes)
        self._are_copied.set()
        if self._copied is not None:
            self._copied.synchronize()
        return copies

    def _write_file(self, path: Path, writes: list[Write]) -> list[Piece]:
        """Write the places of one file, in their order, and return their hashes."""
        hasher = PieceHasher()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            for write in writes:
                for offset, chunk in _chunks(write):
                    if self._is_abandoned:
                        raise OSError("the save was given up")
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
    """Cut a write's bytes; those of a GPU come to the CPU one chunk at a time."""
    offset = write.offset
    for chunk in write.data.view(torch.uint8).split(CHUNK_BYTES):
        yield offset, memoryview(chunk.cpu().numpy())
        offset += chunk.numel()
