"""Build the table of parameters that one launch of AdamW's Triton kernel updates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from fabric_train.distributed.ranks import to_device_async

CHUNK = 2**15
"""The elements that one program of the kernel updates. 8 billion elements need 245,000 programs, and 1 MB of owners."""
_VECTOR_BYTES = 16  # of the widest load of a GPU's thread


class Row(NamedTuple):
    """A parameter in the table: the byte addresses of its tensors, and the position of its elements in the full tensor.

    Local element ``i`` is element ``begin + i + i // width * gap`` of the full tensor.
    """

    weights: int
    gradient: int
    exp_avg: int
    exp_avg_sq: int
    exp_avg_scales: int
    """The address of the scales; 0 if moments are not in 8 bits."""
    exp_avg_sq_scales: int
    numel: int
    """The number of local elements."""
    first_program: int
    """The number of the parameter's first program. Each later program updates the next ``CHUNK`` elements."""
    begin: int
    width: int
    gap: int
    key: int
    """The key of the random bits, int32."""


_FIRST_PROGRAM = Row._fields.index("first_program")


class StepFactors(NamedTuple):
    """The factors of AdamW's step (arXiv:1711.05101), which depend on the step and the parameter group."""

    weight_factor: float
    """The decay of the weights."""
    first_gain: float
    """1 - β₁."""
    second_decay: float
    """β₂."""
    second_gain: float
    """1 - β₂."""
    rate: float
    """The learning rate, with the bias correction of the first moment."""
    root_factor: float
    """The bias correction of the second moment's root."""
    eps: float


class Storage(NamedTuple):
    """The storage that all parameters of a table have, for which the kernel is compiled."""

    weights: torch.dtype
    gradient: torch.dtype
    moments: torch.dtype
    """The dtype of the moments; uint8 for 8 bits."""
    rounds_stochastically: bool
    is_aligned: bool
    """See :func:`are_aligned`."""


@dataclass(frozen=True)
class TensorTable:
    """The parameters of one launch, on the device."""

    storage: Storage
    rows: torch.Tensor
    """int64 [parameters, fields of Row]."""
    factors: torch.Tensor
    """fp32 [parameters, fields of StepFactors]."""
    owners: torch.Tensor
    """The index of the parameter that each program updates, int32 [programs]."""
    numel: int
    """The number of elements of all parameters."""


def tensor_table(storage: Storage, parameters: Sequence[tuple[Row, StepFactors]], device: torch.device) -> TensorTable:
    """Return the table of a launch from rows, whose ``first_program`` is not set yet. The host does not wait."""
    rows = np.array([row for row, _ in parameters], dtype=np.int64)
    factors = np.array([factors for _, factors in parameters], dtype=np.float32)
    numels = np.array([row.numel for row, _ in parameters], dtype=np.int64)
    num_programs = (numels + CHUNK - 1) // CHUNK
    rows[:, _FIRST_PROGRAM] = num_programs.cumsum() - num_programs
    owners = np.arange(len(rows), dtype=np.int32).repeat(num_programs)
    return TensorTable(
        storage,
        rows=to_device_async(torch.from_numpy(rows), device),
        factors=to_device_async(torch.from_numpy(factors), device),
        owners=to_device_async(torch.from_numpy(owners), device),
        numel=int(numels.sum()),
    )


def are_aligned(addresses: Sequence[int]) -> bool:
    """Return whether the kernel can use its widest loads for tensors at these addresses."""
    return all(address % _VECTOR_BYTES == 0 for address in addresses)
