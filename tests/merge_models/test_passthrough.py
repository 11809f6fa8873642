"""merge_models keeps some decoder layers of a model, in any family that can describe this, or refuses in one line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from fabric_train.cli.errors import InputError
from fabric_train.merge_models.__main__ import main
from fabric_train.model.layer_settings import cut_config
from tests.support.checkpoint_examples import CHAT_TEMPLATE, trained_weights, write_full
from tests.support.exports import verify_in_this_process
from tests.support.small_families import small_config, small_model

INPUT_IDS = torch.arange(24).unsqueeze(0)  # [1, T]


@pytest.fixture(scope="module", autouse=True)
def no_fresh_process() -> Iterator[None]:
    with verify_in_this_process():
        yield


def write_family(folder: Path, family: str, **settings: Any) -> Path:
    """Write a small random model of a family in fp32, without a tokenizer."""
    config = small_config(family)
    for name, value in settings.items():
        setattr(config, name, value)
    small_model(config).save_pretrained(folder)
    return folder


def keep(model_dir: Path, layers: str, target: Path, *words: str) -> Any:
    """Return the model with these layers as transformers loads it."""
    given = ["--method", "passthrough", "--models", str(model_dir), "--layers", layers]
    main([*given, "--output_dir", str(target), "--dtype", "float32", *words])
    return AutoModelForCausalLM.from_pretrained(target, dtype="auto").eval()


@torch.inference_mode()
def logits_without_layers(model_dir: Path, layers: list[int]) -> torch.Tensor:
    """Return the logits of the model with other layers removed in memory, each with the kind that it had."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    decoder = model.transformer if hasattr(model, "transformer") else model.model
    name = "h" if hasattr(decoder, "h") else "layers"
    setattr(decoder, name, nn.ModuleList([getattr(decoder, name)[layer] for layer in layers]))
    config = decoder.config
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    config.num_hidden_layers = len(layers)
    logits: torch.Tensor = model(input_ids=INPUT_IDS, use_cache=False).logits
    return logits


@pytest.mark.parametrize(
    "family, settings",
    [
        ("llama", {}),
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4}),
        ("smollm3", {"no_rope_layers": [1, 0, 0, 1]}),
        ("llama4_text", {"no_rope_layers": [1, 0, 1, 0], "moe_layers": [1, 2]}),
        ("qwen3_moe", {"mlp_only_layers": [0, 3]}),
        ("gpt2", {}),
    ],
)
def test_a_kept_layer_computes_what_it_did(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    model_dir = write_family(tmp_path / "model", family, **settings)
    kept = keep(model_dir, "0,2-3", tmp_path / "kept")
    text_config = kept.config.get_text_config()
    assert text_config.num_hidden_layers == 3
    with torch.inference_mode():
        logits = kept(input_ids=INPUT_IDS, use_cache=False).logits
    torch.testing.assert_close(logits, logits_without_layers(model_dir, [0, 2, 3]), rtol=0, atol=0)


def test_the_tensors_of_kept_layers_get_new_numbers_in_the_order_given(tmp_path: Path) -> None:
    model_dir = write_family(tmp_path / "model", "llama")
    keep(model_dir, "3,0-1", tmp_path / "kept", "--max_shard_size", "100KB")
    stored = load_file(model_dir / "model.safetensors")
    kept: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "kept").glob("*.safetensors"):
        kept |= load_file(file)
    assert len(list((tmp_path / "kept").glob("*.safetensors"))) > 1
    for name, tensor in kept.items():
        stored_name = name
        for new, old in enumerate((3, 0, 1)):
            if name.startswith(f"model.layers.{new}."):
                stored_name = name.replace(f"layers.{new}.", f"layers.{old}.")
        assert torch.equal(tensor, stored[stored_name]), name
    removed = [name for name in stored if name.startswith("model.layers.2.")]
    assert len(kept) == len(stored) - len(removed)


def test_the_card_says_which_layers_of_which_model_were_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_dir = write_family(tmp_path / "whole", "llama")
    keep(model_dir, "0,2-3", tmp_path / "kept")
    said = "3 of 4 layers, in this order: 0, 2–3"
    assert f"kept {said}" in capsys.readouterr().out
    card = (tmp_path / "kept" / "README.md").read_text()
    assert "Decoder layers of a model, selected with Fabric Train. Method: Passthrough" in card
    assert f"Kept: {said}." in card
    assert "| `whole` |" in card
    assert "Difference" not in card
    report = json.loads((tmp_path / "kept" / "verification.json").read_text())
    assert (report["faults"], report["logits"]["max_difference"]) == ([], 0)


def test_the_tokenizer_stays_and_a_run_gives_a_model(tmp_path: Path, tiny_model_dir: Path) -> None:
    run = tmp_path / "ours"
    weights = trained_weights(tiny_model_dir)
    write_full(run / "checkpoints" / "step-00000001", tiny_model_dir, weights, step=1)
    keep(run, "1", tmp_path / "kept")
    assert AutoTokenizer.from_pretrained(tmp_path / "kept").chat_template == CHAT_TEMPLATE
    kept = load_file(tmp_path / "kept" / "model.safetensors")
    name = "layers.{}.mlp.up_proj.weight"
    assert torch.equal(kept[f"model.{name.format(0)}"], weights[f"model.{name.format(1)}"].float())
    assert "| `ours, step 1` |" in (tmp_path / "kept" / "README.md").read_text()


def test_a_layer_may_be_repeated_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_dir = write_family(tmp_path / "model", "llama")
    kept = keep(model_dir, "0-2,2-3", tmp_path / "kept")
    assert kept.config.num_hidden_layers == 5
    note = "note: --layers has layer 2 more than once; a range includes both of its ends"
    assert note in capsys.readouterr().err


def refusal(target: Path, model_dir: Path, *words: str) -> str:
    with pytest.raises(InputError) as refused:
        main(["--models", str(model_dir), "--output_dir", str(target), *words])
    assert not target.exists()
    assert len(refused.value.faults) == 1
    return str(refused.value)


def test_no_layers_and_layers_that_a_model_does_not_have_are_refused(tmp_path: Path) -> None:
    model_dir = write_family(tmp_path / "model", "llama")
    words = ("--method", "passthrough", "--layers")
    fault = refusal(tmp_path / "out", model_dir, *words, "0-2,4")
    assert fault == f"--layers: there is no layer 4: {model_dir} has 4 layers, 0 to 3; give layers of the model"
    assert "--layers: expected text" in refusal(tmp_path / "out", model_dir, *words, "")


@pytest.mark.parametrize(
    "family, settings, layers, fault",
    [
        (
            "deepseek_v3",
            {"first_k_dense_replace": 2},
            "1-3",
            "would not stay the same as layer 1 (mlp); first_k_dense_replace decides by its number what",
        ),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            "0,2",
            "; scale_attn_by_inverse_layer_idx decides by its number what a layer is; choose other layers",
        ),
    ],
)
def test_layers_that_are_numbered_by_a_setting_are_refused_by_its_name(
    tmp_path: Path, family: str, settings: dict[str, Any], layers: str, fault: str
) -> None:
    model_dir = write_family(tmp_path / "model", family, **settings)
    assert fault in refusal(tmp_path / "out", model_dir, "--method", "passthrough", "--layers", layers)


def test_layers_that_use_the_keys_of_other_layers_are_refused() -> None:
    config = small_config("gemma4_text")
    config.num_kv_shared_layers = 2
    with pytest.raises(InputError, match=r"use the keys and values of other layers \(num_kv_shared_layers\)"):
        cut_config(config, [0, 2, 3], "a model")


def test_lists_of_layer_numbers_get_the_new_numbers() -> None:
    config = small_config("qwen3_moe")
    config.mlp_only_layers = [0, 3]
    assert cut_config(config, [0, 2, 3], "a model").mlp_only_layers == [0, 2]
    assert config.mlp_only_layers == [0, 3]
    assert config.num_hidden_layers == 4
