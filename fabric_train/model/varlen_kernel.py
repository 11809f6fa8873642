"""torch's variable-length attention kernel: causal attention for documents that follow one another, without a mask."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # the torch of torch-xla is too old; only GPUs take this kernel
    varlen_attn: Any = None  # type: ignore[no-redef]


def grouped_query_arguments(kernel: Callable[..., Any]) -> dict[str, bool]:
    """Return the arguments that let ``varlen_attn`` have fewer heads of keys and values: none before torch 2.12."""
    if "enable_gqa" in inspect.signature(kernel).parameters:
        return {"enable_gqa": True}
    return {}


_GROUPED_QUERY_ARGUMENTS: dict[str, Any] = {} if varlen_attn is None else grouped_query_arguments(varlen_attn)


def attention_dtype(query: torch.Tensor) -> torch.dtype:
    """Return the dtype in which attention is computed: autocast's, or the query's."""
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return query.dtype


def causal_varlen(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    borders: torch.Tensor,
    key_borders: torch.Tensor,
    longest: int,
    longest_keys: int,
    scaling: float | None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Return causal attention within documents, [N, H, D] like ``queries``, computed by torch's kernel.

    The last query of a document sees its last key, so a document may have more keys than queries.

    Args:
        queries: [N, H, D], the tokens of all documents.
        keys: [M, K, D], with H a multiple of K.
        values: [M, K, D].
        borders: Where documents begin and end among the queries, int32 [documents + 1].
        key_borders: Where they begin and end among the keys, int32 [documents + 1].
        longest: The most queries of a document.
        longest_keys: The most keys of a document.
        scaling: The factor of the scores; None: D ** -0.5.
        sliding_window: The most tokens that a token sees, itself included; None: all of its document.
    """
    num_earlier_tokens = (sliding_window or 0) - 1  # -1: no limit
    output: Any = varlen_attn(
        queries,
        keys,
        values,
        borders,
        key_borders,
        longest,
        longest_keys,
        scale=scaling,
        window_size=(num_earlier_tokens, 0),
        **_GROUPED_QUERY_ARGUMENTS,
    )
    return output
