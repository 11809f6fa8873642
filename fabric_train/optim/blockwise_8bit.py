"""Block-wise 8-bit quantization of optimizer states (arXiv:2110.02861).

Each number is stored as the index of one of 256 levels. A block of 256 consecutive numbers has one scale, its largest
magnitude.
"""

import functools

import torch

BLOCK = 256


class Blockwise8Bit:
    """A vector stored as one byte per number and one fp32 scale per block; zeros at first.

    Writing back what was read, into the same blocks, does not change the bytes.
    """

    def __init__(self, count: int, signed: bool, device: torch.device) -> None:
        """Store ``count`` zeros on a device. Without ``signed``, numbers are not negative and levels are finer."""
        levels = _levels(signed).to(device)
        self._levels, self._midpoints = levels, (levels[1:] + levels[:-1]) / 2
        self._codes = torch.full((count,), int((levels == 0).nonzero()), dtype=torch.uint8, device=device)
        self._scales = torch.zeros(-(-count // BLOCK), device=device)

    def __len__(self) -> int:
        return len(self._codes)

    def read(self, begin: int, count: int) -> torch.Tensor:
        """Return fp32 [count], the elements from ``begin``, which is the start of a block."""
        codes = self._codes[begin : begin + count]
        numbers = _blocks(self._levels[codes.int()])
        numbers *= self._scales[begin // BLOCK :][: len(numbers), None]
        return numbers.flatten()[: len(codes)]

    def write(self, begin: int, numbers: torch.Tensor) -> None:
        """Store finite fp32 numbers from element ``begin``. They fill whole blocks, or reach to the end."""
        blocks = _blocks(numbers)
        scales = blocks.abs().amax(1)
        self._scales[begin // BLOCK :][: len(blocks)] = scales
        normalized = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
        codes = torch.bucketize(normalized, self._midpoints, out_int32=True).flatten()[: len(numbers)]
        self._codes[begin : begin + len(numbers)] = codes.to(torch.uint8)


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
