"""Run a model on packed rows, with attention within documents.

On a GPU, torch's variable-length kernel replaces ``sdpa`` where it works (``attention_choice``); other
implementations get masks from transformers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PretrainedConfig, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fabric_train.data.batch import Batch, Documents
from fabric_train.model import context_parallel
from fabric_train.model.context_parallel import CONTEXT, CONTEXT_VARLEN
from fabric_train.model.varlen_kernel import attention_dtype, causal_varlen

VARLEN = "sdpa_varlen"
"""transformers' name for :func:`attend`. It has "sdpa" in it, because both need the same support from a model
family."""


def register_attention() -> None:
    """Add this program's attention functions to transformers' table, from which configurations choose by name.

    This is called when the attention of a model is chosen, and may be called again.
    """
    ALL_ATTENTION_FUNCTIONS.register(VARLEN, attend)
    ALL_ATTENTION_FUNCTIONS.register(CONTEXT, context_parallel.attend)
    ALL_ATTENTION_FUNCTIONS.register(CONTEXT_VARLEN, context_parallel.attend)


def forward(model: Any, input_ids: torch.Tensor, documents: Documents | None, **model_arguments: Any) -> Any:
    """Return the model's output for packed rows, in which a token sees only the tokens of its document before it.

    Args:
        model: a causal language model of transformers, wrapped or not.
        input_ids: int64 [B, T].
        documents: the documents in the rows; None: each row is one document.
        model_arguments: more arguments of the model's ``forward``.
    """
    assert "row_slice" not in model_arguments or model.config._attn_implementation in (CONTEXT, CONTEXT_VARLEN)
    # with a cache, transformers treats restarting positions as one sequence, and documents see each other
    arguments: dict[str, Any] = {"input_ids": input_ids, "use_cache": False, **model_arguments}
    if documents is not None:
        arguments["position_ids"] = documents.position_ids
    if _needs_borders(model.config, input_ids, documents):
        if documents is not None:
            borders = documents.borders
            longest = documents.longest
        else:  # the rows are kept apart by their borders, too
            num_rows, longest = input_ids.shape
            borders = torch.arange(num_rows + 1, dtype=torch.int32, device=input_ids.device) * longest
        arguments |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
        arguments |= {"max_length_q": longest, "max_length_k": longest}
    with _borders_without_search(has_documents=documents is not None):
        return model(**arguments)


def forward_batch(model: Any, batch: Batch, **model_arguments: Any) -> Any:
    """Return the model's output for the rows of a batch, or for this rank's slice of them."""
    row_slice = batch.row_slice
    if row_slice is None:
        return forward(model, batch.input_ids, batch.documents, **model_arguments)
    return forward(
        model,
        row_slice.input_ids,
        None,
        position_ids=row_slice.position_ids,
        row_slice=row_slice,
        **model_arguments,
    )


def _needs_borders(config: PretrainedConfig, input_ids: torch.Tensor, documents: Documents | None) -> bool:
    """Return whether the model's attention takes the borders of documents instead of a mask."""
    implementation = str(config._attn_implementation)
    if implementation != VARLEN:
        return "flash" in implementation
    if documents is not None:
        return True
    # without documents, ``attend`` calls sdpa, which has no sliding window
    window = getattr(config.get_text_config(), "sliding_window", None)
    return window is not None and window < input_ids.shape[1]


@contextmanager
def _borders_without_search(*, has_documents: bool) -> Iterator[None]:
    """Replace transformers' search for document borders within the block, since the loader knows the borders.

    To find out whether rows have several documents, transformers' function looks at the values of the positions, and so
    waits for the device in every forward pass. It is a function of the module ``masking_utils``, which is patched for
    the forward pass and restored after it.
    """
    search = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _number_documents if has_documents else _find_no_documents
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = search


def _number_documents(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the number of each token's document in its row, int64 [B, T], from positions int64 [B, T].

    A document begins where a position is not one more than the previous one.
    """
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)  # 1 within a document
    return (steps != 1).cumsum(-1)


def _find_no_documents(position_ids: torch.Tensor) -> None:
    """Return None, which tells transformers that every row is one document."""


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
    **sdpa_arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within documents, as transformers calls it.

    Args:
        module: the attention module.
        query: [B, H, T, D] of any float dtype.
        key: [B, K, T, D].
        value: [B, K, T, D].
        attention_mask: None, because transformers makes none for this implementation.
        scaling: the factor of the scores; None: D ** -0.5.
        sliding_window: the most tokens that a token sees, itself included.
        cu_seq_lens_q: ``borders`` of ``Documents``; None if every row is one document, and the layer has no window.
        max_length_q: ``longest`` of ``Documents``, or None.
        sdpa_arguments: other arguments of transformers, which torch's kernel does not need.

    Returns:
        [B, T, H, D] in autocast's dtype, or the query's; and None instead of the attention weights.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, **sdpa_arguments)
    dtype = attention_dtype(query)
    # the kernel takes the tokens of all rows in one dimension: [B * T, heads, D]
    queries, keys, values = (heads.transpose(1, 2).flatten(0, 1).to(dtype) for heads in (query, key, value))
    output = causal_varlen(
        queries,
        keys,
        values,
        borders=cu_seq_lens_q,
        key_borders=cu_seq_lens_q,
        longest=max_length_q,
        longest_keys=max_length_q,
        scaling=scaling,
        sliding_window=sliding_window,
    )
    batch_size, _, length, _ = query.shape
    return output.unflatten(0, (batch_size, length)), None
