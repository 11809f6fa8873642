"""DoRA in 16 bits rounds an output once, and makes no copy of a weight."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fabric_train.arguments import TrainArguments, parse
from fabric_train.model.adapter import Adapter, attach
from fabric_train.preflight.prepare import prepare
from tests.support.device_operations import DeviceOperations
from tests.support.short_runs import argv

RANK = 4


def adapted_layer(in_features: int, out_features: int, device: str) -> Any:
    """Return a linear layer in bf16 with DoRA, whose adapter is not initialized."""
    model: Any = nn.Module()
    model.q_proj = nn.Linear(in_features, out_features, bias=False, dtype=torch.bfloat16, device=device)
    model.get_output_embeddings = lambda: None
    attach(model, Adapter("dora", rank=RANK, alpha=2.0 * RANK), "the model", device)
    return model.q_proj


class LargestResult(TorchDispatchMode):
    """A dispatch mode that keeps the bytes of the largest tensor that an operation makes; views make none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.bytes = max(self.bytes, result.nbytes)
        return result


@pytest.mark.numerical
def test_an_output_in_bf16_is_the_exact_one_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    layer = adapted_layer(256, 256, "cpu")
    ratio = 1.006  # bf16 has 8 significant bits: it would round this to 1.0078
    with torch.no_grad():
        layer.weight.normal_(generator=generator)
        layer.lora_A.weight.normal_(generator=generator)
        layer.lora_B.weight.zero_()
        layer.lora_magnitude_vector.copy_(ratio * layer.weight.float().norm(dim=1))
        inputs = torch.randn(512, 256, generator=generator).bfloat16()
        output = layer(inputs).double()
        exact = ratio * nn.functional.linear(inputs, layer.weight).double()
    # one rounding changes a number by up to 2**-8 of itself; the difference of the ratio from 1 is rounded too
    tolerance = 2**-8 + (ratio - 1) * 2**-8
    assert ((output - exact).abs() <= tolerance * exact.abs()).all()


def test_norms_make_no_tensor_as_large_as_a_bf16_weight() -> None:
    with FakeTensorMode():
        layer = adapted_layer(4096, 1024, "cpu")
        with LargestResult() as largest:
            layer._row_norms()
    assert largest.bytes < layer.weight.nbytes / 8


def test_the_output_of_dora_takes_one_kernel_more_than_that_of_lora() -> None:
    tokens = 2048
    features = 1024
    layer = adapted_layer(features, features, "meta")
    layer._row_norms = lambda: layer.lora_magnitude_vector.detach()
    inputs = torch.empty(tokens, features, dtype=torch.bfloat16, device="meta")
    with DeviceOperations() as operations, torch.no_grad():
        layer(inputs)
    # as large as the output: x W^T reads x, writes; addmm reads, writes; addcmul reads, writes
    output_bytes = tokens * features * 2
    small_bytes = layer.weight.nbytes + 2 * inputs.nbytes
    assert operations.bytes < 7 * output_bytes + small_bytes


@pytest.mark.parametrize(("kind", "version"), [("dora", "2"), ("lora", "1")])
def test_a_run_that_resumes_an_earlier_dora_is_told_of_the_change(
    tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, kind: str, version: str
) -> None:
    words = argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run", adapter=kind)
    run = prepare(parse(TrainArguments, words))
    assert run.versions["fabric_train DoRA"] == version  # a checkpoint without it has version 1
