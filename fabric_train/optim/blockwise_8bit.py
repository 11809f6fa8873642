"""Store numbers in 8 bits (arXiv:2110.02861): one byte for each number, and one fp32 scale for each block.

A byte is the index of one of 256 levels. A block is 256 consecutive numbers; its scale is their largest magnitude.
"""

import functools

import torch
import torch.nn.functional as F

BLOCK = 256
"""The number of values that share a scale."""
_NUM_DECADES = 7  # from 1e-7 to 1


class Blockwise8Bit:
    """A vector in 8 bits; writing back values that were just read changes nothing."""

    def __init__(self, count: int, *, signed: bool, device: torch.device) -> None:
        """Store ``count`` zeros on a device. Without ``signed``, numbers are not negative and levels are finer."""
        self._levels, self._midpoints = levels_and_midpoints(signed, device)
        code_of_zero = int((_compute_levels(signed) == 0).nonzero())
        self.codes = torch.full((count,), code_of_zero, dtype=torch.uint8, device=device)
        """Indices of the levels, uint8 [count]."""
        num_blocks = -(-count // BLOCK)
        self.scales = torch.zeros(num_blocks, device=device)
        """The largest magnitude of each block, fp32 [blocks]."""

    def __len__(self) -> int:
        return len(self.codes)

    def read(self, begin: int, count: int) -> torch.Tensor:
        """Return the elements from ``begin``, which is the start of a block: fp32 [count]."""
        codes = self.codes[begin : begin + count]
        numbers = _split_into_blocks(self._levels[codes.int()])  # [blocks, BLOCK]
        first_block = begin // BLOCK
        numbers *= self.scales[first_block : first_block + len(numbers), None]
        return numbers.flatten()[: len(codes)]

    def write(self, begin: int, numbers: torch.Tensor) -> None:
        """Store finite fp32 numbers from element ``begin`` on. They must fill whole blocks, or reach the end."""
        blocks = _split_into_blocks(numbers)
        scales = blocks.abs().amax(1)
        first_block = begin // BLOCK
        self.scales[first_block : first_block + len(blocks)] = scales
        divisors = torch.where(scales > 0, scales, 1.0)[:, None]
        # The index of the nearest level is the number of midpoints below the number.
        codes = torch.bucketize(blocks / divisors, self._midpoints[:-1], out_int32=True)
        self.codes[begin : begin + len(numbers)] = codes.flatten()[: len(numbers)].to(torch.uint8)


@functools.cache
def levels_and_midpoints(signed: bool, device: torch.device) -> torch.Tensor:
    """Return the 256 levels and the 255 midpoints between them, the last one twice: fp32 [2, 256]."""
    levels = _compute_levels(signed)
    midpoints = (levels[1:] + levels[:-1]) / 2
    padded_midpoints = torch.cat([midpoints, midpoints[-1:]])
    return torch.stack([levels, padded_midpoints]).to(device)


def _split_into_blocks(numbers: torch.Tensor) -> torch.Tensor:
    """Return [blocks, BLOCK], with the last block padded with zeros."""
    return F.pad(numbers, (0, -len(numbers) % BLOCK)).view(-1, BLOCK)


@functools.cache
def _compute_levels(signed: bool) -> torch.Tensor:
    """Return the 256 levels of the paper's dynamic tree quantization, fp32, ascending.

    They cover the decades from 1e-7 to 1, and each decade has twice as many levels as the one below. Unlike in the
    paper, the lowest signed level is -1. So a block's largest magnitude is exact, and writing the block again finds the
    same scale.
    """
    levels = [torch.tensor([0.0, 1.0])]
    for decade in range(_NUM_DECADES):  # the range of the smallest numbers comes first
        top_of_decade = 10.0 ** (decade + 1 - _NUM_DECADES)
        num_levels = 2 ** (decade + 1)
        if signed:
            num_levels //= 2  # the other half are their negatives
        edges = torch.linspace(0.1, 1, num_levels + 1, dtype=torch.float64)
        midpoints = (edges[:-1] + edges[1:]) / 2
        decade_levels = (midpoints * top_of_decade).float()
        levels.append(decade_levels)
        if signed:
            levels.append(-decade_levels)
    ascending = torch.cat(levels).sort().values
    if signed:
        ascending[0] = -1.0
    assert len(ascending) == 256  # 2 + 4 + 8 + … + 128 in the decades, and 0 and 1
    return ascending
