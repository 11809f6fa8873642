"""A model is spread over devices layer by layer; an adapter is put on its base model and never read from a pickle."""

import json
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fabric_train.cli.errors import InputError
from fabric_train.inference.arguments import GenerateArguments
from fabric_train.inference.devices import spread
from fabric_train.inference.generate import generate
from fabric_train.inference.load_model import describe, load_for_inference
from fabric_train.inference.models_in_turn import ModelsInTurn, _base_key
from fabric_train.inference.peft_adapter import add_adapter
from fabric_train.inference.prompts import encode_text
from fabric_train.model.hf_model import read_shape
from fabric_train.model.load_weights import build_on_meta
from tests.support.tiny_model import write_tokenizer
from tests.support.unequal_rows import write_model

_LAYER_BYTES = 4 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64)


def test_layers_stay_whole_and_the_host_takes_the_rest(tiny_model_dir: Path) -> None:
    shape = read_shape(str(tiny_model_dir))
    shape.config.num_hidden_layers = 8
    model: Any = build_on_meta(shape, torch.float32)
    embedding = model.get_input_embeddings().weight.nbytes
    first = 2 * embedding + 3 * _LAYER_BYTES  # accelerate leaves room for one more of the largest part
    places = spread(model, {0: first, 1: 6 * _LAYER_BYTES})
    assert set(places.values()) == {"cuda:0", "cuda:1"}
    assert places["model.embed_tokens"] == places["lm_head"] == places["model.layers.0"] == "cuda:0"
    places = spread(model, {0: first, 1: 2 * _LAYER_BYTES})
    assert places["model.layers.7"] == "cpu"
    assert not any(part.startswith("model.layers.7.") for part in places)


def test_a_model_larger_than_the_machine_is_refused(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_on_meta(read_shape(str(tiny_model_dir)), torch.float32)
    monkeypatch.setattr("accelerate.utils.get_max_memory", lambda: {"cpu": 1000})
    with pytest.raises(
        InputError, match=r"weights \(0\.\d MB\) do not fit in this machine's GPU and host memory \(0\.0 MB"
    ):
        spread(model, {0: 1000})


def _adapter(folder: Path, base: object, **more: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, **more}))
    return folder


def test_adapters_that_cannot_be_used_are_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    nameless = _adapter(tmp_path / "nameless", None)
    with pytest.raises(InputError, match="it does not name a base model; give one with --base_model"):
        load_for_inference(str(nameless))
    with pytest.raises(InputError, match=r"it has no adapter_model\.safetensors; save the adapter again"):
        load_for_inference(str(nameless), base_model=str(tiny_model_dir))
    pickled = _adapter(tmp_path / "pickled", str(tiny_model_dir))
    (pickled / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"adapter_model\.bin is a pickle, which is never read"):
        load_for_inference(str(pickled))
    with pytest.raises(InputError, match="not a folder with an adapter; leave out --base_model"):
        load_for_inference(str(tiny_model_dir), base_model=str(tiny_model_dir))


def test_an_adapter_needs_peft(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    folder = _adapter(tmp_path / "adapter", str(tiny_model_dir))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"needs peft; run pip install 'fabric-train\[peft\]'"):
        load_for_inference(str(folder))


SLOW = "(.*)*x$"
"""An expression with which ``re`` would be busy for years."""


def test_expressions_of_an_adapter_are_matched_as_by_peft_and_in_time(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(write_model(tmp_path / "base"))
    pattern = r".*layers\.1\..*(q|up)_proj"
    settings: dict[str, Any] = {"r": 2, "rank_pattern": {"up_.*": 3, "q_proj": 4}, "init_lora_weights": False}
    config = peft.LoraConfig(**settings, target_modules=pattern, exclude_modules=".*k_proj", task_type="CAUSAL_LM")
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "lora")
    file = tmp_path / "lora" / "adapter_config.json"
    content = json.loads(file.read_text())
    model = add_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "lora", "base")
    shapes = {
        name.split(".lora_A")[0][-7:]: len(weight) for name, weight in model.named_parameters() if "lora_A" in name
    }
    assert shapes == {".q_proj": 4, "up_proj": 3}
    for more in ({"target_modules": SLOW}, {"exclude_modules": SLOW}, {"rank_pattern": {SLOW: 8}}):
        file.write_text(json.dumps(content | more))
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        with suppress(InputError):  # or there is nothing that it matches
            add_adapter(plain, tmp_path / "lora", "base")
    for setting, value in (("layers_pattern", SLOW), ("modules_to_save", [SLOW])):
        file.write_text(json.dumps(content | {"target_modules": ["q_proj"], setting: value}))
        with pytest.raises(InputError, match=setting):
            add_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "lora", "base")


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"setting_of_tomorrow": 2}, r"the installed peft .* does not support setting_of_tomorrow 2; "),
        ({"megatron_config": {"a": 1}}, "needs a package: No module named 'megatron'"),
        ({"target_parameters": ["experts.none"]}, None),
        ({"setting_of_tomorrow": None, "lora_dtype": "bfloat16"}, None),
    ],
)
def test_settings_of_another_peft_are_refused_or_noted(
    tmp_path: Path,
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, object],
    fault: str | None,
) -> None:
    peft = pytest.importorskip("peft")
    folder = tmp_path / "adapter"
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model_dir), config).save_pretrained(folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    if fault is None:
        add_adapter(model, folder, "base")
    else:
        with pytest.raises(InputError, match=fault):
            add_adapter(model, folder, "base")
    noted = capsys.readouterr().err
    assert ("target_parameters" in noted) == ("target_parameters" in settings)
    assert "site-packages" not in noted


def test_whole_modules_of_an_adapter_do_not_reach_the_next_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = write_model(tmp_path / "base")
    write_tokenizer(base, ["a text"])
    settings: dict[str, Any] = {"r": 2, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    for name, whole in (("whole", ["lm_head", "norm"]), ("plain", None)):
        torch.manual_seed(0)
        config = peft.LoraConfig(**settings, target_modules=["q_proj"], modules_to_save=whole)
        tuned = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        for parameter_name, parameter in tuned.named_parameters():
            if "modules_to_save" in parameter_name:
                parameter.data += 0.1
        tuned.save_pretrained(tmp_path / name)
    ids = torch.tensor([[5, 9, 7, 100]])
    models = [str(tmp_path / "whole"), str(base), str(tmp_path / "plain"), str(tmp_path / "whole"), str(base)]
    alone = {name: load_for_inference_without_tokenizer(name)(ids).logits for name in models}
    assert len({round(logits.sum().item(), 4) for logits in alone.values()}) == 3
    in_turn = ModelsInTurn()
    for name in models:
        assert torch.equal(in_turn.load(name)(ids).logits, alone[name]), name


def test_models_read_in_another_dtype_do_not_share_a_base(tiny_model_dir: Path) -> None:
    described = describe(str(tiny_model_dir), None)
    assert _base_key(described) == _base_key(replace(described))
    assert _base_key(described) != _base_key(replace(described, dtype=torch.bfloat16))


def load_for_inference_without_tokenizer(name: str) -> Any:
    return ModelsInTurn().load(name)


def test_an_adapter_changes_the_text_of_its_base(tmp_path: Path, tiny_model_dir: Path) -> None:
    peft = pytest.importorskip("peft")
    base, tokenizer = load_for_inference(str(tiny_model_dir))
    ids = encode_text(tokenizer, "To be")
    settings = GenerateArguments("", num_tokens=8)
    plain = generate(base, tokenizer, [ids], settings)
    torch.manual_seed(0)
    tuned = peft.get_peft_model(base, peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM")).eval()
    tuned.save_pretrained(tmp_path / "lora")
    expected = tuned(torch.tensor([ids])).logits
    model, tokenizer = load_for_inference(str(tmp_path / "lora"))
    assert torch.equal(model(torch.tensor([ids])).logits, expected)
    assert generate(model, tokenizer, [ids], settings)[0].new_ids != plain[0].new_ids
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config | {"r": 8}))
    with pytest.raises(InputError, match=r"this adapter does not fit .*; give its base model with --base_model"):
        load_for_inference(str(tmp_path / "lora"))
