"""The comparison of adapters with transformers and peft passes where they agree, and notices a scale that is off."""

from functools import partial
from typing import Any

import pytest
import torch

from benchmarks import adapter_parity
from benchmarks.adapter_parity import ADAPTERS, Difference, compare_in_bf16, compare_in_fp32
from tests.support.compiler_backend import NO_CODE

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, settings_as_they_were: None) -> None:
    monkeypatch.setattr(adapter_parity, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=NO_CODE))


@pytest.mark.parametrize(("name", "compare"), [("LoRA", compare_in_bf16), ("QLoRA", compare_in_fp32)])
def test_adapters_agree_with_transformers_and_peft(name: str, compare: Any) -> None:
    differences = compare(ADAPTERS[name])
    assert list(differences) == ["eager", "compiled"]
    assert all(difference.is_allowed for difference in differences.values()), differences


@pytest.mark.parametrize("compare", [compare_in_fp32, compare_in_bf16])
def test_an_adapter_that_is_scaled_by_a_twentieth_more_does_not(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_config = adapter_parity.lora_config

    def other_config(rank: int) -> Any:
        config = plain_config(rank)
        config.lora_alpha *= 1.05
        return config

    monkeypatch.setattr(adapter_parity, "lora_config", other_config)
    differences = compare(ADAPTERS["LoRA"])
    assert not any(difference.is_allowed for difference in differences.values()), differences


def test_a_difference_that_is_not_a_number_is_not_allowed() -> None:
    assert not Difference(float("nan"), 0.0, 1.0, 1.0).is_allowed
