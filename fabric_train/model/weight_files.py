"""The tensors of a checkpoint read one at a time: from one safetensors file, several, or the shards that ranks wrote.

Sharded files are those of torch's ``HuggingFaceStorageWriter(save_distributed=True)``: plain safetensors, whose header
says under ``DCP_SHARDING_INFO`` where in the full tensor each piece begins. Reading them here instead of through
``torch.distributed.checkpoint`` lets a 70B model be exported with one tensor in memory.
"""

import functools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from fabric_train.cli.errors import InputError, first_line
from fabric_train.files.git_lfs import check_not_pointer
from fabric_train.files.safe_paths import check_file_name

SHARDING_INFO = "DCP_SHARDING_INFO"
"""Where a header says in which place of the full tensor each piece begins."""
_OPEN_FILES = 2
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class _Piece:
    """A block of a tensor: the file that holds it, where the block begins in the full tensor, and its shape."""

    file: Path
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


class Weights(Protocol):
    """Where a rank reads its part of a model's weights; ``name`` is the parameter's in the model."""

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return the block of ``shape`` that begins at ``offsets`` of the full tensor, on the CPU, not to be written
        into.
        """
        ...


class CheckpointTensors:
    """Tensors by name over safetensors files, whole or in pieces; a tensor is read when it is asked for.

    What was read of a file stays in memory while the file is open, so only the last few are.

    Args:
        files: in any order.
        mend: what the user can do about a file that cannot be read.

    Raises:
        InputError: a file cannot be read, or pieces of a tensor are missing.
    """

    def __init__(self, files: list[Path], mend: str = "take another checkpoint") -> None:
        self._pieces: dict[str, list[_Piece]] = {}
        self._mend = mend
        self._opened = functools.lru_cache(maxsize=_OPEN_FILES)(functools.partial(_opened, mend=mend))
        for path in files:
            self._open(path)
        self._shapes = {name: _full_shape(pieces) for name, pieces in self._pieces.items()}
        for name, pieces in self._pieces.items():
            if sum(math.prod(piece.shape) for piece in pieces) != math.prod(self._shapes[name]):
                raise InputError(f"{files[0].parent}: pieces of {name} are missing: a file of the checkpoint was lost")

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def shape(self, name: str) -> torch.Size:
        """Return the shape of the full tensor without reading it."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which the tensor is stored."""
        return self._pieces[name][0].dtype

    def read(self, name: str) -> torch.Tensor:
        """Return the full tensor on the CPU in its stored dtype."""
        shape = self.shape(name)
        return self.read_block(name, (0,) * len(shape), shape)

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return the block of ``shape`` that begins at ``offsets`` of the full tensor, reading no more than it.

        Where one file has it all, it is a view of the file, which writing into it does not change.
        """
        pieces = self._pieces[name]
        if len(pieces) == 1 and shape and 0 not in shape:
            slices = tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))
            return self._opened(pieces[0].file).get_slice(name)[slices]
        block = torch.empty(tuple(shape), dtype=self.dtype(name))
        for piece in pieces:
            common = [
                (max(begin, piece_begin), min(begin + size, piece_begin + piece_size))
                for begin, size, piece_begin, piece_size in zip(offsets, shape, piece.offsets, piece.shape, strict=True)
            ]
            if all(begin < end for begin, end in common):
                here = tuple(slice(b - origin, e - origin) for (b, e), origin in zip(common, offsets, strict=True))
                there = tuple(
                    slice(b - origin, e - origin) for (b, e), origin in zip(common, piece.offsets, strict=True)
                )
                block[here] = self._opened(piece.file).get_slice(name)[there]
        return block

    def _open(self, path: Path) -> None:
        file = self._opened(path)
        begins = json.loads((file.metadata() or {}).get(SHARDING_INFO, "{}"))
        for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
            header = file.get_slice(name)
            shape = tuple(header.get_shape())
            offsets = tuple(begins[name]["saved_offsets"]) if name in begins else (0,) * len(shape)
            if header.get_dtype() not in DTYPES:
                raise InputError(f"{path}: {name} is of type {header.get_dtype()}, which is not read; {self._mend}")
            self._pieces.setdefault(name, []).append(_Piece(path, offsets, shape, DTYPES[header.get_dtype()]))


def open_weights(checkpoint: Path) -> CheckpointTensors:
    """Open the weights of a full or sharded checkpoint, or of a Hugging Face folder. Tied duplicates may be absent.

    Raises:
        InputError: the folder holds no weights, or not all of them.
    """
    sharded = (checkpoint / "model").is_dir()
    files = sorted((checkpoint / "model").glob("*.safetensors")) if sharded else safetensors_files(checkpoint)
    if not files:
        raise InputError(f"{checkpoint}: no weights in it (model.safetensors, model-00001-of-….safetensors or model/)")
    return CheckpointTensors(files)


def refuse_unreadable_weights(folder: Path) -> None:
    """Refuse a Hugging Face folder whose weights are absent, cut off or listed under names that lead out of it, as far
    as the files' headers tell; what is read in a moment is found before anything is started.

    Raises:
        InputError: naming the file.
    """
    pickled = [folder / "pytorch_model.bin", folder / "pytorch_model.bin.index.json"]  # which torch reads safely
    files = safetensors_files(folder)
    if not files and not any(file.is_file() for file in pickled):
        raise InputError(f"{folder}: no weights in it (model.safetensors); fetch the model again")
    for file in files:
        _opened(file, "fetch the model again")
    if pickled[1].is_file():
        shard_names(pickled[1])


def shard_names(index: Path) -> list[str]:
    """Return the files that a ``*.index.json`` of sharded weights names.

    Raises:
        InputError: it is damaged, or names a file elsewhere.
    """
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"{index}: not an index of weights ({reason}); fetch the folder again") from error
    return sorted(check_file_name(name, index) for name in names)


def safetensors_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights of a Hugging Face folder; none where it has other weights, or none at all.

    Raises:
        InputError: the index of the files is damaged.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in shard_names(index)]
    return sorted(folder.glob("model.safetensors"))


def _opened(path: Path, mend: str) -> Any:
    try:
        check_not_pointer(path)
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise InputError(f"{path}: the file is missing; {mend}") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a complete safetensors file ({first_line(error)}); {mend}") from error


def _full_shape(pieces: list[_Piece]) -> torch.Size:
    ends = ([start + size for start, size in zip(piece.offsets, piece.shape, strict=True)] for piece in pieces)
    return torch.Size(max(sizes) for sizes in zip(*ends, strict=True))
