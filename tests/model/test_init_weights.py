"""A new model has the sizes it is asked for, and weights that are a function of the seed and their names."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fabric_train.arguments import ModelArguments, TrainArguments, parse
from fabric_train.cli.errors import InputError
from fabric_train.model.hf_model import DEFAULT_LAYER_CLASS
from fabric_train.model.init_weights import new_shape, open_new
from fabric_train.model.weight_files import Weights
from tests.support.forked_runs import ForkedRuns
from tests.support.programs import option_words
from tests.support.unequal_rows import LENGTH, VOCABULARY, argv, metrics, write_rows

SIZES: dict[str, Any] = {
    "hidden_width": 32,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 48,
    "max_context_width": 64,
    "vocab_size": VOCABULARY,
}
LINE = option_words(SIZES)


def weights(family: str, seed: int = 0, **sizes: Any) -> tuple[Weights, dict[str, torch.Size]]:
    shape = new_shape(ModelArguments(from_scratch=family, **SIZES | sizes), DEFAULT_LAYER_CLASS)
    unread = open_new(shape, torch.float32, seed)
    assert unread.weights is not None
    return unread.weights, {name: parameter.shape for name, parameter in unread.model.named_parameters()}


def whole(family: str, seed: int = 0, **sizes: Any) -> dict[str, torch.Tensor]:
    there, shapes = weights(family, seed, **sizes)
    return {name: there.read_block(name, (0,) * len(shape), shape) for name, shape in shapes.items()}


def faults(*line: str) -> list[str]:
    with pytest.raises(InputError) as refusal:
        parse(TrainArguments, ["--train_data_dir", "tokens", "--output_dir", "run", *line])
    return list(refusal.value.faults)


def test_new_weights_have_the_names_and_spread_of_transformers() -> None:
    tensors = whole("gpt2", num_layers=8, hidden_width=64)
    up = tensors["transformer.h.0.mlp.c_fc.weight"]
    down = tensors["transformer.h.0.mlp.c_proj.weight"]
    assert up.std().item() == pytest.approx(0.02, rel=0.05)
    assert down.std().item() == pytest.approx(0.02 / math.sqrt(2 * 8), rel=0.05)  # GPT-2's residual layers
    assert abs(up.mean().item()) < 0.002
    assert torch.equal(tensors["transformer.ln_f.weight"], torch.ones(64))
    assert torch.equal(tensors["transformer.ln_f.bias"], torch.zeros(64))
    padded = whole("gemma", architecture={"pad_token_id": 3})["model.embed_tokens.weight"]
    assert not padded[3].any()
    assert padded[2].all()
    assert padded[4].all()


def test_any_block_of_a_weight_is_that_of_the_whole() -> None:
    there, _ = weights("llama", vocab_size=20_000, hidden_width=64)  # 5 chunks
    full = whole("llama", vocab_size=20_000, hidden_width=64)["model.embed_tokens.weight"]
    for first, rows, column, columns in (
        (0, 1, 0, 64),
        (4095, 3, 0, 64),
        (8191, 9000, 5, 7),
        (19_999, 1, 63, 1),
        (7, 0, 0, 64),
    ):
        block = there.read_block("model.embed_tokens.weight", (first, column), (rows, columns))
        assert torch.equal(block, full[first : first + rows, column : column + columns])


def test_weights_differ_by_name_and_seed_and_by_nothing_else() -> None:
    tensors = whole("llama")
    again = whole("llama", num_layers=3)
    other = whole("llama", seed=1)
    up = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)]
    assert not torch.equal(tensors[up[0]], tensors[up[1]])
    assert not torch.equal(tensors[up[0]], other[up[0]])
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)


@pytest.mark.slow
def test_new_model_starts_the_same_on_any_ranks_and_resumes(forked_runs: ForkedRuns, tmp_path: Path) -> None:
    tokens = write_rows(tmp_path / "tokens")
    logged = []
    for name, ranks in (("single", 1), ("fsdp", 2), ("fsdp2", 2)):
        line = argv(Path("none"), tokens, tmp_path / name, parallelism=name, max_step=3, save_step_interval=2)
        family = ["--from_scratch", "llama"] if name != "fsdp2" else []  # the family of sizes alone
        forked_runs.start([*line, *family, *LINE, "--num_key_value_heads", "2"], ranks).finish()
        logged.append([float(row["train_loss"]) for row in metrics(tmp_path / name)])
    assert logged[1] == pytest.approx(logged[0], rel=1e-5)
    assert logged[2] == pytest.approx(logged[0], rel=1e-5)
    assert logged[0][0] == pytest.approx(math.log(VOCABULARY), rel=0.02)
    config = json.loads((tmp_path / "fsdp" / "checkpoints" / "step-00000002" / "config.json").read_text())
    assert (config["model_type"], config["num_key_value_heads"], config["head_dim"]) == ("llama", 2, 8)
    resumed = argv(Path("none"), tokens, tmp_path / "resumed", parallelism="single", max_step=3, resume="true")
    start = ["--checkpoint", str(tmp_path / "fsdp" / "checkpoints" / "step-00000002")]
    forked_runs.start([*resumed, *start, "--from_scratch", "llama", *LINE, "--num_key_value_heads", "2"], 1).finish()
    assert float(metrics(tmp_path / "resumed")[-1]["train_loss"]) == pytest.approx(logged[0][2], rel=1e-5)
    assert SIZES["max_context_width"] >= LENGTH


def test_sizes_that_make_no_model_are_refused() -> None:
    assert faults("--hidden_width", "64") == [
        "--hidden_width creates a new model, which also needs --num_layers, --num_heads, --intermediate_size, "
        "--max_context_width, --vocab_size; add them, or leave --hidden_width out"
    ]
    assert faults("--from_scratch", "llama", *LINE[:4]) == [
        "--from_scratch llama also needs --num_heads, --intermediate_size, --max_context_width, --vocab_size"
    ]
    assert faults("--from_scratch", "llama", *LINE[2:], "--hidden_width", "33", "--num_key_value_heads", "3") == [
        "--hidden_width 33 is not a multiple of --num_heads 4",
        "--num_heads 4 is not a multiple of --num_key_value_heads 3",
    ]


@pytest.mark.parametrize(
    ("family", "sizes", "said"),
    [
        ("lama", {}, "--from_scratch lama: transformers has no such family"),
        ("bert_generation_", {}, "has no such family"),
        ("gpt2", {"num_key_value_heads": 2}, "--num_key_value_heads 2: gpt2 models have no such setting; leave it out"),
        ("llama", {"architecture": {"rope_thetta": 1}}, "--architecture rope_thetta: the configuration of llama has"),
        ("vit", {}, "vit models have no such setting"),
        ("gemma4_text", {}, "--from_scratch gemma4_text: its layers have heads of several sizes; give another family"),
    ],
)
def test_families_and_values_that_are_not_there_are_refused(family: str, sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refusal:
        new_shape(ModelArguments(from_scratch=family, **SIZES | sizes), DEFAULT_LAYER_CLASS)
    (fault,) = refusal.value.faults
    assert said in fault
    assert "\n" not in fault


def test_heads_of_latent_attention_keep_the_size_of_their_rotary_part() -> None:
    arguments = ModelArguments(from_scratch="deepseek_v3", **SIZES)
    shape = new_shape(arguments, DEFAULT_LAYER_CLASS)
    assert shape.config.head_dim == shape.config.qk_rope_head_dim
