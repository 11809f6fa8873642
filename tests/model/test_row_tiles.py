"""MLP and norms in tiles give the loss and gradients of whole rows, and need less memory, as the plan says."""

import copy
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Derived:
    """The mean loss of two rows, and its gradient by parameter."""

    loss: float
    gradients: dict[str, torch.Tensor]


def loss_and_gradients(model: Any, precision: torch.dtype | None = None) -> Derived:
    model.zero_grad()
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % 64
    with torch.autocast("cpu", precision, enabled=precision is not None):
        loss = model(ids, labels=ids).loss
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    return Derived(loss.item(), gradients)


def assert_close(derived: Derived, expected: Derived, loss_tolerance: float, gradient_tolerance: float) -> None:
    """Check that loss and gradients differ by a share of the loss, and of the norm of each gradient, at most."""
    assert derived.loss == pytest.approx(expected.loss, rel=loss_tolerance)
    for name, gradient in expected.gradients.items():
        difference = derived.gradients[name] - gradient
        assert difference.norm() <= gradient_tolerance * gradient.norm(), name


@pytest.mark.numerical
@pytest.mark.parametrize("size", [1, 7, LENGTH, 64, 2 * LENGTH])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_loss_is_equal_and_gradients_to_the_order_of_sums(
    llama: LlamaForCausalLM, size: int, is_checkpointed: bool
) -> None:
    expected = loss_and_gradients(copy.deepcopy(llama))
    tiled = copy.deepcopy(llama)
    tile_rows(tiled, [*tiled.model.layers], size)
    if is_checkpointed:
        checkpoint_layers(tiled.model.layers)
    assert_close(loss_and_gradients(tiled), expected, loss_tolerance=1e-6, gradient_tolerance=1e-5)


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
        derived = loss_and_gradients(tiled, precision)
        assert len(derived.gradients) == 2 * 2 * 7  # A and B of 7 linear layers in 2 layers
        assert_close(derived, loss_and_gradients(model, precision), tolerance, tolerance)


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
    whole_bytes = peak(llama.config, None, length)
    tiled_bytes = peak(llama.config, size, length)
    with FakeTensorMode():
        assert peak(llama.config, None, length, cut_two_tiles) == whole_bytes
        assert peak(llama.config, size, length, cut_two_tiles) == tiled_bytes
    # in fp32
    hidden_bytes = 4 * length * HIDDEN
    inner_bytes = 4 * length * INNER
    assert whole_bytes > 5 * inner_bytes + 4 * hidden_bytes
    assert tiled_bytes < 15 * hidden_bytes
    assert cut_two_tiles(length, size) == list(cut_tiles(length, size))[:2]


def test_an_mlp_of_another_form_is_left_whole() -> None:
    def reason_against(family: str, layers: str, **sizes: int) -> str | None:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
        return why_not_tiled(getattr(model.base_model, layers))

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    assert reason_against("qwen3", "layers", **sizes) is None
    assert "does not consist of linear layers only" in str(reason_against("mixtral", "layers", **sizes))
    assert "does not consist of linear layers only" in str(reason_against("gpt2", "h", n_layer=1, n_embd=64, n_head=2))


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

    def train(checkpointing: str, mlp_tile_size: object) -> list[float]:
        """Return the losses and the gradient norms of two steps."""
        run = tmp_path / f"{checkpointing}-{mlp_tile_size}"
        settings = {"parallelism": parallelism, "devices": 2, "max_step": 2, "micro_batch_size": 2}
        words = argv(
            model, tokens, run, **settings, activation_checkpointing=checkpointing, mlp_tile_size=mlp_tile_size
        )
        forked_runs.start(words, 2).finish()
        rows = metrics(run)
        return [float(row["train_loss"]) for row in rows] + [float(row["grad_norm"]) for row in rows]

    expected = train("none", "none")
    assert len(expected) == 4
    assert train("none", 5) == pytest.approx(expected, rel=1e-5)
    assert train("full", 5) == pytest.approx(expected, rel=1e-5)
