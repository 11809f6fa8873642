"""Make the batch of one forward pass: padded rows, document borders and prediction targets.

Shapes: B rows, T tokens per row, N supervised tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
import xxhash

from fabric_train.data.rollout_values import RolloutValues
from fabric_train.data.teacher_states import TeacherStates
from fabric_train.data.tensor_record import TensorRecord
from fabric_train.distributed.ranks import ContextGroup, to_device_async

IGNORED_LABEL = -100
SUM_OF_HASHES = 1 << 40  # the sums of 8,192 ranks are exact in fp64


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

    A target belongs to the piece that has the target token, not the token that predicts it. So the targets of a piece
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

    def count_by_source(self, num_sources: int, *, counts_pieces: bool = False) -> torch.Tensor:
        """Return the number of targets and of bytes of each source, fp64 [2, sources].

        With ``counts_pieces``, for objectives whose loss is not a sum over tokens, return the number of pieces and NaN.
        """
        if counts_pieces:
            counts = torch.ones_like(self.num_bytes)
            num_bytes = torch.full_like(self.num_bytes, torch.nan)
        else:
            counts = self.num_targets.double()
            num_bytes = self.num_bytes
        totals = torch.zeros(2, num_sources, dtype=torch.float64)
        return totals.index_add(1, self.sources, torch.stack([counts, num_bytes]).double())


@dataclass(frozen=True)
class RowSegment:
    """Tokens ``begin`` to ``end`` of a slice, which are consecutive in the rows, and the keys that they see.

    The keys are the tokens ``begin_key`` to ``end_key`` of the rows: from the start of the first token's document to
    the last token. ``lengths`` are the numbers of tokens of each document in the slice, and ``borders``, int32
    [documents + 1], their cumulative sums from 0. ``key_lengths`` and ``key_borders`` are the same for the keys. They
    differ only in the first document: its keys begin before the slice if its tokens do.
    """

    begin: int
    end: int
    begin_key: int
    end_key: int
    lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    borders: torch.Tensor
    key_borders: torch.Tensor

    def to(self, device: torch.device) -> "RowSegment":
        return replace(
            self,
            borders=to_device_async(self.borders, device),
            key_borders=to_device_async(self.key_borders, device),
        )


@dataclass(frozen=True)
class RowSlice:
    """A rank's part of the rows of a batch: S tokens, in which N targets are predicted."""

    group: ContextGroup
    input_ids: torch.Tensor
    """int64 [1, S]."""
    position_ids: torch.Tensor
    """int64 [1, S], from 0 in each document."""
    positions: torch.Tensor
    """The positions in the slice at which targets are predicted, int64 [N]."""
    target_ids: torch.Tensor
    """The tokens to predict at these positions, int64 [N]."""
    target_indices: torch.Tensor
    """The indices of these targets among the targets of the batch, int64 [N]."""
    chunk_indices: torch.Tensor
    """For each chunk of the rows, its index among the chunks of rank 0, then those of rank 1 and so on, int64."""
    segments: tuple[RowSegment, ...]
    """The consecutive tokens of the slice."""

    def to(self, device: torch.device) -> "RowSlice":
        """Return the slice on a device; the host does not wait."""
        return replace(
            self,
            input_ids=to_device_async(self.input_ids, device),
            position_ids=to_device_async(self.position_ids, device),
            positions=to_device_async(self.positions, device),
            target_ids=to_device_async(self.target_ids, device),
            target_indices=to_device_async(self.target_indices, device),
            chunk_indices=to_device_async(self.chunk_indices, device),
            segments=tuple(segment.to(device) for segment in self.segments),
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
    without one. In rows of unpaired answers, these documents are the prompt with its answer and the same prompt with
    another row's answer, and ``is_desirable``, bool [answers], are the labels. ``unpaired_batch`` selects one of both;
    ``kl``, fp64 [] on the device, is the KL divergence that KTO then compares the answers with.

    Labels supervise the targets, unless the rows predict all tokens: then every token of a document but its first is a
    target, and ``is_supervised``, bool [N], are those that the labels of the rows supervise; None if all are.

    ``teacher`` are the stored values of a teacher for the targets, in their order; None if none are read. ``rollout``
    are the values of sampled completions for the targets; None for other rows. ``loss_factor``, fp64 [] on the device,
    multiplies the loss of rows that train beside completions.

    If several ranks compute the rows, ``row_slice`` is this rank's part of them, from ``context_parallel.place_batch``.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    documents: Documents | None = None
    targets: Targets | None = None
    lengths: tuple[int, ...] = ()
    pieces: Pieces | None = None
    reference: torch.Tensor | None = None
    is_desirable: torch.Tensor | None = None
    kl: torch.Tensor | None = None
    row_slice: RowSlice | None = None
    is_supervised: torch.Tensor | None = None
    teacher: TeacherStates | None = None
    rollout: RolloutValues | None = None
    loss_factor: torch.Tensor | None = None

    @property
    def num_pairs(self) -> int:
        """The number of preference pairs or unpaired answers, if the documents are pairs or answers."""
        return 0 if self.documents is None else (len(self.documents.borders) - 1) // 2

    def pin_memory(self) -> "Batch":
        targets = self.targets or find_targets(self.labels)
        return Batch(
            input_ids=self.input_ids.pin_memory(),
            labels=self.labels.pin_memory(),
            documents=self.documents.pin_memory() if self.documents else None,
            targets=targets.pin_memory(),
            lengths=self.lengths,
            pieces=self.pieces.pin_memory() if self.pieces else None,
            reference=None if self.reference is None else self.reference.pin_memory(),
            is_desirable=None if self.is_desirable is None else self.is_desirable.pin_memory(),
            is_supervised=None if self.is_supervised is None else self.is_supervised.pin_memory(),
            teacher=None if self.teacher is None else self.teacher.pin_memory(),
            rollout=None if self.rollout is None else self.rollout.pin_memory(),
        )

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device; the host does not wait for page-locked memory."""
        if device.type == "xla":  # XLA compiles for each shape, so the number of targets must not change
            targets = targets_everywhere(self.labels)
        else:
            targets = self.targets or find_targets(self.labels)
        return Batch(
            input_ids=self.input_ids.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            documents=self.documents.to(device) if self.documents else None,
            targets=targets.to(device),
            lengths=self.lengths,
            pieces=self.pieces,
            reference=None if self.reference is None else self.reference.to(device, non_blocking=True),
            is_desirable=None if self.is_desirable is None else self.is_desirable.to(device, non_blocking=True),
            kl=self.kl,
            is_supervised=None if self.is_supervised is None else self.is_supervised.to(device, non_blocking=True),
            teacher=None if self.teacher is None else self.teacher.to(device),
            rollout=None if self.rollout is None else self.rollout.to(device),
            loss_factor=self.loss_factor,
        )


def pad_rows(
    input_ids: Sequence[np.ndarray],
    labels: Sequence[np.ndarray],
    document_starts: Sequence[np.ndarray],
    *,
    predicts_all: bool = False,
) -> Batch:
    """Make a batch of rows; shorter rows are padded at the end by unsupervised tokens.

    Args:
        input_ids: The token ids of each row. Without rows, return the batch of a rank that has no row left.
        labels: Its labels, -100 where nothing is supervised.
        document_starts: The positions in each row at which documents begin, ascending; empty: each row is one document.
        predicts_all: Make every token a target, see ``Batch.is_supervised``, and not only the supervised ones.
    """
    if not input_ids:
        empty = torch.zeros(1, 2, dtype=torch.int64)
        return Batch(empty, torch.full_like(empty, IGNORED_LABEL))
    ends = list(map(content_end, input_ids, labels))
    padded_ids = _padded(input_ids, 0)
    padded_labels = _padded(labels, IGNORED_LABEL)
    if not predicts_all:
        return make_batch(padded_ids, padded_labels, document_starts, ends)

    is_padding = np.arange(padded_ids.shape[1]) >= np.array(ends)[:, None]
    all_labels = np.where(is_padding, IGNORED_LABEL, padded_ids)  # each token is its own label
    batch = make_batch(padded_ids, all_labels, document_starts, ends)
    targets = find_targets(batch.labels)
    # a target is the token after its position
    is_supervised = torch.from_numpy(padded_labels != IGNORED_LABEL).flatten()[targets.positions + 1]
    return replace(batch, targets=targets, is_supervised=is_supervised)


def make_batch(
    input_ids: np.ndarray, labels: np.ndarray, document_starts: Sequence[np.ndarray], ends: Sequence[int]
) -> Batch:
    """Make a batch of rows of one length, whose documents are isolated if any row has several.

    Args:
        input_ids: int64 [B, T].
        labels: int64 [B, T]; changed in place, see :func:`isolate`.
        document_starts: The positions in each row at which documents begin, ascending; empty: each row is one document.
        ends: Where the padding of each row begins [B].
    """
    lengths = document_lengths(document_starts, ends)
    # only the first position of a row can be 0, so a row with a start above 0 has one among its first two
    has_borders = any(starts[:2].any() for starts in document_starts)
    if has_borders:
        return replace(isolate(input_ids, labels, document_starts), lengths=lengths)
    return Batch(torch.from_numpy(input_ids), torch.from_numpy(labels), lengths=lengths)


def content_end(input_ids: np.ndarray, labels: np.ndarray) -> int:
    """Return where a row's padding begins: a run of two or more equal, unsupervised tokens at its end."""
    is_content = (labels != IGNORED_LABEL) | (input_ids != input_ids[-1:])
    content_positions = np.flatnonzero(is_content)
    end = int(content_positions[-1]) + 1 if len(content_positions) else 0
    num_padding = len(input_ids) - end
    return end if num_padding > 1 else len(input_ids)


def document_lengths(document_starts: Sequence[np.ndarray], ends: Sequence[int]) -> tuple[int, ...]:
    """Return the number of tokens of each document in rows of ``ends`` [B] tokens; without starts, of each row."""
    if not len(document_starts):
        return tuple(ends)
    lengths: list[int] = []
    for starts, end in zip(document_starts, ends, strict=True):
        inner_borders = starts[(starts > 0) & (starts < end)]
        lengths += np.diff([0, *inner_borders, end]).tolist()
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
    # the row and the column of each document start
    rows = np.repeat(np.arange(num_rows), [len(starts) for starts in document_starts])
    columns = np.concatenate(document_starts)

    # a token's document begins at the largest start up to the token
    starts_so_far = np.zeros((num_rows, length), dtype=np.int64)
    starts_so_far[rows, columns] = columns
    starts_so_far = np.maximum.accumulate(starts_so_far, axis=1)
    position_ids = np.arange(length) - starts_so_far  # [B, T]

    # the first token of a row has no prediction anyway, and its label stays
    is_inside_row = columns > 0
    labels[rows[is_inside_row], columns[is_inside_row]] = IGNORED_LABEL

    borders = np.append(np.flatnonzero(position_ids == 0), num_rows * length).astype(np.int32)
    longest = int(np.diff(borders).max())
    documents = Documents(torch.from_numpy(position_ids), torch.from_numpy(borders), longest)
    return Batch(torch.from_numpy(input_ids), torch.from_numpy(labels), documents)


def _padded(rows: Sequence[np.ndarray], filler: int) -> np.ndarray:
    """Return rows as int64 [B, T], filled up to the longest one, but at least one token."""
    longest = max(1, *map(len, rows))
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


def targets_everywhere(labels: torch.Tensor) -> Targets:
    """Return a target for every position of labels [B, T]: -100, which cross entropy ignores, if none is supervised."""
    return Targets(torch.arange(labels.numel()), next_token_labels(labels).flatten())


def count_supervised(labels: torch.Tensor) -> torch.Tensor:
    """Return the number of supervised tokens of labels [B, T], a 0-dim int64 tensor on the labels' device."""
    return (labels[:, 1:] != IGNORED_LABEL).sum()


def hash_numbers(numbers: np.ndarray, previous_hash: str = "") -> str:
    """Return the XXH3-128 hash of the bytes of ``previous_hash`` and then of numbers, as little-endian int64."""
    return xxhash.xxh3_128_hexdigest(bytes.fromhex(previous_hash) + numbers.astype("<i8").tobytes())


def hash_supervised(input_ids: torch.Tensor, labels: torch.Tensor) -> int:
    """Return a hash of rows that does not depend on their order: the sum of :func:`hash_row`, modulo ``SUM_OF_HASHES``.

    Ids and labels are int64 [B, T] on the CPU.
    """
    total = 0
    for row_ids, row_labels in zip(input_ids.numpy(), labels.numpy(), strict=True):
        total += hash_row(row_ids, row_labels)
    return total % SUM_OF_HASHES


def hash_row(input_ids: np.ndarray, labels: np.ndarray) -> int:
    """Return the XXH3-64 of a row up to its last supervised token, int64 [T] each; 0 if nothing is supervised."""
    supervised_positions = np.flatnonzero(labels != IGNORED_LABEL)
    if not len(supervised_positions):
        return 0
    end = int(supervised_positions[-1]) + 1
    return int(xxhash.xxh3_64_intdigest(input_ids[:end].tobytes() + labels[:end].tobytes()))
