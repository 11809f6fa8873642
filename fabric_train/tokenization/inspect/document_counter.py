"""Join the pieces of documents in the rows to whole documents; count their lengths and missing ends."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class DocumentPieces:
    """P pieces of documents in order, each of which lies in one row.

    Attributes:
        rows: each piece's row in the split, int64 [P].
        lengths: in tokens, int64 [P].
        begins: whether the document begins with the piece, bool [P].
        is_inside: whether the piece ends before its row does, bool [P].
        ends_exactly: whether its last token ends documents, bool [P].
        ends_nearly: whether its second-last token ends documents, bool [P].
    """

    rows: np.ndarray
    lengths: np.ndarray
    begins: np.ndarray
    is_inside: np.ndarray
    ends_exactly: np.ndarray
    ends_nearly: np.ndarray


@dataclass
class _OpenDocument:
    """The last document so far, which the next row may continue, and the properties of its last piece."""

    length: int
    num_pieces: int
    row: int
    last_length: int
    ends_exactly: bool
    has_end: bool
    is_inside: bool


@dataclass
class DocumentCounter:
    """A counter of the documents of a split.

    Attributes:
        lengths: number of documents by length in tokens.
        without_end: documents without a token that ends documents; ``first_without_end`` is the row of the first.
        over_rows: documents that lie in several rows.
        cut: documents that are cut off at the end of the split or of a merged part.
        pieces: pieces that may or may not be whole documents.
    """

    lengths: Counter[int] = field(default_factory=Counter)
    without_end: int = 0
    first_without_end: int | None = None
    over_rows: int = 0
    cut: int = 0
    pieces: int = 0
    _open: _OpenDocument | None = None

    def add(self, pieces: DocumentPieces, overlap: int) -> None:
        """Add the pieces of rows in sequence: a piece that begins no document continues the one before it.

        Such a piece repeats the last ``overlap`` tokens of the row before, or as many as are there.
        """
        if not len(pieces.rows):
            return
        has_end = self._has_end(pieces)
        row_before = np.append(self._open.last_length if self._open else 0, pieces.lengths[:-1])
        new = pieces.lengths - np.where(pieces.begins, 0, np.minimum(overlap, row_before))
        firsts = np.flatnonzero(pieces.begins)
        num_continued = int(firsts[0]) if len(firsts) else len(new)
        if self._open and num_continued:
            length = self._open.length + int(new[:num_continued].sum())
            num_pieces = self._open.num_pieces + num_continued
            self._open = _opened(pieces, has_end, num_continued - 1, length, num_pieces)
        if not len(firsts):
            return
        self._close()
        stops = np.append(firsts[1:], len(new))
        lengths, num_pieces_each = np.add.reduceat(new, firsts), stops - firsts
        self._count(lengths[:-1])
        self.over_rows += int((num_pieces_each[:-1] > 1).sum())
        last = stops[:-1] - 1
        self._add_missing_ends(pieces.rows[last][~has_end[last]])
        self._open = _opened(pieces, has_end, -1, int(lengths[-1]), int(num_pieces_each[-1]))

    def add_unordered(self, pieces: DocumentPieces) -> None:
        """Add pieces that any other row may continue; the end of a piece at a row's end may be in another row."""
        self._count(pieces.lengths)
        self.pieces += len(pieces.rows)
        has_end = pieces.ends_exactly | pieces.ends_nearly
        self._add_missing_ends(pieces.rows[pieces.is_inside & ~has_end])

    def finish(self) -> None:
        """Close the last document, which may be cut off: no row continues it."""
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
            self._add_missing_ends(np.array([self._open.row]))
        self._open = None

    def _add_missing_ends(self, rows: np.ndarray) -> None:
        if len(rows):
            self.without_end += len(rows)
            self.first_without_end = int(rows[0]) if self.first_without_end is None else self.first_without_end

    def _has_end(self, pieces: DocumentPieces) -> np.ndarray:
        """Return whether the last or second-last token, which may be in the row before, ends a document, bool [P]."""
        row_before = np.append(self._open is not None and self._open.ends_exactly, pieces.ends_exactly[:-1])
        crosses = (pieces.lengths == 1) & ~pieces.begins
        return pieces.ends_exactly | pieces.ends_nearly | (crosses & row_before)

    def _count(self, lengths: np.ndarray) -> None:
        # few lengths are distinct: k of them need k² / 2 tokens
        values, counts = np.unique(lengths, return_counts=True)
        for length, count in zip(values.tolist(), counts.tolist(), strict=True):
            self.lengths[length] += count


def _opened(pieces: DocumentPieces, has_end: np.ndarray, last: int, length: int, num_pieces: int) -> _OpenDocument:
    return _OpenDocument(
        length=length,
        num_pieces=num_pieces,
        row=int(pieces.rows[last]),
        last_length=int(pieces.lengths[last]),
        ends_exactly=bool(pieces.ends_exactly[last]),
        has_end=bool(has_end[last]),
        is_inside=bool(pieces.is_inside[last]),
    )
