"""Numbers in 8 bits each: the index of a level, times the largest magnitude of 256 that follow each other
(arXiv:2110.02861).
"""

import functools

import torch

BLOCK = 256


class EightBits:
    """A vector of numbers, 0 at first, in a byte each and a scale for each block.

    What is read, written back into the same blocks, gives the same bytes.
    """

    def __init__(self, count: int, signed: bool, device: torch.device) -> None:
        """Hold ``count`` zeros; where not ``signed``, the numbers are never negative and have finer levels."""
        levels = _levels(signed).to(device)
        self._levels, self._middles = levels, (levels[1:] + levels[:-1]) / 2
        self._codes = torch.full((count,), int((levels == 0).nonzero()), dtype=torch.uint8, device=device)
        self._scales = torch.zeros(-(-count // BLOCK), device=device)

    def __len__(self) -> int:
        return len(self._codes)

    def read(self, begin: int, count: int) -> torch.Tensor:
        """Return fp32 [count] from element ``begin`` on, which begins a block."""
        codes = self._codes[begin : begin + count]
        numbers = _blocks(self._levels[codes.int()])
        numbers *= self._scales[begin // BLOCK :][: len(numbers), None]
        return numbers.flatten()[: len(codes)]

    def write(self, begin: int, numbers: torch.Tensor) -> None:
        """Take finite fp32 numbers from element ``begin`` on; they are whole blocks, or reach to the end."""
        blocks = _blocks(numbers)
        scales = blocks.abs().amax(1)
        self._scales[begin // BLOCK :][: len(blocks)] = scales
        # of a block of zeros, nothing is to be divided by
        shares = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
        codes = torch.bucketize(shares, self._middles, out_int32=True).flatten()[: len(numbers)]
        self._codes[begin : begin + len(numbers)] = codes.to(torch.uint8)


def _blocks(numbers: torch.Tensor) -> torch.Tensor:
    """Return [blocks, BLOCK], the last one filled up with zeros."""
    return torch.nn.functional.pad(numbers, (0, -len(numbers) % BLOCK)).view(-1, BLOCK)


@functools.cache
def _levels(signed: bool) -> torch.Tensor:
    """Return the 256 levels of the paper's dynamic tree, ascending: decades from 1e-7 to 1, each with twice as many
    levels as the one below.

    Unlike the paper's, the lowest signed level is -1: so the largest magnitude of a block is kept as it is, and its
    scale is found again.
    """
    levels = [torch.tensor([0.0, 1.0])]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        levels += [middles.float(), -middles.float()] if signed else [middles.float()]
    ascending = torch.cat(levels).sort().values
    if signed:
        ascending[0] = -1.0
    assert len(ascending) == 256
    return ascending
