"""Round to bfloat16 stochastically, with random bits that depend on the seed, the parameter, the step and the element.

So a replica on another rank, a run on another number of ranks and a resumed run all round in the same way.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fabric_train.distributed.sharded_parameters import FlatShard

_LOWER_16_BITS = 0xFFFF


@dataclass(frozen=True)
class LocalElements:
    """The elements of a tensor that a rank has: runs of ``width``, each ``stride`` apart, the first at ``begin``."""

    begin: int
    width: int
    stride: int

    def indices(self, start: int, count: int, device: torch.device) -> torch.Tensor:
        """Return the indices, modulo 2³², of ``count`` local elements from ``start`` on: int32 [count]."""
        if self.width == self.stride:  # one run
            first_index = _wrap(self.begin + start)
            return torch.arange(count, dtype=torch.int32, device=device).add_(first_index)
        local_indices = torch.arange(start, start + count, device=device)
        num_earlier_gaps = local_indices // self.width
        gap = self.stride - self.width
        indices = self.begin + local_indices + num_earlier_gaps * gap
        return indices.to(torch.int32)


def local_elements(parameter: nn.Parameter, flat_shards: Mapping[int, FlatShard]) -> LocalElements:
    """Return the elements of a parameter that this rank has; ``flat_shards`` are FSDP1's."""
    # FSDP1: a range of the flattened parameter.
    if id(parameter) in flat_shards:
        shard = flat_shards[id(parameter)]
        begin, end = shard.range(shard.rank)
        width = max(end - begin, 1)  # it is a divisor, also on a rank that has no element
        return LocalElements(begin, width=width, stride=width)

    # The whole parameter.
    shape = parameter.shape
    if not isinstance(parameter, DTensor):
        return LocalElements(begin=0, width=shape.numel(), stride=shape.numel())

    # FSDP2 and tensor parallelism: a block, sharded along its first dimension and at most one other.
    local_shape, offsets = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
    begin = sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))
    inner_dims = [dim for dim in range(1, len(shape)) if local_shape[dim] != shape[dim]]
    assert len(inner_dims) < 2, f"a parameter is sharded along {len(inner_dims)} dimensions besides its first"
    if not inner_dims:
        width = math.prod(local_shape)
        return LocalElements(begin, width=width, stride=width)
    dim = inner_dims[0]
    return LocalElements(begin, width=math.prod(local_shape[dim:]), stride=math.prod(shape[dim:]))


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
    bits *= _wrap(0x846CA68B)
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    return bits


def upper_half(bits: torch.Tensor) -> torch.Tensor:
    """Return the upper 16 bits of int32 ``bits``, as numbers from 0 to 2¹⁶ - 1."""
    return (bits >> 16).bitwise_and_(_LOWER_16_BITS)  # the shift copies the sign bit


def lower_half(bits: torch.Tensor) -> torch.Tensor:
    """Return the lower 16 bits of int32 ``bits``, as numbers from 0 to 2¹⁶ - 1."""
    return bits & _LOWER_16_BITS


def round_stochastically(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Round finite fp32 ``values`` in place to one of the two nearest bfloat16 numbers, and return them.

    The mean of many roundings is the value. bfloat16 keeps the upper 16 of the 32 bits; the lower 16 bits, divided by
    2¹⁶, are the probability of rounding away from zero. ``random`` is int32, uniform from 0 to 2¹⁶ - 1.
    """
    return values.view(torch.int32).add_(random).bitwise_and_(-0x10000).view(torch.float32)


def _wrap(number: int) -> int:
    """Return the int32 that is equal to ``number`` modulo 2³²."""
    return (number + 2**31) % 2**32 - 2**31
