"""A CPU stand-in for the kernel of ``torch.nn.attention.varlen``, which torch has for GPUs only.

It computes from the borders alone, one sequence after the other, with the formulas of attention. Everything above it is
torch's own: ``varlen_attn``, its checks, its autograd formula and its registration for fake tensors.

Shapes: N tokens of all sequences, H heads of queries, K of keys and values, D head size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fabric_train.model.attention import register_attention

register_attention()  # transformers finds the attention of a configuration by its name

CALLS: list[tuple[list[int], int]] = []
"""The borders and the longest length of each forward call in :func:`varlen_kernel_on_cpu`."""


def _weights(query: torch.Tensor, key: torch.Tensor, scale: float, window: int) -> torch.Tensor:
    """Return what each query of a sequence gives each key, [H, queries, keys]; ``window`` earlier tokens, -1: all."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(scores.shape[2] - scores.shape[1])
    return scores.masked_fill(~(seen if window < 0 else seen.triu(-window)), float("-inf")).float().softmax(-1)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    borders_of_keys: torch.Tensor,
    longest: int,
    longest_of_keys: int,
    dropout: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int = -1,
    window_size_right: int = -1,
    **_: Any,
) -> tuple[torch.Tensor, ...]:
    assert borders.dtype == borders_of_keys.dtype == torch.int32
    assert (longest, longest_of_keys) == (int(borders.diff().max()), int(borders_of_keys.diff().max()))
    assert (borders_of_keys.diff() >= borders.diff()).all()
    assert (int(borders[0]), int(borders[-1]), int(borders_of_keys[-1])) == (0, len(query), len(key))
    assert window_size_left < 0 or torch.equal(borders, borders_of_keys)
    assert query.dtype == key.dtype == value.dtype
    assert window_size_right == 0
    assert is_causal == (window_size_left < 0)
    assert not dropout
    assert not return_debug_mask
    CALLS.append((borders.tolist(), longest))

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        weights = _weights(query, key, scale or query.shape[2] ** -0.5, window_size_left).to(value.dtype)
        return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(query.shape[1] // value.shape[1], dim=1))

    log_sums = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    empty = torch.empty(0, dtype=torch.uint64)
    lengths = borders.diff(), borders_of_keys.diff(), borders_of_keys.diff()
    return torch.cat(_of_each(attend, lengths, query, key, value)), log_sums, empty, empty, query.new_empty(0)


def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    log_sums: torch.Tensor,
    borders: torch.Tensor,
    borders_of_keys: torch.Tensor,
    *_: Any,
    scale: float | None = None,
    window_size_left: int = -1,
    **__: Any,
) -> tuple[torch.Tensor, ...]:
    def gradients(
        grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        factor = scale or query.shape[2] ** -0.5
        group = query.shape[1] // key.shape[1]
        weights = _weights(query, key, factor, window_size_left)
        of_weights = torch.einsum("qhd,khd->hqk", grad, value.repeat_interleave(group, dim=1)).float()
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * factor
        of_scores = of_scores.to(query.dtype)
        weights = weights.to(query.dtype)
        of_query = torch.einsum("hqk,khd->qhd", of_scores, key.repeat_interleave(group, dim=1))
        of_key = torch.einsum("hqk,qhd->khd", of_scores, query).unflatten(1, (-1, group)).sum(2)
        of_value = torch.einsum("hqk,qhd->khd", weights, grad).unflatten(1, (-1, group)).sum(2)
        return of_query, of_key, of_value

    of_queries = borders.diff()
    of_keys = borders_of_keys.diff()
    each = _of_each(gradients, (of_queries, of_queries, of_keys, of_keys), grad, query, key, value)
    return tuple(torch.cat(parts) for parts in zip(*each, strict=True))


def _of_each(function: Callable[..., Any], lengths: Sequence[torch.Tensor], *tensors: torch.Tensor) -> list[Any]:
    """Return the function's results for each sequence of tensors [N, ...]; each tensor has ``lengths`` of its own."""
    split = (tensor.split(each.tolist()) for tensor, each in zip(tensors, lengths, strict=True))
    return [function(*parts) for parts in zip(*split, strict=True)]


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
