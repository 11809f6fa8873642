"""Other families than Llama are read by each rank in parts, and train under both FSDPs as in plain PyTorch."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fabric_train.cli.errors import InputError
from fabric_train.distributed.strategy import ParameterMaterializer
from fabric_train.model.hf_model import read_shape
from fabric_train.model.load_weights import load_model, open_pretrained, read_weights
from tests.support.forked_runs import ForkedRuns
from tests.support.plain_training import GRAD_CLIP, LR, WEIGHT_DECAY, plain_pytorch
from tests.support.unequal_rows import ROWS_PER_WINDOW, VOCABULARY, argv, metrics, write_model, write_rows

STEPS = 3
PLAIN = {"lr": LR, "grad_clip": GRAD_CLIP, "weight_decay": WEIGHT_DECAY}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": SIZES | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "gpt_neox": SIZES | {"intermediate_size": 48},
    "mistral": GROUPED,
    "mixtral": GROUPED | {"num_local_experts": 4},
    "qwen3": GROUPED | {"tie_word_embeddings": True},
    "gemma": GROUPED,
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families") / request.param
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **FAMILIES[request.param]))
        for parameter in built.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)  # norms and biases are not all one and zero either
    built.float().save_pretrained(folder, max_shard_size="20KB")
    return folder


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("families") / "tokens")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_model_read_in_parts_is_the_one_that_transformers_loads(model: Path, dtype: torch.dtype) -> None:
    shape = read_shape(str(model))
    by_transformers: Any = load_model(shape, dtype)

    unread = open_pretrained(shape, dtype)
    read_in_parts: Any = unread.model
    assert unread.weights is not None
    assert all(parameter.is_meta for parameter in read_in_parts.parameters())
    read_in_parts.apply(ParameterMaterializer(torch.device("cpu")))
    read_weights(read_in_parts, unread.weights)

    # a tied weight is one parameter in both
    assert_same_tensors(dict(read_in_parts.named_parameters()), dict(by_transformers.named_parameters()))
    assert_same_tensors(dict(read_in_parts.named_buffers()), dict(by_transformers.named_buffers()))
    assert read_in_parts.generation_config == by_transformers.generation_config


def assert_same_tensors(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


# each family once; tied weights under both
SHARDED_BY = {
    "gpt2": "fsdp",
    "gpt_neox": "fsdp",
    "mistral": "fsdp2",
    "mixtral": "fsdp2",
    "qwen3": "fsdp2",
    "gemma": "fsdp",
}


@pytest.mark.numerical
@pytest.mark.slow
@pytest.mark.parametrize(("model", "parallelism"), SHARDED_BY.items(), indirect=["model"])
def test_family_trains_as_in_plain_pytorch(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, tokens: Path, parallelism: str
) -> None:
    settings = {"parallelism": parallelism, "max_step": STEPS, **PLAIN, "micro_batch_size": 2}
    forked_runs.start(argv(model, tokens, tmp_path / "run", **settings), 2).finish()
    losses, norms = plain_pytorch(model, tokens, ROWS_PER_WINDOW, STEPS)
    logged = metrics(tmp_path / "run")
    assert [float(row["train_loss"]) for row in logged] == pytest.approx(losses, rel=1e-5)
    assert [float(row["grad_norm"]) for row in logged] == pytest.approx(norms, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mistral"], indirect=True)
def test_rank_reads_a_shard_that_begins_within_a_row(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, tokens: Path
) -> None:
    settings = {"parallelism": "fsdp", "max_step": STEPS, **PLAIN, "total_batch_size": 6}
    forked_runs.start(argv(model, tokens, tmp_path / "run", **settings), 3).finish()
    losses, _ = plain_pytorch(model, tokens, 6, STEPS)
    assert [float(row["train_loss"]) for row in metrics(tmp_path / "run")] == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
def test_a_stored_head_that_differs_from_the_tied_embedding_is_kept(
    forked_runs: ForkedRuns, tmp_path: Path, tokens: Path
) -> None:
    """transformers does not tie them, although the configuration says so."""
    # given a model with a head of its own, whose configuration says that it is the embedding
    folder = write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    by_transformers: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert not torch.equal(by_transformers.lm_head.weight, by_transformers.model.embed_tokens.weight)

    # then it is loaded as transformers does
    loaded = load_model(read_shape(str(folder)), torch.float32)
    assert_same_tensors(loaded.state_dict(), by_transformers.state_dict())

    # and it trains so, also when it is resumed
    settings = {"parallelism": "fsdp2", "max_step": STEPS, **PLAIN, "save_step_interval": 2}
    forked_runs.start(argv(folder, tokens, tmp_path / "run", **settings), 2).finish()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    forked_runs.start(argv(folder, tokens, tmp_path / "resumed", **settings, checkpoint=checkpoint), 2).finish()
    expected_losses, _ = plain_pytorch(folder, tokens, ROWS_PER_WINDOW, STEPS)
    losses = [float(row["train_loss"]) for row in metrics(tmp_path / "run")]
    resumed_losses = [float(row["train_loss"]) for row in metrics(tmp_path / "resumed")]
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert resumed_losses == losses[2:]
    assert json.loads((checkpoint / "config.json").read_text())["tie_word_embeddings"] is False


def test_weights_of_another_shape_are_named_in_one_line(tmp_path: Path, tiny_model_dir: Path) -> None:
    folder = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": config["intermediate_size"] + 8}))
    fault = (
        r"weights are missing or do not have the shape in config.json, such as model.layers.0.mlp.down_proj.weight; "
    )
    with pytest.raises(InputError, match=fault):
        load_model(read_shape(str(folder)), torch.float32)
