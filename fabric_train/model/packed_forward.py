"""Run the forward pass over packed rows, so that documents of one row do not attend to each other.

transformers searches the positions for document borders, which waits for the device: once per forward pass, and with
flash-attention in every layer. The data loader knows the borders, so this module replaces the search. It is the only
place that patches transformers.
"""

from typing import Any

import torch
from transformers import masking_utils

from fabric_train.data.batch import Documents

VARLEN = "sdpa_varlen"
"""transformers' name of ``model.varlen_attention``. It has "sdpa" in it: both need the same of a model family."""

_find_borders = masking_utils.find_packed_sequence_indices
_has_borders: bool | None = None
"""Whether rows of the current forward pass hold several documents; None outside of :func:`forward`."""


def forward(model: Any, input_ids: torch.Tensor, documents: Documents | None, **more: Any) -> Any:
    """Return the model's output for packed rows.

    Args:
        model: Causal language model, wrapped or not.
        input_ids: [B, T] int64.
        documents: The document borders; a token sees only earlier tokens of its document. None: of its row.
        more: Further arguments of the model.
    """
    global _has_borders
    # with a cache, transformers treats restarting positions as one sequence, and documents see each other
    arguments: dict[str, Any] = {"input_ids": input_ids, "use_cache": False, **more}
    if documents is not None:
        arguments["position_ids"] = documents.position_ids
    if _needs_borders(model.config, input_ids, documents):
        arguments |= _border_arguments(input_ids, documents)
    _has_borders = documents is not None
    try:
        return model(**arguments)
    finally:
        _has_borders = None


def _needs_borders(config: Any, input_ids: torch.Tensor, documents: Documents | None) -> bool:
    """Return whether attention gets borders: flash always, ours for documents and for windows shorter than a row."""
    if config._attn_implementation != VARLEN:
        return "flash" in config._attn_implementation
    window = getattr(config.get_text_config(), "sliding_window", None)
    return documents is not None or (window is not None and window < input_ids.shape[1])


def _border_arguments(input_ids: torch.Tensor, documents: Documents | None) -> dict[str, Any]:
    """Return the arguments of variable-length kernels for the sequences that they keep apart: documents, or rows."""
    if documents is not None:
        borders, longest = documents.borders, documents.longest
    else:
        num_rows, longest = input_ids.shape
        borders = torch.arange(num_rows + 1, dtype=torch.int32, device=input_ids.device) * longest
    return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest}


def _known_borders(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Return the number of each token's document in its row, int64 [B, T]; None if every row is one document.

    A document begins where a position is not one more than the previous one. This does not wait for the device. Outside
    of :func:`forward`, transformers' own search runs.
    """
    if _has_borders is None:
        return _find_borders(position_ids)
    if not _has_borders:
        return None
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)


masking_utils.find_packed_sequence_indices = _known_borders
