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
from fabric_train.data.batch import IGNORED_LABEL, Batch, hash_numbers, make_batch
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
    """The state of a lane after a row: where the next row and the last one begin.

    A resumed run reads the last row again and compares the hash of its ids, to check that the texts have not changed.
    ``tokens_read`` counts the tokens of each source so far; empty if that was not done from the first row on.
    """

    next_row: TextPosition
    last_row: TextPosition
    row_hash: str
    tokens_read: tuple[int, ...] = field(default=(), compare=False)

    def numbers(self) -> list[int]:
        """Return the cursor as integers of 64 bits: 3 for each position, 2 for the hash, 1 for each source."""
        hash_halves = np.frombuffer(bytes.fromhex(self.row_hash), ">i8").tolist()
        return [*self.next_row, *self.last_row, *hash_halves, *self.tokens_read]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> "LaneCursor":
        """Return the cursor for the result of :meth:`numbers`; raise a ValueError or TypeError for other numbers."""
        integers = list(map(int, numbers))
        hash_halves = integers[6:8]
        return cls(
            next_row=TextPosition(*integers[:3]),
            last_row=TextPosition(*integers[3:6]),
            row_hash="".join(half.to_bytes(8, "big", signed=True).hex() for half in hash_halves),
            tokens_read=tuple(integers[8:]),
        )


class DealtDocument(NamedTuple):
    """A document and the lane that receives it; ``document_number`` is its number in pass ``epoch``."""

    epoch: int
    document_number: int
    lane: int
    document: Document


class Piece(NamedTuple):
    """A part of a document in a row: its position in the row, its source, and its share of the document's bytes."""

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
    """Yield the documents of pass ``epoch`` and of all later passes, each with its lane.

    Args:
        read: Returns the documents of a pass.
        num_lanes: The number of lanes over all ranks.
        epoch: The number of the first pass, counted from 0.

    Raises:
        InputError: a pass has fewer documents than there are lanes.
    """
    for current_epoch in count(epoch):
        bytes_and_lanes = [(0, lane) for lane in range(num_lanes)]  # a heap of the bytes that each lane has received
        num_documents = 0
        for document in read(current_epoch):
            num_bytes, lane = bytes_and_lanes[0]
            heapq.heapreplace(bytes_and_lanes, (num_bytes + document.num_bytes, lane))
            yield DealtDocument(current_epoch, num_documents, lane, document)
            num_documents += 1
        if num_documents < num_lanes:
            raise InputError(
                f"--streaming_dataset has {num_documents} documents with text, fewer than the {num_lanes} rows of a "
                "step; give more documents, or a smaller --total_batch_size"
            )


class Lanes:
    """A reader of some of the lanes, each an endless sequence of rows of ``max_length`` tokens."""

    def __init__(
        self,
        read: Callable[[int], Iterable[Document]],
        encode: Callable[[Document], EncodedDocument],
        num_lanes: int,
        begins: Mapping[int, TextPosition],
        max_length: int,
        num_sources: int,
    ) -> None:
        """Prepare to read lanes; documents are only read when rows are requested.

        Args:
            read: Returns the documents of a pass.
            encode: Returns the tokens of a document, at least 1.
            num_lanes: The number of lanes over all ranks.
            begins: The lanes to read, each with the position of its first row.
            max_length: The tokens of a row.
            num_sources: The number of sources whose tokens are counted; 0 counts none.
        """
        self._encode = encode
        self._max_length = max_length
        first_epoch = min(position.epoch for position in begins.values())
        self._dealt = deal(read, num_lanes, first_epoch)
        self.lanes = {lane: _Lane(position, (0,) * num_sources) for lane, position in begins.items()}

    def next_row(self, lane_index: int) -> LaneRow:
        """Return the next row of a lane, cut from its documents one after the other."""
        # take pieces of documents until the row is full
        lane = self.lanes[lane_index]
        row_begin = lane.position
        tokens = np.empty((2, self._max_length), np.int32)  # ids and labels
        document_starts: list[int] = []
        pieces: list[Piece] = []
        filled = 0
        while filled < self._max_length:
            if not lane.tokens.size:
                self._open_document(lane)
            if lane.position.offset == 0:
                document_starts.append(filled)
            piece_tokens = lane.take(self._max_length - filled)  # [2, length]
            length = piece_tokens.shape[1]
            pieces.append(Piece(filled, lane.source, lane.bytes_per_token * length))
            tokens[:, filled : filled + length] = piece_tokens
            filled += length
        lane.count(pieces, self._max_length)
        cursor = LaneCursor(lane.position, row_begin, hash_numbers(tokens[0]), lane.tokens_read)
        return LaneRow(tokens[0], tokens[1], document_starts, pieces, cursor)

    def _open_document(self, lane: "_Lane") -> None:
        """Encode the next document of a lane.

        Documents before it that belong to other lanes wait in their lanes.
        """
        # deal documents until this lane gets one
        while not lane.waiting:
            dealt = next(self._dealt)
            receiver = self.lanes.get(dealt.lane)
            if receiver is None:
                continue  # another rank or worker reads this lane
            # documents before the position that a resumed lane begins at were in earlier rows
            if (dealt.epoch, dealt.document_number) >= (receiver.position.epoch, receiver.position.document):
                receiver.waiting.append(dealt)

        # encode it
        dealt = lane.waiting.popleft()
        encoded = self._encode(dealt.document)
        tokens = np.stack([encoded.input_ids, encoded.input_ids])  # ids and labels
        if encoded.supervised is not None:
            tokens[1, ~encoded.supervised] = IGNORED_LABEL
        # the first document of a resumed lane may begin in an earlier row
        lane.tokens = tokens[:, lane.position.offset :]
        lane.source = dealt.document.source
        lane.bytes_per_token = dealt.document.num_bytes / len(encoded.input_ids)
        if not lane.tokens.size:
            raise InputError(
                f"--streaming_dataset: document {dealt.document_number} ends before token {lane.position.offset}, "
                "where the checkpoint's row begins: the texts have changed, or stream.json is damaged; use another "
                "checkpoint"
            )
        lane.position = TextPosition(dealt.epoch, dealt.document_number, lane.position.offset)


class _Lane:
    """The state of a lane between two pieces of documents."""

    def __init__(self, position: TextPosition, tokens_read: tuple[int, ...]) -> None:
        self.position = position
        """Where the next piece begins."""
        self.tokens_read = tokens_read
        """The tokens of each source in the rows so far; empty: they are not counted."""
        self.tokens = np.empty((2, 0), np.int32)
        """The ids and labels that remain of the open document, int32 [2, tokens]."""
        self.source = 0
        """The source of the open document."""
        self.bytes_per_token = 0.0
        """Of the open document."""
        self.waiting: deque[DealtDocument] = deque()
        """The documents after the open one."""

    def take(self, max_tokens: int) -> np.ndarray:
        """Return the next tokens of the open document, int32 [2, up to ``max_tokens``], and advance past them."""
        piece = self.tokens[:, :max_tokens]
        self.tokens = self.tokens[:, max_tokens:]
        epoch, document, offset = self.position
        if self.tokens.size:
            self.position = TextPosition(epoch, document, offset + piece.shape[1])
        else:
            self.position = TextPosition(epoch, document + 1, 0)
        return piece

    def count(self, pieces: Sequence[Piece], row_length: int) -> None:
        """Add the tokens of the pieces of a row to ``tokens_read``, unless tokens are not counted."""
        if not self.tokens_read:
            return
        counts = list(self.tokens_read)
        begins = [piece.position for piece in pieces]
        ends = [*begins[1:], row_length]
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
        """The number of micro-batches of a window on each rank."""
        return self.rows_per_window // (self.micro_batch_size * self.world_size)

    def lanes(self, batch: int) -> range:
        """Return the lanes whose rows are micro-batch ``batch`` of a window on this rank."""
        return positions(batch, self.micro_batch_size, self.world_size, self.rank)


@dataclass(frozen=True)
class StreamBatches:
    """The windows of a streaming run on this rank; for ``read`` and ``encode`` see :class:`Lanes`."""

    read: Callable[[int], Iterable[Document]]
    encode: Callable[[Document], EncodedDocument]
    num_sources: int
    max_length: int
    isolates: bool
    """Whether attention stays within a document."""
    order: LaneOrder
    cursors: Sequence[LaneCursor] | None
    """The states of the lanes of all ranks after the checkpoint's step; None at the beginning of a run."""
    num_workers: int
    """The most processes that make batches; with 0, this process makes them."""
    pin_memory: bool

    def windows(self, after_step: int, last_step: int) -> Iterator[Window]:
        """Yield the windows of the steps ``after_step + 1`` to ``last_step``; ``cursors`` belong to ``after_step``."""
        batches = iter(self._loader(last_step - after_step))
        for step in range(after_step + 1, last_step + 1):
            window_batches: list[StreamBatch] = [next(batches) for _ in range(self.order.num_batches)]
            cursors = np.concatenate([batch.cursors for batch in window_batches])
            yield Window(
                step=step,
                epoch=int(cursors[0, 1]),  # column 0 is the lane, column 1 the epoch of its next row
                ends_epoch=False,
                rows=np.arange(self.order.rows_per_window),
                micro_batch_size=self.order.micro_batch_size,
                batches=[batch.batch for batch in window_batches],
                cursors=cursors,
            )

    def _loader(self, num_windows: int) -> DataLoader:
        """Return the loader, whose workers divide the micro-batches of a window evenly.

        Each lane therefore stays with one worker.
        """
        num_workers = self.num_workers
        while num_workers > 0 and self.order.num_batches % num_workers != 0:
            num_workers -= 1
        return WorkerLoader(_LaneDataset(self, num_windows), num_workers, self.pin_memory, batch_size=None)

    def batches(self, worker: int, num_workers: int, num_windows: int) -> Iterator["StreamBatch"]:
        """Yield the micro-batches of a worker: every ``num_workers``-th of each window, from ``worker`` on.

        Raises:
            InputError: the row before the checkpoint differs from the row that the run was trained on.
        """
        # the lanes of this worker, with the positions at which they begin
        lanes_of_batches = [self.order.lanes(batch) for batch in range(worker, self.order.num_batches, num_workers)]
        begins: dict[int, TextPosition] = {}
        for lanes in lanes_of_batches:
            for lane in lanes:
                begins[lane] = self.cursors[lane].last_row if self.cursors else TextPosition()
        reader = Lanes(
            self.read,
            self.encode,
            num_lanes=self.order.rows_per_window,
            begins=begins,
            max_length=self.max_length,
            num_sources=self.num_sources,
        )

        # a resumed run reads the last row of each lane again, to see that the texts have not changed
        if self.cursors:
            for lane in begins:
                saved = self.cursors[lane]
                if reader.next_row(lane).cursor != saved:
                    raise InputError(
                        f"--streaming_dataset: row {lane} of the checkpoint's last step differs from the row that "
                        "was trained on, because earlier texts have changed; resume with the original texts, or load "
                        "only the checkpoint's weights with --weights_only true"
                    )
                # tokens are counted from the first row of the run on, or not at all
                is_counted = len(saved.tokens_read) == self.num_sources
                reader.lanes[lane].tokens_read = saved.tokens_read if is_counted else ()

        for _ in range(num_windows):
            for lanes in lanes_of_batches:
                rows = [reader.next_row(lane) for lane in lanes]
                yield _stream_batch(lanes, rows, self.isolates)


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
        worker = get_worker_info()
        if worker is None:  # without workers, the main process makes all micro-batches
            batches = self._batches.batches(0, 1, self._num_windows)
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # --num_workers decides how many cores are used
            batches = self._batches.batches(worker.id, worker.num_workers, self._num_windows)
        try:
            yield from batches
        except (InputError, RunError, OSError) as error:
            yield error


def _stream_batch(lanes: range, rows: Sequence[LaneRow], isolates: bool) -> StreamBatch:
    """Return the micro-batch of one row of each lane, see :class:`StreamBatch`."""
    # the rows [B, max_length], without padding
    input_ids = np.stack([row.input_ids for row in rows]).astype(np.int64)
    labels = np.stack([row.labels for row in rows]).astype(np.int64)
    document_starts = []
    if isolates:
        document_starts = [np.array(row.document_starts, np.int64) for row in rows]
    batch = make_batch(input_ids, labels, document_starts, ends=[input_ids.shape[1]] * len(rows))
    pieces = place_pieces(_row_pieces(rows), batch.labels.numpy())

    lane_cursors = [(lane, *row.cursor.numbers()) for lane, row in zip(lanes, rows, strict=True)]
    return StreamBatch(replace(batch, pieces=pieces), np.array(lane_cursors, np.int64))


def _row_pieces(rows: Sequence[LaneRow]) -> RowPieces:
    """Return the pieces of all rows as arrays."""
    row_indices: list[int] = []
    piece_positions: list[int] = []
    sources: list[int] = []
    num_tokens: list[int] = []
    num_bytes: list[float] = []
    for row_index, row in enumerate(rows):
        begins = [piece.position for piece in row.pieces]
        ends = [*begins[1:], len(row.input_ids)]
        for piece, end in zip(row.pieces, ends, strict=True):
            row_indices.append(row_index)
            piece_positions.append(piece.position)
            sources.append(piece.source)
            num_tokens.append(end - piece.position)
            num_bytes.append(piece.num_bytes)
    return RowPieces(
        rows=np.array(row_indices),
        positions=np.array(piece_positions),
        sources=np.array(sources),
        num_tokens=np.array(num_tokens),
        num_bytes=np.array(num_bytes),
    )
