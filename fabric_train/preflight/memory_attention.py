"""Attention on fake CPU tensors that takes the memory of a GPU's kernels."""

from collections.abc import Callable
from typing import Any

import torch


def attention_on_gpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Do what ``scaled_dot_product_attention`` does on a recent GPU (torch/nn/functional.py, with the same arguments).

    Without a mask and in 16 bits it is the flash kernel, which takes fewer heads of keys and values. Otherwise it is
    the memory-efficient kernel, which takes a mask as numbers to add.
    """
    aten: Any = torch.ops.aten
    if attn_mask is None and query.dtype != torch.float32:
        found: tuple[torch.Tensor, ...] = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
        return found[0]
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    found = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs_grad, dropout_p, is_causal, scale=scale
    )
    return found[0]


def attention_of_slices(attention: Callable[..., torch.Tensor], num_ranks: int) -> Callable[..., torch.Tensor]:
    """Let an attention take the keys and values of several ranks, whose gradients are added in fp32.

    Here each rank repeats its own, which takes as much memory; see ``model.context_parallel``.
    """

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any, **given: Any) -> torch.Tensor:
        key, value = (each.float().repeat(1, 1, num_ranks, 1).to(each.dtype) for each in (key, value))
        return attention(query, key, value, *more, **given)

    return attend
