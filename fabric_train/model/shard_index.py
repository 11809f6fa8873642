"""Read and write the index of a sharded checkpoint, ``shards.json``: which rank's file has which rows of a tensor.

Without it, a rank that resumes a run would read the headers of all files. For a 70B that 512 ranks saved these are 220
MB, and the rank needs only a few. Tensors with the same number of rows are mostly divided alike, so the index has each
division once and grows by a few kilobytes per hundred ranks.
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
from fabric_train.files.typed_json import read_json

SHARD_INDEX = "shards.json"
NO_ROWS = -1
"""In place of the first row, if a rank has written nothing of a tensor."""
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


def shard_name(part: str, rank: int) -> str:
    """Return the name of a rank's file in a checkpoint; ``part`` is ``model`` or ``optimizer``."""
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
    """The index of the tensor's division in the list of divisions."""


@dataclass(frozen=True)
class _ShardIndex:
    """The content of ``shards.json``."""

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
        """Return the pieces that have some of the rows ``begin`` to ``end``; a tensor without dimensions has one row.

        With first rows 0, 10, 20, the rows 12 to 25 are in the second piece and the third.
        """
        # a piece ends where the next one begins, the last one with the tensor
        first_rows = self.division.first_rows
        num_rows = self.shape[0] if self.shape else 1
        end_rows = [*first_rows[1:], num_rows]
        first_piece = max(bisect_right(first_rows, begin) - 1, 0)
        end_piece = bisect_left(first_rows, end)
        pieces = []
        for index in range(first_piece, end_piece):
            name = shard_name(self.folder.name, self.division.ranks[index])
            file = self.folder / Path(name).name
            if not self.shape:
                pieces.append(Piece(file, (), (), self.dtype))
                continue
            row_shape = self.shape[1:]
            offsets_in_row = (0,) * len(row_shape)
            num_piece_rows = end_rows[index] - first_rows[index]
            pieces.append(
                Piece(
                    file,
                    offsets=(first_rows[index], *offsets_in_row),
                    shape=(num_piece_rows, *row_shape),
                    dtype=self.dtype,
                )
            )
        return pieces


def write_shard_index(folder: Path, entries: Sequence[Entry], first_rows: Mapping[int, Sequence[int]]) -> Path:
    """Write the index to the folder of a part of a checkpoint, and return its path.

    Args:
        folder: The folder with the files of the ranks.
        entries: All tensors, in the same order as on every rank.
        first_rows: By rank, the first row that it has written of each tensor, or ``NO_ROWS`` if it has written none.
    """
    ranks = np.array(sorted(first_rows))
    rows_by_rank = np.array([first_rows[rank] for rank in ranks.tolist()], dtype=np.int64)  # [ranks, tensors]
    divisions: list[_Division] = []
    division_indices: dict[bytes, int] = {}  # by the first rows of all ranks, as bytes
    tensors: dict[str, _Tensor] = {}
    for (name, dtype, shape), rows in zip(entries, rows_by_rank.T, strict=True):
        division_index = division_indices.setdefault(rows.tobytes(), len(divisions))
        if division_index == len(divisions):  # a new one
            num_without_rows = int((rows == NO_ROWS).sum())
            order = np.argsort(rows, kind="stable")[num_without_rows:]  # NO_ROWS is sorted before all rows
            divisions.append(_Division(ranks[order].tolist(), rows[order].tolist()))
        tensors[name] = _Tensor(DTYPE_NAMES[dtype], list(shape), division_index)
    path = folder / SHARD_INDEX
    content = json.dumps(asdict(_ShardIndex(divisions, tensors)), separators=(",", ":"))
    path.write_text(f"{content}\n", encoding="utf-8")
    return path


def read_shard_index(folder: Path, advice: str) -> dict[str, ShardedTensor]:
    """Return the tensors of an index by name; raise an InputError with the ``advice`` if the file is damaged."""
    path = folder / SHARD_INDEX
    index = read_json(path, _ShardIndex, advice)
    tensors = {}
    for name, tensor in index.tensors.items():
        if tensor.dtype not in DTYPES:
            raise InputError(f"{path}: {name} has the unsupported type {tensor.dtype}; {advice}")
        division = None
        if 0 <= tensor.division < len(index.divisions):
            division = index.divisions[tensor.division]
        # the rows begin with 0, and each piece has a rank
        if division is None or division.first_rows[:1] != [0] or len(division.ranks) != len(division.first_rows):
            raise InputError(f"{path}: damaged ({name} is not split from its first row on); {advice}")
        tensors[name] = ShardedTensor(folder, DTYPES[tensor.dtype], torch.Size(tensor.shape), division)
    return tensors
