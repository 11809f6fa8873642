"""Extended positions have the frequencies that transformers computes from config.json, in fp32 also far out."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fabric_train.arguments import ModelArguments
from fabric_train.cli.errors import InputError
from fabric_train.model.hf_model import ModelShape, read_shape, shape_from_config
from fabric_train.model.load_weights import open_pretrained
from fabric_train.model.rope import RopeChange, how_to_extend, note_on_rope, original_positions

SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def shape(config: Any) -> ModelShape:
    return shape_from_config(config, "model", "LlamaDecoderLayer", None)


def llama(**values: Any) -> ModelShape:
    return shape(LlamaConfig(**SIZES, **{"max_position_embeddings": 64, **values}))


def change(scaling: str | None = None, theta: float | None = None, **values: Any) -> RopeChange:
    return RopeChange(ModelArguments(rope_scaling=scaling).scaling, theta, **values)


@pytest.fixture
def tiny(tiny_model_dir: Path) -> ModelShape:
    return read_shape(str(tiny_model_dir))


@pytest.mark.parametrize("scaling", ["llama3:8", "yarn:8", "linear:8"])
def test_a_bf16_model_has_transformers_frequencies_in_fp32(tiny: ModelShape, scaling: str) -> None:
    """transformers has a function for each kind. cos and sin belong to fp32 angles at the last of 128k positions."""
    extended = change(scaling, 5e5).apply(tiny, 2048)
    assert extended.max_positions == extended.config.max_position_embeddings == 2048
    model: Any = open_pretrained(extended, torch.bfloat16).model
    expected, factor = ROPE_INIT_FUNCTIONS[scaling.partition(":")[0]](extended.config)
    rotary = model.model.rotary_emb
    assert rotary.inv_freq.dtype == torch.float32
    assert torch.equal(rotary.inv_freq, expected)
    plain = 1 / 5e5 ** (torch.arange(0, 16, 2) / 16)
    assert rotary.inv_freq[-1].item() == pytest.approx(plain[-1].item() / 8)
    assert factor == pytest.approx(0.1 * math.log(8) + 1 if scaling == "yarn:8" else 1)
    far = 131_071
    cos, sin = rotary(torch.zeros(1, 1, 64), torch.tensor([[far]]))
    angles = far * expected.double()
    assert torch.allclose(cos[0, 0, :8].double(), angles.cos() * factor, atol=1e-2)
    assert torch.allclose(sin[0, 0, :8].double(), angles.sin() * factor, atol=1e-2)
    in_bf16 = far * expected.bfloat16().double()
    assert (in_bf16 - angles).abs().max() > 1


@pytest.mark.parametrize("scaling", ["llama3:4", "yarn:4", "linear:2.5", "none", None])
@pytest.mark.parametrize("theta", [None, 1e6])
def test_a_change_that_is_applied_again_changes_nothing(
    tiny: ModelShape, scaling: str | None, theta: float | None
) -> None:
    once = change(scaling, theta).apply(tiny, 600)
    again = change(scaling, theta).apply(once, 600)
    assert again.config.to_dict() == once.config.to_dict()
    assert note_on_rope(once, again) is None
    unchanged = 256 if theta is None else 600
    positions = {"llama3:4": 1024, "yarn:4": 1024, "linear:2.5": 640, "none": 600, None: unchanged}
    assert once.max_positions == positions[scaling]


def test_another_scaling_counts_from_the_original_positions() -> None:
    scaled = llama(rope_parameters=LLAMA_3_1, max_position_embeddings=512)
    assert original_positions(scaled.config) == 64
    yarn = change("yarn:16").apply(scaled, 512)
    assert yarn.config.rope_parameters == {
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "factor": 16.0,
        "original_max_position_embeddings": 64,
    }
    assert yarn.max_positions == 1024
    assert change("llama3:4").apply(scaled, 512).max_positions == 512
    linear = change("linear:16").apply(yarn, 512)
    assert original_positions(linear.config) == 64
    plain = change("none").apply(linear, 32)
    assert plain.config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert plain.max_positions == 64
    assert note_on_rope(linear, plain) == (
        "model: 1,024 positions, linear factor 16 from 64 positions, theta 500,000 -> 64 positions, theta 500,000"
    )


def test_a_higher_base_takes_as_many_positions_as_the_rows_have() -> None:
    assert change(theta=1e6).apply(llama(), 32).max_positions == 64
    raised = change(theta=1e6).apply(llama(), 100)
    assert (raised.max_positions, raised.config.rope_parameters["rope_theta"]) == (100, 1e6)
    scaled = change(theta=1e6).apply(llama(rope_parameters=LLAMA_3_1, max_position_embeddings=512), 600)
    assert scaled.config.rope_parameters == LLAMA_3_1 | {"rope_theta": 1e6}
    assert scaled.max_positions == 600


def test_longer_rows_need_an_extension_or_allow_changes() -> None:
    assert change().apply(llama(), 100).max_positions == 64
    forced = change(allows_longer_rows=True).apply(llama(), 100)
    assert forced.max_positions == 100
    assert forced.config.rope_parameters == llama().config.rope_parameters
    assert how_to_extend(llama(), 100) == ", or extend the positions: --rope_scaling llama3:2 (docs/long_rows.md)"


def test_partial_rotary_and_phi3s_original_positions_stay() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    longer: dict[str, Any] = {"max_position_embeddings": 256, "original_max_position_embeddings": 64, "pad_token_id": 0}
    phi = shape(Phi3Config(rope_parameters=rope, **SIZES, **longer))
    assert change("llama3:8").apply(phi, 64).max_positions == 512
    rope = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    half = GPTNeoXConfig(rope_parameters=rope, **SIZES)
    scaled = change("yarn:2").apply(shape(half), 64)
    assert scaled.config.rope_parameters["partial_rotary_factor"] == 0.5
    model: Any = AutoModelForCausalLM.from_config(scaled.config)
    assert len(model.gpt_neox.rotary_emb.inv_freq) == 4  # half of the 16 dimensions of a head, in pairs


def test_wrong_changes_are_one_line() -> None:
    gpt2 = shape(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=16, n_positions=64))
    with pytest.raises(InputError, match=r"--rope_scaling: model \(gpt2\) has no rotary positions") as raised:
        change("yarn:2").apply(gpt2, 64)
    assert len(raised.value.faults) == 1
    with pytest.raises(InputError, match=r"--rope_theta: model \(gpt2\)"):
        change(theta=5e5).apply(gpt2, 64)
    assert change(allows_longer_rows=True).apply(gpt2, 128).max_positions == 64
    assert how_to_extend(gpt2, 128) == ""
    with pytest.raises(InputError, match="rows have 300 tokens; give llama3:5"):
        change("llama3:4").apply(llama(), 300)


@pytest.mark.parametrize("given", ["llama3", "llama3:1", "yarn:0.5", "ntk:4", "none:2", "yarn:nan", "linear:-2"])
def test_wrong_scalings_are_named(given: str) -> None:
    (fault,) = ModelArguments(rope_scaling=given).faults()
    assert fault == (
        "--rope_scaling: expected llama3:FACTOR, yarn:FACTOR or linear:FACTOR with a factor above 1, or none; "
        f"got {given!r}"
    )
