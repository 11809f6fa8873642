"""Attention that is told where documents begin, by torch's variable-length kernel (``torch.nn.attention.varlen``).

With a mask of T × T, torch has no flash kernel, reads every masked block, and copies the heads of keys and values. The
variable-length kernel gets the borders that the data loader knows. It skips what no token sees and takes grouped heads.
It is registered with transformers as an implementation of attention, for which transformers makes no mask.

Shapes: B rows, T tokens per row, H heads of queries, K of keys and values, D head size.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fabric_train.data.batch import isolate
from fabric_train.distributed.precision import compute_dtype
from fabric_train.model.packed_forward import VARLEN, forward

if TYPE_CHECKING:
    from arguments import TrainArguments
    from fabric_train.model.hf_model import ModelShape

_MIN_CAPABILITY = (8, 0)  # Ampere, the first GPU of torch's flash kernels
_LARGEST_HEAD = 256
_NOT_ON_ALL_GPUS = range(193, 225)  # head sizes whose backward pass torch has only for some GPUs
_OTHER_TERMS = ("softcap", "s_aux", "position_bias")  # of attention scores, which the kernel does not add


def grouped_heads(kernel: Callable[..., Any]) -> dict[str, bool]:
    """Return the arguments with which ``varlen_attn`` takes fewer heads of keys and values: none before torch 2.12."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(kernel).parameters else {}


_GROUPED_HEADS: Any = grouped_heads(varlen_attn)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within documents, as transformers calls it.

    Args:
        module: The attention layer.
        query: [B, H, T, D] of any float dtype.
        key: [B, K, T, D].
        value: [B, K, T, D].
        attention_mask: None, because transformers makes none for this implementation.
        scaling: Factor of the scores; None: D ** -0.5.
        sliding_window: A token sees at most so many, itself included; None: its whole document.
        cu_seq_lens_q: ``Documents.borders``; None if every row is one document, and the layer has no window.
        max_length_q: ``Documents.longest``.
        more: Further arguments of transformers.

    Returns:
        [B, T, H, D] in autocast's dtype, or the query's, and None instead of the attention weights.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, **more)
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    query_of_rows, key_of_rows, value_of_rows = (
        heads.transpose(1, 2).flatten(0, 1).to(dtype) for heads in (query, key, value)
    )
    output: Any = varlen_attn(
        query_of_rows,
        key_of_rows,
        value_of_rows,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        **_GROUPED_HEADS,
    )
    return output.unflatten(0, (query.shape[0], query.shape[2])), None


def choose_attention(shape: "ModelShape", arguments: "TrainArguments") -> str | None:
    """Replace the ``sdpa`` of a model on a GPU by :func:`attend`, where it works.

    Args:
        shape: The model; ``config._attn_implementation`` is changed.
        arguments: The run's arguments.

    Returns:
        Why the model keeps its masks; None if it does not, or is not to be changed.
    """
    if arguments.model.attention != "sdpa":
        return None
    on_device = None if arguments.planning.plans_for_others else _why_device_cannot()
    reason = on_device or why_model_cannot(shape, compute_dtype(arguments.model.precision))
    if reason is None:
        shape.config._attn_implementation = VARLEN
    return reason


def _why_device_cannot() -> str | None:
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no flash attention"
    if min(map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))) < _MIN_CAPABILITY:
        return "torch's kernel for documents needs an Ampere GPU or a newer one"
    return None


def why_model_cannot(shape: "ModelShape", dtype: torch.dtype) -> str | None:
    """Return why the variable-length kernel does not compute a model's attention; None if it does.

    The model runs on the meta device with two documents in a row, and each call of its attention is checked.

    Args:
        shape: The model.
        dtype: Of the matrix products.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return "torch's kernel for documents computes in 16 bits only"
    faults: list[str | None] = []

    def probe(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **given: Any) -> Any:
        faults.append(_fault_of_call(module, query, key, value, given))
        return value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    ALL_ATTENTION_FUNCTIONS.register(VARLEN, probe)
    chosen, shape.config._attn_implementation = shape.config._attn_implementation, VARLEN
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(shape.config, dtype=dtype).train()
        if not model._supports_flash_attn:
            return "the masks of this model family have more in them than documents"
        documents = isolate(np.ones((1, 4), dtype=np.int64), np.ones((1, 4), dtype=np.int64), [np.array([0, 2])])
        batch = documents.to(torch.device("meta"))
        forward(model, batch.input_ids, batch.documents)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        pass  # what follows the first attention may need real tensors, such as a router of experts
    finally:
        shape.config._attn_implementation = chosen
        ALL_ATTENTION_FUNCTIONS.register(VARLEN, attend)
    return next(filter(None, faults), None) if faults else "the attention of this model family cannot be replaced"


def _fault_of_call(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: dict[str, Any]
) -> str | None:
    """Return what the kernel does not take in a call of attention with two documents; None if it takes all."""
    sizes = {heads.shape[3] for heads in (query, key, value)}
    if given.get("cu_seq_lens_q") is None:
        return "the model does not pass document borders to its attention"
    if given.get("dropout"):
        return f"torch's kernel for documents has no dropout, and the model's attention has {given['dropout']:g}"
    if not getattr(module, "is_causal", True) or any(given.get(name) is not None for name in _OTHER_TERMS):
        return "the model's attention is not plain causal attention"
    if len(sizes) > 1 or any(size % 8 or size > _LARGEST_HEAD or size in _NOT_ON_ALL_GPUS for size in sizes):
        return f"torch's kernel for documents does not take heads of size {' and '.join(map(str, sorted(sizes)))}"
    return None


ALL_ATTENTION_FUNCTIONS.register(VARLEN, attend)
