"""Compute losses and gradients of random packed rows on all ranks together, and compare them with one rank's.

Each rank computes a slice of every row (context parallelism). Start it with forked ranks; it takes no arguments.
"""

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
_SUPERVISED_SHARE = 0.75


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Draw rows of one document or of several documents of any length; not all tokens are supervised."""
    num_rows = draw(st.integers(1, 3))
    row_length = draw(st.integers(2, 40))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    input_ids = random.integers(0, VOCABULARY, (num_rows, row_length))
    labels = np.where(random.random((num_rows, row_length)) < _SUPERVISED_SHARE, input_ids, IGNORED_LABEL)
    is_one_document = draw(st.booleans())
    if is_one_document:
        return pad_rows(list(input_ids), list(labels), [])
    inner_borders = st.sets(st.integers(1, row_length - 1), max_size=6)
    document_starts = [np.array([0, *sorted(draw(inner_borders))]) for _ in range(num_rows)]
    return isolate(input_ids, labels, document_starts)


def build(attention: str, num_key_value_heads: int, is_checkpointed: bool = False) -> LlamaForCausalLM:
    """Return a small model with seeded random weights and one of our kinds of attention, or one of transformers'."""
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


def compute(model: LlamaForCausalLM, batch: Batch) -> list[torch.Tensor]:
    """Return each target's loss, and the gradients of a sum in which each target has another weight."""
    losses = losses_at_targets(model, batch, by_token=True)[1]
    # with equal weights, losses that were exchanged between two targets would not show in the gradients
    weights = torch.linspace(0.5, 2, len(losses))
    (losses * weights).sum().backward()
    results = [losses.detach()]
    for parameter in model.parameters():
        assert parameter.grad is not None
        results.append(parameter.grad)
    return results


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(batches(), st.sampled_from([1, 2, 3]), st.booleans(), st.booleans())
def check_slices(batch: Batch, num_key_value_heads: int, is_checkpointed: bool, by_kernel: bool) -> None:
    """Check the losses and gradients of all ranks together against those of the whole rows.

    All ranks draw the same examples, and agree on the result, so they also shrink a failure together. A rank that
    stopped alone would leave the others waiting in a collective.
    """
    group = ContextGroup(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    sliced_batch = Batch(batch.input_ids, batch.labels, batch.documents, row_slice=cut_rows(batch, group))
    sliced_model = build(CONTEXT_VARLEN if by_kernel else CONTEXT, num_key_value_heads, is_checkpointed)
    losses, *gradients = compute(sliced_model, sliced_batch)
    for gradient in gradients:
        dist.all_reduce(gradient)

    expected_losses, *expected_gradients = compute(build("sdpa", num_key_value_heads), batch)
    differences = []
    for actual, expected in zip([losses, *gradients], [expected_losses, *expected_gradients], strict=True):
        if expected.numel():
            largest = expected.abs().max().clamp(min=1e-3)
            differences.append(((actual - expected).abs() / largest).max())
    largest_difference = torch.stack(differences).max()
    dist.all_reduce(largest_difference, dist.ReduceOp.MAX)
    assert largest_difference < TOLERANCE


def main() -> None:
    """Check slices of random batches on this rank and the others."""
    dist.init_process_group("gloo")
    with varlen_kernel_on_cpu():
        check_slices()
    dist.destroy_process_group()
