"""The index of a sharded checkpoint's tensors: it names the file that has each row.

Without it, a rank that continues a run reads the headers of all files. Of a 70B that 512 ranks saved these are 220 MB,
and the rank needs a few. Tensors with the same number of rows are mostly divided alike, so the index has each division
once and grows by a few kilobytes per hundred ranks. A folder without an index is read by the headers.
"""

import json
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import read_json

SHARD_INDEX = "shards.json"
NO_ROWS = -1
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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
class _Index:
    divisions: list[_Division]
    tensors: dict[str, _Tensor]


@dataclass(frozen=True)
class Piece:
    """A block of a tensor in a file, at ``offsets`` in the full tensor."""

    file: Path
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor whose rows are in the files of several ranks."""

    folder: Path
    dtype: torch.dtype
    shape: torch.Size
    division: _Division

    def pieces(self, begin: int = 0, end: int = sys.maxsize) -> list[Piece]:
        """Return the pieces that have some of the rows from ``begin`` to ``end``; a tensor of a number has one row."""
        firsts, num_rows = self.division.first_rows, self.shape[0] if self.shape else 1
        numbers = range(max(bisect_right(firsts, begin) - 1, 0), bisect_left(firsts, end))
        found = []
        for number in numbers:
            first, last = firsts[number], (*firsts[number + 1 : number + 2], num_rows)[0]
            offsets, shape = ((first, *[0] * (len(self.shape) - 1)), (last - first, *self.shape[1:]))
            file = self.folder / Path(shard_name(self.folder.name, self.division.ranks[number])).name
            found.append(Piece(file, offsets, shape, self.dtype) if self.shape else Piece(file, (), (), self.dtype))
        return found


Entry = tuple[str, torch.dtype, Sequence[int]]
"""A tensor's name, dtype and full shape."""


def write_shard_index(folder: Path, entries: Sequence[Entry], first_rows: Mapping[int, Sequence[int]]) -> Path:
    """Write the index into the folder of a part of a checkpoint, and return its path.

    Args:
        folder: with the files of the ranks.
        entries: all tensors, in the order that they have on every rank.
        first_rows: by rank, the first row of what it has written of each tensor, ``NO_ROWS`` for nothing.
    """
    ranks, numbers, divisions, tensors = np.array(sorted(first_rows)), dict[bytes, int](), list[_Division](), {}
    by_tensor = np.array([first_rows[rank] for rank in ranks.tolist()], dtype=np.int64).T
    for (name, dtype, shape), rows in zip(entries, by_tensor, strict=True):
        number = numbers.setdefault(rows.tobytes(), len(divisions))
        if number == len(divisions):
            order = np.argsort(rows, kind="stable")[(rows == NO_ROWS).sum() :]
            divisions.append(_Division(ranks[order].tolist(), rows[order].tolist()))
        tensors[name] = _Tensor(DTYPE_NAMES[dtype], list(shape), number)
    path = folder / SHARD_INDEX
    path.write_text(json.dumps(asdict(_Index(divisions, tensors)), separators=(",", ":")) + "\n", encoding="utf-8")
    return path


def read_shard_index(folder: Path, advice: str) -> dict[str, ShardedTensor]:
    """Return the tensors of an index by name; an InputError, with the ``advice``, if the file is damaged."""
    index = read_json(folder / SHARD_INDEX, _Index, advice)
    tensors = {}
    for name, tensor in index.tensors.items():
        division = index.divisions[tensor.division] if 0 <= tensor.division < len(index.divisions) else None
        if tensor.dtype not in DTYPES:
            raise InputError(f"{folder / SHARD_INDEX}: {name} has the unsupported type {tensor.dtype}; {advice}")
        if division is None or division.first_rows[:1] != [0] or len(division.ranks) != len(division.first_rows):
            raise InputError(f"{folder / SHARD_INDEX}: damaged ({name} is not divided from its first row on); {advice}")
        tensors[name] = ShardedTensor(folder, DTYPES[tensor.dtype], torch.Size(tensor.shape), division)
    return tensors
