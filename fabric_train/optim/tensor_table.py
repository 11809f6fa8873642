"""Describe many parameters as rows of a table, so that one kernel launch updates all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from fabric_train.distributed.host_memory import to_device_async

CHUNK = 2**15
"""Elements that one program of the kernel updates. Its 245,000 programs for 8 billion elements take 1 MB of owners."""

_VECTOR_BYTES = 16  # of the widest load of a GPU's thread


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
    """What the parameters of a table have in common, which the kernel is compiled for.

    ``moments`` is uint8 for moments in 8 bits. ``is_aligned``: all addresses are multiples of 16 bytes.
    """

    weights: torch.dtype
    gradient: torch.dtype
    moments: torch.dtype
    rounds_stochastically: bool
    is_aligned: bool


@dataclass(frozen=True)
class TensorTable:
    """The parameters of one launch, on the device.

    Attributes:
        storage: See :class:`Storage`.
        rows: int64 [parameters, fields of Row].
        factors: fp32 [parameters, 7], each row from ``compiled_adamw.step_factors``.
        owners: int32 [programs], the parameter of each program.
        numel: Number of elements of all parameters together.
    """

    storage: Storage
    rows: torch.Tensor
    factors: torch.Tensor
    owners: torch.Tensor
    numel: int


def tensor_table(
    storage: Storage, parameters: Sequence[tuple[Row, Sequence[float]]], device: torch.device
) -> TensorTable:
    """Return the table of a kernel launch. The host does not wait for the device.

    Args:
        storage: See :class:`Storage`.
        parameters: One or more rows, whose ``first_program`` is set here, each with the factors of its step, from
            ``compiled_adamw.step_factors``.
        device: That the kernel runs on.
    """
    rows = np.array([row for row, _ in parameters], dtype=np.int64)
    factors = np.array([factors for _, factors in parameters], dtype=np.float32)
    numels = rows[:, Row._fields.index("numel")]
    programs = (numels + CHUNK - 1) // CHUNK
    rows[:, Row._fields.index("first_program")] = programs.cumsum() - programs
    owners = np.arange(len(rows), dtype=np.int32).repeat(programs)
    first, second, third = (to_device_async(torch.from_numpy(each), device) for each in (rows, factors, owners))
    return TensorTable(storage, first, second, third, int(numels.sum()))


def is_aligned(addresses: Sequence[int]) -> bool:
    """Return whether the kernel can use the widest loads for tensors at these addresses."""
    return not any(address % _VECTOR_BYTES for address in addresses)
