"""Compiled layers compute what they compute uncompiled, of rows of any length, also where they keep less."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from fabric_train.distributed.compile import compile_layers
from fabric_train.model.hf_model import load_model, read_shape
from fabric_train.training.loss import summed_loss


@pytest.fixture
def settings_as_they_were() -> Iterator[None]:
    with torch._functorch.config.patch(activation_memory_budget=1.0), torch._dynamo.config.patch(optimize_ddp=True):
        yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("settings_as_they_were")
def test_of_many_lengths_layers_are_compiled_once_and_keep_no_more_than_their_budget(tiny_model_dir: Path) -> None:
    model: Any = load_model(read_shape(str(tiny_model_dir)), torch.float32).train()
    rows = [torch.randint(3, 1000, (2, length), generator=torch.Generator().manual_seed(0)) for length in LENGTHS]
    expected = [loss_and_gradients(model, ids) for ids in rows]
    compile_layers(model.model.layers, any_length=True, budget=0.3)
    counters.clear()
    graphs = []
    for ids, (loss, gradients) in zip(rows, expected, strict=True):
        found, found_gradients = loss_and_gradients(model, ids)
        graphs.append(counters["stats"]["unique_graphs"])
        assert found == pytest.approx(loss, rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-4, atol=1e-5)
    assert graphs[0] > 0
    assert graphs[-1] == graphs[0]


LENGTHS = (24, 17, 40, 9, 33)


def loss_and_gradients(model: Any, ids: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = summed_loss(model, ids, ids)
    loss.backward()
    return loss.item(), {name: weight.grad.clone() for name, weight in model.named_parameters()}
