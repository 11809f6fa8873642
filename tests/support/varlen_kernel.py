"""A CPU stand-in for the kernel of ``torch.nn.attention.varlen``, which torch has for GPUs only.

It computes from the borders alone, one sequence after the other, with the formulas of attention. Everything above it is
torch's own: ``varlen_attn``, its checks, its autograd formula and its registration for fake tensors.

Shapes: N tokens of all sequences, H heads of queries, K heads of keys and values, D head size; Q queries and T keys of
one sequence. Sequence ``i`` has the tokens ``borders[i]`` to ``borders[i + 1]``. A sequence has at least as many keys
as queries: its queries are the last ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fabric_train.model.attention import register_attention

register_attention()  # transformers finds the attention of a configuration by its name

CALLS: list[tuple[list[int], int]] = []
"""The borders and the longest length of each forward call in :func:`varlen_kernel_on_cpu`."""


@contextmanager
def varlen_kernel_on_cpu() -> Iterator[None]:
    """Use the stand-in as the CPU's kernel, and clear :data:`CALLS`."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    CALLS.clear()
    try:
        yield
    finally:
        library._destroy()


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_borders: torch.Tensor,
    key_borders: torch.Tensor,
    longest_query: int,
    longest_key: int,
    dropout: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int = -1,
    window_size_right: int = -1,
    **_: object,
) -> tuple[torch.Tensor, ...]:
    """Check the arguments and return the output [N, H, D], and four tensors that the GPU kernel's backward needs."""
    query_lengths = query_borders.diff()
    key_lengths = key_borders.diff()
    assert query_borders.dtype == key_borders.dtype == torch.int32
    assert longest_query == int(query_lengths.max())
    assert longest_key == int(key_lengths.max())
    assert (key_lengths >= query_lengths).all()
    assert int(query_borders[0]) == 0
    assert int(query_borders[-1]) == len(query)
    assert int(key_borders[-1]) == len(key)
    assert window_size_left < 0 or torch.equal(query_borders, key_borders)
    assert query.dtype == key.dtype == value.dtype
    assert window_size_right == 0
    assert is_causal == (window_size_left < 0)
    assert not dropout
    assert not return_debug_mask
    CALLS.append((query_borders.tolist(), longest_query))

    outputs = []
    sequences = zip(
        _sequences(query, query_borders), _sequences(key, key_borders), _sequences(value, key_borders), strict=True
    )
    for sequence_query, sequence_key, sequence_value in sequences:
        probabilities = _probabilities(sequence_query, sequence_key, scale, window_size_left).to(value.dtype)
        outputs.append(torch.einsum("hqt,thd->qhd", probabilities, _repeat_heads(sequence_value, query)))

    log_sum_exp = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    rng_state = torch.empty(0, dtype=torch.uint64)
    debug_mask = query.new_empty(0)
    return torch.cat(outputs), log_sum_exp, rng_state, rng_state, debug_mask


def _backward(
    output_grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    query_borders: torch.Tensor,
    key_borders: torch.Tensor,
    *_: object,
    scale: float | None = None,
    window_size_left: int = -1,
    **__: object,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query [N, H, D], key and value [N, K, D]."""
    query_grads = []
    key_grads = []
    value_grads = []
    sequences = zip(
        _sequences(output_grad, query_borders),
        _sequences(query, query_borders),
        _sequences(key, key_borders),
        _sequences(value, key_borders),
        strict=True,
    )
    for sequence_output_grad, sequence_query, sequence_key, sequence_value in sequences:
        query_grad, key_grad, value_grad = _sequence_gradients(
            sequence_output_grad, sequence_query, sequence_key, sequence_value, scale, window_size_left
        )
        query_grads.append(query_grad)
        key_grads.append(key_grad)
        value_grads.append(value_grad)
    return torch.cat(query_grads), torch.cat(key_grads), torch.cat(value_grads)


def _sequence_gradients(
    output_grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query [Q, H, D], key and value [T, K, D] of one sequence."""
    factor = scale or query.shape[2] ** -0.5
    probabilities = _probabilities(query, key, scale, window)  # [H, Q, T]

    # gradient of the softmax: each probability times the difference of its gradient from the mean one
    probability_grad = torch.einsum("qhd,thd->hqt", output_grad, _repeat_heads(value, query)).float()
    mean_grad = (probabilities * probability_grad).sum(-1, keepdim=True)
    score_grad = (probabilities * (probability_grad - mean_grad) * factor).to(query.dtype)

    # heads of queries that share a head of keys and values add their gradients
    num_sharing_heads = query.shape[1] // key.shape[1]
    query_grad = torch.einsum("hqt,thd->qhd", score_grad, _repeat_heads(key, query))
    key_grad = torch.einsum("hqt,qhd->thd", score_grad, query).unflatten(1, (-1, num_sharing_heads)).sum(2)
    value_grad = torch.einsum("hqt,qhd->thd", probabilities.to(query.dtype), output_grad)
    value_grad = value_grad.unflatten(1, (-1, num_sharing_heads)).sum(2)
    return query_grad, key_grad, value_grad


def _probabilities(query: torch.Tensor, key: torch.Tensor, scale: float | None, window: int) -> torch.Tensor:
    """Return how much each query of a sequence attends to each key, fp32 [H, Q, T].

    Args:
        query: [Q, H, D].
        key: [T, K, D].
        scale: of the scores; None for 1/√D.
        window: a query sees itself and so many earlier keys; all of them if it is negative.
    """
    scores = torch.einsum("qhd,thd->hqt", query, _repeat_heads(key, query)) * (scale or query.shape[2] ** -0.5)
    num_earlier_keys = scores.shape[2] - scores.shape[1]
    is_seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(num_earlier_keys)
    if window >= 0:
        is_seen = is_seen.triu(-window)
    return scores.masked_fill(~is_seen, float("-inf")).float().softmax(-1)


def _repeat_heads(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return keys or values [T, K, D] as [T, H, D], for the H heads of the query."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


def _sequences(tensor: torch.Tensor, borders: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split a tensor [N, ...] into its sequences."""
    return tensor.split(borders.diff().tolist())
