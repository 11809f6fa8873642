"""Plan the rows: which piece of a document goes into which row, from the lengths of the documents alone."""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from fabric_train.token_dataset.manifest import LAST_INCOMPLETE_ROW

Packing = Literal["concat", "best_fit", "none"]


@dataclass(frozen=True)
class RowPlan:
    """The pieces of documents that make up rows of ``max_length`` tokens; 24 bytes per piece and 8 per row.

    Row r holds the pieces ``row_offsets[r] : row_offsets[r + 1]``, joined from position 0 on. The rest of the row is
    padding. The ``concat`` example of :func:`plan_rows`, three rows of five pieces::

        row_offsets  0     2  3     5
        entries      0  1  1  1  2      abcd e | efghi | ij klm
        starts       0  0  0  4  0
        lengths      4  1  5  2  3
        repeated     0  0  1  1  0

    """

    max_length: int
    row_offsets: np.ndarray  # int64 [rows + 1]
    order: np.ndarray  # int64 [entries], the documents to pack; one may come several times
    entries: np.ndarray  # int64 [pieces], the entry of ``order`` that the piece is cut from
    starts: np.ndarray  # int64 [pieces], the position of the piece's first token in its document
    lengths: np.ndarray  # int32 [pieces]
    repeated: np.ndarray  # int32 [pieces], tokens at the piece's start that are also in the row or window before it
    tokens_in: int
    tokens_dropped: dict[str, int]  # tokens of these that are in no row, by reason

    @property
    def num_rows(self) -> int:
        return len(self.row_offsets) - 1

    @cached_property
    def begins(self) -> np.ndarray:
        """Whether a document begins with the piece, bool [pieces]; it does not if all its tokens are repeated."""
        return (self.starts == 0) & (self.repeated == 0)

    def documents(self, pieces: slice | np.ndarray) -> np.ndarray:
        """Return the documents that some pieces are cut from, int64."""
        return self.order[self.entries[pieces]]

    @property
    def tokens_in_rows(self) -> int:
        """Tokens in the rows, repeated ones included and padding not."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def tokens_repeated(self) -> int:
        return int(self.repeated.sum(dtype=np.int64))

    @property
    def tokens_padding(self) -> int:
        return self.num_rows * self.max_length - self.tokens_in_rows


def plan_rows(
    lengths: np.ndarray,
    order: np.ndarray,
    packing: Packing,
    max_length: int,
    overlap: int,
    sources: np.ndarray | None = None,
) -> RowPlan:
    """Plan rows of ``max_length`` tokens.

    - ``concat`` joins the documents and cuts the result into rows. The last row is dropped if it is not full.
    - ``best_fit`` fills rows with whole documents, and ``none`` gives each document a row of its own. Both first cut a
      document that is longer than a row into windows, and pad rows at the end.

    A row or window that continues a document first repeats the ``overlap`` tokens before it, or fewer if the row before
    holds fewer tokens of the document. Empty documents are skipped.

    Documents a b c d, e f g h i j and k l m in rows of 5, ``overlap`` 1, where ``·`` is padding::

        concat     a b c d e    e f g h i    i j k l m
        best_fit   a b c d ·    e f g h i    i j k l m
        none       a b c d ·    e f g h i    i j · · ·    k l m · ·

    Rows of ``best_fit`` are in the order of their first documents, and so are the documents in a row.

    Args:
        lengths: int64 [documents], tokens in each document.
        order: int64 [any number], the documents to pack, in this order; a document may come several times.
        overlap: less than ``max_length``.
        sources: int64 [documents], the number of each document's source: ``best_fit`` puts no two into one row if a
            source's documents follow each other in ``order``; None does not tell them apart. A row of ``none`` has one
            document, and ``concat`` joins the last row of a source with the next one.
    """
    order = order[lengths[order] > 0]
    if packing == "concat":
        return _plan_joined(lengths, order, max_length, overlap)
    windows = _cut_windows(lengths, order, max_length, overlap)
    if packing == "none":
        return windows
    return _fill_best(windows, np.zeros(len(windows.entries)) if sources is None else sources[order][windows.entries])


def joined_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the joined ranges ``start, start + 1, ..., start + length - 1``, int64 [sum of the lengths]."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)


def best_fit_decreasing(lengths: np.ndarray, max_length: int) -> np.ndarray:
    """Return the row of each piece, int64 [pieces]; rows are numbered in the order of their first pieces.

    The pieces are placed from the longest to the shortest, equal ones in their order. Each goes into the fullest row
    that has room for it ("Fewer Truncations Improve Language Modeling", arXiv:2404.10830). How full the rows get does
    not depend on the order of the pieces. Pieces of one length are placed together in all rows with equal room, so the
    number of steps depends on the number of different lengths and hardly on the number of pieces.

    ``lengths`` are integers [pieces] from 1 to ``max_length``.
    """
    max_length = min(max_length, int(lengths.sum()))  # a longer row would hold no more
    by_length = np.argsort((max_length - lengths).astype(np.min_scalar_type(max_length)), kind="stable")  # radix sort
    counts = np.bincount(lengths)
    rows = np.empty(len(lengths), dtype=np.int64)
    with_room: dict[int, list[np.ndarray]] = defaultdict(list)  # room → rows, in groups
    is_room = np.zeros(max_length + 1, dtype=bool)
    num_rows = placed = 0

    def keep(group: np.ndarray, room: int) -> None:
        if len(group) and room:
            with_room[room].append(group)
            is_room[room] = True

    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            room = length + int(is_room[length:].argmax())
            if is_room[room]:
                group = with_room[room].pop()
                is_room[room] = bool(with_room[room])
            else:
                room = max_length
                group = np.arange(num_rows, num_rows - (-left // (max_length // length)))
                num_rows += len(group)
            # a row that has just received a piece stays the best fit for the next one, as long as that fits
            each = room // length
            num_full = min(len(group), left // each)
            rest = left % each if num_full < len(group) else 0
            taken = num_full * each + rest
            rows[by_length[placed : placed + taken]] = np.repeat(group[: num_full + (rest > 0)], each)[:taken]
            keep(group[:num_full], room - each * length)
            keep(group[num_full : num_full + 1] if rest else group[:0], room - rest * length)
            keep(group[num_full + (rest > 0) :], room)
            placed += taken
            left -= taken
    return _number_by_first(rows, num_rows)


def _number_by_first(rows: np.ndarray, num_rows: int) -> np.ndarray:
    first = np.empty(num_rows, dtype=np.int64)
    first[rows[::-1]] = np.arange(len(rows))[::-1]  # of several assignments, numpy keeps the last
    number = np.empty(num_rows, dtype=np.int64)
    number[np.argsort(first)] = np.arange(num_rows)
    return number[rows]


def _cut_windows(lengths: np.ndarray, order: np.ndarray, max_length: int, overlap: int) -> RowPlan:
    """Give each document a row, or several windows if it is too long; each window has at least one new token."""
    stride = max_length - overlap
    num_windows = 1 + np.maximum(-((max_length - lengths[order]) // stride), 0)
    entries = np.repeat(np.arange(len(order)), num_windows)
    starts = np.arange(len(entries)) - np.repeat(np.cumsum(num_windows) - num_windows, num_windows)
    starts *= stride
    return RowPlan(
        max_length=max_length,
        row_offsets=np.arange(len(entries) + 1),
        order=order,
        entries=entries,
        starts=starts,
        lengths=np.minimum(lengths[order][entries] - starts, max_length).astype(np.int32),
        repeated=np.where(starts > 0, np.int32(overlap), np.int32(0)),
        tokens_in=int(lengths[order].sum()),
        tokens_dropped={},
    )


def _fill_best(windows: RowPlan, sources: np.ndarray) -> RowPlan:
    """Pack the windows of each stretch of one source, ``sources`` [windows], on their own."""
    num_rows = 0
    packed = [np.zeros(0, dtype=np.int64)]
    for lengths in np.split(windows.lengths, np.flatnonzero(np.diff(sources)) + 1):
        packed.append(num_rows + best_fit_decreasing(lengths, windows.max_length))
        num_rows = int(packed[-1].max(initial=num_rows - 1)) + 1
    rows = np.concatenate(packed)
    row_offsets = np.concatenate([[0], np.cumsum(np.bincount(rows))])
    by_row = np.argsort(rows, kind="stable")
    return replace(
        windows,
        row_offsets=row_offsets,
        entries=windows.entries[by_row],
        starts=windows.starts[by_row],
        lengths=windows.lengths[by_row],
        repeated=windows.repeated[by_row],
    )


def _plan_joined(lengths: np.ndarray, order: np.ndarray, max_length: int, overlap: int) -> RowPlan:
    document_begins = np.cumsum(lengths[order])
    tokens_in = int(document_begins[-1]) if len(order) else 0
    document_begins -= lengths[order]
    row_begins, row_repeats = _cut_joined(document_begins, tokens_in, max_length, overlap)
    # a piece begins where a document or a row begins; a stable sort merges two sorted arrays in linear time
    in_rows = document_begins[: np.searchsorted(document_begins, row_begins[-1])]
    borders = np.sort(np.concatenate([in_rows, row_begins]), kind="stable")
    borders = borders[np.diff(borders, prepend=-1) > 0]
    piece_lengths = np.diff(borders).astype(np.int32)
    row_offsets = np.searchsorted(borders, row_begins)
    entries = np.searchsorted(document_begins, borders[:-1], side="right") - 1
    starts = borders[:-1] - document_begins[entries]
    repeated = np.zeros(len(starts), dtype=np.int32)
    repeated[row_offsets[:-1]] = row_repeats
    starts -= repeated
    piece_lengths += repeated
    return RowPlan(
        max_length=max_length,
        row_offsets=row_offsets,
        order=order,
        entries=entries,
        starts=starts,
        lengths=piece_lengths,
        repeated=repeated,
        tokens_in=tokens_in,
        tokens_dropped={LAST_INCOMPLETE_ROW: tokens_in - int(row_begins[-1])},
    )


def _cut_joined(
    document_begins: np.ndarray, num_tokens: int, max_length: int, overlap: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return where rows' new tokens begin and the last ends, int64 [rows + 1], and what rows repeat, int64 [rows]."""
    if not overlap:
        begins = np.arange(0, num_tokens + 1, max_length)
        return begins, np.zeros(len(begins) - 1, dtype=np.int64)
    row_begins = [0]
    row_repeats = []
    position = repeated = 0
    while position + max_length - repeated <= num_tokens:
        row_repeats.append(repeated)
        position += max_length - repeated
        row_begins.append(position)
        document = document_begins.searchsorted(position, side="right") - 1
        # a document that began before this row has filled the whole row, and overlap is less than a row
        repeated = min(overlap, position - int(document_begins[document]))
    return np.array(row_begins), np.array(row_repeats, dtype=np.int64)
