"""MLP and norms in tiles give the loss and gradients of whole rows, and need less memory, as the plan says."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.errors import InputError
from fabric_train.distributed.decoder_layers import checkpoint_layers
from fabric_train.model.adapter import Adapter, attach
from fabric_train.model.row_tiles import CutTiles, cut_tiles, cut_two_tiles, tile_rows, why_not_tiled
from fabric_train.model.trained_parts import freeze_other_parts
from fabric_train.preflight.memory_activations import _LiveBytes
from tests.support.forked_runs import ForkedRuns
from tests.support.unequal_rows import argv, metrics, write_model, write_rows

HIDDEN = 64
INNER = 160
LENGTH = 50
REQUIRED = ["--train_data_dir", "tokens", "--output_dir", "run"]


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        num_hidden_layers=2,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_attention_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def loss_and_gradients(model: Any, precision: torch.dtype | None = None) -> tuple[torch.Tensor, dict[str, Any]]:
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % 64
    with torch.autocast("cpu", precision, enabled=precision is not None):
        loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.numerical
@pytest.mark.parametrize("size", [1, 7, LENGTH, 64, 2 * LENGTH])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_loss_is_equal_and_gradients_to_the_order_of_sums(
    llama: LlamaForCausalLM, size: int, is_checkpointed: bool
) -> None:
    loss, expected = loss_and_gradients(copy.deepcopy(llama))
    model = copy.deepcopy(llama)
    tile_rows(model, [*model.model.layers], size)
    if is_checkpointed:
        checkpoint_layers(model.model.layers)
    found_loss, found = loss_and_gradients(model)
    assert found_loss == pytest.approx(loss.item(), rel=1e-6)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.numerical
def test_an_adapter_and_autocast_have_the_same_gradients(llama: LlamaForCausalLM) -> None:
    adapter = Adapter("lora", rank=4, alpha=8.0)
    model: Any = copy.deepcopy(llama)
    attach(model, adapter, "the model", "cpu")
    freeze_other_parts(model, adapter)
    for name, weight in model.named_parameters():
        if name.endswith("lora_B.weight"):
            torch.nn.init.normal_(weight, std=0.02)
    tiled = copy.deepcopy(model)
    tile_rows(tiled, [*tiled.model.layers], 16)
    for precision, tolerance in ((None, 1e-5), (torch.bfloat16, 2e-2)):
        (loss, expected), (found_loss, found) = (loss_and_gradients(each, precision) for each in (model, tiled))
        assert found_loss == pytest.approx(loss.item(), rel=tolerance)
        assert len(found) == 2 * 2 * 7
        for name, gradient in expected.items():
            assert (found[name] - gradient).norm() <= tolerance * gradient.norm(), name
        model.zero_grad()
        tiled.zero_grad()


def peak(config: LlamaConfig, size: int | None, length: int, cut: CutTiles = cut_tiles) -> int:
    """Count the bytes that operations of a forward and a backward pass of a checkpointed layer have at their peak."""
    model: Any = LlamaForCausalLM(config).train()
    if size:
        tile_rows(model, [*model.model.layers], size, cut)
    layer = model.model.layers[0]
    checkpoint_layers([layer])
    hidden = torch.randn(1, length, HIDDEN, requires_grad=True)
    positions = torch.ones(1, length, HIDDEN // 4), torch.zeros(1, length, HIDDEN // 4)
    gradient = torch.ones(1, length, HIDDEN)
    with _LiveBytes(model) as live:
        layer(hidden, position_embeddings=positions).backward(gradient)
    return live.most


def test_a_layer_needs_the_bytes_that_the_plan_counts(llama: LlamaForCausalLM) -> None:
    length = 4096
    size = 256
    real = {given: peak(llama.config, given, length) for given in (None, size)}
    with FakeTensorMode():
        planned = {given: peak(llama.config, given, length, cut_two_tiles) for given in (None, size)}
    assert planned == real
    hidden = 4 * length * HIDDEN
    inner = 4 * length * INNER
    assert real[None] > 5 * inner + 4 * hidden
    assert real[size] < 15 * hidden
    assert cut_two_tiles(length, size) == list(cut_tiles(length, size))[:2]


def test_an_mlp_of_another_form_is_left_whole() -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    for kind, fits in (("mixtral", False), ("qwen3", True), ("gpt2", False)):
        config = AutoConfig.for_model(kind, **(sizes if kind != "gpt2" else {"n_layer": 1, "n_embd": 64, "n_head": 2}))
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        base = model.base_model
        reason = why_not_tiled(base.h if kind == "gpt2" else base.layers)
        assert (reason is None) is fits
        assert fits or "is not made of linear layers alone" in str(reason)


def test_tiles_are_refused_beside_what_they_do_not_work_with() -> None:
    for options, fault in (
        ("--compile true", "does not work with --compile true"),
        ("--activation_checkpointing selective", "does not work with --activation_checkpointing selective"),
        ("--parallelism fsdp2 --tensor_parallel_size 2", "does not work with --tensor_parallel_size 2"),
    ):
        with pytest.raises(InputError, match=f"--mlp_tile_size 4096 {fault}"):
            parse(TrainArguments, [*REQUIRED, "--mlp_tile_size", "4k", *options.split()])


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", ["fsdp2", "fsdp", "ddp"])
def test_ranks_train_in_tiles_as_without(forked_runs: ForkedRuns, tmp_path: Path, parallelism: str) -> None:
    model = write_model(tmp_path / "model")
    tokens = write_rows(tmp_path / "tokens")
    given: dict[str, Any] = {"parallelism": parallelism, "devices": 2, "max_step": 2, "micro_batch_size": 2}
    logged = []
    for checkpointing, size in (("none", "none"), ("none", 5), ("full", 5)):
        folder = tmp_path / f"{checkpointing}-{size}"
        options = given | {"activation_checkpointing": checkpointing, "mlp_tile_size": size}
        forked_runs.start(argv(model, tokens, folder, **options), 2).finish()
        logged.append([float(row[name]) for row in metrics(folder) for name in ("train_loss", "grad_norm")])
    assert len(logged[0]) == 4
    assert all(found == pytest.approx(logged[0], rel=1e-5) for found in logged[1:])
