"""The gradient's norm is the true one, however large and however cut the gradient is."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fabric_train.distributed import gradients
from fabric_train.distributed.gradients import clip_grad_norm
from tests.support.device_operations import DeviceOperations
from tests.support.forked_runs import ForkedRuns
from tests.support.sharded_8b import NUM_ELEMENTS, eight_ranks, sharded_parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallelism", "num_ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2), ("fsdp2", 2), ("fsdp2", 4)]
)
def test_the_norm_of_a_large_gradient_is_the_true_one(
    forked_runs: ForkedRuns, parallelism: str, num_ranks: int
) -> None:
    line = f"--accelerator cpu --precision 32-true --parallelism {parallelism} --train_data_dir unused"
    line += f" --output_dir unused --model_name none --devices {num_ranks}"
    run = forked_runs.start(line.split(), num_ranks, program="tests.support.large_gradient")
    run.finish()
    printed = json.loads(run.stdout().splitlines()[-1])
    assert printed["before"] == pytest.approx(printed["exact"], rel=1e-6)
    assert printed["clipped"] == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("fsdp2", [False, True])
def test_clipping_an_8b_is_few_launches_that_read_it_twice(fsdp2: bool) -> None:
    precision: Any = SimpleNamespace(unscale_gradients=lambda optimizer: None)
    fabric: Any = SimpleNamespace(device=torch.device("meta"), strategy=SimpleNamespace(precision=precision))
    with eight_ranks(), DeviceOperations() as counted:
        parameters = sharded_parameters(fsdp2).values()
        model = SimpleNamespace(parameters=lambda: parameters)
        counted.launches.clear()
        counted.bytes = 0
        clip_grad_norm(fabric, model, None, 1.0)
    assert counted.launches.total() <= 50, counted.launches
    gradient_bytes = 2 * NUM_ELEMENTS
    assert 2 * gradient_bytes <= counted.bytes <= 2.01 * gradient_bytes  # in-place operations are counted once here


@pytest.mark.numerical
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_for_a_gpu_and_for_a_cpu_are_the_true_ones(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    tensors = [torch.randn(count, generator=random).to(dtype) for count in (1, 0, 5000, 100_001)]
    exact = torch.stack([tensor.double().norm() for tensor in tensors])
    torch.testing.assert_close(gradients._squared_norms(tensors)[1:].sqrt(), exact, rtol=1e-6, atol=0)
    for_a_gpu = torch.stack([*gradients._norms_in_fp64(tensors)])
    torch.testing.assert_close(for_a_gpu, exact[exact > 0], rtol=1e-12, atol=0)
    assert gradients._norms_in_fp64(tensors[1:2]) == ()
