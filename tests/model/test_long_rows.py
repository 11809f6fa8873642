"""Long rows in tiles or in slices of several ranks have the loss and gradients of whole rows; tiles save memory."""

import copy
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PretrainedConfig,
)

from arguments import TrainArguments, parse
from fabric_train.cli.errors import InputError
from fabric_train.data.batch import Batch
from fabric_train.data.row_slices import Stretch, cut_rows, deal_chunks
from fabric_train.distributed.decoder_layers import checkpoint_layers
from fabric_train.distributed.ranks import ContextGroup
from fabric_train.distributed.strategy import resolve_parallelism
from fabric_train.model import long_rows
from fabric_train.model.adapter import Adapter, attach
from fabric_train.model.attention import choose_attention
from fabric_train.model.long_rows import (
    CONTEXT,
    _attend_by_document,
    _attend_by_kernel,
    tile_rows,
    tiles_of,
    two_tiles_of,
    why_not_tiled,
)
from fabric_train.model.trained_parts import freeze_other_parts
from fabric_train.preflight.memory_activations import _LiveBytes
from tests.support import context_slices
from tests.support.context_slices import batches
from tests.support.forked_runs import ForkedRuns
from tests.support.unequal_rows import argv, metrics, write_model, write_rows

HIDDEN, INNER, LENGTH = 64, 160, 50
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


def peak(config: LlamaConfig, size: int | None, length: int) -> int:
    """Count the bytes that operations of a forward and a backward pass of a checkpointed layer have at their peak."""
    model: Any = LlamaForCausalLM(config).train()
    if size:
        tile_rows(model, [*model.model.layers], size)
    layer = model.model.layers[0]
    checkpoint_layers([layer])
    hidden = torch.randn(1, length, HIDDEN, requires_grad=True)
    positions = torch.ones(1, length, HIDDEN // 4), torch.zeros(1, length, HIDDEN // 4)
    gradient = torch.ones(1, length, HIDDEN)
    with _LiveBytes(model) as live:
        layer(hidden, position_embeddings=positions).backward(gradient)
    return live.most


def test_a_layer_needs_the_bytes_that_the_plan_counts(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    length, size = 4096, 256
    real = {given: peak(llama.config, given, length) for given in (None, size)}
    monkeypatch.setattr(long_rows, "tiles_of", two_tiles_of)
    with FakeTensorMode():
        planned = {given: peak(llama.config, given, length) for given in (None, size)}
    assert planned == real
    hidden, inner = 4 * length * HIDDEN, 4 * length * INNER
    assert real[None] > 5 * inner + 4 * hidden
    assert real[size] < 15 * hidden
    assert two_tiles_of(length, size) == list(tiles_of(length, size))[:2]


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
    model, tokens = write_model(tmp_path / "model"), write_rows(tmp_path / "tokens")
    given: dict[str, Any] = {"parallelism": parallelism, "devices": 2, "max_step": 2, "micro_batch_size": 2}
    logged = []
    for checkpointing, size in (("none", "none"), ("none", 5), ("full", 5)):
        folder = tmp_path / f"{checkpointing}-{size}"
        options = given | {"activation_checkpointing": checkpointing, "mlp_tile_size": size}
        forked_runs.start(argv(model, tokens, folder, **options), 2).finish()
        logged.append([float(row[name]) for row in metrics(folder) for name in ("train_loss", "grad_norm")])
    assert len(logged[0]) == 4
    assert all(found == pytest.approx(logged[0], rel=1e-5) for found in logged[1:])


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_losses_and_gradients_are_those_of_one_rank(forked_runs: ForkedRuns, num_ranks: int) -> None:
    forked_runs.start([], num_ranks, program=context_slices.__name__).finish()


@given(batches(), st.integers(1, 5))
def test_every_token_is_in_one_slice_and_sees_its_document(batch: Batch, num_ranks: int) -> None:
    slices = [cut_rows(batch, ContextGroup(None, rank, num_ranks)) for rank in range(num_ranks)]
    assert len({part.input_ids.shape for part in slices}) == 1
    num_rows, length = batch.input_ids.shape
    borders = np.arange(num_rows + 1) * length
    if batch.documents is not None:
        borders = batch.documents.borders.numpy()
    size = slices[0].input_ids.shape[1] * num_ranks // len(slices[0].chunks)
    place = torch.arange(len(slices[0].chunks) * size).view(-1, size)[slices[0].chunks].flatten().tolist()
    gathered = torch.cat([part.input_ids[0] for part in slices])[place]
    assert gathered[: num_rows * length].tolist() == batch.input_ids.flatten().tolist()
    own_place = 0
    for part in slices:
        for stretch in part.stretches:
            documents = zip(stretch.lengths, stretch.key_lengths, strict=True)
            last_key = stretch.first_key
            for num_tokens, num_keys in documents:
                begin, last_key = last_key, last_key + num_keys
                own = [place.index(own_place + number) for number in range(num_tokens)]
                own_place += num_tokens
                assert own == [*range(last_key - num_tokens, last_key)]  # the last keys are of the tokens themselves
                inside = [border for border in borders if border < last_key]
                assert begin == (inside[-1] if last_key <= num_rows * length else num_rows * length)
            assert last_key == stretch.last_key
    numbers = torch.cat([part.numbers for part in slices])
    assert sorted(numbers.tolist()) == [*range(len(numbers))]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_long_document_is_dealt_so_that_all_ranks_have_the_same_work(num_ranks: int) -> None:
    ranks, _ = deal_chunks(np.array([0, 131072]), num_ranks)
    assert ranks.tolist() == [*reversed(range(num_ranks)), *range(num_ranks)] or len(ranks) == 2 * num_ranks
    for borders in ([0, 100_000, 131072], [0, 3, 90_000, 90_500, 131072]):
        ranks, size = deal_chunks(np.array(borders), num_ranks)
        tokens = np.concatenate([np.arange(end - begin) + 1 for begin, end in pairwise(borders)])
        work = np.bincount(ranks, [part.sum() for part in tokens.reshape(-1, size)])
        assert work.max() < 1.02 * work.mean()


def test_short_documents_are_not_cut_more_than_the_balance_needs() -> None:
    ranks, size = deal_chunks(np.arange(0, 4096 + 1, 64), 4)
    assert (ranks.tolist(), size) == ([0, 1, 2, 3], 1024)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "full", "mlp_tile_size": 16},
        {"lora_rank": 4, "activation_checkpointing": "full", "precision": "bf16-mixed"},
    ],
)
def test_a_run_has_the_losses_of_one_rank(forked_runs: ForkedRuns, tmp_path: Path, options: dict[str, object]) -> None:
    model, tokens = write_model(tmp_path / "model"), write_rows(tmp_path / "tokens")
    given = {"max_step": 3, "micro_batch_size": 2, **options}
    ranks = {"parallelism": "fsdp2", "devices": 2, "context_parallel_size": 2}
    forked_runs.start(argv(model, tokens, tmp_path / "one", **given)).finish()
    forked_runs.start(argv(model, tokens, tmp_path / "two", **given, **ranks), 2).finish()
    one, two = (
        [[float(row[name]) for name in ("train_loss", "grad_norm")] for row in metrics(tmp_path / run)]
        for run in ("one", "two")
    )
    rel = 1e-2 if "precision" in options else 1e-5
    assert np.array(two) == pytest.approx(np.array(one), rel=rel)


def arguments_of(*options: str) -> TrainArguments:
    given = ["--train_data_dir", "tokens", "--output_dir", "run", "--parallelism", "fsdp2"]
    return parse(TrainArguments, [*given, "--context_parallel_size", "2", *options])


SMALL: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 50, "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        (LlamaConfig(**SMALL), [], None),
        (LlamaConfig(**SMALL, head_dim=20), [], None),  # a size that only the kernel does not take
        (LlamaConfig(**SMALL), ["--attention", "eager"], "--attention eager does not take a part of a row"),
        (MistralConfig(**SMALL, num_key_value_heads=4, sliding_window=5), [], "has a sliding window"),
        (GPT2Config(vocab_size=50, n_embd=64, n_layer=1, n_head=2), [], "has no dropout, and .* has 0.1"),
    ],
    ids=["llama", "llama of any size", "eager", "mistral", "gpt2"],
)
def test_a_model_whose_attention_takes_no_slices_is_refused(
    config: PretrainedConfig, options: list[str], reason: str | None
) -> None:
    config._attn_implementation = "sdpa"
    shape: Any = SimpleNamespace(config=config)
    if reason is None:
        choose_attention(shape, arguments_of(*options), "cpu")
        assert config._attn_implementation == CONTEXT
    else:
        with pytest.raises(InputError, match=f"--context_parallel_size 2: .*{reason}.*; leave it out"):
            choose_attention(shape, arguments_of(*options), "cpu")


@pytest.mark.parametrize(
    ("options", "num_devices", "fault"),
    [
        ([], 5, "does not divide the 5 devices that share the model; give"),
        (
            ["--tensor_parallel_size", "2"],
            6,
            "the 6 devices that share the model in groups of 2; ",
        ),
        (["--num_nodes", "2", "--sharding_strategy", "HYBRID_SHARD"], 6, "does not divide the 3 devices that share"),
    ],
)
def test_devices_that_do_not_make_whole_groups_are_refused(options: list[str], num_devices: int, fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        resolve_parallelism(arguments_of(*options), num_devices, "cpu")


@pytest.mark.cuda
def test_on_cuda_the_kernel_sees_the_keys_before_a_stretch() -> None:
    """The stretch has the end of a document of 300 tokens, one of 64, and the beginning of one of 100."""
    lengths, key_lengths = (100, 64, 36), (300, 64, 36)
    borders, key_borders = (
        torch.tensor([0, *np.cumsum(each)], dtype=torch.int32, device="cuda") for each in (lengths, key_lengths)
    )
    stretch = Stretch(0, 200, 0, 400, lengths, key_lengths, borders, key_borders)
    generator = torch.Generator("cuda").manual_seed(0)
    given = [
        torch.randn(tokens, heads, 64, dtype=torch.bfloat16, device="cuda", generator=generator)
        for tokens, heads in ((200, 8), (400, 2), (400, 2))
    ]
    found = []
    for attend, dtype in ((_attend_by_kernel, torch.bfloat16), (_attend_by_document, torch.float32)):
        inputs = [each.detach().to(dtype).requires_grad_() for each in given]
        query, key, value = inputs
        output = attend(query, key, value, stretch, None)
        (output.float() * torch.linspace(-1, 1, 200, device="cuda")[:, None, None]).sum().backward()
        found.append([output, *(each.grad for each in inputs)])
    for of_kernel, expected in zip(*found, strict=True):
        torch.testing.assert_close(of_kernel.float(), expected, rtol=2e-2, atol=2e-2)
