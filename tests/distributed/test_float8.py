"""Layers converted to float8 keep their names and nearly their loss; where they cannot be used, a run says so."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from arguments import TrainArguments, parse
from fabric_train.cli.errors import InputError
from fabric_train.distributed.precision import check_float8, convert_to_float8


def test_products_of_the_layers_alone_are_in_float8_and_names_stay(tiny_model_dir: Path) -> None:
    pytest.importorskip("torchao")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16)
    names, ids = list(model.state_dict()), torch.arange(3, 67)[None]
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
            "--float8 true is slower than bf16 in layers that are not compiled; add --compile true",
        ),
    ],
)
def test_float8_is_refused_where_it_cannot_help(options: str, accelerator: str, fault: str) -> None:
    given = ["--train_data_dir", "tokens", "--output_dir", "run", "--float8", "true", *options.split()]
    with pytest.raises(InputError) as error:
        check_float8(parse(TrainArguments, given), accelerator)
    assert str(error.value).startswith(fault)
