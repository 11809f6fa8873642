"""Layers converted to float8 keep their names and nearly their loss; where they cannot be used, a run says so."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from transformers import AutoModelForCausalLM

from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.errors import InputError
from fabric_train.distributed.precision import check_float8, convert_to_float8
from fabric_train.model.adapter import Adapter, attach, without_adapters
from fabric_train.model.trained_parts import freeze_other_parts


def test_products_of_the_layers_alone_are_in_float8_and_names_stay(tiny_model_dir: Path) -> None:
    pytest.importorskip("torchao")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16)
    names = list(model.state_dict())
    ids = torch.arange(3, 67)[None]
    loss = model(input_ids=ids, labels=ids).loss
    convert_to_float8(model.model.layers, emulate=True)
    kinds = {name.rsplit(".", 1)[-1]: type(module).__name__ for name, module in model.named_modules()}
    assert {kinds[name] for name in ("q_proj", "o_proj", "gate_proj", "down_proj")} == {"Float8Linear"}
    assert kinds["lm_head"] == "Linear"
    assert list(model.state_dict()) == names
    converted = model(input_ids=ids, labels=ids).loss
    assert converted.item() != loss.item()
    assert converted.item() == pytest.approx(loss.item(), rel=0.01)
    converted.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_an_adapter_is_added_to_the_output_of_a_float8_layer(tiny_model_dir: Path) -> None:
    pytest.importorskip("torchao")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16)
    adapter = Adapter("lora", rank=16, alpha=32)
    attach(model, adapter, "the model", "cpu")
    freeze_other_parts(model, adapter)
    layer: Any
    names = sorted(model.state_dict())
    layer = model.model.layers[0].mlp.up_proj
    with torch.no_grad():
        layer.lora_B.weight.uniform_(-0.1, 0.1)
    linear = nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=torch.bfloat16)
    linear.weight = layer.weight
    layer_without_adapter = nn.Sequential(linear)  # the conversion replaces the linear layers in a module
    with without_adapters(model):
        convert_to_float8(model.model.layers, emulate=True)
    convert_to_float8([layer_without_adapter], emulate=True)
    layer = model.model.layers[0].mlp.up_proj
    assert type(layer).__name__ == "AdaptedFloat8Linear"
    assert type(layer.lora_A).__name__ == "Linear"
    assert sorted(model.state_dict()) == names
    inputs = torch.randn(2, 24, layer.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    lora_a = layer.lora_A.weight.detach().clone().requires_grad_()
    lora_b = layer.lora_B.weight.detach().clone().requires_grad_()
    low_rank = F.linear(inputs, lora_a.bfloat16()) * adapter.scale
    output = layer(inputs)
    base = layer_without_adapter(inputs)
    expected = torch.addmm(base.flatten(0, 1), low_rank.flatten(0, 1), lora_b.bfloat16().t()).view_as(base)
    assert torch.equal(output, expected)
    assert not torch.equal(layer_without_adapter(inputs), F.linear(inputs, layer.weight))  # it is float8
    output.float().square().sum().backward()
    expected.float().square().sum().backward()
    assert torch.equal(layer.lora_A.weight.grad, lora_a.grad)
    assert torch.equal(layer.lora_B.weight.grad, lora_b.grad)
    assert layer.lora_A.weight.dtype == torch.float32
    assert layer.weight.grad is None


def test_compiled_float8_layers_take_no_product_for_frozen_weights(tiny_model_dir: Path) -> None:
    """Without the compiler, torchao's backward pass computes the gradient of every weight."""
    pytest.importorskip("torchao")
    numbers = []
    for in_float8 in (False, True):
        products: list[str] = []

        def count(graph: torch.fx.GraphModule, _: object, products: list[str] = products) -> Any:
            products += [node.name for node in graph.graph.nodes if str(node.target).endswith("mm.default")]
            return make_boxed_func(graph.forward)

        model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16)
        adapter = Adapter("lora", rank=16, alpha=32)
        attach(model, adapter, "the model", "cpu")
        freeze_other_parts(model, adapter)
        if in_float8:
            with without_adapters(model):
                convert_to_float8(model.model.layers, emulate=True)
        mlp = model.model.layers[0].mlp
        mlp.compile(backend=aot_autograd(fw_compiler=count))
        inputs = torch.randn(1, 24, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        mlp(inputs).float().sum().backward()
        numbers.append(len(products))
    assert numbers[0] == numbers[1] > 9


@pytest.mark.parametrize(
    ("options", "accelerator", "fault"),
    [
        ("--compile true", "cpu", "--float8 true needs a GPU"),
        (
            "--compile true --precision 32-true",
            "cuda",
            "--float8 true needs bf16-mixed or bf16-true",
        ),
        (
            "--compile false",
            "cuda",
            "--float8 true is slower than bf16 without compiled layers; add --compile true",
        ),
    ],
)
def test_float8_is_refused_where_it_cannot_help(options: str, accelerator: str, fault: str) -> None:
    given = ["--train_data_dir", "tokens", "--output_dir", "run", "--float8", "true", *options.split()]
    with pytest.raises(InputError) as error:
        check_float8(parse(TrainArguments, given), accelerator)
    assert str(error.value).startswith(fault)
