"""Round fp32 to bfloat16 stochastically, so that many small changes add up (arXiv:2010.06192).

The random bits are a hash of seed, step, parameter and element, not a stream of random numbers. So they are the same on
every replica, with every sharding, on every device, and in a resumed run.
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
class LocalElements:
    """The elements of a flattened full tensor that a rank has.

    They are runs of ``width`` consecutive elements. The first run begins at ``begin``, and each following one
    ``stride`` elements after the previous one.
    """

    begin: int
    width: int
    stride: int

    def indices(self, first: int, count: int, device: torch.device) -> torch.Tensor:
        """Return the indices modulo 2³² of ``count`` local elements from number ``first`` on: int32 [count]."""
        if self.width == self.stride:
            return torch.arange(count, dtype=torch.int32, device=device).add_(_wrapped(self.begin + first))
        local = torch.arange(first, first + count, device=device)
        indices = local // self.width * (self.stride - self.width) + local + self.begin
        return indices.to(torch.int32)


def local_elements(parameter: nn.Parameter, cuts: dict[int, FlatShard]) -> LocalElements:
    """Return the elements of a parameter that this rank has; ``cuts`` are FSDP1's, from ``shards.flat_shards``."""
    if id(parameter) in cuts:
        cut = cuts[id(parameter)]
        begin, end = cut.range(cut.rank)
        return LocalElements(begin, max(end - begin, 1), max(end - begin, 1))
    full = parameter.shape
    if not isinstance(parameter, DTensor):
        return LocalElements(0, full.numel(), full.numel())
    shape, offsets = compute_local_shape_and_global_offset(full, parameter.device_mesh, parameter.placements)
    begin = sum(offset * math.prod(full[axis + 1 :]) for axis, offset in enumerate(offsets))
    sharded_dims = [dim for dim, (local, size) in enumerate(zip(shape, full, strict=True)) if dim and local != size]
    dim = sharded_dims[-1] if sharded_dims else 0
    assert len(sharded_dims) < 2, f"a parameter is sharded along {len(sharded_dims)} dimensions besides its first"
    width = math.prod(shape[dim:])
    return LocalElements(begin, width, math.prod(full[dim:]) if sharded_dims else width)


def salt(seed: int, name: str) -> int:
    """Return a hash of a seed and a parameter's name, in the range of int32."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def random_bits(indices: torch.Tensor, key: torch.Tensor | int) -> torch.Tensor:
    """Return 32 random bits for each of the int32 ``indices``, with the same shape and dtype.

    The hash is Chris Wellons' lowbias32 (https://nullprogram.com/blog/2018/07/31). int32 products wrap. Right shifts
    copy the sign bit, so the result is masked.
    """
    bits = indices ^ key
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    bits *= 0x7FEB352D
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits *= _wrapped(0x846CA68B)
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    return bits


def round_stochastically(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Round finite fp32 ``values`` in place to one of the two nearest bfloat16 numbers, and return them.

    The mean of many roundings is the value. bfloat16 keeps the upper 16 of the 32 bits; the lower 16 bits, divided by
    2¹⁶, are the probability of rounding away from zero. ``random`` is int32, uniform from 0 to 2¹⁶ - 1.
    """
    return values.view(torch.int32).add_(random).bitwise_and_(-0x10000).view(torch.float32)


def _wrapped(number: int) -> int:
    """Return the int32 that is equal to ``number`` modulo 2³²."""
    return (number + 2**31) % 2**32 - 2**31
