"""Deal the documents of --streaming_dataset to lanes, and cut each lane into rows without end.

A step of R rows takes one row from each of R lanes. So a rank reads all sources, but encodes only the documents of its
own lanes. A document goes to the lane that has received the fewest bytes in this pass over the sources, so all lanes
advance through the sources at about the same speed. Four documents, two lanes::

    bytes    9  2  4  5           lane 0  document 0, document 0 of the next pass, ...
    lane     0  1  1  1           lane 1  documents 1 2 3, documents 1 2 3 of the next pass, ...

A lane joins its documents and cuts the result every ``max_length`` tokens, chats too, as ``--packing concat`` does; no
token is dropped between passes.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np

from fabric_train.cli.errors import InputError
from fabric_train.data.batch import IGNORED_LABEL, hash_of
from fabric_train.data.stream_documents import Document
from fabric_train.tokenization.documents import EncodedDocument


class TextPosition(NamedTuple):
    """A position of a lane: token ``offset`` of document ``document`` in pass ``epoch``, all counted from 0.

    With ``offset`` 0 it is the first token of the lane's next document, whose number is ``document`` or higher.
    """

    epoch: int = 0
    document: int = 0
    offset: int = 0


@dataclass(frozen=True)
class LaneCursor:
    """The state of a lane after a row.

    A resumed run reads the last row again and compares its hash, to check that the texts have not changed.

    Args:
        next: where the next row begins.
        last: where the last row begins.
        row_hash: hash of the last row's ids.
        tokens_read: tokens of each source in all rows so far; empty if they were not counted from the first row on.
    """

    next: TextPosition
    last: TextPosition
    row_hash: str
    tokens_read: tuple[int, ...] = field(default=(), compare=False)

    def numbers(self) -> list[int]:
        """Return the cursor as integers of 64 bits: 8, and the tokens of each source."""
        halves = (int.from_bytes(bytes.fromhex(half), "big", signed=True) for half in _halves(self.row_hash))
        return [*self.next, *self.last, *halves, *self.tokens_read]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> "LaneCursor":
        """Return the cursor of which :meth:`numbers` returned ``numbers``.

        Raises:
            ValueError, TypeError: ``numbers`` are not those of a cursor.
        """
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
    """A row of a lane.

    Args:
        input_ids: int32 [max_length].
        labels: int32 [max_length], the ids, and -100 for those that are not supervised.
        document_starts: the positions at which documents begin.
        pieces: the parts of documents that it consists of, the first at position 0.
        cursor: the state of the lane after this row.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    document_starts: list[int]
    pieces: list[Piece]
    cursor: LaneCursor


def deal(read: Callable[[int], Iterable[Document]], num_lanes: int, epoch: int) -> Iterator[DealtDocument]:
    """Yield the documents of pass ``epoch`` and of all later passes, each with its lane.

    Args:
        read: returns the documents of a pass.
        num_lanes: number of lanes.
        epoch: the first pass.

    Raises:
        InputError: a pass has fewer documents than there are lanes.
    """
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
    """A reader of some of the lanes, each an endless sequence of rows.

    Args:
        read: returns the documents of a pass.
        encode: returns a document's tokens, at least 1.
        num_lanes: the number of all lanes.
        begins: where each lane that is read here begins.
        max_length: tokens in a row.
        num_sources: whose tokens are counted.
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
        self._encode, self._max_length = encode, max_length
        self._dealt = deal(read, num_lanes, min(position.epoch for position in begins.values()))
        self._lanes = {lane: _Lane(position, (0,) * num_sources) for lane, position in begins.items()}

    def set_tokens_read(self, number: int, tokens_read: tuple[int, ...]) -> None:
        """Set the tokens of each source in the rows of lane ``number`` so far; without any, none are counted."""
        self._lanes[number].tokens_read = tokens_read

    def next_row(self, number: int) -> LaneRow:
        """Return the next row of lane ``number``.

        Raises:
            InputError: a document cannot be read, or a pass has fewer documents than there are lanes.
        """
        lane = self._lanes[number]
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
            receiver = self._lanes.get(dealt.lane)
            if receiver is not None and dealt[:2] >= receiver.position[:2]:  # earlier ones were in earlier rows
                receiver.waiting.append(dealt)
        dealt = lane.waiting.popleft()
        encoded = self._encode(dealt.document)
        lane.tokens = np.stack([encoded.input_ids, encoded.input_ids])
        if encoded.supervised is not None:
            lane.tokens[1, ~encoded.supervised] = IGNORED_LABEL
        lane.tokens = lane.tokens[:, lane.position.offset :]
        lane.source, lane.bytes_per_token = dealt.document.source, dealt.document.num_bytes / len(encoded.input_ids)
        if not lane.tokens.size:
            raise InputError(
                f"--streaming_dataset: document {dealt.number} ends before token {lane.position.offset}, where the "
                "checkpoint's row begins: the texts have changed, or stream.json is damaged; use another checkpoint"
            )
        lane.position = TextPosition(dealt.epoch, dealt.number, lane.position.offset)


class _Lane:
    """A lane at ``position``: ``tokens`` (ids and labels) are left of its document, those ``waiting`` come after it."""

    def __init__(self, position: TextPosition, tokens_read: tuple[int, ...]) -> None:
        self.position, self.tokens_read = position, tokens_read
        self.tokens, self.source, self.bytes_per_token = np.empty((2, 0), np.int32), 0, 0.0
        self.waiting: deque[DealtDocument] = deque()

    def take(self, most: int) -> np.ndarray:
        """Take at most ``most`` tokens of the document, and advance the position."""
        piece, self.tokens = self.tokens[:, :most], self.tokens[:, most:]
        epoch, document, offset = self.position
        if self.tokens.size:
            self.position = TextPosition(epoch, document, offset + piece.shape[1])
        else:
            self.position = TextPosition(epoch, document + 1, 0)
        return piece

    def count(self, pieces: Sequence[Piece], length: int) -> None:
        """Count the tokens of a row of ``length`` tokens as read, unless those before it are not known."""
        if self.tokens_read:
            counts = list(self.tokens_read)
            ends = [*(piece.position for piece in pieces[1:]), length]
            for piece, end in zip(pieces, ends, strict=True):
                counts[piece.source] += end - piece.position
            self.tokens_read = tuple(counts)


def _halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]
