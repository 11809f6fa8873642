"""Rows → the batch of one forward pass: padded, and its documents kept apart."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fabric_train.data.pickle_arrays import SentAsArrays
from fabric_train.model.packed_forward import Documents
from fabric_train.training.loss import IGNORED_LABEL, Targets, find_targets


@dataclass(frozen=True)
class Batch(SentAsArrays):
    """Rows of one forward pass on one rank.

    ``input_ids`` and ``labels`` are [B, T] int64. ``documents`` keeps documents apart that share a row; None where no
    row holds more than one, or all shall see each other. A rank that has no row left in a window gets a row without
    supervised tokens. ``targets``, those of the labels, are found before the batch goes to a device. ``lengths`` are
    how many tokens see each other: of each document, or of each row where they are not kept apart, without padding.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    documents: Documents | None = None
    targets: Targets | None = None
    lengths: tuple[int, ...] = ()

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory (the DataLoader calls this)."""
        documents = self.documents and self.documents.pin_memory()
        targets = (self.targets or find_targets(self.labels)).pin_memory()
        return Batch(self.input_ids.pin_memory(), self.labels.pin_memory(), documents, targets, self.lengths)

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        input_ids, labels = (part.to(device, non_blocking=True) for part in (self.input_ids, self.labels))
        targets = (self.targets or find_targets(self.labels)).to(device)
        return Batch(input_ids, labels, self.documents and self.documents.to(device), targets, self.lengths)


def pad_rows(
    input_ids: Sequence[np.ndarray], labels: Sequence[np.ndarray], document_starts: Sequence[np.ndarray]
) -> Batch:
    """Make a batch of rows, shorter ones padded at the end with unsupervised tokens; of none, that of a rank which has
    no row left. See ``isolate`` for ``document_starts``; without any, a row is one document.
    """
    if not input_ids:
        nothing = torch.zeros(1, 2, dtype=torch.int64)
        return Batch(nothing, torch.full_like(nothing, IGNORED_LABEL))
    ends = list(map(content_end, input_ids, labels))
    return make_batch(_padded(input_ids, 0), _padded(labels, IGNORED_LABEL), document_starts, ends)


def make_batch(
    input_ids: np.ndarray, labels: np.ndarray, document_starts: Sequence[np.ndarray], ends: Sequence[int]
) -> Batch:
    """Make a batch that keeps documents apart where a row holds more than one; see ``isolate`` for the arguments.

    ``ends`` [B] are where each row's padding begins.
    """
    lengths = document_lengths(document_starts, ends)
    if any(start for row in document_starts for start in row[:2]):  # the first may be 0, the second is above
        return replace(isolate(input_ids, labels, document_starts), lengths=lengths)
    return Batch(torch.from_numpy(input_ids), torch.from_numpy(labels), lengths=lengths)


def content_end(input_ids: np.ndarray, labels: np.ndarray) -> int:
    """Return where a row's padding begins: with its last run of one unsupervised token, of two tokens or more.

    A single one may as well be a token that is not supervised, and counts as content.
    """
    differ = np.flatnonzero((labels != IGNORED_LABEL) | (input_ids != input_ids[-1:]))
    end = int(differ[-1]) + 1 if len(differ) else 0
    return end if len(input_ids) - end > 1 else len(input_ids)


def document_lengths(document_starts: Sequence[np.ndarray], ends: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of each piece that documents cut rows of ``ends`` [B] tokens into, or of the rows where there
    are no ``document_starts``.
    """
    if not len(document_starts):
        return tuple(ends)
    lengths = []
    for starts, end in zip(document_starts, ends, strict=True):
        lengths += np.diff([0, *starts[(starts > 0) & (starts < end)], end]).tolist()
    return tuple(lengths)


def isolate(input_ids: np.ndarray, labels: np.ndarray, document_starts: Sequence[np.ndarray]) -> Batch:
    """Make a batch in which no document sees another, and none's first token is predicted from another's last.

    Rows of 5 in which documents begin at 3, and at 0, 1 and 4::

        position_ids  0 1 2 0 1    borders  0 3 5 6 9 10    labels  . . . -100 .
                      0 0 1 2 0                                     . -100 . . -100

    Args:
        input_ids: int64 [B, T].
        labels: int64 [B, T]; those at the documents' starts are overwritten.
        document_starts: integers [any number] for each row, ascending: the positions at which documents begin.
    """
    num_rows, length = input_ids.shape
    rows = np.repeat(np.arange(num_rows), [len(starts) for starts in document_starts])
    columns = np.concatenate(document_starts)
    begins = np.zeros((num_rows, length), dtype=np.int64)
    begins[rows, columns] = columns  # the largest one up to a token is where its document begins
    position_ids = np.arange(length) - np.maximum.accumulate(begins, axis=1)
    labels[rows[columns > 0], columns[columns > 0]] = IGNORED_LABEL
    borders = np.append(np.flatnonzero(position_ids == 0), num_rows * length).astype(np.int32)
    documents = Documents(torch.from_numpy(position_ids), torch.from_numpy(borders), int(np.diff(borders).max()))
    return Batch(torch.from_numpy(input_ids), torch.from_numpy(labels), documents)


def _padded(rows: Sequence[np.ndarray], filler: int) -> np.ndarray:
    longest = max(1, *(len(row) for row in rows))
    padded = np.full((len(rows), longest), filler, dtype=np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded
