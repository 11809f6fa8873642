"""fp32 → bfloat16, up or down by chance, so that what many small changes add up to is not lost (arXiv:2010.06192).

The chance is no stream of random numbers but a hash of seed, step, parameter and element. So it is the same on every
replica, however a parameter is cut among ranks, on every device, and in a resumed run.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fabric_train.distributed.shards import FlatShard


@dataclass(frozen=True)
class Place:
    """Which elements of the full tensor a rank's part is, both flattened: ``width`` that follow each other from
    ``begin`` on, then as many ``stride`` further on, and so on.
    """

    begin: int
    width: int
    stride: int

    def numbers(self, first: int, count: int, device: torch.device) -> torch.Tensor:
        """Return the numbers in the full tensor, modulo 2³², of ``count`` elements of the part from ``first`` on:
        int32 [count].
        """
        if self.width == self.stride:
            return torch.arange(count, dtype=torch.int32, device=device).add_(_wrapped(self.begin + first))
        index = torch.arange(first, first + count, device=device)
        numbers = index // self.width * (self.stride - self.width) + index + self.begin
        return numbers.to(torch.int32)


def place_of(parameter: nn.Parameter, cuts: dict[int, FlatShard]) -> Place:
    """Return where this rank's part of a parameter lies; ``cuts`` are FSDP1's, from ``shards.flat_shards``."""
    if id(parameter) in cuts:
        cut = cuts[id(parameter)]
        begin, end = cut.range(cut.rank)
        return Place(begin, max(end - begin, 1), max(end - begin, 1))
    full = parameter.shape
    if not isinstance(parameter, DTensor):
        return Place(0, full.numel(), full.numel())
    shape, offsets = compute_local_shape_and_global_offset(full, parameter.device_mesh, parameter.placements)
    begin = sum(offset * math.prod(full[axis + 1 :]) for axis, offset in enumerate(offsets))
    cut_axes = [axis for axis, (here, whole) in enumerate(zip(shape, full, strict=True)) if axis and here != whole]
    axis = cut_axes[-1] if cut_axes else 0
    assert len(cut_axes) < 2, f"a parameter is cut along {len(cut_axes)} dimensions beside its first"
    width = math.prod(shape[axis:])
    return Place(begin, width, math.prod(full[axis:]) if cut_axes else width)


def salt(seed: int, name: str) -> int:
    """Return the number that stands for a seed and a parameter, an int32."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def random_bits(numbers: torch.Tensor, key: torch.Tensor | int) -> torch.Tensor:
    """Return 32 random bits for each of the int32 ``numbers``, of the same shape and type.

    The hash is Chris Wellons' lowbias32 (https://nullprogram.com/blog/2018/07/31). int32 products wrap, and shifts to
    the right bring copies of the sign in, which are masked away.
    """
    bits = numbers ^ key
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    bits *= 0x7FEB352D
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits *= _wrapped(0x846CA68B)
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    return bits


def round_by_chance(values: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """Round finite fp32 ``values``, in place, to one of the two nearest that bfloat16 can hold, and return them; the
    nearer one is the likelier one, so that the mean is the value itself.

    ``chance`` is int32, uniform from 0 to 2¹⁶ - 1. Of a number's 32 bits bfloat16 keeps the upper half; the lower half
    is the chance, out of 2¹⁶, of going to the next one.
    """
    return values.view(torch.int32).add_(chance).bitwise_and_(-0x10000).view(torch.float32)


def _wrapped(number: int) -> int:
    """Return the int32 that is equal modulo 2³²."""
    return (number + 2**31) % 2**32 - 2**31
