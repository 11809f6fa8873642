"""Do on a CPU what the kernel of AdamW's step does, from the same table of addresses: for machines without Triton."""

import ctypes

import torch

from fabric_train.optim.adamw import adamw_step
from fabric_train.optim.blockwise_8bit import Blockwise8Bit
from fabric_train.optim.stochastic_rounding import LocalElements
from fabric_train.optim.tensor_table import CHUNK, Row, TensorTable

CPU = torch.device("cpu")


def launch(table: TensorTable) -> None:
    """Update the parameters of a table chunk by chunk, as the programs of the kernel do."""
    rows = [Row._make(fields) for fields in table.rows.tolist()]
    for program, parameter in enumerate(table.owners.tolist()):
        row = rows[parameter]
        _update_chunk(table, row, table.factors[parameter], chunk=program - row.first_program)


def _update_chunk(table: TensorTable, row: Row, factors: torch.Tensor, chunk: int) -> None:
    """Update chunk number ``chunk`` of a parameter; ``factors`` are fp32 [7]."""
    begin = chunk * CHUNK
    count = min(CHUNK, row.numel - begin)
    elements = slice(begin, begin + count)
    storage = table.storage
    weights = _tensor_at(row.weights, row.numel, storage.weights)[elements]
    gradient = _tensor_at(row.gradient, row.numel, storage.gradient)[elements]
    indices = None
    if storage.rounds_stochastically:
        indices = LocalElements(row.begin, row.width, row.width + row.gap).indices(begin, count, CPU)
    key = torch.tensor(row.key, dtype=torch.int32)

    if storage.moments != torch.uint8:
        exp_avg = _tensor_at(row.exp_avg, row.numel, storage.moments)[elements]
        exp_avg_sq = _tensor_at(row.exp_avg_sq, row.numel, storage.moments)[elements]
        adamw_step([weights, exp_avg, exp_avg_sq], gradient, factors, indices, key)
        return

    # moments in 8 bits are decoded for the step, and encoded again after it
    exp_avg_8bit = _blockwise_8bit_at(row.exp_avg, row.exp_avg_scales, row.numel, signed=True)
    exp_avg_sq_8bit = _blockwise_8bit_at(row.exp_avg_sq, row.exp_avg_sq_scales, row.numel, signed=False)
    exp_avg = exp_avg_8bit.read(begin, count)
    exp_avg_sq = exp_avg_sq_8bit.read(begin, count)
    adamw_step([weights, exp_avg, exp_avg_sq], gradient, factors, indices, key)
    exp_avg_8bit.write(begin, exp_avg)
    exp_avg_sq_8bit.write(begin, exp_avg_sq)


def _tensor_at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor [count] at an address; it shares the memory."""
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype)


def _blockwise_8bit_at(codes_address: int, scales_address: int, count: int, *, signed: bool) -> Blockwise8Bit:
    """Return the ``count`` values in 8 bits whose codes and scales are at these addresses."""
    values = Blockwise8Bit(count, signed=signed, device=CPU)
    values.codes = _tensor_at(codes_address, count, torch.uint8)
    values.scales = _tensor_at(scales_address, len(values.scales), torch.float32)
    return values
