"""Deal the documents of --streaming_dataset to lanes, cut each lane into rows, and make the windows of a run from them.

A step of R rows takes one row from each of R lanes: position p of every window is a row of lane p, and
``step_sampler.positions`` gives the positions of each rank. So a rank reads all sources, but encodes only the documents
of its own lanes, each lane has one reader, and a window has the same rows for any number of ranks and workers.

A document goes to the lane that has received the fewest bytes in this pass over the sources, so all lanes
advance through the sources at about the same speed. Four documents, two lanes::

    bytes    9  2  4  5           lane 0  document 0, document 0 of the next pass, ...
    lane     0  1  1  1           lane 1  documents 1 2 3, documents 1 2 3 of the next pass, ...

A lane joins its documents and cuts the result every ``max_length`` tokens, chats too, as ``--packing concat`` does; no
token is dropped between passes.
"""

import heapq
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fabric_train.cli.errors import InputError, RunError
from fabric_train.data.batch import IGNORED_LABEL, Batch, hash_of, make_batch
from fabric_train.data.step_sampler import Window, WorkerLoader, positions
from fabric_train.data.stream_documents import Document
from fabric_train.data.token_dataset import RowPieces, place_pieces
from fabric_train.reading.documents import EncodedDocument


class TextPosition(NamedTuple):
    """A position of a lane: token ``offset`` of document ``document`` in pass ``epoch``, all counted from 0.

    With ``offset`` 0 it is the first token of the lane's next document, whose number is ``document`` or higher.
    """

    epoch: int = 0
    document: int = 0
    offset: int = 0


@dataclass(frozen=True)
class LaneCursor:
    """The state of a lane after a row: where the ``next`` row and the ``last`` one begin.

    A resumed run reads the last row again and compares the hash of its ids, to check that the texts have not changed.
    ``tokens_read`` counts the tokens of each source so far; empty if that was not done from the first row on.
    """

    next: TextPosition
    last: TextPosition
    row_hash: str
    tokens_read: tuple[int, ...] = field(default=(), compare=False)

    def numbers(self) -> list[int]:
        """Return the cursor as integers of 64 bits: 8, and the tokens of each source."""
        halves = np.frombuffer(bytes.fromhex(self.row_hash), ">i8").tolist()
        return [*self.next, *self.last, *halves, *self.tokens_read]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> "LaneCursor":
        """Return the cursor that :meth:`numbers` described; a ValueError or TypeError if these are not its numbers."""
        positions, halves, tokens_read = (tuple(map(int, part)) for part in (numbers[:6], numbers[6:8], numbers[8:]))
        row_hash = "".join(half.to_bytes(8, "big", signed=True).hex() for half in halves)
        return cls(TextPosition(*positions[:3]), TextPosition(*positions[3:]), row_hash, tokens_read)


class DealtDocument(NamedTuple):
    """A document and the lane that receives it; ``number`` is its number in pass ``epoch``."""

    epoch: int
    number: int
    lane: int
    document: Document


class Piece(NamedTuple):
    """A part of a document in a row: where it begins there, its source, and its share of the document's bytes."""

    position: int
    source: int
    num_bytes: float


@dataclass(frozen=True)
class LaneRow:
    """A row of a lane, int32 [max_length], labels -100 where nothing is supervised, and the ``cursor`` after it."""

    input_ids: np.ndarray
    labels: np.ndarray
    document_starts: list[int]
    pieces: list[Piece]
    cursor: LaneCursor


def deal(read: Callable[[int], Iterable[Document]], num_lanes: int, epoch: int) -> Iterator[DealtDocument]:
    """Yield the documents of pass ``epoch`` and of all later passes, each with its lane; ``read`` returns a pass."""
    for current in count(epoch):
        dealt = [(0, lane) for lane in range(num_lanes)]  # a heap of bytes received
        number = -1
        for number, document in enumerate(read(current)):
            num_bytes, lane = dealt[0]
            heapq.heapreplace(dealt, (num_bytes + document.num_bytes, lane))
            yield DealtDocument(current, number, lane, document)
        if number + 1 < num_lanes:
            raise InputError(
                f"--streaming_dataset: {number + 1} documents with text, fewer than the {num_lanes} rows of a step; "
                "give more documents, or a smaller --total_batch_size"
            )


class Lanes:
    """A reader of some of the lanes, each an endless sequence of rows of ``max_length`` tokens.

    ``read`` returns the documents of a pass, ``encode`` at least 1 token of a document. Of all ``num_lanes``, those in
    ``begins`` are read here, from these positions on. ``tokens_read`` has the tokens of each source in the rows of a
    lane so far; without any, none are counted.
    """

    def __init__(
        self,
        read: Callable[[int], Iterable[Document]],
        encode: Callable[[Document], EncodedDocument],
        num_lanes: int,
        begins: Mapping[int, TextPosition],
        max_length: int,
        num_sources: int,
    ) -> None:
        self._encode = encode
        self._max_length = max_length
        self._dealt = deal(read, num_lanes, min(position.epoch for position in begins.values()))
        self.lanes = {lane: _Lane(position, (0,) * num_sources) for lane, position in begins.items()}

    def next_row(self, number: int) -> LaneRow:
        lane = self.lanes[number]
        begin = lane.position
        tokens = np.empty((2, self._max_length), np.int32)  # ids and labels
        document_starts: list[int] = []
        pieces: list[Piece] = []
        filled = 0
        while filled < self._max_length:
            if not lane.tokens.size:
                self._open_document(lane)
            if lane.position.offset == 0:
                document_starts.append(filled)
            taken = lane.take(self._max_length - filled)
            pieces.append(Piece(filled, lane.source, lane.bytes_per_token * taken.shape[1]))
            tokens[:, filled : filled + taken.shape[1]] = taken
            filled += taken.shape[1]
        lane.count(pieces, self._max_length)
        cursor = LaneCursor(lane.position, begin, hash_of(tokens[0]), lane.tokens_read)
        return LaneRow(tokens[0], tokens[1], document_starts, pieces, cursor)

    def _open_document(self, lane: "_Lane") -> None:
        while not lane.waiting:
            dealt = next(self._dealt)
            receiver = self.lanes.get(dealt.lane)
            if receiver is not None and dealt[:2] >= receiver.position[:2]:  # earlier ones were in earlier rows
                receiver.waiting.append(dealt)
        dealt = lane.waiting.popleft()
        encoded = self._encode(dealt.document)
        lane.tokens = np.stack([encoded.input_ids, encoded.input_ids])
        if encoded.supervised is not None:
            lane.tokens[1, ~encoded.supervised] = IGNORED_LABEL
        lane.tokens = lane.tokens[:, lane.position.offset :]
        lane.source = dealt.document.source
        lane.bytes_per_token = dealt.document.num_bytes / len(encoded.input_ids)
        if not lane.tokens.size:
            raise InputError(
                f"--streaming_dataset: document {dealt.number} ends before token {lane.position.offset}, where the "
                "checkpoint's row begins: the texts have changed, or stream.json is damaged; use another checkpoint"
            )
        lane.position = TextPosition(dealt.epoch, dealt.number, lane.position.offset)


class _Lane:
    """A lane at ``position``: ``tokens`` (ids and labels) are left of its document, those ``waiting`` come after it."""

    def __init__(self, position: TextPosition, tokens_read: tuple[int, ...]) -> None:
        self.position = position
        self.tokens_read = tokens_read
        self.tokens = np.empty((2, 0), np.int32)
        self.source = 0
        self.bytes_per_token = 0.0
        self.waiting: deque[DealtDocument] = deque()

    def take(self, most: int) -> np.ndarray:
        piece = self.tokens[:, :most]
        self.tokens = self.tokens[:, most:]
        epoch, document, offset = self.position
        following = (document, offset + piece.shape[1]) if self.tokens.size else (document + 1, 0)
        self.position = TextPosition(epoch, *following)
        return piece

    def count(self, pieces: Sequence[Piece], length: int) -> None:
        """Count the tokens of a row of ``length`` tokens as read, unless those before it are not known."""
        if self.tokens_read:
            counts = list(self.tokens_read)
            ends = [*(piece.position for piece in pieces[1:]), length]
            for piece, end in zip(pieces, ends, strict=True):
                counts[piece.source] += end - piece.position
            self.tokens_read = tuple(counts)


@dataclass(frozen=True)
class LaneOrder:
    """The assignment of lanes to the micro-batches of a rank; it is the same in every window."""

    rows_per_window: int
    micro_batch_size: int
    world_size: int
    rank: int

    @property
    def num_batches(self) -> int:
        """Micro-batches of a window on each rank."""
        return self.rows_per_window // (self.micro_batch_size * self.world_size)

    def lanes(self, batch: int) -> range:
        """Return the lanes whose rows are micro-batch ``batch`` of a window on this rank."""
        return positions(batch, self.micro_batch_size, self.world_size, self.rank)


@dataclass(frozen=True)
class StreamBatches:
    """The windows of a streaming run on this rank, made by up to ``num_workers`` processes; see :class:`Lanes`.

    ``isolates`` says whether attention stays within a document. ``cursors`` are the state of all lanes, also of other
    ranks; None at the beginning of a run.
    """

    read: Callable[[int], Iterable[Document]]
    encode: Callable[[Document], EncodedDocument]
    num_sources: int
    max_length: int
    isolates: bool
    order: LaneOrder
    cursors: Sequence[LaneCursor] | None
    num_workers: int
    pin_memory: bool

    def windows(self, after_step: int, last_step: int) -> Iterator[Window]:
        """Yield the windows of the steps ``after_step + 1`` to ``last_step``; the cursors are of ``after_step``."""
        made = iter(self._loader(last_step - after_step))
        for step in range(after_step + 1, last_step + 1):
            parts = [next(made) for _ in range(self.order.num_batches)]
            cursors = np.concatenate([part.cursors for part in parts])
            yield Window(
                step=step,
                epoch=int(cursors[0, 1]),
                ends_epoch=False,
                rows=np.arange(self.order.rows_per_window),
                micro_batch_size=self.order.micro_batch_size,
                batches=[part.batch for part in parts],
                cursors=cursors,
            )

    def _loader(self, num_windows: int) -> DataLoader:
        """Return the loader, whose workers divide the micro-batches of a window: each lane stays with one worker."""
        num_batches = self.order.num_batches
        dividing = [number for number in range(1, self.num_workers + 1) if num_batches % number == 0]
        num_workers = max(dividing, default=0)
        return WorkerLoader(_LaneDataset(self, num_windows), num_workers, self.pin_memory, batch_size=None)

    def batches(self, first: int, stride: int, num_windows: int) -> Iterator["StreamBatch"]:
        """Yield every ``stride``-th micro-batch of each of ``num_windows`` windows, from micro-batch ``first`` on."""
        own = [self.order.lanes(batch) for batch in range(first, self.order.num_batches, stride)]
        begins = {lane: self.cursors[lane].last if self.cursors else TextPosition() for lanes in own for lane in lanes}
        reader = Lanes(self.read, self.encode, self.order.rows_per_window, begins, self.max_length, self.num_sources)
        if self.cursors:
            for lane in begins:
                saved = self.cursors[lane]
                if reader.next_row(lane).cursor != saved:
                    raise InputError(
                        f"--streaming_dataset: row {lane} of the last step before the checkpoint is not the one that "
                        "was trained on: texts up to it have changed; resume with the original texts, or take only "
                        "the checkpoint's weights with --weights_only true"
                    )
                reader.lanes[lane].tokens_read = saved.tokens_read if len(saved.tokens_read) == self.num_sources else ()
        for _ in range(num_windows):
            for lanes in own:
                yield _batch(lanes, [reader.next_row(lane) for lane in lanes], self.isolates)


@dataclass(frozen=True)
class StreamBatch:
    """A micro-batch of B rows; ``cursors``, int64 [B, 9 or more], have each row's lane and ``LaneCursor.numbers``."""

    batch: Batch
    cursors: np.ndarray

    def pin_memory(self) -> "StreamBatch":
        """Return the batch in page-locked memory (the DataLoader calls this)."""
        return StreamBatch(self.batch.pin_memory(), self.cursors)


class _LaneDataset(IterableDataset):
    def __init__(self, batches: StreamBatches, num_windows: int) -> None:
        self._batches = batches
        self._num_windows = num_windows

    def __iter__(self) -> Iterator[StreamBatch | InputError | RunError | OSError]:
        """Yield this worker's micro-batches, or an error as the last item, so that the DataLoader adds no traceback."""
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info else (0, 1)
        if info:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # --num_workers decides how many cores are used
        try:
            yield from self._batches.batches(first, stride, self._num_windows)
        except (InputError, RunError, OSError) as error:
            yield error


def _batch(lanes: range, rows: Sequence[LaneRow], isolates: bool) -> StreamBatch:
    input_ids = np.stack([row.input_ids for row in rows]).astype(np.int64)
    labels = np.stack([row.labels for row in rows]).astype(np.int64)
    starts = [np.array(row.document_starts, np.int64) for row in rows] if isolates else []
    cursors = np.array([(lane, *row.cursor.numbers()) for lane, row in zip(lanes, rows, strict=True)], np.int64)
    batch = make_batch(input_ids, labels, starts, [input_ids.shape[1]] * len(rows))
    return StreamBatch(replace(batch, pieces=place_pieces(_pieces(rows), batch.labels.numpy())), cursors)


def _pieces(rows: Sequence[LaneRow]) -> RowPieces:
    lengths = [len(row.input_ids) for row in rows]
    begins = [[piece.position for piece in row.pieces] for row in rows]
    pieces = [piece for row in rows for piece in row.pieces]
    return RowPieces(
        rows=np.repeat(np.arange(len(rows)), [len(row.pieces) for row in rows]),
        positions=np.concatenate(begins),
        sources=np.array([piece.source for piece in pieces], np.int64),
        num_tokens=np.concatenate([np.diff([*of_row, end]) for of_row, end in zip(begins, lengths, strict=True)]),
        num_bytes=np.array([piece.num_bytes for piece in pieces]),
    )
