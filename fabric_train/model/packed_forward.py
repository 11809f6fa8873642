"""The forward pass over packed rows: what a model is told about documents, so that none attends to another.

transformers looks for document borders in the positions and waits for the device to do so: once a forward pass, and
with flash-attention again in every layer. The loader already knows the borders, so the search is replaced here. This is
the one place that patches transformers.
"""

from typing import Any

import torch
from transformers import masking_utils

from fabric_train.data.batch import Documents

_search_borders = masking_utils.find_packed_sequence_indices
_has_borders: bool | None = None
"""Whether rows of the running forward pass hold several documents; None outside of :func:`forward`."""


def forward(model: Any, input_ids: torch.Tensor, documents: Documents | None, **more: Any) -> Any:
    """Return what the model returns for packed rows.

    Args:
        model: causal language model, wrapped or not.
        input_ids: [B, T] int64.
        documents: the document borders; a token sees only earlier tokens of its document. None: of its row.
        more: further arguments of the model.
    """
    global _has_borders
    # with a cache, transformers takes restarting positions for one sequence, and documents see each other
    arguments: dict[str, Any] = {"input_ids": input_ids, "use_cache": False, **more}
    if documents is not None:
        arguments["position_ids"] = documents.position_ids
    if "flash" in model.config._attn_implementation:
        arguments |= _flash_arguments(input_ids, documents)
    _has_borders = documents is not None
    try:
        return model(**arguments)
    finally:
        _has_borders = None


def _flash_arguments(input_ids: torch.Tensor, documents: Documents | None) -> dict[str, Any]:
    """Return the borders of the sequences that flash-attention keeps apart: documents, or rows."""
    if documents is not None:
        borders, longest = documents.borders, documents.longest
    else:
        num_rows, longest = input_ids.shape
        borders = torch.arange(num_rows + 1, dtype=torch.int32, device=input_ids.device) * longest
    return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest}


def _known_borders(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Number the documents of each row, int64 [B, T], without waiting for the device; None if a row is one document.

    A document begins where a position is not one more than the last. Outside of :func:`forward` transformers searches.
    """
    if _has_borders is None:
        return _search_borders(position_ids)
    if not _has_borders:
        return None
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)


masking_utils.find_packed_sequence_indices = _known_borders
