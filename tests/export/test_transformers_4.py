"""Exports have the names of settings that transformers 4 reads; tests/downstream/ loads some there."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from fabric_train.export.hub_format import add_former_names

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def written(folder: Path, family: str, **settings: Any) -> dict[str, Any]:
    """Return config.json of a model of a family after the former names were added."""
    AutoConfig.for_model(family, **SIZES, dtype="bfloat16", **settings).save_pretrained(folder)
    before = AutoConfig.from_pretrained(folder)
    add_former_names(folder)
    assert AutoConfig.from_pretrained(folder).rope_parameters == before.rope_parameters
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def test_positions_have_the_base_and_scaling_of_version_4(tmp_path: Path) -> None:
    config = written(tmp_path, "llama", rope_parameters={"rope_theta": 5e5, **LLAMA_3})
    assert (config["rope_theta"], config["rope_scaling"]) == (5e5, LLAMA_3)
    assert config["rope_parameters"] == {"rope_theta": 5e5, **LLAMA_3}
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"


def test_positions_that_are_not_scaled_have_a_base_alone(tmp_path: Path) -> None:
    config = written(tmp_path, "qwen3", rope_parameters={"rope_type": "default", "rope_theta": 5e4})
    assert config["rope_theta"] == 5e4
    assert "rope_scaling" not in config


def test_a_family_with_other_names_gets_those(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5}
    config = written(tmp_path, "gpt_neox", rope_parameters=rope)
    assert (config["rotary_emb_base"], config["rotary_pct"]) == (5e4, 0.5)


def test_sets_for_each_type_of_layer_stay_alone(tmp_path: Path) -> None:
    config = written(tmp_path, "gemma3_text")
    assert config["rope_parameters"].keys() == {"full_attention", "sliding_attention"}
    assert not config.keys() & {"rope_theta", "rope_scaling"}


def test_a_config_that_would_be_read_differently_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fabric_train.export.hub_format.former_names", lambda config: {"hidden_act": "relu"})
    folder = tmp_path / "llama"
    AutoConfig.for_model("llama", **SIZES).save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    del content["hidden_act"]
    (folder / "config.json").write_text(json.dumps(content))
    before = (folder / "config.json").read_bytes()
    add_former_names(folder)
    assert (folder / "config.json").read_bytes() == before


def test_tokenizer_has_the_class_and_lists_of_version_4(tmp_path: Path) -> None:
    AutoConfig.for_model("llama", **SIZES, dtype="float32").save_pretrained(tmp_path)
    settings: dict[str, Any] = {
        "tokenizer_class": "TokenizersBackend",
        "extra_special_tokens": ["<a>"],
        "eos_token": "é",
        "chat_template": None,  # hides chat_template.jinja from llama.cpp's converter
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    add_former_names(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<a>"],
        "eos_token": "é",
    }
