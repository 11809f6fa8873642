"""Rows computed by several ranks: slices of them, their balance, and losses and gradients as of one rank."""

from collections.abc import Callable
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
    assert len({row_slice.input_ids.shape for row_slice in slices}) == 1
    num_rows, length = batch.input_ids.shape
    num_tokens = num_rows * length  # the tokens after them are padding, so that all chunks have one size

    # the slices, one after the other and then with their chunks in order, are the rows one after the other
    chunk_indices = slices[0].chunk_indices
    chunk_size = slices[0].input_ids.shape[1] * num_ranks // len(chunk_indices)
    sliced_positions = torch.arange(len(chunk_indices) * chunk_size).view(-1, chunk_size)[chunk_indices].flatten()
    sliced_ids = torch.cat([row_slice.input_ids[0] for row_slice in slices])
    assert sliced_ids[sliced_positions][:num_tokens].tolist() == batch.input_ids.flatten().tolist()

    # each token sees the keys from the beginning of its document to itself
    borders = np.arange(num_rows + 1) * length
    if batch.documents is not None:
        borders = batch.documents.borders.numpy()
    row_positions = sliced_positions.argsort().tolist()  # in the rows, of each token in the slices
    sliced_position = 0
    for row_slice in slices:
        for segment in row_slice.segments:
            end_key = segment.begin_key
            for num_queries, num_keys in zip(segment.lengths, segment.key_lengths, strict=True):
                begin_key = end_key
                end_key = begin_key + num_keys
                query_positions = row_positions[sliced_position : sliced_position + num_queries]
                sliced_position += num_queries
                assert query_positions == [*range(end_key - num_queries, end_key)]  # the last keys are of the tokens
                if end_key <= num_tokens:
                    assert begin_key == max(border for border in borders if border < end_key)
                else:
                    assert begin_key == num_tokens
            assert end_key == segment.end_key

    # each target is in one slice
    target_indices = torch.cat([row_slice.target_indices for row_slice in slices])
    assert sorted(target_indices.tolist()) == [*range(len(target_indices))]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_long_document_is_dealt_so_that_all_ranks_have_the_same_work(num_ranks: int) -> None:
    ranks, _ = deal_chunks(np.array([0, 131072]), num_ranks)
    assert ranks.tolist() == [*reversed(range(num_ranks)), *range(num_ranks)] or len(ranks) == 2 * num_ranks
    for borders in ([0, 100_000, 131072], [0, 3, 90_000, 90_500, 131072]):
        ranks, chunk_size = deal_chunks(np.array(borders), num_ranks)
        # the work of a token is the number of tokens that it sees
        work_by_token = np.concatenate([np.arange(end - begin) + 1 for begin, end in pairwise(borders)])
        work_by_chunk = work_by_token.reshape(-1, chunk_size).sum(axis=1)
        work_by_rank = np.bincount(ranks, work_by_chunk)
        assert work_by_rank.max() < 1.02 * work_by_rank.mean()


def test_short_documents_are_not_cut_more_than_the_balance_needs() -> None:
    ranks, chunk_size = deal_chunks(np.arange(0, 4096 + 1, 64), 4)
    assert ranks.tolist() == [0, 1, 2, 3]
    assert chunk_size == 1024


def test_the_keys_of_a_chunk_are_counted_with_the_token_itself() -> None:
    assert count_keys(np.array([0, 3, 8]), 2).tolist() == [1 + 2 + 3 + 1, 2 + 3 + 4 + 5]
    assert count_keys(np.array([0, 6]), 4).tolist() == [1 + 2, 3 + 4, 5 + 6, 1 + 2]  # the last two are padding


def test_a_document_is_attended_to_with_the_scale_of_the_model() -> None:
    query, key, value = torch.randn(3, 5, 2, 8, generator=torch.Generator().manual_seed(0))
    borders = torch.tensor([0, 5], dtype=torch.int32)
    segment = RowSegment(0, 5, 0, 5, (5,), (5,), borders, borders)
    output = _attend_by_document(query, key, value, segment, 0.9)
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.9
    scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(output, torch.einsum("hqk,khd->qhd", scores.softmax(-1), value))


def test_gradients_of_keys_are_summed_in_fp32_whatever_their_type() -> None:
    exchange: Any = SimpleNamespace(_gradient=None)
    gradients = torch.tensor([1, 2**-9, 2**-9], dtype=torch.bfloat16)  # in bfloat16, 1 + 2^-9 is 1
    for gradient in gradients.view(3, 1, 1, 1, 1):
        _Exchange.add_gradient(exchange, 1, 2, gradient, 3)
    assert exchange._gradient.flatten().tolist() == [0, 1 + 2**-8, 0]


def test_chunks_that_follow_each_other_are_one_segment() -> None:
    """A segment is a call of the attention kernel."""
    # chunks 0, 1 and 3 of 4 tokens, of documents of 6, 8 and 2 tokens
    joined, last = _find_segments(np.array([0, 1, 3]), 4, np.array([0, 6, 14, 16]))
    # chunks 0 and 1: the first document, and the beginning of the second
    assert (joined.begin, joined.end, joined.begin_key, joined.end_key) == (0, 8, 0, 8)
    assert joined.lengths == (6, 2)
    assert joined.key_lengths == (6, 2)
    # chunk 3: the end of the second document, which sees it from its beginning at 6, and the third
    assert (last.begin, last.end, last.begin_key, last.end_key) == (8, 12, 6, 16)
    assert last.lengths == (2, 2)
    assert last.key_lengths == (8, 2)


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
    settings = {"max_step": 2, "micro_batch_size": 4, **options}
    context_parallel = {"parallelism": "fsdp2", "devices": 2, "context_parallel_size": 2}
    forked_runs.start(argv(model, tokens, tmp_path / "one", **settings)).finish()
    forked_runs.start(argv(model, tokens, tmp_path / "two", **settings, **context_parallel), 2).finish()
    rel = 1e-2 if "precision" in options else 1e-5
    for row, expected_row in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
        for column in ("train_loss", "grad_norm"):
            assert float(row[column]) == pytest.approx(float(expected_row[column]), rel=rel)


def arguments_of(*options: str) -> TrainArguments:
    context_parallel = ["--parallelism", "fsdp2", "--context_parallel_size", "2"]
    return parse(TrainArguments, ["--train_data_dir", "tokens", "--output_dir", "run", *context_parallel, *options])


SMALL: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 50, "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        (LlamaConfig(**SMALL), [], None),
        (LlamaConfig(**SMALL, head_dim=20), [], None),  # a size that only the kernel does not take
        (LlamaConfig(**SMALL), ["--attention", "eager"], "--attention eager does not support parts of rows"),
        (MistralConfig(**SMALL, num_key_value_heads=4, sliding_window=5), [], "has a sliding window"),
        (
            GPT2Config(vocab_size=50, n_embd=64, n_layer=1, n_head=2),
            [],
            "does not support dropout, but .* has dropout 0.1",
        ),
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
        with pytest.raises(InputError, match=f"--context_parallel_size 2: .*{reason}.*; leave out --context_par"):
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
    borders = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")
    key_borders = torch.tensor([0, *np.cumsum(key_lengths)], dtype=torch.int32, device="cuda")
    segment = RowSegment(0, 200, 0, 400, lengths, key_lengths, borders, key_borders)
    generator = torch.Generator("cuda").manual_seed(0)
    bf16_inputs = []
    for num_tokens, num_heads in ((200, 8), (400, 2), (400, 2)):  # query, key, value
        shape = (num_tokens, num_heads, 64)
        bf16_inputs.append(torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=generator))

    def attend_and_derive(attend: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor | None]:
        """Return the output, and the gradients of query, key and value."""
        inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in bf16_inputs]
        output = attend(*inputs, segment, None)
        weights = torch.linspace(-1, 1, 200, device="cuda")[:, None, None]
        (output.float() * weights).sum().backward()
        return [output, *(tensor.grad for tensor in inputs)]

    kernel_results = attend_and_derive(_attend_by_kernel, torch.bfloat16)
    expected_results = attend_and_derive(_attend_by_document, torch.float32)
    for actual, expected in zip(kernel_results, expected_results, strict=True):
        assert actual is not None
        torch.testing.assert_close(actual.float(), expected, rtol=2e-2, atol=2e-2)
