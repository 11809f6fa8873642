"""Deal the texts of --streaming_dataset to lanes, and cut each lane into rows without end.

A step of R rows takes one row from each of R lanes. So a rank reads all sources, but encodes only the documents of its
own lanes. A document goes to the lane that has received the fewest bytes in this pass over the sources, so all lanes
advance through the sources at about the same speed. Four documents, two lanes::

    bytes    9  2  4  5           lane 0  document 0, document 0 of the next pass, ...
    lane     0  1  1  1           lane 1  documents 1 2 3, documents 1 2 3 of the next pass, ...

A lane joins its documents and cuts the result every ``max_length`` tokens; no token is dropped between passes.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

from fabric_train.cli.errors import InputError
from fabric_train.data.row_hash import hash_of


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
    """

    next: TextPosition
    last: TextPosition
    row_hash: str

    def numbers(self) -> list[int]:
        """Return the cursor as 8 integers of 64 bits."""
        halves = (int.from_bytes(bytes.fromhex(half), "big", signed=True) for half in _halves(self.row_hash))
        return [*self.next, *self.last, *halves]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> "LaneCursor":
        """Return the cursor of which :meth:`numbers` returned ``numbers``.

        Raises:
            ValueError, TypeError: ``numbers`` are not those of a cursor.
        """
        *positions, high, low = map(int, numbers)
        row_hash = "".join(half.to_bytes(8, "big", signed=True).hex() for half in (high, low))
        return cls(TextPosition(*positions[:3]), TextPosition(*positions[3:]), row_hash)


class Text(NamedTuple):
    """A text and the lane that receives it; ``document`` is its number in pass ``epoch``."""

    epoch: int
    document: int
    lane: int
    text: str


@dataclass(frozen=True)
class LaneRow:
    """A row of a lane.

    Args:
        input_ids: int32 [max_length].
        document_starts: the positions at which documents begin.
        cursor: the state of the lane after this row.
    """

    input_ids: np.ndarray
    document_starts: list[int]
    cursor: LaneCursor


def deal(read: Callable[[], Iterable[str]], num_lanes: int, epoch: int) -> Iterator[Text]:
    """Yield the texts of pass ``epoch`` and of all later passes, each with its lane.

    Args:
        read: returns the texts of one pass.
        num_lanes: number of lanes.
        epoch: the first pass.

    Raises:
        InputError: a pass has fewer texts than there are lanes.
    """
    for current in count(epoch):
        dealt = [(0, lane) for lane in range(num_lanes)]  # a heap of bytes received
        number = -1
        for number, text in enumerate(read()):
            num_bytes, lane = dealt[0]
            heapq.heapreplace(dealt, (num_bytes + len(text.encode()), lane))
            yield Text(current, number, lane, text)
        if number + 1 < num_lanes:
            raise InputError(
                f"--streaming_dataset: {number + 1} documents with text, fewer than the {num_lanes} rows of a step; "
                "give more documents, or a smaller --total_batch_size"
            )


class Lanes:
    """A reader of some of the lanes, each an endless sequence of rows.

    Args:
        read: returns the texts of one pass; none of them is blank.
        encode: returns a document's ids, int32 [at least 1], BOS and EOS included.
        num_lanes: the number of all lanes.
        begins: where each lane that is read here begins.
        max_length: tokens in a row.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[str]],
        encode: Callable[[str], np.ndarray],
        num_lanes: int,
        begins: Mapping[int, TextPosition],
        max_length: int,
    ) -> None:
        self._encode, self._max_length = encode, max_length
        self._dealt = deal(read, num_lanes, min(position.epoch for position in begins.values()))
        self._lanes = {lane: _Lane(position) for lane, position in begins.items()}

    def next_row(self, number: int) -> LaneRow:
        """Return the next row of lane ``number``.

        Raises:
            InputError: a text cannot be read, or a pass has fewer texts than there are lanes.
        """
        lane = self._lanes[number]
        begin = lane.position
        input_ids = np.empty(self._max_length, np.int32)
        document_starts: list[int] = []
        filled = 0
        while filled < self._max_length:
            if not len(lane.tokens):
                self._open_document(lane)
            if lane.position.offset == 0:
                document_starts.append(filled)
            piece = lane.take(self._max_length - filled)
            input_ids[filled : filled + len(piece)] = piece
            filled += len(piece)
        return LaneRow(input_ids, document_starts, LaneCursor(lane.position, begin, hash_of(input_ids)))

    def _open_document(self, lane: "_Lane") -> None:
        while not lane.waiting:
            text = next(self._dealt)
            receiver = self._lanes.get(text.lane)
            if receiver is not None and text[:2] >= receiver.position[:2]:  # earlier texts were in earlier rows
                receiver.waiting.append(text)
        text = lane.waiting.popleft()
        lane.tokens = self._encode(text.text)[lane.position.offset :]
        if not len(lane.tokens):
            raise InputError(
                f"--streaming_dataset: document {text.document} ends before token {lane.position.offset}, where the "
                "checkpoint's row begins: the texts have changed, or stream.json is damaged; use another checkpoint"
            )
        lane.position = TextPosition(text.epoch, text.document, lane.position.offset)


class _Lane:
    """A lane at ``position``; ``tokens`` are left of the document there, and the texts ``waiting`` come after it."""

    def __init__(self, position: TextPosition) -> None:
        self.position = position
        self.tokens = np.empty(0, np.int32)
        self.waiting: deque[Text] = deque()

    def take(self, most: int) -> np.ndarray:
        """Take at most ``most`` tokens of the document, and advance the position."""
        piece, self.tokens = self.tokens[:most], self.tokens[most:]
        epoch, document, offset = self.position
        if len(self.tokens):
            self.position = TextPosition(epoch, document, offset + len(piece))
        else:
            self.position = TextPosition(epoch, document + 1, 0)
        return piece


def _halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]
