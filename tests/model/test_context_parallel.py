"""Rows computed by several ranks: slices of them, their balance, and losses and gradients as of one rank."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from transformers import GPT2Config, LlamaConfig, MistralConfig, PretrainedConfig

from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.errors import InputError
from fabric_train.data.batch import Batch, RowSegment
from fabric_train.distributed.ranks import ContextGroup
from fabric_train.distributed.strategy import resolve_parallelism
from fabric_train.model.attention_choice import choose_attention
from fabric_train.model.context_parallel import (
    CONTEXT,
    _attend_by_document,
    _attend_by_kernel,
    _Exchange,
    _find_segments,
    count_keys,
    cut_rows,
    deal_chunks,
)
from tests.support import context_slices
from tests.support.context_slices import batches
from tests.support.forked_runs import ForkedRuns
from tests.support.unequal_rows import argv, metrics, write_model, write_rows


@pytest.mark.numerical
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
    size = slices[0].input_ids.shape[1] * num_ranks // len(slices[0].chunk_indices)
    place = torch.arange(len(slices[0].chunk_indices) * size).view(-1, size)[slices[0].chunk_indices].flatten().tolist()
    gathered = torch.cat([part.input_ids[0] for part in slices])[place]
    assert gathered[: num_rows * length].tolist() == batch.input_ids.flatten().tolist()
    own_place = 0
    for part in slices:
        for segment in part.segments:
            documents = zip(segment.lengths, segment.key_lengths, strict=True)
            end_key = segment.begin_key
            for num_tokens, num_keys in documents:
                begin = end_key
                end_key = end_key + num_keys
                own = [place.index(own_place + number) for number in range(num_tokens)]
                own_place += num_tokens
                assert own == [*range(end_key - num_tokens, end_key)]  # the last keys are of the tokens themselves
                inside = [border for border in borders if border < end_key]
                assert begin == (inside[-1] if end_key <= num_rows * length else num_rows * length)
            assert end_key == segment.end_key
    numbers = torch.cat([part.target_indices for part in slices])
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


def test_the_keys_of_a_chunk_are_counted_with_the_token_itself() -> None:
    assert count_keys(np.array([0, 3, 8]), 2).tolist() == [1 + 2 + 3 + 1, 2 + 3 + 4 + 5]
    assert count_keys(np.array([0, 6]), 4).tolist() == [1 + 2, 3 + 4, 5 + 6, 1 + 2]  # the last two are padding


def test_a_document_is_attended_to_with_the_scale_of_the_model() -> None:
    query, key, value = torch.randn(3, 5, 2, 8, generator=torch.Generator().manual_seed(0))
    borders = torch.tensor([0, 5], dtype=torch.int32)
    segment = RowSegment(0, 5, 0, 5, (5,), (5,), borders, borders)
    found = _attend_by_document(query, key, value, segment, 0.9)
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.9
    scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(found, torch.einsum("hqk,khd->qhd", scores.softmax(-1), value))


def test_gradients_of_keys_are_summed_in_fp32_whatever_their_type() -> None:
    exchange: Any = SimpleNamespace(_gradient=None)
    parts = torch.tensor([1, 2**-9, 2**-9], dtype=torch.bfloat16)  # in bfloat16, 1 + 2^-9 is 1
    for part in parts.view(3, 1, 1, 1, 1):
        _Exchange.add_gradient(exchange, 1, 2, part, 3)
    assert exchange._gradient.flatten().tolist() == [0, 1 + 2**-8, 0]


def test_chunks_that_follow_each_other_are_one_segment() -> None:
    """A segment is a call of the attention kernel."""
    found = _find_segments(np.array([0, 1, 3]), 4, np.array([0, 6, 14, 16]))
    assert [(part.begin, part.end, part.begin_key, part.end_key) for part in found] == [(0, 8, 0, 8), (8, 12, 6, 16)]
    assert [part.lengths for part in found] == [(6, 2), (2, 2)]
    assert [part.key_lengths for part in found] == [(6, 2), (8, 2)]


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
    model = write_model(tmp_path / "model")
    tokens = write_rows(tmp_path / "tokens")
    given = {"max_step": 2, "micro_batch_size": 4, **options}
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
    shape: Any = SimpleNamespace(config=config, longest_row=None)
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
def test_on_cuda_the_kernel_sees_the_keys_before_a_segment() -> None:
    """The segment has the end of a document of 300 tokens, one of 64, and the beginning of one of 100."""
    lengths = (100, 64, 36)
    key_lengths = (300, 64, 36)
    borders, key_borders = (
        torch.tensor([0, *np.cumsum(each)], dtype=torch.int32, device="cuda") for each in (lengths, key_lengths)
    )
    segment = RowSegment(0, 200, 0, 400, lengths, key_lengths, borders, key_borders)
    generator = torch.Generator("cuda").manual_seed(0)
    given = [
        torch.randn(tokens, heads, 64, dtype=torch.bfloat16, device="cuda", generator=generator)
        for tokens, heads in ((200, 8), (400, 2), (400, 2))
    ]
    found = []
    for attend, dtype in ((_attend_by_kernel, torch.bfloat16), (_attend_by_document, torch.float32)):
        inputs = [each.detach().to(dtype).requires_grad_() for each in given]
        query, key, value = inputs
        output = attend(query, key, value, segment, None)
        (output.float() * torch.linspace(-1, 1, 200, device="cuda")[:, None, None]).sum().backward()
        found.append([output, *(each.grad for each in inputs)])
    for of_kernel, expected in zip(*found, strict=True):
        torch.testing.assert_close(of_kernel.float(), expected, rtol=2e-2, atol=2e-2)
