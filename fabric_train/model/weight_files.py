"""Read tensors one at a time from safetensors files, including the shards of a sharded checkpoint.

Sharded files have the format of torch's ``HuggingFaceStorageWriter(save_distributed=True)``: their headers have, under
``DCP_SHARDING_INFO``, the offsets of each piece. A 70B model can be exported with one tensor in memory. The index next
to them (``shard_index``) says which file has which rows.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open

from fabric_train.cli.errors import InputError, first_line, raise_if_limit_reached
from fabric_train.files.regular_file import check_file_name, check_not_pointer
from fabric_train.files.typed_json import parse_json, read_json
from fabric_train.model.shard_index import DTYPES, SHARD_INDEX, Piece, ShardedTensor, read_shard_index

SHARDING_INFO = "DCP_SHARDING_INFO"
"""The key for the offsets of each piece in the full tensor, in a header's metadata."""
_MAX_OPEN_FILES = 2


class _StoredPiece(NamedTuple):
    """A piece of a tensor, and the position of its first byte in its file."""

    piece: Piece
    position: int


@dataclass(frozen=True)
class _Index:
    weight_map: dict[str, str]


@dataclass(frozen=True)
class _SavedPiece:
    """The entry of a tensor under ``DCP_SHARDING_INFO``."""

    saved_offsets: list[int]


class Weights(Protocol):
    """A source of a model's weights, by the names of its parameters."""

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return the block of ``shape`` that begins at ``offsets`` of the full tensor, on the CPU. Do not change it."""


class StoredTensors(Weights, Protocol):
    """A model's tensors by name, which are not in memory but read on request."""

    def __iter__(self) -> Iterator[str]: ...

    def shape(self, name: str) -> torch.Size:
        """Return the shape of the full tensor without reading it."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which the tensor is read."""

    def read(self, name: str) -> torch.Tensor:
        """Return the full tensor on the CPU. Do not change it."""
        return self.read_block(name, (0,) * len(self.shape(name)), self.shape(name))


class CheckpointTensors(StoredTensors):
    """The tensors in safetensors files by name, each in one piece or several, which are read on request.

    Pages that were read stay in memory, so only the last few files stay mapped. ``advice`` is for an unreadable file.
    """

    def __init__(self, files: list[Path], advice: str = "use another checkpoint") -> None:
        """Find the tensors of all files and their shapes; InputError if a piece is missing."""
        self.metadata: dict[str, str] = {}  # of the files' headers
        self._advice = advice
        self._open = functools.lru_cache(maxsize=_MAX_OPEN_FILES)(functools.partial(_open_file, advice=advice))
        self._headers: dict[Path, dict[str, _StoredPiece]] = {}

        # Which pieces the tensors have: from the index, or else from the headers of all files.
        self._sharded: dict[str, ShardedTensor] = {}
        self._pieces: dict[str, list[Piece]] = {}
        if files and (files[0].parent / SHARD_INDEX).is_file():
            self._sharded = read_shard_index(files[0].parent, advice)
        else:
            for path in files:
                for name, stored in self._header(path).items():
                    self._pieces.setdefault(name, []).append(stored.piece)

        self._shapes = {name: tensor.shape for name, tensor in self._sharded.items()}
        for name, pieces in self._pieces.items():
            shape = _full_shape(pieces)
            self._shapes[name] = shape
            if sum(math.prod(piece.shape) for piece in pieces) != shape.numel():
                raise InputError(f"{files[0].parent}: pieces of {name} are missing, because a file was lost; {advice}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def shape(self, name: str) -> torch.Size:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        if name in self._sharded:
            return self._sharded[name].dtype
        return self._pieces[name][0].dtype

    def file_of(self, name: str) -> Path:
        """Return the file with a tensor, or for a tensor in several files, the file with its first row."""
        return self._find_pieces(name, (), ())[0].file

    def read(self, name: str) -> torch.Tensor:
        """Return the full tensor on the CPU in its stored dtype. It may be a view of the file: do not write to it."""
        pieces = self._pieces.get(name, [])
        shape = self.shape(name)
        is_in_one_file = len(pieces) == 1
        if is_in_one_file and shape and 0 not in shape:
            return self._open(pieces[0].file).get_slice(name)[:]
        return super().read(name)

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Read only the block of ``shape`` that begins at ``offsets`` of the full tensor, on the CPU.

        Whole rows are read into new memory, so that no pages of the file stay in this process.
        """
        block = torch.empty(tuple(shape), dtype=self.dtype(name))
        for piece in self._find_pieces(name, offsets, shape):
            overlap = _find_overlap(piece, offsets, shape)
            if overlap is None:
                continue
            block_slices = _relative_slices(overlap, offsets)
            piece_slices = _relative_slices(overlap, piece.offsets)
            target = block[block_slices]
            has_whole_rows = target.shape[1:] == piece.shape[1:]
            if has_whole_rows and target.is_contiguous():
                begin_row = piece_slices[0].start if piece_slices else 0
                row_bytes = math.prod(piece.shape[1:]) * piece.dtype.itemsize
                self._read_bytes(piece.file, self._position(name, piece) + begin_row * row_bytes, target)
            else:
                block[block_slices] = self._open(piece.file).get_slice(name)[piece_slices]
        return block

    def _read_bytes(self, path: Path, position: int, target: torch.Tensor) -> None:
        """Fill a contiguous tensor with the bytes of a file from ``position`` on."""
        with path.open("rb", buffering=0) as file:
            file.seek(position)
            unfilled = target.reshape(-1).view(torch.uint8).numpy().data  # a view of the tensor's memory
            while unfilled:  # one call to the kernel reads 2 GiB at most
                num_read = file.readinto(unfilled)
                if not num_read:
                    raise InputError(f"{path}: the file was truncated; {self._advice}")
                unfilled = unfilled[num_read:]

    def _find_pieces(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> list[Piece]:
        """Return the pieces that may overlap a block: those with one of its rows, or all if there is no index."""
        if name not in self._sharded:
            return self._pieces[name]
        begin_row = offsets[0] if offsets else 0
        num_rows = shape[0] if shape else 1
        return self._sharded[name].pieces(begin_row, begin_row + num_rows)

    def _position(self, name: str, piece: Piece) -> int:
        """Return the position of a piece's first byte in its file."""
        stored = self._header(piece.file).get(name)
        if stored is None or stored.piece != piece:
            raise InputError(f"{piece.file}: {name} does not match {SHARD_INDEX}; {self._advice}")
        return stored.position

    def _header(self, path: Path) -> dict[str, _StoredPiece]:
        """Return the pieces in a file by the tensor's name; the header is read once."""
        if path not in self._headers:
            self._headers[path] = self._read_header(path)
        return self._headers[path]

    def _read_header(self, path: Path) -> dict[str, _StoredPiece]:
        """Read the header of a file, and add its metadata to ``metadata``."""
        file = self._open(path)
        metadata: dict[str, str] = file.metadata() or {}
        offsets_by_name = self._parse_offsets(path, metadata.pop(SHARDING_INFO, "{}"))
        self.metadata |= metadata
        with path.open("rb") as opened:
            header_size = int.from_bytes(opened.read(8), "little")  # the format's first 8 bytes
        position = 8 + header_size
        pieces: dict[str, _StoredPiece] = {}
        for name in file.offset_keys():  # tensors follow each other without gaps, as safe_open has checked
            header = file.get_slice(name)
            shape = tuple(header.get_shape())
            offsets = offsets_by_name.get(name, (0,) * len(shape))
            if len(offsets) != len(shape) or min(offsets, default=0) < 0:
                raise InputError(f"{path}: {name} has the offsets {offsets} in its header; {self._advice}")
            if header.get_dtype() not in DTYPES:
                raise InputError(f"{path}: {name} has the unsupported type {header.get_dtype()}; {self._advice}")
            piece = Piece(path, offsets, shape, DTYPES[header.get_dtype()])
            pieces[name] = _StoredPiece(piece, position)
            position += math.prod(shape) * piece.dtype.itemsize
        return pieces

    def _parse_offsets(self, path: Path, sharding_info: str) -> dict[str, tuple[int, ...]]:
        """Return the offsets of the pieces in a file by the tensor's name; empty for a file with full tensors."""
        try:
            saved = parse_json(sharding_info, dict[str, _SavedPiece])
        except ValueError as error:
            raise InputError(f"{path}: damaged header ({SHARDING_INFO}: {error}); {self._advice}") from None
        return {name: tuple(piece.saved_offsets) for name, piece in saved.items()}


def open_weights(checkpoint: Path) -> CheckpointTensors:
    """Open the weights of a full or sharded checkpoint, or of a Hugging Face folder. Tied duplicates may be absent."""
    if (checkpoint / "model").is_dir():
        files = sorted((checkpoint / "model").glob("*.safetensors"))
    else:
        files = safetensors_files(checkpoint)
    if not files:
        raise InputError(f"{checkpoint}: it has no weights (model.safetensors, model-00001-of-….safetensors or model/)")
    return CheckpointTensors(files)


def check_weight_files(folder: Path) -> None:
    """Check that a Hugging Face folder has weights and that the headers of its files can be read. This is fast."""
    pickle = folder / "pytorch_model.bin"  # read with weights_only=True
    pickle_index = folder / "pytorch_model.bin.index.json"
    files = safetensors_files(folder)
    if not files and not pickle.is_file() and not pickle_index.is_file():
        raise InputError(f"{folder}: it has no weights (model.safetensors); download the model again")
    for file in files:
        _open_file(file, "download the model again")
    if pickle_index.is_file():
        shard_names(pickle_index)


def shard_names(index: Path) -> list[str]:
    """Return the file names in a ``*.index.json`` of sharded weights."""
    names = set(read_json(index, _Index, "download the folder again").weight_map.values())
    return sorted(check_file_name(name, index) for name in names)


def safetensors_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a Hugging Face folder, if there are any."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in shard_names(index)]
    return sorted(folder.glob("model.safetensors"))


def _open_file(path: Path, advice: str) -> Any:
    try:
        check_not_pointer(path)
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise InputError(f"{path}: the file is missing; {advice}") from None
    except (SafetensorError, OSError) as error:
        raise_if_limit_reached(error)
        raise InputError(f"{path}: not a complete safetensors file ({first_line(error)}); {advice}") from error


def _full_shape(pieces: Iterable[Piece]) -> torch.Size:
    """Return the shape of the tensor that pieces cover: in each dimension, the largest end of a piece."""
    sizes: list[int] = []
    for piece in pieces:
        ends = [offset + size for offset, size in zip(piece.offsets, piece.shape, strict=True)]
        if not sizes:
            sizes = ends
        sizes = [max(size, end) for size, end in zip(sizes, ends, strict=True)]
    return torch.Size(sizes)


def _find_overlap(piece: Piece, offsets: Sequence[int], shape: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return the overlap of a piece and a block as (begin, end) in each dimension of the full tensor, or None."""
    overlap = []
    for begin, size, piece_begin, piece_size in zip(offsets, shape, piece.offsets, piece.shape, strict=True):
        overlap_begin = max(begin, piece_begin)
        overlap_end = min(begin + size, piece_begin + piece_size)
        if overlap_begin >= overlap_end:
            return None
        overlap.append((overlap_begin, overlap_end))
    return overlap


def _relative_slices(ranges: Iterable[tuple[int, int]], offsets: Sequence[int]) -> tuple[slice, ...]:
    """Return ranges of the full tensor as slices of a block that begins at ``offsets``."""
    return tuple(slice(begin - offset, end - offset) for (begin, end), offset in zip(ranges, offsets, strict=True))
