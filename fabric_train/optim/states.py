"""What an optimizer keeps for its parameters: states that it declares, numbers in 8 bits, and a table for one kernel.

Saving, restoring, resharding and the memory plan read nothing of an optimizer but its declared states.

In 8 bits (arXiv:2110.02861), each number is stored as the index of one of 256 levels. A block of 256 consecutive
numbers has one scale, its largest magnitude.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from fabric_train.distributed.ranks import to_device_async
from fabric_train.distributed.sharded_parameters import local_part

BLOCK = 256
CHUNK = 2**15
"""Elements that one program of the kernel updates. Its 245,000 programs for 8 billion elements take 1 MB of owners."""
_VECTOR_BYTES = 16  # of the widest load of a GPU's thread


@dataclass(frozen=True)
class State:
    """A tensor that an optimizer keeps for each parameter that it updates.

    ``name`` is its key in ``optimizer.state[parameter]``, and the end of its name in a checkpoint, where it has
    ``dtype``. Without a ``shape``, it has the parameter's: then it is sharded like the parameter, and starts with
    zeros; a state of another shape is the same on all ranks. ``held_bytes``: of an element in memory.
    """

    name: str
    dtype: torch.dtype
    shape: torch.Size | None = None
    held_bytes: int | None = None


class DeclaredStates(torch.optim.Optimizer):
    """An optimizer whose states can be saved, resharded and planned; mix it in before a class of ``torch.optim``."""

    def declare_states(self, parameter: nn.Parameter) -> tuple[State, ...]:
        """Return the states that the optimizer keeps for a parameter, which may be on the meta device."""
        raise NotImplementedError(f"{type(self).__name__} does not declare its states")

    def read_states(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return this rank's part of a parameter's states by name, flat. Before the first step there are none."""
        kept = self.state.get(parameter, {})
        return {each.name: flat_local(kept[each.name]) for each in self.declare_states(parameter) if each.name in kept}

    def restore_states(self, parameter: nn.Parameter, states: Mapping[str, torch.Tensor]) -> None:
        """Set a parameter's states, on its device; states of its shape are sharded like it."""
        self.state[parameter] = dict(states)


def flat_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor as a vector over the same memory."""
    return local_part(tensor.detach()).view(-1)


class Blockwise8Bit:
    """A vector as one byte per number and one fp32 scale per block; writing back numbers just read changes nothing."""

    def __init__(self, count: int, signed: bool, device: torch.device) -> None:
        """Store ``count`` zeros on a device. Without ``signed``, numbers are not negative and levels are finer."""
        self._levels, self._midpoints = levels_and_midpoints(signed, device)
        zero = int((_levels(signed) == 0).nonzero())
        self.codes = torch.full((count,), zero, dtype=torch.uint8, device=device)
        """uint8 [count], indices of the levels."""
        self.scales = torch.zeros(-(-count // BLOCK), device=device)
        """fp32 [blocks], the largest magnitude of each block."""

    def __len__(self) -> int:
        return len(self.codes)

    def read(self, begin: int, count: int) -> torch.Tensor:
        """Return fp32 [count], the elements from ``begin``, which is the start of a block."""
        codes = self.codes[begin : begin + count]
        numbers = _blocks(self._levels[codes.int()])
        numbers *= self.scales[begin // BLOCK :][: len(numbers), None]
        return numbers.flatten()[: len(codes)]

    def write(self, begin: int, numbers: torch.Tensor) -> None:
        """Store finite fp32 numbers from element ``begin``. They fill whole blocks, or reach to the end."""
        blocks = _blocks(numbers)
        scales = blocks.abs().amax(1)
        self.scales[begin // BLOCK :][: len(blocks)] = scales
        normalized = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
        codes = torch.bucketize(normalized, self._midpoints[:-1], out_int32=True).flatten()[: len(numbers)]
        self.codes[begin : begin + len(numbers)] = codes.to(torch.uint8)


@functools.cache
def levels_and_midpoints(signed: bool, device: torch.device) -> torch.Tensor:
    """Return the 256 levels and the 255 midpoints between them, the last one twice: fp32 [2, 256]."""
    levels = _levels(signed)
    midpoints = (levels[1:] + levels[:-1]) / 2
    return torch.stack([levels, torch.cat([midpoints, midpoints[-1:]])]).to(device)


def _blocks(numbers: torch.Tensor) -> torch.Tensor:
    """Return [blocks, BLOCK], with the last block padded with zeros."""
    return torch.nn.functional.pad(numbers, (0, -len(numbers) % BLOCK)).view(-1, BLOCK)


@functools.cache
def _levels(signed: bool) -> torch.Tensor:
    """Return the 256 levels of the paper's dynamic tree quantization, fp32, ascending.

    They cover the decades from 1e-7 to 1, and each decade has twice as many levels as the one below. Unlike in the
    paper, the lowest signed level is -1. So a block's largest magnitude is exact, and writing the block again finds the
    same scale.
    """
    levels = [torch.tensor([0.0, 1.0])]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        midpoints = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        levels += [midpoints.float(), -midpoints.float()] if signed else [midpoints.float()]
    ascending = torch.cat(levels).sort().values
    if signed:
        ascending[0] = -1.0
    assert len(ascending) == 256
    return ascending


class Row(NamedTuple):
    """A parameter in the table: addresses in bytes, and where its elements lie in the full tensor.

    Local element ``i`` is element ``begin + i + i // width * gap`` of the full tensor. The addresses of scales are 0 if
    moments are not in 8 bits. ``first_program`` is the number of the parameter's first program; each following one
    updates the next ``CHUNK`` elements.
    """

    weights: int
    gradient: int
    first: int
    second: int
    first_scales: int
    second_scales: int
    numel: int
    first_program: int
    begin: int
    width: int
    gap: int
    key: int


class Storage(NamedTuple):
    """What the parameters of a table have in common, for which a kernel is compiled; moments in 8 bits are uint8."""

    weights: torch.dtype
    gradient: torch.dtype
    moments: torch.dtype
    rounds_stochastically: bool
    is_aligned: bool


@dataclass(frozen=True)
class TensorTable:
    """The parameters of one launch, ``numel`` elements together, on the device.

    ``rows`` are int64 [parameters, fields of Row]; ``factors`` fp32 [parameters, 7], each row from
    ``adamw.step_factors``; ``owners`` int32 [programs], the parameter of each program.
    """

    storage: Storage
    rows: torch.Tensor
    factors: torch.Tensor
    owners: torch.Tensor
    numel: int


def tensor_table(
    storage: Storage, parameters: Sequence[tuple[Row, Sequence[float]]], device: torch.device
) -> TensorTable:
    """Return the table of a launch from rows, without their ``first_program``, and factors. The host does not wait."""
    rows = np.array([row for row, _ in parameters], dtype=np.int64)
    factors = np.array([factors for _, factors in parameters], dtype=np.float32)
    numels = rows[:, Row._fields.index("numel")]
    programs = (numels + CHUNK - 1) // CHUNK
    rows[:, Row._fields.index("first_program")] = programs.cumsum() - programs
    owners = np.arange(len(rows), dtype=np.int32).repeat(programs)
    first, second, third = (to_device_async(torch.from_numpy(each), device) for each in (rows, factors, owners))
    return TensorTable(storage, first, second, third, int(numels.sum()))


def is_aligned(addresses: Sequence[int]) -> bool:
    """Whether the kernel can use the widest loads for tensors at these addresses."""
    return not any(address % _VECTOR_BYTES for address in addresses)
