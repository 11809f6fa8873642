"""Take AdamW's step over many parameters in one Triton kernel, which reads and writes each number once.

It computes the formula of ``adamw.adamw_step`` and rounds with the same random bits: in Triton's interpreter the
results are bit-identical. Numbers in bfloat16 are read and written as the upper halves of fp32 numbers, so that the
rounding is the one written here.
"""

import torch
import triton
import triton.language as tl

# ruff: noqa: N803 - constants are in capitals, as is usual in Triton
from fabric_train.optim.blockwise_8bit import BLOCK, levels_and_midpoints
from fabric_train.optim.tensor_table import CHUNK, Row, StepFactors, TensorTable

# columns of ``TensorTable.rows``
_NUM_FIELDS = tl.constexpr(len(Row._fields))
_WEIGHTS = tl.constexpr(Row._fields.index("weights"))
_GRADIENT = tl.constexpr(Row._fields.index("gradient"))
_EXP_AVG = tl.constexpr(Row._fields.index("exp_avg"))
_EXP_AVG_SQ = tl.constexpr(Row._fields.index("exp_avg_sq"))
_EXP_AVG_SCALES = tl.constexpr(Row._fields.index("exp_avg_scales"))
_EXP_AVG_SQ_SCALES = tl.constexpr(Row._fields.index("exp_avg_sq_scales"))
_NUMEL = tl.constexpr(Row._fields.index("numel"))
_FIRST_PROGRAM = tl.constexpr(Row._fields.index("first_program"))
_BEGIN = tl.constexpr(Row._fields.index("begin"))
_WIDTH = tl.constexpr(Row._fields.index("width"))
_GAP = tl.constexpr(Row._fields.index("gap"))
_KEY = tl.constexpr(Row._fields.index("key"))
# columns of ``TensorTable.factors``
_NUM_FACTORS = tl.constexpr(len(StepFactors._fields))
_WEIGHT_FACTOR = tl.constexpr(StepFactors._fields.index("weight_factor"))
_FIRST_GAIN = tl.constexpr(StepFactors._fields.index("first_gain"))
_SECOND_DECAY = tl.constexpr(StepFactors._fields.index("second_decay"))
_SECOND_GAIN = tl.constexpr(StepFactors._fields.index("second_gain"))
_RATE = tl.constexpr(StepFactors._fields.index("rate"))
_ROOT_FACTOR = tl.constexpr(StepFactors._fields.index("root_factor"))
_EPS = tl.constexpr(StepFactors._fields.index("eps"))

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
    num_programs = len(table.owners)
    _adamw_kernel[(num_programs,)](
        table.rows,
        table.factors,
        table.owners,
        levels_and_midpoints(True, device),
        levels_and_midpoints(False, device),
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
    row = rows + owner * _NUM_FIELDS  # has the fields of ``Row``, in order
    row_factors = factors + owner * _NUM_FACTORS
    numel = tl.load(row + _NUMEL)
    begin = (tl.program_id(0) - tl.load(row + _FIRST_PROGRAM)) * _CHUNK
    end = tl.minimum(begin + _CHUNK, numel)
    # Whole blocks are updated without a mask, so that loads are wide; the rest with one.
    masked_begin = end - (end - begin) % (_ROWS * _COLUMNS)
    while begin < masked_begin:
        _update(
            row, row_factors, signed_levels, unsigned_levels, begin, None,
            WEIGHTS, GRADIENT, MOMENTS, STOCHASTIC, ALIGNED,
        )  # fmt: skip
        begin += _ROWS * _COLUMNS
    if masked_begin < end:
        _update(
            row, row_factors, signed_levels, unsigned_levels, masked_begin, end,
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
    weights_address = tl.load(row + _WEIGHTS)
    first_address = tl.load(row + _EXP_AVG)
    second_address = tl.load(row + _EXP_AVG_SQ)
    first_scales = tl.load(row + _EXP_AVG_SCALES)
    second_scales = tl.load(row + _EXP_AVG_SQ_SCALES)

    # read
    weights = _read(weights_address, 0, signed_levels, begin, end, WEIGHTS, ALIGNED)
    gradient = _read(tl.load(row + _GRADIENT), 0, signed_levels, begin, end, GRADIENT, ALIGNED)
    first = _read(first_address, first_scales, signed_levels, begin, end, MOMENTS, ALIGNED)
    second = _read(second_address, second_scales, unsigned_levels, begin, end, MOMENTS, ALIGNED)

    # the formula of ``adamw.adamw_step``
    first = first + (gradient - first) * tl.load(factors + _FIRST_GAIN)
    second = second * tl.load(factors + _SECOND_DECAY) + gradient * gradient * tl.load(factors + _SECOND_GAIN)
    root = tl.sqrt_rn(second) * tl.load(factors + _ROOT_FACTOR) + tl.load(factors + _EPS)
    weights = weights * tl.load(factors + _WEIGHT_FACTOR) - tl.div_rn(tl.load(factors + _RATE) * first, root)

    # round and write
    lower = None
    upper = None
    if STOCHASTIC:
        bits = _random_bits(row, begin)
        lower = bits & 0xFFFF
        upper = bits >> 16
    _write(weights_address, 0, signed_levels, begin, end, weights, upper, WEIGHTS, ALIGNED)
    _write(first_address, first_scales, signed_levels, begin, end, first, lower, MOMENTS, ALIGNED)
    _write(second_address, second_scales, unsigned_levels, begin, end, second, lower, MOMENTS, ALIGNED)


@triton.jit
def _read(address, scales, levels, begin, end, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the [_ROWS, _COLUMNS] elements from ``begin`` on in fp32."""
    offsets = _offsets()
    mask = None
    if end is not None:
        mask = begin + offsets < end
    if KIND == _FP32:
        numbers = tl.load(_pointer(address, begin, tl.float32, ALIGNED) + offsets, mask=mask)
    elif KIND == _BF16:
        upper = tl.load(_pointer(address, begin, tl.uint16, ALIGNED) + offsets, mask=mask)
        numbers = (upper.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        codes = tl.load(_pointer(address, begin, tl.uint8, ALIGNED) + offsets, mask=mask)
        numbers = tl.load(levels + codes.to(tl.int32)) * _load_scales(scales, begin, end)
    return numbers


@triton.jit
def _write(address, scales, levels, begin, end, numbers, random, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Store fp32 numbers; round to bfloat16 with ``random``, uint32 below 2¹⁶, or to the nearest if it is None."""
    offsets = _offsets()
    mask = None
    if end is not None:
        mask = begin + offsets < end
    if KIND == _FP32:
        tl.store(_pointer(address, begin, tl.float32, ALIGNED) + offsets, numbers, mask=mask)
    elif KIND == _BF16:
        bits = numbers.to(tl.uint32, bitcast=True)
        if random is None:
            random = 0x7FFF + ((bits >> 16) & 1)  # halves go to the even neighbour
        upper = ((bits + random) >> 16).to(tl.uint16)
        tl.store(_pointer(address, begin, tl.uint16, ALIGNED) + offsets, upper, mask=mask)
    else:
        sizes = tl.abs(numbers)
        if end is not None:
            sizes = tl.where(mask, sizes, 0.0)
        scale = tl.max(sizes, axis=1, keep_dims=True)
        _store_scales(scales, begin, end, scale)
        normalized = tl.div_rn(numbers, tl.where(scale > 0, scale, 1.0))
        # The code is the number of midpoints below, found by bisection; the midpoints follow the 256 levels.
        codes = tl.zeros_like(offsets)
        for power in tl.static_range(8):
            half = 128 >> power
            codes += tl.where(tl.load(levels + 255 + codes + half) < normalized, half, 0)
        tl.store(_pointer(address, begin, tl.uint8, ALIGNED) + offsets, codes.to(tl.uint8), mask=mask)


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
    """Return 32 random bits for each element from ``begin`` on; see ``stochastic_rounding.random_bits``."""
    local_indices = begin + _offsets()
    indices = tl.load(row + _BEGIN) + local_indices
    gap = tl.load(row + _GAP)
    if gap != 0:
        indices += local_indices // tl.load(row + _WIDTH) * gap
    bits = indices.to(tl.uint32) ^ tl.load(row + _KEY).to(tl.uint32)
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= bits >> 15
    bits *= 0x846CA68B
    bits ^= bits >> 16
    return bits
