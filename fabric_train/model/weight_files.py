"""Read tensors one at a time from safetensors files, also from the shards of a sharded checkpoint.

Sharded files have the format of torch's ``HuggingFaceStorageWriter(save_distributed=True)``: the header has under
``DCP_SHARDING_INFO`` the offsets of each piece. A 70B model can be exported with one tensor in memory.

The index beside them, ``shards.json``, names the file that has each row. Without it, a rank that continues a run reads
the headers of all files. Of a 70B that 512 ranks saved these are 220 MB, and the rank needs a few. Tensors with the
same number of rows are mostly divided alike, so the index has each division once and grows by a few kilobytes per
hundred ranks.
"""

import functools
import json
import math
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import add
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from fabric_train.cli.errors import InputError, first_line, raise_reached_limit
from fabric_train.files.regular_file import check_file_name, check_not_pointer, parse_json, read_json

SHARDING_INFO = "DCP_SHARDING_INFO"
"""The key in a header's metadata for the offsets of each piece in the full tensor."""
SHARD_INDEX = "shards.json"
NO_ROWS = -1
_OPEN_FILES = 2
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Entry = tuple[str, torch.dtype, Sequence[int]]
"""A tensor's name, dtype and full shape."""


@dataclass(frozen=True)
class Piece:
    """A block of a tensor in a file, at ``offsets`` in the full tensor."""

    file: Path
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


class _InFile(NamedTuple):
    piece: Piece
    position: int  # of its first byte


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
    """The named tensors of a model outside of memory; each is read on request."""

    def __iter__(self) -> Iterator[str]: ...

    def shape(self, name: str) -> torch.Size:
        """Return the shape of the full tensor without reading it."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which the tensor is read."""

    def read(self, name: str) -> torch.Tensor:
        """Return the full tensor on the CPU. Do not change it."""
        return self.read_block(name, (0,) * len(self.shape(name)), self.shape(name))


class CheckpointTensors(StoredTensors):
    """The tensors of safetensors files by name, in one piece or several; each is read on request.

    Pages that were read stay in memory, so only the last few files stay mapped. ``advice`` is for an unreadable file.
    """

    def __init__(self, files: list[Path], advice: str = "use another checkpoint") -> None:
        self._pieces: dict[str, list[Piece]] = {}  # of files without an index
        self._sharded: dict[str, ShardedTensor] = {}
        self.metadata: dict[str, str] = {}  # of the files
        self._advice = advice
        self._file = functools.lru_cache(maxsize=_OPEN_FILES)(functools.partial(_open_file, advice=advice))
        self._headers: dict[Path, dict[str, _InFile]] = {}
        if files and (files[0].parent / SHARD_INDEX).is_file():
            self._sharded = read_shard_index(files[0].parent, advice)
        else:
            for path in files:
                for name, in_file in self._header(path).items():
                    self._pieces.setdefault(name, []).append(in_file.piece)
        self._shapes = {name: tensor.shape for name, tensor in self._sharded.items()}
        for name, pieces in self._pieces.items():
            ends = [map(add, piece.offsets, piece.shape) for piece in pieces]
            self._shapes[name] = torch.Size(map(max, zip(*ends, strict=True)))
            if sum(math.prod(piece.shape) for piece in pieces) != math.prod(self._shapes[name]):
                raise InputError(f"{files[0].parent}: pieces of {name} are missing, so a file was lost; {advice}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def shape(self, name: str) -> torch.Size:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._sharded[name].dtype if name in self._sharded else self._pieces[name][0].dtype

    def file_of(self, name: str) -> Path:
        """Return the file that holds the tensor, of a sharded checkpoint the first one."""
        return self._pieces_at(name, (), ())[0].file

    def read(self, name: str) -> torch.Tensor:
        """Return the full tensor on the CPU in its stored dtype, maybe a view of the file, which no write changes."""
        pieces = self._pieces.get(name, ())
        shape = self.shape(name)
        if len(pieces) == 1 and shape and 0 not in shape:
            return self._file(pieces[0].file).get_slice(name)[:]
        return super().read(name)

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Read only the block of ``shape`` that begins at ``offsets`` of the full tensor, on the CPU.

        Whole rows are read into memory of their own, so that no pages of the file stay in this process.
        """
        block = torch.empty(tuple(shape), dtype=self.dtype(name))
        for piece in self._pieces_at(name, offsets, shape):
            overlap = [
                (max(begin, piece_begin), min(begin + size, piece_begin + piece_size))
                for begin, size, piece_begin, piece_size in zip(offsets, shape, piece.offsets, piece.shape, strict=True)
            ]
            if not all(begin < end for begin, end in overlap):
                continue
            in_block = _relative(overlap, offsets)
            in_piece = _relative(overlap, piece.offsets)
            target = block[in_block]
            if target.shape[1:] == piece.shape[1:] and target.is_contiguous():
                first_row = in_piece[0].start if in_piece else 0
                row = math.prod(piece.shape[1:]) * piece.dtype.itemsize
                self._read_bytes(piece.file, self._position(name, piece) + first_row * row, target)
            else:
                block[in_block] = self._file(piece.file).get_slice(name)[in_piece]
        return block

    def _read_bytes(self, path: Path, position: int, target: torch.Tensor) -> None:
        """Fill a contiguous tensor with the bytes of a file from ``position`` on."""
        with path.open("rb", buffering=0) as file:
            file.seek(position)
            missing = target.reshape(-1).view(torch.uint8).numpy().data
            while missing:  # one call to the kernel reads 2 GiB at most
                count = file.readinto(missing)
                if not count:
                    raise InputError(f"{path}: the file has become shorter; {self._advice}")
                missing = missing[count:]

    def _pieces_at(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> list[Piece]:
        """Return the pieces of a tensor, of one with an index those that have some row of a block."""
        if name not in self._sharded:
            return self._pieces[name]
        begin = offsets[0] if offsets else 0
        return self._sharded[name].pieces(begin, begin + (shape[0] if shape else 1))

    def _position(self, name: str, piece: Piece) -> int:
        """Return the first byte of a piece in its file."""
        in_file = self._header(piece.file).get(name)
        if in_file is None or in_file.piece != piece:
            raise InputError(f"{piece.file}: {name} is not as {SHARD_INDEX} says; {self._advice}")
        return in_file.position

    def _header(self, path: Path) -> dict[str, _InFile]:
        """Return the pieces in a file by name; it is read once."""
        if path not in self._headers:
            self._headers[path] = self._read_header(path)
        return self._headers[path]

    def _read_header(self, path: Path) -> dict[str, _InFile]:
        pieces: dict[str, _InFile] = {}
        file = self._file(path)
        metadata: dict[str, str] = file.metadata() or {}
        begins = self._offsets(path, metadata.pop(SHARDING_INFO, "{}"))
        self.metadata |= metadata
        with path.open("rb") as opened:
            position = 8 + int.from_bytes(opened.read(8), "little")  # after the header: the format's first 8 bytes
        for name in file.offset_keys():  # tensors follow each other without gaps, as safe_open has checked
            header = file.get_slice(name)
            shape = tuple(header.get_shape())
            offsets = begins.get(name, (0,) * len(shape))
            if len(offsets) != len(shape) or min(offsets, default=0) < 0:
                raise InputError(f"{path}: {name} has the offsets {offsets} in its header; {self._advice}")
            if header.get_dtype() not in DTYPES:
                raise InputError(f"{path}: {name} has the unsupported type {header.get_dtype()}; {self._advice}")
            piece = Piece(path, offsets, shape, DTYPES[header.get_dtype()])
            pieces[name] = _InFile(piece, position)
            position += math.prod(shape) * piece.dtype.itemsize
        return pieces

    def _offsets(self, path: Path, info: str) -> dict[str, tuple[int, ...]]:
        try:
            saved = parse_json(info, dict[str, _SavedPiece])
        except ValueError as error:
            raise InputError(f"{path}: damaged header ({SHARDING_INFO}: {error}); {self._advice}") from None
        return {name: tuple(piece.saved_offsets) for name, piece in saved.items()}


def open_weights(checkpoint: Path) -> CheckpointTensors:
    """Open the weights of a full or sharded checkpoint, or of a Hugging Face folder. Tied duplicates may be absent."""
    sharded = (checkpoint / "model").is_dir()
    files = sorted((checkpoint / "model").glob("*.safetensors")) if sharded else safetensors_files(checkpoint)
    if not files:
        raise InputError(f"{checkpoint}: no weights in it (model.safetensors, model-00001-of-….safetensors or model/)")
    return CheckpointTensors(files)


def check_weight_files(folder: Path) -> None:
    """Check that a Hugging Face folder has weights and that the headers of its files can be read. This is fast."""
    pickled = [folder / "pytorch_model.bin", folder / "pytorch_model.bin.index.json"]  # read with weights_only=True
    files = safetensors_files(folder)
    if not files and not any(file.is_file() for file in pickled):
        raise InputError(f"{folder}: no weights in it (model.safetensors); fetch the model again")
    for file in files:
        _open_file(file, "fetch the model again")
    if pickled[1].is_file():
        shard_names(pickled[1])


def shard_names(index: Path) -> list[str]:
    """Return the file names in a ``*.index.json`` of sharded weights."""
    names = set(read_json(index, _Index, "fetch the folder again").weight_map.values())
    return sorted(check_file_name(name, index) for name in names)


def safetensors_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a Hugging Face folder, which may be none."""
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
        raise_reached_limit(error)
        raise InputError(f"{path}: not a complete safetensors file ({first_line(error)}); {advice}") from error


def _relative(ranges: Iterable[tuple[int, int]], offsets: Sequence[int]) -> tuple[slice, ...]:
    """Return ranges of the full tensor as slices of a block that begins at ``offsets``."""
    return tuple(slice(begin - offset, end - offset) for (begin, end), offset in zip(ranges, offsets, strict=True))


def shard_name(part: str, rank: int) -> str:
    """Return the name of a rank's file in a checkpoint."""
    return f"{part}/shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


@dataclass(frozen=True)
class _Division:
    """The ranks that hold a tensor and the first row of each, in the order of the rows."""

    ranks: list[int]
    first_rows: list[int]


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    shape: list[int]
    division: int


@dataclass(frozen=True)
class _ShardIndex:
    divisions: list[_Division]
    tensors: dict[str, _Tensor]


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor whose rows are in the files of several ranks."""

    folder: Path
    dtype: torch.dtype
    shape: torch.Size
    division: _Division

    def pieces(self, begin: int = 0, end: int = sys.maxsize) -> list[Piece]:
        """Return the pieces that have some of the rows from ``begin`` to ``end``; a tensor of a number has one row."""
        firsts = self.division.first_rows
        num_rows = self.shape[0] if self.shape else 1
        numbers = range(max(bisect_right(firsts, begin) - 1, 0), bisect_left(firsts, end))
        found = []
        for number in numbers:
            first = firsts[number]
            last = (*firsts[number + 1 : number + 2], num_rows)[0]
            offsets = (first, *[0] * (len(self.shape) - 1))
            shape = (last - first, *self.shape[1:])
            file = self.folder / Path(shard_name(self.folder.name, self.division.ranks[number])).name
            found.append(Piece(file, offsets, shape, self.dtype) if self.shape else Piece(file, (), (), self.dtype))
        return found


def write_shard_index(folder: Path, entries: Sequence[Entry], first_rows: Mapping[int, Sequence[int]]) -> Path:
    """Write the index into the folder of a part of a checkpoint, and return its path.

    Args:
        folder: with the files of the ranks.
        entries: all tensors, in the order that they have on every rank.
        first_rows: by rank, the first row of what it has written of each tensor, ``NO_ROWS`` for nothing.
    """
    ranks = np.array(sorted(first_rows))
    numbers: dict[bytes, int] = {}
    divisions: list[_Division] = []
    tensors = {}
    by_tensor = np.array([first_rows[rank] for rank in ranks.tolist()], dtype=np.int64).T
    for (name, dtype, shape), rows in zip(entries, by_tensor, strict=True):
        number = numbers.setdefault(rows.tobytes(), len(divisions))
        if number == len(divisions):
            order = np.argsort(rows, kind="stable")[(rows == NO_ROWS).sum() :]
            divisions.append(_Division(ranks[order].tolist(), rows[order].tolist()))
        tensors[name] = _Tensor(DTYPE_NAMES[dtype], list(shape), number)
    path = folder / SHARD_INDEX
    path.write_text(json.dumps(asdict(_ShardIndex(divisions, tensors)), separators=(",", ":")) + "\n", encoding="utf-8")
    return path


def read_shard_index(folder: Path, advice: str) -> dict[str, ShardedTensor]:
    """Return the tensors of an index by name; an InputError, with the ``advice``, if the file is damaged."""
    index = read_json(folder / SHARD_INDEX, _ShardIndex, advice)
    tensors = {}
    for name, tensor in index.tensors.items():
        division = index.divisions[tensor.division] if 0 <= tensor.division < len(index.divisions) else None
        if tensor.dtype not in DTYPES:
            raise InputError(f"{folder / SHARD_INDEX}: {name} has the unsupported type {tensor.dtype}; {advice}")
        if division is None or division.first_rows[:1] != [0] or len(division.ranks) != len(division.first_rows):
            raise InputError(f"{folder / SHARD_INDEX}: damaged ({name} is not divided from its first row on); {advice}")
        tensors[name] = ShardedTensor(folder, DTYPES[tensor.dtype], torch.Size(tensor.shape), division)
    return tensors
