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
    rows = [Row._make(row) for row in table.rows.tolist()]
    for program, owner in enumerate(table.owners.tolist()):
        _run_program(table, rows[owner], table.factors[owner], program - rows[owner].first_program)


def _run_program(table: TensorTable, row: Row, factors: torch.Tensor, chunk: int) -> None:
    begin = chunk * CHUNK
    count = min(CHUNK, row.numel - begin)
    weights = _at(row.weights, row.numel, table.storage.weights)[begin : begin + count]
    gradient = _at(row.gradient, row.numel, table.storage.gradient)[begin : begin + count]
    indices = None
    if table.storage.rounds_stochastically:
        indices = LocalElements(row.begin, row.width, row.width + row.gap).indices(begin, count, CPU)
    key = torch.tensor(row.key, dtype=torch.int32)
    if table.storage.moments != torch.uint8:
        moments = [_at(each, row.numel, table.storage.moments) for each in (row.exp_avg, row.exp_avg_sq)]
        adamw_step([weights, *(each[begin : begin + count] for each in moments)], gradient, factors, indices, key)
        return
    stored = [_in_8bit(row.exp_avg, row.exp_avg_scales, row.numel, signed=True)]
    stored += [_in_8bit(row.exp_avg_sq, row.exp_avg_sq_scales, row.numel, signed=False)]
    read = [each.read(begin, count) for each in stored]
    adamw_step([weights, *read], gradient, factors, indices, key)
    for each, values in zip(stored, read, strict=True):
        each.write(begin, values)


def _at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor [count] at an address."""
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)


def _in_8bit(codes: int, scales: int, count: int, *, signed: bool) -> Blockwise8Bit:
    stored = Blockwise8Bit(count, signed=signed, device=CPU)
    stored.codes = _at(codes, count, torch.uint8)
    stored.scales = _at(scales, len(stored.scales), torch.float32)
    return stored
