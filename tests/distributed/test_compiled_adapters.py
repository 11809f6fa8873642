"""Compiled layers with adapters compute what uncompiled ones do, also with frozen weights in 4 bits."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from transformers import AutoConfig, LlamaConfig

from fabric_train.data.batch import Batch, isolate
from fabric_train.distributed.decoder_layers import checkpoint_layers, compile_layers
from fabric_train.model.adapter import Adapter
from fabric_train.model.attention import VARLEN
from fabric_train.training.objective import CrossEntropy
from tests.support.adapted_llama import adapted_llama, adapter_gradients
from tests.support.compiler_backend import NO_CODE, RANKS_WITHOUT_CODE
from tests.support.forked_runs import ForkedRuns
from tests.support.plain_training import LR
from tests.support.rounding import assert_same_training, num_sums_of_gradient, rounding_tolerance
from tests.support.unequal_rows import LENGTH, ROWS_PER_WINDOW, argv, metrics, write_model, write_rows
from tests.support.varlen_kernel import varlen_kernel_on_cpu

NUM_LAYERS = 3
NUM_STEPS = 4


def adapted_model(kind: str, *, base_weights: str | None, dropout: float = 0.0) -> Any:
    """Return a small model in fp32 with variable-length attention, and an adapter with random weights."""
    config = LlamaConfig(
        vocab_size=200,
        num_hidden_layers=NUM_LAYERS,
        hidden_size=128,
        intermediate_size=192,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    adapter = Adapter(kind, rank=4, alpha=8.0, dropout=dropout, base_weights=base_weights)
    return adapted_llama(config, adapter, VARLEN)


def batches_of_documents() -> list[Batch]:
    """Return two batches of two rows with several documents, of which every token is a target."""
    ids = np.random.default_rng(0).integers(3, 200, (2, 24))
    batches = []
    for first_starts, second_starts in (([0, 3, 12], [7]), ([0, 1, 2, 3, 20], [3, 4, 5, 23])):
        isolated = isolate(ids, ids.copy(), [np.array(first_starts), np.array(second_starts)])
        batches.append(Batch(isolated.input_ids, isolated.input_ids, isolated.documents))
    return batches


def loss_and_gradients(model: Any, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of a batch and the gradients of the adapter; dropout draws the same numbers in every call."""
    model.zero_grad()
    torch.manual_seed(0)
    loss = CrossEntropy().loss(model, batch).total
    loss.backward()
    return loss.item(), adapter_gradients(model)


@pytest.mark.usefixtures("settings_as_they_were")
@pytest.mark.parametrize(
    ("kind", "base_weights", "recomputed"),
    [
        ("lora", "nf4", "none"),
        ("lora", None, "full"),
        ("lora", "nf4_double", "none"),
        ("dora", "nf4", "selective"),
        ("dora", None, "full"),
        ("dora", "nf4_double", "full"),
    ],
)
def test_layers_with_an_adapter_are_whole_graphs_that_all_layers_share(
    monkeypatch: pytest.MonkeyPatch, kind: str, base_weights: str | None, recomputed: str
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=NO_CODE))
    model = adapted_model(kind, base_weights=base_weights)
    batches = batches_of_documents()
    with varlen_kernel_on_cpu():
        expected_results = [loss_and_gradients(model, batch) for batch in batches]
        compile_layers(model.model.layers, any_length=False, budget=0.4 if recomputed == "selective" else 1.0)
        if recomputed == "full":
            checkpoint_layers(model.model.layers)
        counters.clear()
        results = [loss_and_gradients(model, batch) for batch in batches]
    for (loss, gradients), (expected_loss, expected_gradients) in zip(results, expected_results, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        for name, gradient in expected_gradients.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5)
    # the input of the first layer has no gradient, since the embedding is frozen: one graph for it, one for the others
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.usefixtures("settings_as_they_were")
@pytest.mark.parametrize(
    ("recomputed", "backend"),
    # without inductor's seeds, torch's partitioner draws again in the backward pass
    [("full", NO_CODE), pytest.param("selective", "inductor", marks=pytest.mark.slow)],
)
def test_both_passes_of_compiled_layers_drop_the_same_inputs(
    monkeypatch: pytest.MonkeyPatch, recomputed: str, backend: str
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    model = adapted_model("lora", base_weights="nf4", dropout=0.3)
    compile_layers(model.model.layers, any_length=False, budget=0.4 if recomputed == "selective" else 1.0)
    if recomputed == "full":
        checkpoint_layers(model.model.layers)
    batch = batches_of_documents()[0]
    with varlen_kernel_on_cpu():
        loss, gradients = loss_and_gradients(model, batch)
        norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in gradients.values()])).item()
        # the loss along the gradient, by central differences
        step_size = 0.02
        losses = []
        for direction in (step_size, -2 * step_size):
            with torch.no_grad():
                for name, gradient in gradients.items():
                    model.get_parameter(name).add_(gradient, alpha=direction / norm)
            losses.append(loss_and_gradients(model, batch)[0])
    slope = (losses[0] - losses[1]) / (2 * step_size)
    # a mask of the backward pass that is not the forward pass's would change a third of the inputs
    assert slope == pytest.approx(norm, rel=0.01)
    # other numbers are drawn for another seed
    torch.manual_seed(1)
    with varlen_kernel_on_cpu():
        assert CrossEntropy().loss(model, batch).total.item() != pytest.approx(loss, rel=1e-4)


# ---------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def compiled_runs(tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns) -> Iterator[ForkedRuns]:
    imports = ["tests.support.warm_compiler", "bitsandbytes"]
    runs = forked_runs.with_imports(tmp_path_factory.mktemp("runs"), imports)
    yield runs
    runs.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rows are whole blocks of NF4, two or three."""
    return write_model(tmp_path_factory.mktemp("model"), hidden_size=128, intermediate_size=192)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("tokens") / "rows", num_rows=21)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallelism", "num_ranks", "options"),
    [
        ("ddp", 2, {"adapter": "dora", "activation_checkpointing": "full"}),
        ("fsdp", 2, {"adapter": "lora"}),
        ("fsdp2", 2, {"adapter": "lora", "base_weights": "nf4", "activation_checkpointing": "full"}),
        ("fsdp2", 2, {"adapter": "dora", "base_weights": "nf4_double", "activation_checkpointing": "selective"}),
    ],
    ids=["ddp", "fsdp", "fsdp2 in 4 bits", "fsdp2 with dora in 4 bits"],
)
def test_compiled_ranks_train_the_adapter_that_uncompiled_ones_do(
    compiled_runs: ForkedRuns,
    tmp_path: Path,
    model: Path,
    tokens: Path,
    parallelism: str,
    num_ranks: int,
    options: dict[str, object],
) -> None:
    def train(compiles: str) -> tuple[list[dict[str, str]], dict[str, torch.Tensor]]:
        run = tmp_path / compiles
        settings = {"parallelism": parallelism, "lora_rank": 4, "max_step": NUM_STEPS, "lr": LR, **options}
        words = argv(model, tokens, run, compile=compiles, **settings)
        compiled_runs.start(words, num_ranks, before=RANKS_WITHOUT_CODE).finish()  # traces, but writes no C++
        adapter = load_file(run / "checkpoints" / f"step-{NUM_STEPS:08d}" / "adapter_model.safetensors")
        return metrics(run), adapter

    rows, adapter = train("true")
    expected_rows, expected_adapter = train("false")
    for column in ("train_loss", "grad_norm"):
        expected_values = [float(row[column]) for row in expected_rows]
        assert [float(row[column]) for row in rows] == pytest.approx(expected_values, rel=1e-5)
    # two orders of a gradient's sums differ by rounding, which grows with their number
    tokens_per_row = LENGTH
    tokens_per_window = ROWS_PER_WINDOW * LENGTH
    num_sums = num_sums_of_gradient(AutoConfig.from_pretrained(model), tokens_per_row, tokens_per_window)
    assert_same_training(adapter, expected_adapter, LR, NUM_STEPS, rounding_tolerance(num_sums))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base_weights", "before"), [("nf4", RANKS_WITHOUT_CODE), ("nf4_double", "")], ids=["traced", "compiled"]
)
def test_a_compiled_run_in_4_bits_with_dropout_resumes_bit_for_bit(
    compiled_runs: ForkedRuns, tmp_path: Path, model: Path, tokens: Path, base_weights: str, before: str
) -> None:
    settings = {
        "adapter": "lora",
        "lora_rank": 4,
        "lora_dropout": 0.1,
        "base_weights": base_weights,
        "compile": "true",
        "activation_checkpointing": "full",
        "parallelism": "single",
        "save_step_interval": 2,
        "keep_checkpoints": 9,
        "max_step": NUM_STEPS,
    }
    whole = tmp_path / "whole"
    compiled_runs.start(argv(model, tokens, whole, **settings), 1, before=before).finish()
    checkpoint = whole / "checkpoints" / "step-00000002"
    resumed = tmp_path / "resumed"
    compiled_runs.start(argv(model, tokens, resumed, checkpoint=checkpoint, **settings), 1, before=before).finish()

    last = Path("checkpoints") / f"step-{NUM_STEPS:08d}"
    for weights in ("adapter_model.safetensors", "optimizer/optimizer.safetensors"):
        tensors = load_file(resumed / last / weights)
        expected_tensors = load_file(whole / last / weights)
        assert tensors.keys() == expected_tensors.keys()
        for name, expected in expected_tensors.items():
            assert torch.equal(tensors[name], expected), name
    losses_by_step = {row["step"]: row["train_loss"] for row in metrics(whole)}
    for row in metrics(resumed):
        assert row["train_loss"] == losses_by_step[row["step"]]
