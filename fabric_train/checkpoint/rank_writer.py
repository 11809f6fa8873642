"""Write this rank's part of a checkpoint, and join the hashes of all ranks into checksums.json.

The ranks hash the pieces of each file with XXH3-128 while they write them.
"""

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

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
from fabric_train.model.shard_index import Entry, write_shard_index

_RANK_FILE_PREFIX = ".checksums-"
_ALIGNMENT = 16  # bytes, of tensors in the staging buffers; a multiple of every dtype's size
_MIN_PINNED = 2**20  # bytes


@dataclass(frozen=True)
class Write:
    """A flat tensor on any device, and the file and byte offset to write it to."""

    file: str
    offset: int
    data: torch.Tensor


class Staging:
    """Host buffers into which a save copies the tensors before training changes them.

    All saves use the same buffers. For a GPU they are pinned, and copies run on a separate stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[torch.Tensor] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._state_is_final: torch.cuda.Event | None = None

    def mark(self) -> None:
        """Record an event on the GPU: the save has the state at this point."""
        if self._stream is not None:
            self._state_is_final = torch.cuda.current_stream(self._device).record_event()

    def copy(self, writes: list[Write]) -> tuple[list[Write], torch.cuda.Event | None]:
        """Copy the tensors into the buffers.

        Returns:
            The writes with the copies in place of the tensors, and the GPU event after which the copies are complete
            and the tensors may change. On a CPU the event is None: the copies are complete.
        """
        # enlarge the buffers if needed
        is_gpu = self._stream is not None
        num_bytes = sum(_align(write.data.nbytes) for write in writes)
        if sum(len(buffer) for buffer in self._buffers) < num_bytes:
            self._buffers = []  # frees the old buffers before new ones are allocated
            sizes = pinned_sizes(num_bytes) if is_gpu else [num_bytes]
            self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=is_gpu) for size in sizes]

        copies = []
        with torch.cuda.stream(self._stream):  # does nothing on a CPU
            if self._stream is not None and self._state_is_final is not None:
                self._stream.wait_event(self._state_is_final)
            for write, block in _assign_blocks(writes, self._buffers):
                block.copy_(write.data, non_blocking=True)
                copies.append(Write(write.file, write.offset, block))
        if self._stream is None:
            return copies, None
        return copies, self._stream.record_event()


def pinned_sizes(num_bytes: int) -> list[int]:
    """Return sizes of pinned buffers for ``num_bytes`` bytes, the largest first.

    They are powers of two: torch rounds pinned memory up to one, which would waste up to half of a single buffer.
    """
    sizes = []
    while num_bytes > 0:
        largest_power = 1 << (num_bytes.bit_length() - 1)
        size = max(largest_power, _MIN_PINNED)
        sizes.append(size)
        num_bytes -= size
    return sizes


def _assign_blocks(writes: list[Write], buffers: list[torch.Tensor]) -> Iterator[tuple[Write, torch.Tensor]]:
    """Yield the writes, each with its block of a buffer; a write is split where a buffer ends."""
    unused_buffers = iter(buffers)
    free_bytes = torch.empty(0, dtype=torch.uint8)  # the unused end of the current buffer
    for write in writes:
        data = write.data
        offset = write.offset
        while len(data):
            if not len(free_bytes):
                free_bytes = next(unused_buffers)
            block_data = data[: len(free_bytes) // data.itemsize]
            block = free_bytes[: block_data.nbytes].view(block_data.dtype)
            yield Write(write.file, offset, block_data), block
            data = data[len(block_data) :]
            offset = offset + block_data.nbytes
            free_bytes = free_bytes[_align(block_data.nbytes) :]


def _align(num_bytes: int) -> int:
    """Round up to a multiple of the alignment."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class BackgroundTask:
    """A function that runs in a thread, with this rank's device."""

    def __init__(self, function: Callable[[], None], device: torch.device) -> None:
        self.error: Exception | None = None
        """The exception that ended the function, if any."""
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
                torch.cuda.set_device(self._device)  # a new thread uses GPU 0, and would create a context there
            self._function()
        except Exception as error:  # noqa: BLE001 - all ranks raise it together
            self.error = error


class RankWriter:
    """Write one rank's part of one checkpoint."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        writes: list[Write],
        staging: Staging | None,
        write_texts: Callable[[Path], None],
        first_rows: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Prepare the writes.

        Args:
            folder: The unfinished checkpoint, the same on all ranks.
            rank: This rank.
            writes: This rank's parts of the tensors.
            staging: Buffers into which the tensors are copied first; None writes them directly.
            write_texts: Writes the files without tensors to ``folder``; rank 0 calls it.
            first_rows: See :func:`write_rank_hashes`.
        """
        self._folder = folder
        self._rank = rank
        self._staging = staging
        self._write_texts = write_texts
        self._first_rows = first_rows
        self._writes = sorted(writes, key=lambda write: (write.file, write.offset))
        self._is_abandoned = False
        self._is_copied = threading.Event()
        self._copy_event: torch.cuda.Event | None = None
        if staging is not None:
            staging.mark()

    def wait_until_copied(self) -> None:
        """Wait until the tensors may change. On a GPU, the current stream waits for the copies, not this thread."""
        self._is_copied.wait()
        if self._copy_event is not None:
            torch.cuda.current_stream().wait_event(self._copy_event)

    def abandon(self) -> None:
        """Make :meth:`run` end soon with an error."""
        self._is_abandoned = True

    def run(self) -> None:
        """Copy, write and sync this rank's part; an OSError if that failed or the save was abandoned."""
        # copy the tensors, so that training can continue
        try:
            writes = self._copy()
        finally:
            self._writes = []
            self._is_copied.set()

        # write this rank's bytes of each file
        hashes: dict[str, list[FilePiece]] = {}
        for name, file_writes in groupby(writes, key=lambda write: write.file):
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            hashes[name] = write_tensors(path, file_writes, lambda: self._is_abandoned)

        # files without tensors
        self._folder.mkdir(parents=True, exist_ok=True)  # a rank without tensors has not made it yet
        if self._rank == 0:
            self._write_texts(self._folder)
            for path in self._folder.rglob("*"):
                is_tensor_file = path.suffix == ".safetensors"  # hashed by the ranks that wrote it
                is_rank_file = path.name.startswith(_RANK_FILE_PREFIX)  # removed by ``join_rank_hashes``
                if path.is_file() and not is_tensor_file and not is_rank_file:
                    hashes[path.relative_to(self._folder).as_posix()] = hash_file(path)

        fsync(write_rank_hashes(self._folder, self._rank, hashes, self._first_rows))

    def _copy(self) -> list[Write]:
        """Return the writes with copies of the tensors in host memory, if there is staging."""
        if self._staging is None:
            return self._writes
        copies, self._copy_event = self._staging.copy(self._writes)
        self._is_copied.set()
        if self._copy_event is not None:
            self._copy_event.synchronize()
        return copies


def write_tensors(path: Path, writes: Iterable[Write], is_abandoned: Callable[[], bool]) -> list[FilePiece]:
    """Write tensors of one file in ascending order of their offsets, and sync it.

    Args:
        path: The file; its folder exists.
        writes: The tensors, each of which may be made when it is asked for.
        is_abandoned: Called before each chunk; True ends the writing with an OSError.

    Returns:
        The hashes of what was written.
    """
    hasher = PieceHasher()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        for write in writes:
            offset = write.offset
            for tensor_chunk in write.data.view(torch.uint8).split(CHUNK_BYTES):
                if is_abandoned():
                    raise OSError("the save was abandoned")
                chunk = memoryview(tensor_chunk.cpu().numpy())
                hasher.update(offset, chunk)
                while chunk:  # the system may write only a part of it
                    num_written = os.pwrite(descriptor, chunk, offset)
                    chunk = chunk[num_written:]
                    offset = offset + num_written
        os.fsync(descriptor)
    except OSError as error:
        if error.errno is None or error.filename:
            raise
        # os.pwrite and os.fsync do not name the file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)
    return hasher.pieces()


def write_rank_hashes(
    folder: Path,
    rank: int,
    files: dict[str, list[FilePiece]],
    first_rows: Mapping[str, Sequence[int]] | None = None,
) -> Path:
    """Write one rank's hashes into an unfinished checkpoint.

    Args:
        folder: The unfinished checkpoint.
        rank: The rank.
        files: The hashes of what the rank has written, by the file's path in the checkpoint.
        first_rows: The result of ``tensors.first_rows`` for each sharded part of the checkpoint.

    Returns:
        The file with the hashes.
    """
    path = folder / f"{_RANK_FILE_PREFIX}{rank:05d}.json"
    path.write_text(json.dumps({"files": files, "first_rows": first_rows or {}}), encoding="utf-8")
    return path


def join_rank_hashes(folder: Path, sharded: Mapping[str, Sequence[Entry]] | None = None) -> Path:
    """Join the ranks' hashes into checksums.json, and their rows into an index of each sharded part.

    Args:
        folder: An unfinished checkpoint, in which every rank has called :func:`write_rank_hashes`.
        sharded: The tensors of each sharded part.

    Returns:
        The path of checksums.json.

    Raises:
        OSError: a byte was written by no rank, or by two.
    """
    # read what the ranks have written
    pieces: dict[str, list[FilePiece]] = {}  # by the file's path in the checkpoint
    first_rows: dict[str, dict[int, list[int]]] = {}  # by the part, then by rank
    rank_files = sorted(folder.glob(f"{_RANK_FILE_PREFIX}*.json"))
    for rank_file in rank_files:
        rank = int(rank_file.stem.removeprefix(_RANK_FILE_PREFIX))
        content = json.loads(rank_file.read_text(encoding="utf-8"))
        for name, rank_pieces in content["files"].items():
            pieces.setdefault(name, []).extend(FilePiece(*piece) for piece in rank_pieces)
        for part, rows in content["first_rows"].items():
            first_rows.setdefault(part, {})[rank] = rows

    # the indexes of sharded parts
    for part, entries in (sharded or {}).items():
        if entries:
            index = write_shard_index(folder / part, entries, first_rows[part])
            pieces[index.relative_to(folder).as_posix()] = hash_file(index)

    # checksums.json
    files = {}
    for name, file_pieces in sorted(pieces.items()):
        files[name] = ListedFile((folder / name).stat().st_size, sorted(file_pieces))
        if not files[name].is_tiled:
            raise OSError(f"{folder.name}/{name}: not every byte was written once")
    target = folder / CHECKSUMS
    content = {"hash": "xxh3_128", **asdict(ChecksumsJson(files))}
    target.write_text(json.dumps(content) + "\n", encoding="utf-8")
    for rank_file in rank_files:
        rank_file.unlink()
    return target
