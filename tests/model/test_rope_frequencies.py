"""Rotary frequencies that transformers would choose for every batch are chosen once, by the rows of the run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fabric_train.model.hf_model import read_shape
from fabric_train.model.load_weights import load_model, open_in_parts
from fabric_train.model.rope_frequencies import choose_frequencies, note_on_frequencies

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 40,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "factor": 4.0,
}
LONGROPE = Phi3Config(
    **SIZES, max_position_embeddings=160, original_max_position_embeddings=40, rope_parameters=LONG, bos_token_id=1
)
DYNAMIC = LlamaConfig(
    **SIZES,
    max_position_embeddings=40,
    rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
)


@pytest.mark.parametrize("config", [LONGROPE, DYNAMIC], ids=lambda config: config.model_type)
@pytest.mark.parametrize("length", [40, 100])
def test_a_document_has_the_same_logits_beside_longer_rows(config: Any, length: int) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    choose_frequencies(model, length)
    ids = torch.randint(1, 50, (1, 20))

    def logits(num_tokens: int) -> torch.Tensor:
        row = torch.cat([ids, ids.new_ones(1, num_tokens - 20)], dim=1)
        return model(input_ids=row, use_cache=False).logits[:, :20]

    first = logits(20)
    torch.testing.assert_close(logits(90), first)
    torch.testing.assert_close(logits(20), first)


@pytest.mark.parametrize("config", [LONGROPE, DYNAMIC], ids=lambda config: config.model_type)
def test_another_length_chooses_again_as_transformers_would(config: Any) -> None:
    model: Any = AutoModelForCausalLM.from_config(config)
    kind = config.rope_parameters["rope_type"]
    for length in (100, 40, 41, 20):
        choose_frequencies(model, length)
        expected, _ = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)
        assert torch.equal(model.model.rotary_emb.inv_freq, expected)


def test_model_of_a_run_has_the_frequencies_of_its_rows_however_it_is_read(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(LONGROPE).float().save_pretrained(tmp_path)
    shape = replace(read_shape(str(tmp_path)), longest_row=100)
    expected, _ = ROPE_INIT_FUNCTIONS["longrope"](LONGROPE, seq_len=100)
    opened = open_in_parts(shape, torch.float32)
    assert opened is not None
    for model in (load_model(shape, torch.float32), opened.model):
        rotary: Any = model.get_submodule("model.rotary_emb")
        assert torch.equal(rotary.inv_freq, expected)


@pytest.mark.parametrize(("length", "chosen"), [(40, "short"), (41, "long")])
def test_choice_is_said(length: int, chosen: str) -> None:
    note = note_on_frequencies(LONGROPE, "model", length)
    assert note is not None
    assert f"the {chosen} rotary frequencies" in note
    assert note_on_frequencies(LlamaConfig(**SIZES), "model", length) is None
