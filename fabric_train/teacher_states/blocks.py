"""Write and read a block: a safetensors file with the values of a teacher for consecutive rows of a split.

Its tensors are, for R rows with N targets::

    offsets             int64 [R + 1]      where the targets of each row begin, and the end
    row_hashes          int64 [R]          the hashes of the rows (``data.batch.hash_row``)
    checksums           int64 [R]          the XXH3-64 of the values of each row
    ids                 int32 [N, k]       with log_probabilities, fp32 [N, k + 1], see ``data.teacher_states``
    hidden              bfloat16 [N, H]    or hidden states instead
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fabric_train.cli.errors import RunError, first_line, raise_if_limit_reached
from fabric_train.data.teacher_states import HiddenStates, TeacherStates, TopStates
from fabric_train.files.atomic_folder import fsync
from fabric_train.teacher_states.record import TEACH_AGAIN

_MOST_OPEN = 64
_HIDDEN = "hidden"


@dataclass(frozen=True)
class BlockContent:
    """The rows of a block."""

    row_hashes: list[int]
    """The ``data.batch.hash_row`` of each row."""
    num_targets: list[int]
    """The number of targets of each row."""
    states: TeacherStates
    """The values for the targets of all rows, in order."""


def write_block(file: Path, content: BlockContent) -> None:
    """Write a block; the file is complete or absent, also after a power failure."""
    offsets = [0, *accumulate(content.num_targets)]
    checksums = []
    for begin, end in pairwise(offsets):
        checksums.append(_checksum(_slice_states(content.states, begin, end)))
    tensors = {
        "offsets": torch.tensor(offsets, dtype=torch.int64),
        "row_hashes": _as_int64(content.row_hashes),
        "checksums": _as_int64(checksums),
    }
    if isinstance(content.states, HiddenStates):
        tensors[_HIDDEN] = content.states.bits.view(torch.bfloat16)
    else:
        tensors["ids"] = content.states.ids
        tensors["log_probabilities"] = content.states.log_probabilities

    file.parent.mkdir(exist_ok=True)
    temporary = file.with_name(f".{file.name}.new")
    # not save_file, which hides a full disk in an error of its own
    temporary.write_bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}))
    fsync(temporary)
    temporary.replace(file)
    fsync(file.parent)


@dataclass(frozen=True)
class BlockReader:
    """A ``data.teacher_states.StatesReader`` of the blocks of a split, which are opened when they are needed."""

    files: tuple[Path, ...]
    """The files of the blocks, in order."""
    rows_per_block: int

    def read(self, row: int, row_hash: int) -> TeacherStates:
        """Return the values for the targets of a row, see ``StatesReader.read``."""
        file = self.files[row // self.rows_per_block]
        row_of_block = row % self.rows_per_block
        try:
            return _open_block(file).read(row_of_block, row_hash)
        except (OSError, SafetensorError, RuntimeError, IndexError) as error:
            raise_if_limit_reached(error)
            raise RunError(f"{file}: damaged ({first_line(error)}); {TEACH_AGAIN}") from error


class _OpenedBlock:
    """A block whose file is mapped into memory."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._tensors: Any = safe_open(file, framework="pt")
        self._offsets = self._tensors.get_tensor("offsets").numpy()
        self._row_hashes = self._tensors.get_tensor("row_hashes").numpy().view(np.uint64)
        self._checksums = self._tensors.get_tensor("checksums").numpy().view(np.uint64)
        self._has_hidden = _HIDDEN in self._tensors.keys()  # noqa: SIM118 - the file is no mapping

    def read(self, row: int, row_hash: int) -> TeacherStates:
        """Return the values of a row of the block, by copying them from the file."""
        if self._row_hashes[row] != row_hash:
            raise RunError(
                f"{self._file}: row {row} of this block was computed for another row of tokens; {TEACH_AGAIN}"
            )
        begin, end = self._offsets[row : row + 2].tolist()
        if self._has_hidden:
            bits = self._slice(_HIDDEN, begin, end).view(torch.int16)
            states: TeacherStates = HiddenStates(bits)
        else:
            ids = self._slice("ids", begin, end)
            states = TopStates(ids, self._slice("log_probabilities", begin, end))
        if self._checksums[row] != _checksum(states):
            raise RunError(f"{self._file}: row {row} of this block has changed since it was written; {TEACH_AGAIN}")
        return states

    def _slice(self, name: str, begin: int, end: int) -> torch.Tensor:
        tensor: torch.Tensor = self._tensors.get_slice(name)[begin:end]
        return tensor


@functools.lru_cache(maxsize=_MOST_OPEN)
def _open_block(file: Path) -> _OpenedBlock:
    return _OpenedBlock(file)


def _slice_states(states: TeacherStates, begin: int, end: int) -> TeacherStates:
    return type(states)(*[tensor[begin:end] for tensor in _tensors_of(states)])


def _tensors_of(states: TeacherStates) -> Iterator[torch.Tensor]:
    for field in fields(states):
        yield getattr(states, field.name)


def _checksum(states: TeacherStates) -> int:
    """Return the XXH3-64 of all values."""
    digest = xxhash.xxh3_64()
    for tensor in _tensors_of(states):
        digest.update(tensor.contiguous().numpy().data)
    return int(digest.intdigest())


def _as_int64(hashes: Sequence[int]) -> torch.Tensor:
    """Return unsigned 64-bit numbers as int64 with the same bits."""
    return torch.from_numpy(np.array(hashes, dtype=np.uint64).view(np.int64))
