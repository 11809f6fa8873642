"""Run the kernel of AdamW's step in Triton's interpreter and print, by case, which results differ from the formula's.

Needs ``TRITON_INTERPRET=1`` in the environment before it starts.
"""

import copy
import json
from typing import Any

import torch
import triton.language as tl

from fabric_train.optim import tensor_table, triton_adamw
from fabric_train.optim.adamw import step_factors
from fabric_train.optim.tensor_table import Row, Storage, TensorTable
from tests.support import launch_on_cpu

FP32 = torch.float32
BF16 = torch.bfloat16
EIGHT = torch.uint8
STORAGES = [
    (BF16, BF16, BF16, True),
    (BF16, BF16, FP32, True),
    (BF16, BF16, FP32, False),
    (FP32, FP32, BF16, True),
    (FP32, FP32, BF16, False),
    (FP32, FP32, FP32, False),
    (FP32, FP32, EIGHT, False),
    (BF16, BF16, EIGHT, True),
]
PLACES = [(1, 5, 1, 0), (5000, 2**32 - 100, 5000, 0), (2049, 65, 15, 15)]  # numel, begin, width, gap
CHUNK = 2048  # so that few numbers are several chunks


def main() -> None:
    """Print a JSON object: the names of the tensors that differ, by case."""
    triton_adamw._CHUNK = tl.constexpr(CHUNK)
    tensor_table.CHUNK = launch_on_cpu.CHUNK = CHUNK
    root = torch.Tensor.sqrt  # MKL's, in fp32, is not always the nearest number
    torch.Tensor.sqrt = lambda each: root(each.double()).float()  # type: ignore[method-assign,assignment]
    random = torch.Generator().manual_seed(0)
    print(json.dumps({str(storage): _differing(Storage(*storage, True), random) for storage in STORAGES}))


def _differing(storage: Storage, random: torch.Generator) -> list[str]:
    """Return the tensors that the kernel and the formula do not leave equal bit for bit."""
    ours = [_tensors(storage, numel, random) for numel, *_ in PLACES]
    theirs = copy.deepcopy(ours)
    triton_adamw.launch(_table(storage, ours))
    launch_on_cpu.launch(_table(storage, theirs))
    faults = []
    for (numel, *_), found, expected in zip(PLACES, ours, theirs, strict=True):
        faults += [f"{numel} {name}" for name, each in expected.items() if not torch.equal(found[name], each)]
    return faults


def _tensors(storage: Storage, numel: int, random: torch.Generator) -> dict[str, torch.Tensor]:
    """Return the tensors of a parameter with random contents, by the name of their address in ``Row``."""
    blocks = -(-numel // 256)
    tensors = {
        "weights": torch.randn(numel, generator=random).to(storage.weights),
        "gradient": (0.01 * torch.randn(numel, generator=random)).to(storage.gradient),
        "exp_avg_scales": 0.01 * torch.rand(blocks, generator=random),
        "exp_avg_sq_scales": 1e-4 * torch.rand(blocks, generator=random),
    }
    if storage.moments == EIGHT:
        moments = torch.randint(0, 256, (2, numel), generator=random, dtype=EIGHT)
    else:
        moments = 0.01 * torch.randn(2, numel, generator=random)
        moments = torch.stack([moments[0], moments[1].square()]).to(storage.moments)
    return tensors | {"exp_avg": moments[0].clone(), "exp_avg_sq": moments[1].clone()}


def _table(storage: Storage, of_parameters: list[dict[str, torch.Tensor]]) -> TensorTable:
    factors = step_factors(3, 1e-3, 0.1, (0.9, 0.95), 1e-8)
    parameters: list[Any] = []
    for number, (place, tensors) in enumerate(zip(PLACES, of_parameters, strict=True)):
        numel, *where = place
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        row = Row(**addresses, numel=numel, first_program=0, begin=where[0], width=where[1], gap=where[2], key=-number)
        parameters.append((row, factors))
    return tensor_table.tensor_table(storage, parameters, torch.device("cpu"))


if __name__ == "__main__":
    main()
