"""AdamW's step over many parameters as one Triton kernel, which reads and writes each number once.

It computes the formula of ``adamw.adamw_step`` and rounds with the random bits there; in
Triton's interpreter its results are theirs bit for bit. Numbers in bfloat16 are read and written as the upper
halves of fp32 numbers, so that the rounding is the one written here.
"""

import torch
import triton
import triton.language as tl

# ruff: noqa: N803 - constants are in capitals, as is usual in Triton
from fabric_train.optim.states import BLOCK, CHUNK, Row, TensorTable, levels_and_midpoints

_FIELDS = tl.constexpr(len(Row._fields))
_CHUNK = tl.constexpr(CHUNK)
_COLUMNS = tl.constexpr(BLOCK)  # so that the 8-bit numbers with one scale are a row
_ROWS = tl.constexpr(4)  # with 4 warps, a thread has 8 elements: 16 bytes of bfloat16, which is the widest load
_WARPS = 4

_FP32 = tl.constexpr(0)
_BF16 = tl.constexpr(1)
_8BIT = tl.constexpr(2)
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}


def launch(table: TensorTable) -> None:
    """Update the parameters of a table in one launch. The host does not wait for it."""
    storage = table.storage
    device = table.rows.device
    _adamw_kernel[(len(table.owners),)](
        table.rows,
        table.factors,
        table.owners,
        *(levels_and_midpoints(signed, device) for signed in (True, False)),
        WEIGHTS=_KINDS[storage.weights],
        GRADIENT=_KINDS[storage.gradient],
        MOMENTS=_KINDS[storage.moments],
        STOCHASTIC=storage.rounds_stochastically,
        ALIGNED=storage.is_aligned,
        num_warps=_WARPS,
        enable_fp_fusion=False,  # products and sums are rounded one by one, as in the eager formula
    )


@triton.jit
def _adamw_kernel(
    rows,
    factors,
    owners,
    signed_levels,
    unsigned_levels,
    WEIGHTS: tl.constexpr,
    GRADIENT: tl.constexpr,
    MOMENTS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Update one chunk of one parameter. The tensors are from ``TensorTable``."""
    owner = tl.load(owners + tl.program_id(0))
    row = rows + owner * _FIELDS  # has the fields of ``Row``, in order
    count = tl.load(row + 6)
    chunk = (tl.program_id(0) - tl.load(row + 7)) * _CHUNK
    end = tl.minimum(chunk + _CHUNK, count)
    rest = end - (end - chunk) % (_ROWS * _COLUMNS)
    begin = chunk
    while begin < rest:  # whole blocks without a mask, so that loads are wide
        _update(
            row, factors + owner * 7, signed_levels, unsigned_levels, begin, None,
            WEIGHTS, GRADIENT, MOMENTS, STOCHASTIC, ALIGNED,
        )  # fmt: skip
        begin += _ROWS * _COLUMNS
    if rest < end:
        _update(
            row, factors + owner * 7, signed_levels, unsigned_levels, rest, end,
            WEIGHTS, GRADIENT, MOMENTS, STOCHASTIC, ALIGNED,
        )  # fmt: skip


@triton.jit
def _update(
    row,
    factors,
    signed_levels,
    unsigned_levels,
    begin,
    end,
    WEIGHTS: tl.constexpr,
    GRADIENT: tl.constexpr,
    MOMENTS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Update the [_ROWS, _COLUMNS] elements from ``begin`` on; those before ``end`` if it is not None."""
    weights = _read(tl.load(row), 0, signed_levels, begin, end, WEIGHTS, ALIGNED)
    gradient = _read(tl.load(row + 1), 0, signed_levels, begin, end, GRADIENT, ALIGNED)
    first = _read(tl.load(row + 2), tl.load(row + 4), signed_levels, begin, end, MOMENTS, ALIGNED)
    second = _read(tl.load(row + 3), tl.load(row + 5), unsigned_levels, begin, end, MOMENTS, ALIGNED)
    first = first + (gradient - first) * tl.load(factors + 1)
    second = second * tl.load(factors + 2) + gradient * gradient * tl.load(factors + 3)
    root = tl.sqrt_rn(second) * tl.load(factors + 5) + tl.load(factors + 6)
    weights = weights * tl.load(factors) - tl.div_rn(tl.load(factors + 4) * first, root)
    lower = None
    upper = None
    if STOCHASTIC:
        bits = _random_bits(row, begin)
        lower = bits & 0xFFFF
        upper = bits >> 16
    _write(tl.load(row), 0, signed_levels, begin, end, weights, upper, WEIGHTS, ALIGNED)
    _write(tl.load(row + 2), tl.load(row + 4), signed_levels, begin, end, first, lower, MOMENTS, ALIGNED)
    _write(tl.load(row + 3), tl.load(row + 5), unsigned_levels, begin, end, second, lower, MOMENTS, ALIGNED)


@triton.jit
def _read(address, scales, levels, begin, end, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    at = _offsets()
    mask = None
    if end is not None:
        mask = begin + at < end
    if KIND == _FP32:
        numbers = tl.load(_pointer(address, begin, tl.float32, ALIGNED) + at, mask=mask)
    elif KIND == _BF16:
        upper = tl.load(_pointer(address, begin, tl.uint16, ALIGNED) + at, mask=mask)
        numbers = (upper.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        codes = tl.load(_pointer(address, begin, tl.uint8, ALIGNED) + at, mask=mask)
        numbers = tl.load(levels + codes.to(tl.int32)) * _load_scales(scales, begin, end)
    return numbers


@triton.jit
def _write(address, scales, levels, begin, end, numbers, random, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Store fp32 numbers; round to bfloat16 with ``random``, uint32 below 2¹⁶, or to the nearest if it is None."""
    at = _offsets()
    mask = None
    if end is not None:
        mask = begin + at < end
    if KIND == _FP32:
        tl.store(_pointer(address, begin, tl.float32, ALIGNED) + at, numbers, mask=mask)
    elif KIND == _BF16:
        bits = numbers.to(tl.uint32, bitcast=True)
        if random is None:
            random = 0x7FFF + ((bits >> 16) & 1)  # halves go to the even neighbour
        upper = ((bits + random) >> 16).to(tl.uint16)
        tl.store(_pointer(address, begin, tl.uint16, ALIGNED) + at, upper, mask=mask)
    else:
        sizes = tl.abs(numbers)
        if end is not None:
            sizes = tl.where(mask, sizes, 0.0)
        scale = tl.max(sizes, axis=1, keep_dims=True)
        _store_scales(scales, begin, end, scale)
        normalized = tl.div_rn(numbers, tl.where(scale > 0, scale, 1.0))
        codes = tl.zeros_like(at)  # the number of midpoints below, by bisection; the midpoints follow the 256 levels
        for power in tl.static_range(8):
            half = 128 >> power
            codes += tl.where(tl.load(levels + 255 + codes + half) < normalized, half, 0)
        tl.store(_pointer(address, begin, tl.uint8, ALIGNED) + at, codes.to(tl.uint8), mask=mask)


@triton.jit
def _load_scales(scales, begin, end):
    """Return the scales of the 8-bit blocks from element ``begin`` on: fp32 [_ROWS, 1]."""
    blocks = begin // _COLUMNS + tl.arange(0, _ROWS)[:, None]
    mask = None
    if end is not None:
        mask = blocks * _COLUMNS < end
    return tl.load(scales.to(tl.pointer_type(tl.float32)) + blocks, mask=mask)


@triton.jit
def _store_scales(scales, begin, end, numbers):
    """Store the scales [_ROWS, 1] of the 8-bit blocks from element ``begin`` on."""
    blocks = begin // _COLUMNS + tl.arange(0, _ROWS)[:, None]
    mask = None
    if end is not None:
        mask = blocks * _COLUMNS < end
    tl.store(scales.to(tl.pointer_type(tl.float32)) + blocks, numbers, mask=mask)


@triton.jit
def _offsets():
    """Return the offsets of the elements that are updated at once: int32 [_ROWS, _COLUMNS]."""
    return tl.arange(0, _ROWS)[:, None] * _COLUMNS + tl.arange(0, _COLUMNS)[None, :]


@triton.jit
def _pointer(address, begin, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a pointer to element ``begin`` of the tensor at an address."""
    pointer = address.to(tl.pointer_type(dtype)) + begin
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _random_bits(row, begin):
    """Return 32 random bits for each element from ``begin`` on; see ``adamw.random_bits``."""
    local = begin + _offsets()
    index = tl.load(row + 8) + local
    gap = tl.load(row + 10)
    if gap != 0:
        index += local // tl.load(row + 9) * gap
    bits = index.to(tl.uint32) ^ tl.load(row + 11).to(tl.uint32)
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= bits >> 15
    bits *= 0x846CA68B
    bits ^= bits >> 16
    return bits
