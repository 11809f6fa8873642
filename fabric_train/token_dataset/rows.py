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
    """The pieces of documents that make up rows of ``max_length`` tokens, in 24 bytes per piece and 8 per row.

    Row r has the pieces ``row_offsets[r] : row_offsets[r + 1]``, joined from position 0 on. The rest of the row
    is padding. The ``concat`` example of :func:`plan_rows` has five pieces in three rows::

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
    repeated: np.ndarray  # int32 [pieces], tokens at the piece's start that are also in the previous row or window
    tokens_in: int  # tokens of the documents
    tokens_dropped: dict[str, int]  # tokens of the documents that are in no row, by reason

    @property
    def num_rows(self) -> int:
        return len(self.row_offsets) - 1

    @cached_property
    def begins(self) -> np.ndarray:
        """Whether a document begins with the piece, bool [pieces]; not if all tokens of the piece are repeated."""
        return (self.starts == 0) & (self.repeated == 0)

    def documents(self, pieces: slice | np.ndarray) -> np.ndarray:
        """Return the documents from which some pieces are cut, int64."""
        return self.order[self.entries[pieces]]

    @property
    def tokens_in_rows(self) -> int:
        """The number of tokens in the rows, with repeated tokens and without padding."""
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
    - ``best_fit`` fills rows with whole documents, and ``none`` gives each document a separate row. Both first cut a
      document that is longer than a row into windows, and pad rows at the end.

    A row or window that continues a document first repeats the ``overlap`` tokens before it, or fewer if the previous
    row holds fewer tokens of the document. Empty documents are skipped.

    Documents a b c d, e f g h i j and k l m in rows of 5, ``overlap`` 1, where ``·`` is padding::

        concat     a b c d e    e f g h i    i j k l m
        best_fit   a b c d ·    e f g h i    i j k l m
        none       a b c d ·    e f g h i    i j · · ·    k l m · ·

    Rows of ``best_fit`` are in the order of their first documents, and so are the documents in a row.

    Args:
        lengths: int64 [documents], the number of tokens in each document.
        order: int64 [any number], the documents to pack, in this order; a document may come several times.
        packing: see above.
        max_length: the number of tokens in a row.
        overlap: less than ``max_length``.
        sources: int64 [documents], the number of each document's source. ``best_fit`` does not mix sources in a row if
            the documents of each source follow one another in ``order``; None allows it. A row of ``none`` has one
            document, and ``concat`` joins the last row of a source with the next one.
    """
    order = order[lengths[order] > 0]
    if packing == "concat":
        return _plan_joined(lengths, order, max_length, overlap)
    windows = _cut_windows(lengths, order, max_length, overlap)
    if packing == "none":
        return windows
    if sources is None:
        sources_of_windows = np.zeros(len(windows.entries))
    else:
        sources_of_windows = sources[order][windows.entries]
    return _pack_best_fit(windows, sources_of_windows)


def joined_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the joined ranges ``start, start + 1, ..., start + length - 1``, int64 [sum of the lengths]."""
    ends = np.cumsum(lengths, dtype=np.int64)  # in the result
    total = ends[-1] if len(ends) else 0
    begins = ends - lengths
    return np.arange(total) + np.repeat(starts - begins, lengths)


class _RowsByRoom:
    """Rows that are not full, in groups with the same room."""

    def __init__(self, max_length: int) -> None:
        self._groups: dict[int, list[np.ndarray]] = defaultdict(list)  # by room
        self._has_room = np.zeros(max_length + 1, dtype=bool)  # whether there are rows with this room

    def add(self, rows: np.ndarray, room: int) -> None:
        """Add rows with room for ``room`` more tokens each; full rows are dropped."""
        if len(rows) and room:
            self._groups[room].append(rows)
            self._has_room[room] = True

    def pop_fullest(self, length: int) -> tuple[np.ndarray, int] | None:
        """Remove and return a group of the fullest rows that have room for ``length`` tokens.

        Returns:
            The rows and their room; None if no row has enough room.
        """
        room = length + int(self._has_room[length:].argmax())
        if not self._has_room[room]:
            return None
        rows = self._groups[room].pop()
        self._has_room[room] = bool(self._groups[room])
        return rows, room


def best_fit_decreasing(lengths: np.ndarray, max_length: int) -> np.ndarray:
    """Return the row of each piece, int64 [pieces]; rows are numbered in the order of their first pieces.

    The pieces are placed from the longest to the shortest, equal ones in their order. Each goes into the fullest row
    that has room for it ("Fewer Truncations Improve Language Modeling", arXiv:2404.10830). How full the rows get does
    not depend on the order of the pieces. Pieces of one length are placed together in all rows with equal room, so the
    number of steps depends on the number of different lengths and hardly on the number of pieces.

    Args:
        lengths: integers [pieces] from 1 to ``max_length``.
        max_length: the number of tokens in a row.
    """
    max_length = min(max_length, int(lengths.sum()))  # a longer row would hold no more
    # small unsigned integers are sorted by radix sort, in linear time
    sort_keys = (max_length - lengths).astype(np.min_scalar_type(max_length))
    longest_first = np.argsort(sort_keys, kind="stable")
    counts = np.bincount(lengths)
    rows = np.empty(len(lengths), dtype=np.int64)
    open_rows = _RowsByRoom(max_length)
    num_rows = 0
    num_placed = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        num_remaining = int(counts[length])  # pieces of this length
        while num_remaining:
            # the fullest rows with room for such a piece, or new ones
            fullest = open_rows.pop_fullest(length)
            if fullest is not None:
                group, room = fullest
            else:
                room = max_length
                pieces_per_new_row = max_length // length
                num_new_rows = -(-num_remaining // pieces_per_new_row)  # rounded up
                group = np.arange(num_rows, num_rows + num_new_rows)
                num_rows += num_new_rows

            # a row that has just received a piece stays the best fit for the next one, as long as that fits
            pieces_per_row = room // length
            num_full = min(len(group), num_remaining // pieces_per_row)  # rows that get as many as fit
            num_in_next = 0  # pieces in the row after those, if pieces remain
            if num_full < len(group):
                num_in_next = num_remaining % pieces_per_row
            num_used = num_full + 1 if num_in_next else num_full
            num_taken = num_full * pieces_per_row + num_in_next
            pieces = longest_first[num_placed : num_placed + num_taken]
            places = np.repeat(group[:num_used], pieces_per_row)  # more than the pieces if the last row gets fewer
            rows[pieces] = places[:num_taken]

            open_rows.add(group[:num_full], room - pieces_per_row * length)
            open_rows.add(group[num_full:num_used], room - num_in_next * length)
            open_rows.add(group[num_used:], room)
            num_placed += num_taken
            num_remaining -= num_taken
    return _number_by_first_piece(rows, num_rows)


def _number_by_first_piece(rows: np.ndarray, num_rows: int) -> np.ndarray:
    """Return the row of each piece, int64 [pieces], after rows are renumbered in the order of their first pieces."""
    first_pieces = np.empty(num_rows, dtype=np.int64)
    pieces = np.arange(len(rows))
    first_pieces[rows[::-1]] = pieces[::-1]  # of several assignments, numpy keeps the last
    new_numbers = np.empty(num_rows, dtype=np.int64)
    new_numbers[np.argsort(first_pieces)] = np.arange(num_rows)
    return new_numbers[rows]


def _cut_windows(lengths: np.ndarray, order: np.ndarray, max_length: int, overlap: int) -> RowPlan:
    """Give each document a row, or several windows if it is too long; each window has at least one new token.

    Arguments are as for :func:`plan_rows`; ``order`` has no empty documents.
    """
    lengths = lengths[order]
    stride = max_length - overlap
    num_remaining = np.maximum(lengths - max_length, 0)  # tokens of each document that the first window does not hold
    num_windows = 1 + -(-num_remaining // stride)  # of each document; the division is rounded up
    entries = np.repeat(np.arange(len(order)), num_windows)
    first_windows = np.cumsum(num_windows) - num_windows
    window_in_document = np.arange(len(entries)) - np.repeat(first_windows, num_windows)
    starts = window_in_document * stride
    return RowPlan(
        max_length=max_length,
        row_offsets=np.arange(len(entries) + 1),
        order=order,
        entries=entries,
        starts=starts,
        lengths=np.minimum(lengths[entries] - starts, max_length).astype(np.int32),
        repeated=np.where(starts > 0, np.int32(overlap), np.int32(0)),
        tokens_in=int(lengths.sum()),
        tokens_dropped={},
    )


def _pack_best_fit(windows: RowPlan, sources: np.ndarray) -> RowPlan:
    """Pack several windows into each row; windows of different sources, ``sources`` [windows], are packed apart."""
    num_rows = 0
    rows_by_source = [np.zeros(0, dtype=np.int64)]
    source_borders = np.flatnonzero(np.diff(sources)) + 1
    for lengths in np.split(windows.lengths, source_borders):
        rows = num_rows + best_fit_decreasing(lengths, windows.max_length)
        rows_by_source.append(rows)
        num_rows = int(rows.max(initial=num_rows - 1)) + 1  # as before if there is no window
    rows = np.concatenate(rows_by_source)
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
    """Join the documents and cut the result into rows; arguments are as for :func:`plan_rows`."""
    # positions in the joined documents, in which no token is repeated
    document_ends = np.cumsum(lengths[order])
    tokens_in = int(document_ends[-1]) if len(order) else 0
    document_begins = document_ends - lengths[order]
    row_begins, row_repeats = _cut_joined(document_begins, tokens_in, max_length, overlap)
    end_of_rows = row_begins[-1]

    # a piece begins where a document or a row begins; a stable sort merges two sorted arrays in linear time
    documents_in_rows = document_begins[: np.searchsorted(document_begins, end_of_rows)]
    borders = np.sort(np.concatenate([documents_in_rows, row_begins]), kind="stable")
    borders = borders[np.diff(borders, prepend=-1) > 0]
    piece_begins = borders[:-1]
    piece_lengths = np.diff(borders).astype(np.int32)
    row_offsets = np.searchsorted(borders, row_begins)
    entries = np.searchsorted(document_begins, piece_begins, side="right") - 1

    # the first piece of a row begins earlier by the tokens that it repeats
    repeated = np.zeros(len(piece_begins), dtype=np.int32)
    repeated[row_offsets[:-1]] = row_repeats
    return RowPlan(
        max_length=max_length,
        row_offsets=row_offsets,
        order=order,
        entries=entries,
        starts=piece_begins - document_begins[entries] - repeated,
        lengths=piece_lengths + repeated,
        repeated=repeated,
        tokens_in=tokens_in,
        tokens_dropped={LAST_INCOMPLETE_ROW: tokens_in - int(end_of_rows)},
    )


def _cut_joined(
    document_begins: np.ndarray, num_tokens: int, max_length: int, overlap: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut joined documents into rows.

    Args:
        document_begins: int64 [documents], positions in the joined documents.
        num_tokens: tokens of the joined documents.
        max_length: the number of tokens in a row.
        overlap: the most tokens that a row repeats.

    Returns:
        The positions at which the new tokens of the rows begin and the last row ends, int64 [rows + 1]; and the
        number of tokens that each row repeats, int64 [rows].
    """
    if not overlap:
        row_begins = np.arange(0, num_tokens + 1, max_length)
        return row_begins, np.zeros(len(row_begins) - 1, dtype=np.int64)
    begins = [0]
    repeats = []
    position = 0
    num_repeated = 0
    while True:
        # A row has the repeated tokens and then new ones; tokens that do not fill a row at the end are left out.
        row_end = position + max_length - num_repeated
        if row_end > num_tokens:
            break
        repeats.append(num_repeated)
        begins.append(row_end)
        position = row_end
        # The next row repeats the last tokens of the document that it continues. They are all in the row that was just
        # cut: the document either begins in that row or fills it, and the overlap is shorter than a row.
        document = document_begins.searchsorted(position, side="right") - 1
        num_repeated = min(overlap, position - int(document_begins[document]))
    return np.array(begins), np.array(repeats, dtype=np.int64)
