"""Make the batch of one forward pass: padded rows, document borders and prediction targets.

Shapes: B rows, T tokens per row, N supervised tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
import xxhash

from fabric_train.distributed.ranks import ContextGroup, to_device_async

if TYPE_CHECKING:
    from typing_extensions import Self

IGNORED_LABEL = -100
SUM_OF_HASHES = 1 << 40  # the sums of 8,192 ranks are exact in fp64


class TensorRecord:
    """A base class for dataclasses of tensors. On the CPU, they are pickled by value, as NumPy arrays.

    Data workers send batches through a pipe. For each tensor, torch would share a file instead, which takes a socket,
    one or two milliseconds, and shared memory.
    """

    def __reduce__(self) -> tuple[Any, tuple[type, list[Any]]]:
        return _rebuild, (type(self), self._mapped(torch.Tensor.numpy))

    def _mapped(self, change: Callable[[torch.Tensor], Any]) -> list[Any]:
        values = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        return [change(value) if isinstance(value, torch.Tensor) else value for value in values]

    def pin_memory(self) -> "Self":
        """Return a copy in page-locked memory (the DataLoader calls this of a batch)."""
        return type(self)(*self._mapped(torch.Tensor.pin_memory))

    def to(self, device: torch.device) -> "Self":
        """Return a copy on a device; the host does not wait for page-locked memory."""
        return type(self)(*self._mapped(lambda value: value.to(device, non_blocking=True)))


@dataclass(frozen=True)
class Documents(TensorRecord):
    """The documents of a batch [B, T]. Every row has at least one, and no document spans two rows.

    ``position_ids`` is int64 [B, T] and counts from 0 in every document. ``borders`` is int32 [documents + 1]: the
    start of each document in the flattened batch, and the end of the batch (flash-attention's ``cu_seqlens``).
    ``longest`` is the length of the longest document. Flash-attention uses ``borders`` and ``longest``; the other
    implementations of attention recognize a new document by positions that restart.
    """

    position_ids: torch.Tensor
    borders: torch.Tensor
    longest: int


@dataclass(frozen=True)
class Targets(TensorRecord):
    """The tokens to predict, ``ids`` int64 [N], and where: ``positions`` int64 [N] in the flattened batch."""

    positions: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True)
class Pieces(TensorRecord):
    """The pieces of documents in a batch [B, T], in the order of its rows: P pieces, tensors on the CPU.

    A target belongs to the piece that its own token is in, not the token that predicts it. So the targets of a piece
    follow one another in ``Targets``, targets of the first piece come first, and ``num_targets``, int64 [P], counts
    them. ``sources``, int64 [P], are indices of ``IndexedRows.source_names``. ``num_bytes``, fp64 [P], are the UTF-8
    bytes of text that the targets stand for (``token_dataset.place_pieces``), NaN if that is not known.
    """

    num_targets: torch.Tensor
    sources: torch.Tensor
    num_bytes: torch.Tensor

    def pin_memory(self) -> "Pieces":
        """Return a copy whose ``num_targets``, which a device needs, are in page-locked memory."""
        return replace(self, num_targets=self.num_targets.pin_memory())

    def count_by_source(self, num_sources: int, as_wholes: bool = False) -> torch.Tensor:
        """Return the targets and the bytes of each source, fp64 [2, sources]; ``as_wholes`` its pieces, and NaN."""
        ones = torch.ones_like(self.num_bytes)
        weights = (ones, ones * torch.nan) if as_wholes else (self.num_targets.double(), self.num_bytes.double())
        return torch.zeros(2, num_sources).double().index_add(1, self.sources, torch.stack(weights))


@dataclass(frozen=True)
class Stretch:
    """Tokens ``begin`` to ``end`` of a slice that follow one another in the rows, and the keys that they see.

    These are the tokens ``first_key`` to ``last_key`` of the rows: from the start of the first token's document to the
    last token. ``borders`` and ``key_borders``, int32 [documents + 1], are of the documents among the tokens and among
    the keys. A document has as many keys as tokens, and the first one those before its tokens too. ``lengths`` and
    ``key_lengths`` are the documents' numbers of them.
    """

    begin: int
    end: int
    first_key: int
    last_key: int
    lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    borders: torch.Tensor
    key_borders: torch.Tensor

    def to(self, device: torch.device) -> "Stretch":
        borders, key_borders = (to_device_async(part, device) for part in (self.borders, self.key_borders))
        return replace(self, borders=borders, key_borders=key_borders)


@dataclass(frozen=True)
class RowSlice:
    """A rank's part of the rows of a batch.

    ``input_ids`` and ``position_ids`` are int64 [1, S]. ``positions``, int64 [N], are where targets are predicted in
    the slice, ``target_ids``, int64 [N], the tokens there, and ``numbers``, int64 [N], which targets of the batch they
    are. ``chunks``, int64, has the place of each chunk of the rows among the chunks of rank 0, rank 1 and so on.
    """

    group: ContextGroup
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    positions: torch.Tensor
    target_ids: torch.Tensor
    numbers: torch.Tensor
    chunks: torch.Tensor
    stretches: tuple[Stretch, ...]

    def to(self, device: torch.device) -> "RowSlice":
        """Return the slice on a device; the host does not wait."""
        return replace(
            self,
            input_ids=to_device_async(self.input_ids, device),
            position_ids=to_device_async(self.position_ids, device),
            positions=to_device_async(self.positions, device),
            target_ids=to_device_async(self.target_ids, device),
            numbers=to_device_async(self.numbers, device),
            chunks=to_device_async(self.chunks, device),
            stretches=tuple(stretch.to(device) for stretch in self.stretches),
        )


@dataclass(frozen=True)
class Batch(TensorRecord):
    """The rows of one forward pass on one rank: ``input_ids`` and ``labels``, int64 [B, T].

    ``documents`` is None if no row has more than one, or if the documents of a row may see each other. ``targets`` are
    computed from the labels before the batch goes to a device. ``lengths`` are the numbers of tokens that see each
    other, without padding: of each document, or of each row. ``pieces`` stay on the CPU; None if it is not known where
    the rows come from. A rank without rows left in a window gets one row without supervised tokens, and no pieces.

    In rows of preference pairs, documents 2i and 2i + 1 are the chosen and the rejected sequence of pair i, which is
    piece i. ``reference``, fp64 [pairs, 2], are the log-probabilities of both answers under the reference model; None
    without one. If several ranks compute the rows, ``row_slice`` is this rank's part of them, from
    ``context_parallel.place_batch``.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    documents: Documents | None = None
    targets: Targets | None = None
    lengths: tuple[int, ...] = ()
    pieces: Pieces | None = None
    reference: torch.Tensor | None = None
    row_slice: RowSlice | None = None

    @property
    def num_pairs(self) -> int:
        """The number of preference pairs, if the documents are pairs."""
        return 0 if self.documents is None else (len(self.documents.borders) - 1) // 2

    def pin_memory(self) -> "Batch":
        documents = self.documents and self.documents.pin_memory()
        targets = (self.targets or find_targets(self.labels)).pin_memory()
        pieces = self.pieces and self.pieces.pin_memory()
        reference = None if self.reference is None else self.reference.pin_memory()
        ids = self.input_ids.pin_memory()
        labels = self.labels.pin_memory()
        return Batch(ids, labels, documents, targets, self.lengths, pieces, reference)

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device; for XLA, which compiles for each shape, every position has a target."""
        input_ids, labels = (part.to(device, non_blocking=True) for part in (self.input_ids, self.labels))
        targets = self.targets or find_targets(self.labels)
        if device.type == "xla":  # -100 where none is supervised, which cross entropy leaves out
            targets = Targets(torch.arange(self.labels.numel()), next_token_labels(self.labels).flatten())
        documents = self.documents and self.documents.to(device)
        reference = None if self.reference is None else self.reference.to(device, non_blocking=True)
        return Batch(input_ids, labels, documents, targets.to(device), self.lengths, self.pieces, reference)


def pad_rows(
    input_ids: Sequence[np.ndarray], labels: Sequence[np.ndarray], document_starts: Sequence[np.ndarray]
) -> Batch:
    """Make a batch of rows, with shorter rows padded at the end by unsupervised tokens; for ``document_starts`` see
    ``isolate``.

    Without rows, return the batch of a rank that has no row left. Without ``document_starts``, each row is one
    document.
    """
    if not input_ids:
        empty = torch.zeros(1, 2, dtype=torch.int64)
        return Batch(empty, torch.full_like(empty, IGNORED_LABEL))
    ends = list(map(content_end, input_ids, labels))
    return make_batch(_padded(input_ids, 0), _padded(labels, IGNORED_LABEL), document_starts, ends)


def make_batch(
    input_ids: np.ndarray, labels: np.ndarray, document_starts: Sequence[np.ndarray], ends: Sequence[int]
) -> Batch:
    """Make a batch as ``isolate`` does if any row has several documents; padding begins at ``ends`` [B]."""
    lengths = document_lengths(document_starts, ends)
    if any(start for row in document_starts for start in row[:2]):  # the first may be 0, the second may not
        return replace(isolate(input_ids, labels, document_starts), lengths=lengths)
    return Batch(torch.from_numpy(input_ids), torch.from_numpy(labels), lengths=lengths)


def content_end(input_ids: np.ndarray, labels: np.ndarray) -> int:
    """Return where a row's padding begins: a run of two or more equal, unsupervised tokens at its end."""
    differ = np.flatnonzero((labels != IGNORED_LABEL) | (input_ids != input_ids[-1:]))
    end = int(differ[-1]) + 1 if len(differ) else 0
    return end if len(input_ids) - end > 1 else len(input_ids)


def document_lengths(document_starts: Sequence[np.ndarray], ends: Sequence[int]) -> tuple[int, ...]:
    """Return the number of tokens of each document in rows of ``ends`` [B] tokens; without starts, of each row."""
    if not len(document_starts):
        return tuple(ends)
    lengths = []
    for starts, end in zip(document_starts, ends, strict=True):
        lengths += np.diff([0, *starts[(starts > 0) & (starts < end)], end]).tolist()
    return tuple(lengths)


def isolate(input_ids: np.ndarray, labels: np.ndarray, document_starts: Sequence[np.ndarray]) -> Batch:
    """Make a batch in which no document sees another, and no document's first token is predicted from another's last.

    ``input_ids`` and ``labels`` are int64 [B, T]; the labels at document starts become -100 in place.
    ``document_starts`` are, for each row, the positions at which documents begin, ascending. Two rows of 5 tokens, with
    documents that begin at 3 in the first row, and at 0, 1 and 4 in the second::

        position_ids  0 1 2 0 1    borders  0 3 5 6 9 10    labels  . . . -100 .
                      0 0 1 2 0                                     . -100 . . -100
    """
    num_rows, length = input_ids.shape
    rows = np.repeat(np.arange(num_rows), [len(starts) for starts in document_starts])
    columns = np.concatenate(document_starts)
    begins = np.zeros((num_rows, length), dtype=np.int64)
    begins[rows, columns] = columns  # a token's document begins at the largest of these up to the token
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
    """Shift labels [B, T] so that position t has the token to predict there. The last position predicts nothing."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)


def find_targets(labels: torch.Tensor) -> Targets:
    """Return the supervised tokens of labels [B, T] on the CPU: on a GPU, the host would wait for the device."""
    ids = next_token_labels(labels).flatten()
    positions = (ids != IGNORED_LABEL).nonzero()[:, 0]
    return Targets(positions, ids[positions])


def count_supervised(labels: torch.Tensor) -> torch.Tensor:
    """Return the number of supervised tokens of labels [B, T], a 0-dim int64 tensor on the labels' device."""
    return (labels[:, 1:] != IGNORED_LABEL).sum()


def _rebuild(kind: type, values: list[Any]) -> Any:
    return kind(*(torch.from_numpy(value) if isinstance(value, np.ndarray) else value for value in values))


def hash_of(numbers: np.ndarray, before: str = "") -> str:
    """Return the XXH3-128 hash of numbers, as int64, and of those before them, whose hash is ``before``."""
    return xxhash.xxh3_128_hexdigest(bytes.fromhex(before) + numbers.astype("<i8").tobytes())


def hash_supervised(input_ids: torch.Tensor, labels: torch.Tensor) -> int:
    """Return a hash of rows that does not depend on their order: a sum, modulo ``SUM_OF_HASHES``, of the rows' XXH3-64.

    What follows a row's last supervised token does not count. Ids and labels are int64 [B, T] on the CPU.
    """
    total = 0
    for ids, of_row in zip(input_ids.numpy(), labels.numpy(), strict=True):
        supervised = np.flatnonzero(of_row != IGNORED_LABEL)
        if len(supervised):
            end = int(supervised[-1]) + 1
            total += xxhash.xxh3_64_intdigest(ids[:end].tobytes() + of_row[:end].tobytes())
    return total % SUM_OF_HASHES
