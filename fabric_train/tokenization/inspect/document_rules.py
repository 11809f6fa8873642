"""Pieces of documents, row by row, to whole documents: how long they are, and whether they have an end."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Pieces:
    """Parts of documents that lie in one row each, in order; P of them.

    Args:
        rows: int64 [P], numbers in the split.
        lengths: int64 [P], tokens.
        begins: bool [P], whether the document begins with it.
        is_inside: bool [P], whether it ends before its row does.
        ends_exactly: bool [P], whether its last token is one that ends documents.
        ends_nearly: bool [P], whether its last token but one is.
    """

    rows: np.ndarray
    lengths: np.ndarray
    begins: np.ndarray
    is_inside: np.ndarray
    ends_exactly: np.ndarray
    ends_nearly: np.ndarray


@dataclass
class _OpenDocument:
    """The last document so far, with which the next row may go on; what its last piece is like."""

    length: int
    num_pieces: int
    row: int
    last_length: int
    ends_exactly: bool
    has_end: bool
    is_inside: bool


@dataclass
class DocumentCounter:
    """Counts the documents of a split.

    ``lengths`` says how many have how many tokens. ``without_end`` do not end as they should, the first in the row
    ``first_without_end``.
    ``over_rows`` lie in several rows, and ``cut`` go on after the last row. Of ``pieces`` nobody knows whether they are
    whole documents.
    """

    lengths: Counter[int] = field(default_factory=Counter)
    without_end: int = 0
    first_without_end: int | None = None
    over_rows: int = 0
    cut: int = 0
    pieces: int = 0
    _open: _OpenDocument | None = None

    def add(self, pieces: Pieces, overlap: int) -> None:
        """Take pieces of which one that does not begin goes on with the document before it.

        It repeats that one's last ``overlap`` tokens, or as many as lie in the row before.
        """
        if not len(pieces.rows):
            return
        has_end = self._has_end(pieces)
        row_before = np.append(self._open.last_length if self._open else 0, pieces.lengths[:-1])
        new = pieces.lengths - np.where(pieces.begins, 0, np.minimum(overlap, row_before))
        firsts = np.flatnonzero(pieces.begins)
        num_continued = int(firsts[0]) if len(firsts) else len(new)
        if self._open and num_continued:
            length, num_pieces = (
                self._open.length + int(new[:num_continued].sum()),
                self._open.num_pieces + num_continued,
            )
            self._open = _opened(pieces, has_end, num_continued - 1, length, num_pieces)
        if not len(firsts):
            return
        self._close()
        stops = np.append(firsts[1:], len(new))
        lengths, num_pieces_each = np.add.reduceat(new, firsts), stops - firsts
        self._count(lengths[:-1])
        self.over_rows += int((num_pieces_each[:-1] > 1).sum())
        last = stops[:-1] - 1
        self._miss_ends(pieces.rows[last][~has_end[last]])
        self._open = _opened(pieces, has_end, -1, int(lengths[-1]), int(num_pieces_each[-1]))

    def add_alone(self, pieces: Pieces) -> None:
        """Take pieces that may go on anywhere; those at a row's end may have their end elsewhere, too."""
        self._count(pieces.lengths)
        self.pieces += len(pieces.rows)
        has_end = pieces.ends_exactly | pieces.ends_nearly
        self._miss_ends(pieces.rows[pieces.is_inside & ~has_end])

    def finish(self) -> None:
        """Let no row follow that goes on with the last document: it may be cut."""
        if self._open and not self._open.has_end and not self._open.is_inside:
            self.cut += 1
            self._open.has_end = True
        self._close()

    def _close(self) -> None:
        if self._open is None:
            return
        self._count(np.array([self._open.length]))
        self.over_rows += self._open.num_pieces > 1
        if not self._open.has_end:
            self._miss_ends(np.array([self._open.row]))
        self._open = None

    def _miss_ends(self, rows: np.ndarray) -> None:
        if len(rows):
            self.without_end += len(rows)
            self.first_without_end = int(rows[0]) if self.first_without_end is None else self.first_without_end

    def _has_end(self, pieces: Pieces) -> np.ndarray:
        """Return whether the pieces' last token or the one before, which may lie in the row before, ends a document."""
        row_before = np.append(self._open is not None and self._open.ends_exactly, pieces.ends_exactly[:-1])
        crosses = (pieces.lengths == 1) & ~pieces.begins
        return pieces.ends_exactly | pieces.ends_nearly | (crosses & row_before)

    def _count(self, lengths: np.ndarray) -> None:
        """Distinct lengths are few: k of them need a corpus of k² / 2 tokens."""
        values, counts = np.unique(lengths, return_counts=True)
        for length, count in zip(values.tolist(), counts.tolist(), strict=True):
            self.lengths[length] += count


def _opened(pieces: Pieces, has_end: np.ndarray, last: int, length: int, num_pieces: int) -> _OpenDocument:
    return _OpenDocument(
        length=length,
        num_pieces=num_pieces,
        row=int(pieces.rows[last]),
        last_length=int(pieces.lengths[last]),
        ends_exactly=bool(pieces.ends_exactly[last]),
        has_end=bool(has_end[last]),
        is_inside=bool(pieces.is_inside[last]),
    )
