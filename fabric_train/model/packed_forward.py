"""Where documents lie in a batch, and what a model is told of it, so that none of them sees another.

transformers would find out by itself, from the positions, and wait for the device to do so: once a forward pass, and
under flash-attention again in every layer. Whoever made the batch knows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import masking_utils

from fabric_train.data.pickle_arrays import SentAsArrays


@dataclass(frozen=True)
class Documents(SentAsArrays):
    """Where documents lie in a batch [B, T]; a row is at least one, and none goes from one row into the next.

    ``position_ids`` is int64 [B, T] and counts from 0 in every document. ``borders`` is int32 [documents + 1]: where
    they begin when the rows are laid end to end, and the end of all; ``longest`` is the length of the longest one.
    Flash-attention takes the latter two, the other implementations see a new document in positions that restart.
    """

    position_ids: torch.Tensor
    borders: torch.Tensor
    longest: int

    def pin_memory(self) -> "Documents":
        """Return the same in page-locked memory."""
        return Documents(self.position_ids.pin_memory(), self.borders.pin_memory(), self.longest)

    def to(self, device: torch.device) -> "Documents":
        """Return the same on a device."""
        return Documents(
            self.position_ids.to(device, non_blocking=True), self.borders.to(device, non_blocking=True), self.longest
        )


def forward(model: Any, input_ids: torch.Tensor, documents: Documents | None, **more: Any) -> Any:
    """Return what the model returns for ``input_ids``, int64 [B, T]; see ``loss.summed_loss`` for ``documents``."""
    # with a cache, transformers would take restarting positions for one sequence and let documents see each other
    arguments: dict[str, Any] = {"input_ids": input_ids, "use_cache": False, **more}
    if documents is not None:
        arguments["position_ids"] = documents.position_ids
    if "flash" in model.config._attn_implementation:
        arguments |= _flash_arguments(input_ids, documents)
    with _knowing(packed=documents is not None):
        return model(**arguments)


def _flash_arguments(input_ids: torch.Tensor, documents: Documents | None) -> dict[str, Any]:
    """Return where sequences lie that flash-attention is to keep apart: documents, or rows."""
    if documents is not None:
        borders, longest = documents.borders, documents.longest
    else:
        num_rows, longest = input_ids.shape
        borders = torch.arange(num_rows + 1, dtype=torch.int32, device=input_ids.device) * longest
    return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest}


@contextmanager
def _knowing(*, packed: bool) -> Iterator[None]:
    """Tell transformers whether rows hold several documents, instead of letting it look."""
    looking = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _document_indices if packed else _one_document
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = looking


def _document_indices(position_ids: torch.Tensor) -> torch.Tensor:
    """Number the documents of each row [B, T]: a new one begins where a position is not the next."""
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)


def _one_document(position_ids: torch.Tensor) -> None:
    """Say that every row is one document."""
