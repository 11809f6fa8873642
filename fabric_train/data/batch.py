"""The batch of one forward pass: its rows padded, its documents kept apart, its targets found.

Shapes: B rows, T tokens a row, N supervised tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

IGNORED_LABEL = -100


class PickledAsArrays:
    """Base of dataclasses with CPU tensors, which are pickled by value, as NumPy arrays.

    Data workers send batches through a pipe. For each tensor torch would share a file instead, which takes a socket,
    one or two milliseconds, and room in shared memory.
    """

    def __reduce__(self) -> tuple[Any, tuple[type, list[Any]]]:
        values = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        return _rebuild, (type(self), [value.numpy() if isinstance(value, torch.Tensor) else value for value in values])


@dataclass(frozen=True)
class Documents(PickledAsArrays):
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


@dataclass(frozen=True)
class Targets(PickledAsArrays):
    """What is predicted in a batch [B, T]: ``ids`` int64 [N], the supervised tokens, and ``positions`` int64 [N], where
    in the flattened batch each is predicted.
    """

    positions: torch.Tensor
    ids: torch.Tensor

    def pin_memory(self) -> "Targets":
        """Return the same in page-locked memory."""
        return Targets(self.positions.pin_memory(), self.ids.pin_memory())

    def to(self, device: torch.device) -> "Targets":
        """Return the same on a device."""
        return Targets(self.positions.to(device, non_blocking=True), self.ids.to(device, non_blocking=True))


@dataclass(frozen=True)
class Batch(PickledAsArrays):
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


def next_token_labels(labels: torch.Tensor) -> torch.Tensor:
    """Shift labels [B, T] so that position t holds the token to predict there; the last position predicts nothing."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)


def find_targets(labels: torch.Tensor) -> Targets:
    """Return what is predicted in a batch with labels [B, T]. On a GPU it would wait for the device: their number
    decides the shapes.
    """
    ids = next_token_labels(labels).flatten()
    positions = (ids != IGNORED_LABEL).nonzero()[:, 0]
    return Targets(positions, ids[positions])


def count_supervised(labels: torch.Tensor) -> torch.Tensor:
    """Return how many tokens of labels [B, T] are predicted: a 0-dim int64 tensor, on the labels' device."""
    return (labels[:, 1:] != IGNORED_LABEL).sum()


def _rebuild(kind: type, values: list[Any]) -> Any:
    return kind(*(torch.from_numpy(value) if isinstance(value, np.ndarray) else value for value in values))
