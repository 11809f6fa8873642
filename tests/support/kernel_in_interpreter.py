"""Run the kernel of AdamW's step in Triton's interpreter and print, by case, which results differ from the formula's.

Needs ``TRITON_INTERPRET=1`` in the environment before it starts.
"""

import copy
import json
from dataclasses import dataclass

import torch
import triton.language as tl

from fabric_train.optim import tensor_table, triton_adamw
from fabric_train.optim.adamw import step_factors
from fabric_train.optim.blockwise_8bit import BLOCK
from fabric_train.optim.tensor_table import Row, StepFactors, Storage, TensorTable
from tests.support import launch_on_cpu

FP32 = torch.float32
BF16 = torch.bfloat16
IN_8_BITS = torch.uint8
CHUNK = 2048
"""Elements that a program of the kernel updates; few, so that a parameter is several chunks."""


@dataclass(frozen=True)
class LocalPart:
    """The elements of a parameter that this rank has; see ``Row``."""

    numel: int
    begin: int
    width: int
    gap: int


STORAGES = [
    Storage(weights=BF16, gradient=BF16, moments=BF16, rounds_stochastically=True, is_aligned=True),
    Storage(weights=BF16, gradient=BF16, moments=FP32, rounds_stochastically=True, is_aligned=True),
    Storage(weights=BF16, gradient=BF16, moments=FP32, rounds_stochastically=False, is_aligned=True),
    Storage(weights=FP32, gradient=FP32, moments=BF16, rounds_stochastically=True, is_aligned=True),
    Storage(weights=FP32, gradient=FP32, moments=BF16, rounds_stochastically=False, is_aligned=True),
    Storage(weights=FP32, gradient=FP32, moments=FP32, rounds_stochastically=False, is_aligned=True),
    Storage(weights=FP32, gradient=FP32, moments=IN_8_BITS, rounds_stochastically=False, is_aligned=True),
    Storage(weights=BF16, gradient=BF16, moments=IN_8_BITS, rounds_stochastically=True, is_aligned=True),
]
LOCAL_PARTS = [
    LocalPart(numel=1, begin=5, width=1, gap=0),
    # several chunks, and indices that pass the largest 32-bit number
    LocalPart(numel=5000, begin=2**32 - 100, width=5000, gap=0),
    # one element more than a chunk, in runs with gaps, as a tensor-parallel matrix has them
    LocalPart(numel=2049, begin=65, width=15, gap=15),
]


def main() -> None:
    """Print a JSON object: the names of the tensors that differ, by case."""
    triton_adamw._CHUNK = tl.constexpr(CHUNK)
    tensor_table.CHUNK = CHUNK
    launch_on_cpu.CHUNK = CHUNK
    _round_square_roots_to_nearest()
    random = torch.Generator().manual_seed(0)
    differing_by_case = {}
    for storage in STORAGES:
        case = (storage.weights, storage.gradient, storage.moments, storage.rounds_stochastically)
        differing_by_case[str(case)] = _differing_tensors(storage, random)
    print(json.dumps(differing_by_case))


def _round_square_roots_to_nearest() -> None:
    """Replace ``Tensor.sqrt``: MKL's, in fp32, is not always the nearest number, as the kernel's is."""
    sqrt = torch.Tensor.sqrt

    def nearest_sqrt(tensor: torch.Tensor) -> torch.Tensor:
        return sqrt(tensor.double()).float()

    torch.Tensor.sqrt = nearest_sqrt  # type: ignore[method-assign,assignment]


def _differing_tensors(storage: Storage, random: torch.Generator) -> list[str]:
    """Return the tensors that the kernel and the formula do not leave equal bit for bit."""
    kernel_tensors = [_random_tensors(storage, part.numel, random) for part in LOCAL_PARTS]
    formula_tensors = copy.deepcopy(kernel_tensors)
    triton_adamw.launch(_table(storage, kernel_tensors))
    launch_on_cpu.launch(_table(storage, formula_tensors))
    differing = []
    for part, tensors, expected_tensors in zip(LOCAL_PARTS, kernel_tensors, formula_tensors, strict=True):
        for name, expected in expected_tensors.items():
            if not torch.equal(tensors[name], expected):
                differing.append(f"{part.numel} {name}")
    return differing


def _random_tensors(storage: Storage, numel: int, random: torch.Generator) -> dict[str, torch.Tensor]:
    """Return the tensors of a parameter with random contents, by the name of their address in ``Row``."""
    num_blocks = -(-numel // BLOCK)
    tensors = {
        "weights": torch.randn(numel, generator=random).to(storage.weights),
        "gradient": (0.01 * torch.randn(numel, generator=random)).to(storage.gradient),
        "exp_avg_scales": 0.01 * torch.rand(num_blocks, generator=random),
        "exp_avg_sq_scales": 1e-4 * torch.rand(num_blocks, generator=random),
    }
    if storage.moments == IN_8_BITS:
        tensors["exp_avg"] = torch.randint(0, 256, (numel,), generator=random, dtype=IN_8_BITS)
        tensors["exp_avg_sq"] = torch.randint(0, 256, (numel,), generator=random, dtype=IN_8_BITS)
    else:
        tensors["exp_avg"] = (0.01 * torch.randn(numel, generator=random)).to(storage.moments)
        tensors["exp_avg_sq"] = (0.01 * torch.randn(numel, generator=random)).square().to(storage.moments)
    return tensors


def _table(storage: Storage, tensors_by_parameter: list[dict[str, torch.Tensor]]) -> TensorTable:
    factors = step_factors(3, 1e-3, 0.1, (0.9, 0.95), 1e-8)
    parameters: list[tuple[Row, StepFactors]] = []
    for index, (part, tensors) in enumerate(zip(LOCAL_PARTS, tensors_by_parameter, strict=True)):
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        row = Row(
            **addresses,
            numel=part.numel,
            first_program=0,
            begin=part.begin,
            width=part.width,
            gap=part.gap,
            key=-index,
        )
        parameters.append((row, factors))
    return tensor_table.tensor_table(storage, parameters, torch.device("cpu"))


if __name__ == "__main__":
    main()
