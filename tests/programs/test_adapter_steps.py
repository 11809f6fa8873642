"""The benchmark adapter_steps: the kernels of an operation, their time by roofline, and the least time of a step."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.adapter_steps import GROUPS, cases
from benchmarks.kernels import BANDWIDTH, Kernel, kernels_of
from benchmarks.least_work import LlamaSizes, least_seconds_of_step
from benchmarks.op_counts import DEQUANTIZATION, PARTS
from fabric_train.model.flops import peak_flops

TOKENS = 2048
WIDTH = 1024
BF16_PEAK = 989.4e12  # of an H100, by NVIDIA's data sheet


def matrix(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def kernels_on_meta(func: object, *args: object) -> list[Kernel]:
    """Return the kernels of an operation on meta tensors."""
    result = func(*args)  # type: ignore[operator]
    return kernels_of(func, args, {}, result, lambda tensor: tensor.is_meta)


def test_a_sum_with_a_product_copies_the_matrix_first() -> None:
    kernels = kernels_on_meta(
        torch.ops.aten.addmm.default, matrix(TOKENS, WIDTH), matrix(TOKENS, 16), matrix(16, WIDTH)
    )
    size = TOKENS * WIDTH * 2
    low_size = (TOKENS + WIDTH) * 16 * 2
    assert [(kernel.read, kernel.written) for kernel in kernels] == [(size, size), (size + low_size, size)]
    assert kernels[1].flops == 2 * TOKENS * WIDTH * 16
    # it moves more than it computes
    assert kernels[1].least_seconds == (2 * size + low_size) / BANDWIDTH


def test_the_time_of_a_large_product_is_that_of_its_flops() -> None:
    (kernel,) = kernels_on_meta(torch.ops.aten.mm.default, matrix(4096, 4096), matrix(4096, 4096))
    assert peak_flops("H100", torch.bfloat16) == BF16_PEAK
    assert kernel.least_seconds == pytest.approx(2 * 4096**3 / BF16_PEAK)
    fp32 = [matrix(4096, 4096, dtype=torch.float32) for _ in range(2)]
    (kernel,) = kernels_on_meta(torch.ops.aten.mm.default, *fp32)
    assert kernel.least_seconds == pytest.approx(2 * 4096**3 / 66.9e12)


def test_a_product_in_4_bits_dequantizes_the_weight_and_multiplies() -> None:
    with FakeTensorMode():
        inputs = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16)
        packed = torch.empty(WIDTH * WIDTH // 2, 1, dtype=torch.uint8)
        scales = torch.empty(WIDTH * WIDTH // 64)
        import bitsandbytes  # noqa: F401 - registers the operator

        func = torch.ops.bitsandbytes.gemm_4bit.default
        args = (inputs, packed, [WIDTH, WIDTH], scales, 64, "nf4")
        kernels = kernels_of(func, args, {}, func(*args), lambda tensor: True)
    weight_size = WIDTH * WIDTH * 2
    assert [kernel.part for kernel in kernels] == [DEQUANTIZATION, None]
    assert kernels[0].read == WIDTH * WIDTH // 2 + WIDTH * WIDTH // 16  # 4 bits, and an fp32 scale for 64 weights
    assert kernels[0].written == weight_size
    assert kernels[1].flops == 2 * TOKENS * WIDTH * WIDTH


def test_causal_attention_computes_half_of_its_scores() -> None:
    query = matrix(1, 8, TOKENS, 64)
    func = torch.ops.aten._scaled_dot_product_flash_attention.default
    results = (torch.empty_like(query), *[None] * 8)
    (causal,) = kernels_of(func, (query, query, query, 0.0, True), {}, results, lambda tensor: True)
    (full,) = kernels_of(func, (query, query, query, 0.0, False), {}, results, lambda tensor: True)
    assert full.flops == 4 * TOKENS**2 * 8 * 64
    assert causal.flops == full.flops / 2


def test_the_least_time_of_a_step_follows_from_the_sizes() -> None:
    sizes = LlamaSizes(rank=16, tokens=4096, document=4096)
    assert sizes.matrices == 6_979_321_856  # the 8B without embedding, head and norms
    assert sizes.adapter == 41_943_040  # as peft counts for rank 16 on all linear layers
    seconds = least_seconds_of_step(sizes, in_4_bits=False, has_norms=False)
    assert seconds["matrix products"] == pytest.approx(4 * 4096 * 6_979_321_856 / BF16_PEAK)
    in_4_bits = least_seconds_of_step(sizes, in_4_bits=True, has_norms=True)
    assert set(in_4_bits) == set(GROUPS)
    assert in_4_bits[DEQUANTIZATION] == pytest.approx(2 * 6_979_321_856 * 0.5625 / 3.35e12)


def test_every_part_of_a_step_is_in_one_group() -> None:
    grouped = [part for parts in GROUPS.values() for part in parts]
    assert len(grouped) == len(set(grouped))
    # one device exchanges nothing, and has no teacher
    assert set(PARTS) - set(grouped) == {"casts and copies of FSDP", "collectives", "teacher", "teacher's head"}
    assert len(cases()) == 8
