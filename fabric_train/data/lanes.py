"""Texts without end, dealt to lanes that are cut into rows: what training reads of --streaming_dataset.

A step of R rows takes one row of each of R lanes, so whoever computes some of a step's rows reads all sources but
encodes the documents of its own lanes alone. A document goes to the lane that has been dealt the fewest bytes in this
pass over the sources, and so the lanes need reading on at about the same pace. Four documents, two lanes::

    bytes    9  2  4  5           lane 0  document 0, document 0 of the next pass, ...
    lane     0  1  1  1           lane 1  documents 1 2 3, documents 1 2 3 of the next pass, ...

A lane joins its documents and cuts the whole every ``max_length`` tokens; no token is left out between passes.
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


class Cursor(NamedTuple):
    """Where a lane goes on: with token ``offset`` of the document of that number in pass ``epoch``.

    With ``offset`` 0 it goes on with its first document from that number on. All count from 0.
    """

    epoch: int = 0
    document: int = 0
    offset: int = 0


@dataclass(frozen=True)
class LaneStand:
    """Where a lane stands after a row: the next row begins at ``next``, this one began at ``last`` and had ids of this
    hash. So whoever goes on can read this row again, and see whether the lane is still the same.
    """

    next: Cursor
    last: Cursor
    row_hash: str

    def numbers(self) -> list[int]:
        """The same as 8 numbers of 64 bits."""
        halves = (int.from_bytes(bytes.fromhex(half), "big", signed=True) for half in _halves(self.row_hash))
        return [*self.next, *self.last, *halves]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> "LaneStand":
        """Undo :meth:`numbers`.

        Raises:
            ValueError, TypeError: they are something else.
        """
        *cursors, high, low = map(int, numbers)
        row_hash = "".join(half.to_bytes(8, "big", signed=True).hex() for half in (high, low))
        return cls(Cursor(*cursors[:3]), Cursor(*cursors[3:]), row_hash)


class Text(NamedTuple):
    """A document as it is dealt; ``document`` is its number in pass ``epoch``."""

    epoch: int
    document: int
    lane: int
    text: str


@dataclass(frozen=True)
class LaneRow:
    """``input_ids``: int32 [max_length]; ``document_starts``: positions at which documents begin; ``stand``: of the
    lane after this row.
    """

    input_ids: np.ndarray
    document_starts: list[int]
    stand: LaneStand


def deal(read: Callable[[], Iterable[str]], num_lanes: int, epoch: int) -> Iterator[Text]:
    """Yield the texts of one pass after the other from pass ``epoch`` on; ``read`` begins a pass.

    Raises:
        InputError: a pass has fewer texts than there are lanes.
    """
    for current in count(epoch):
        dealt = [(0, lane) for lane in range(num_lanes)]  # bytes so far; a heap
        number = -1
        for number, text in enumerate(read()):
            num_bytes, lane = dealt[0]
            heapq.heapreplace(dealt, (num_bytes + len(text.encode()), lane))
            yield Text(current, number, lane, text)
        if number + 1 < num_lanes:
            raise InputError(
                f"--streaming_dataset: {number + 1} documents with text do for as many rows of a step, which has "
                f"{num_lanes}; give more documents, or fewer rows a step with --total_batch_size"
            )


class Lanes:
    """Some of the ``num_lanes`` lanes, each an endless sequence of rows.

    Args:
        read: begins a pass over the texts; none of them is blank.
        encode: a document's ids, int32 [at least 1], BOS and EOS included.
        num_lanes: of all.
        cursors: where those begin that are read here.
        max_length: tokens in a row.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[str]],
        encode: Callable[[str], np.ndarray],
        num_lanes: int,
        cursors: Mapping[int, Cursor],
        max_length: int,
    ) -> None:
        self._encode, self._max_length = encode, max_length
        self._dealt = deal(read, num_lanes, min(cursor.epoch for cursor in cursors.values()))
        self._lanes = {lane: _Lane(cursor) for lane, cursor in cursors.items()}

    def next_row(self, number: int) -> LaneRow:
        """Return the next row of a lane.

        Raises:
            InputError: what reading raises.
        """
        lane = self._lanes[number]
        begin = lane.cursor
        input_ids = np.empty(self._max_length, np.int32)
        document_starts: list[int] = []
        filled = 0
        while filled < self._max_length:
            if not len(lane.tokens):
                self._open_document(lane)
            if lane.cursor.offset == 0:
                document_starts.append(filled)
            piece = lane.take(self._max_length - filled)
            input_ids[filled : filled + len(piece)] = piece
            filled += len(piece)
        return LaneRow(input_ids, document_starts, LaneStand(lane.cursor, begin, hash_of(input_ids)))

    def _open_document(self, lane: "_Lane") -> None:
        while not lane.waiting:
            text = next(self._dealt)
            receiver = self._lanes.get(text.lane)
            if receiver is not None and text[:2] >= receiver.cursor[:2]:  # what lies before has been trained on
                receiver.waiting.append(text)
        text = lane.waiting.popleft()
        lane.tokens = self._encode(text.text)[lane.cursor.offset :]
        lane.cursor = Cursor(text.epoch, text.document, lane.cursor.offset)


class _Lane:
    """``tokens`` are those left of the document at ``cursor``, and the texts ``waiting`` come after it."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.tokens = np.empty(0, np.int32)
        self.waiting: deque[Text] = deque()

    def take(self, most: int) -> np.ndarray:
        """Take at most so many tokens of the document."""
        piece, self.tokens = self.tokens[:most], self.tokens[most:]
        epoch, document, offset = self.cursor
        has_ended = not len(self.tokens)
        self.cursor = Cursor(epoch, document + 1, 0) if has_ended else Cursor(epoch, document, offset + len(piece))
        return piece


def _halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]
