"""Compute losses and gradients of random packed rows on all ranks together, and compare them with one rank's."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
import torch.distributed as dist
from hypothesis import given, settings
from transformers import LlamaConfig, LlamaForCausalLM

from fabric_train.data.batch import IGNORED_LABEL, Batch, isolate, pad_rows
from fabric_train.distributed.decoder_layers import checkpoint_layers
from fabric_train.distributed.ranks import ContextGroup
from fabric_train.model.context_parallel import CONTEXT, CONTEXT_VARLEN, cut_rows
from fabric_train.training.objective import losses_at_targets
from tests.support.varlen_kernel import varlen_kernel_on_cpu

VOCABULARY = 60
TOLERANCE = 1e-5


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Rows with documents of any length; about three quarters of the tokens are supervised."""
    shape = draw(st.integers(1, 3)), draw(st.integers(2, 40))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    ids = random.integers(0, VOCABULARY, shape)
    labels = np.where(random.random(shape) < 0.75, ids, IGNORED_LABEL)
    if draw(st.booleans()):
        return pad_rows(list(ids), list(labels), [])
    inside = st.sets(st.integers(1, shape[1] - 1), max_size=6)
    return isolate(ids, labels, [np.array([0, *sorted(draw(inside))]) for _ in range(shape[0])])


def build(attention: str, num_key_value_heads: int, is_checkpointed: bool = False) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=num_key_value_heads,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation=attention)
    if is_checkpointed:
        checkpoint_layers(model.model.layers)
    return model


def compute(model: Any, batch: Batch) -> list[torch.Tensor]:
    """Return each target's loss, and the gradient of a sum in which each target has another weight."""
    losses = losses_at_targets(model, batch, by_token=True)[1]
    (losses * torch.linspace(0.5, 2, len(losses))).sum().backward()
    return [losses.detach(), *(weight.grad for weight in model.parameters())]


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(batches(), st.sampled_from([1, 2, 3]), st.booleans(), st.booleans())
def check_slices(batch: Batch, num_key_value_heads: int, is_checkpointed: bool, by_kernel: bool) -> None:
    """All ranks draw the same examples, and agree on the result, so they also shrink a failure together."""
    group = ContextGroup(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    sliced = Batch(batch.input_ids, batch.labels, batch.documents, row_slice=cut_rows(batch, group))
    model = build(CONTEXT_VARLEN if by_kernel else CONTEXT, num_key_value_heads, is_checkpointed)
    losses, *gradients = compute(model, sliced)
    expected = compute(build("sdpa", num_key_value_heads), batch)
    for gradient in gradients:
        dist.all_reduce(gradient)
    differences = [
        ((found - right).abs() / right.abs().max().clamp(min=1e-3)).max()
        for found, right in zip((losses, *gradients), expected, strict=True)
        if right.numel()
    ]
    largest = torch.stack(differences).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    assert largest < TOLERANCE


def main() -> None:
    dist.init_process_group("gloo")
    with varlen_kernel_on_cpu():
        check_slices()
    dist.destroy_process_group()
