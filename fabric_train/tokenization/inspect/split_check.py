"""Count what is in the rows of a split, and find what is wrong with them, in one pass.

``SplitCheck`` gets the batches. ``DocumentCounter`` follows documents from row to row.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from fabric_train.tokenization.packing.token_folder import RowBatch

IGNORED_LABEL = -100  # as in fabric_train.data.batch, which imports torch
_TOLERATED_UNKNOWN = 0.001


@dataclass(frozen=True)
class Expectation:
    """What the rows should be according to the manifest and the tokenizer; None if unknown.

    With ``in_sequence``, a row can only continue the document of the row before. Otherwise any row can continue a long
    document, so only pieces can be counted. ``ends`` are the ids that end a document: EOS, and in chats the end of a
    turn, after which a template may write one more token, a line break.
    """

    max_length: int | None  # of each row
    overlap: int  # tokens that a row repeats when it continues a document
    in_sequence: bool
    vocab_size: int | None
    bos_token_id: int | None
    unk_token_id: int | None
    ends: tuple[int, ...]
    is_ended: bool  # whether the documents are known to have been written with such an end
    fillers: tuple[int, ...]  # ids that padding may consist of


@dataclass(frozen=True)
class Problem:
    """Something wrong with a split and how often; ``first_row`` is where it occurs first, None if not in a row."""

    split: str
    text: str
    first_row: int | None = None

    def __str__(self) -> str:
        where = "" if self.first_row is None else f", first in row {self.first_row:,}"
        return f"{self.split}: {self.text}{where}"


@dataclass
class Counts:
    """The counts of a split."""

    rows: int = 0
    tokens: int = 0  # without padding
    padding: int = 0
    supervised: int = 0
    lengths: Counter[int] | None = field(default_factory=Counter)  # documents by tokens; None if borders are not stored
    documents_over_rows: int = 0  # that lie in several rows
    documents_cut: int = 0  # cut off at the end of the split or of a merged part
    pieces: int = 0  # that may or may not be whole documents

    @property
    def documents(self) -> int | None:
        """The number of documents that begin in the split; None if unknown."""
        return None if self.lengths is None else sum(self.lengths.values())


@dataclass(frozen=True)
class DocumentPieces:
    """P pieces of documents in order, each of which lies in one row."""

    rows: np.ndarray  # each piece's row in the split, int64 [P]
    lengths: np.ndarray  # in tokens, int64 [P]
    begins: np.ndarray  # whether the document begins with the piece, bool [P]
    is_inside: np.ndarray  # whether the piece ends before its row does, bool [P]
    ends_exactly: np.ndarray  # whether its last token ends documents, bool [P]
    ends_nearly: np.ndarray  # whether its second-last token ends documents, bool [P]


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
    """A counter of the documents of a split, which fills ``counts``, and of those without a token that ends them."""

    counts: Counts
    without_end: int = 0
    first_without_end: int | None = None
    _open: _OpenDocument | None = None

    def add(self, pieces: DocumentPieces, overlap: int) -> None:
        """Add the pieces of rows in sequence: one that begins no document continues the one before it."""
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
        self.counts.documents_over_rows += int((num_pieces_each[:-1] > 1).sum())
        last = stops[:-1] - 1
        self._add_missing_ends(pieces.rows[last][~has_end[last]])
        self._open = _opened(pieces, has_end, -1, int(lengths[-1]), int(num_pieces_each[-1]))

    def add_unordered(self, pieces: DocumentPieces) -> None:
        """Add pieces that any other row may continue; the end of a piece at a row's end may be in another row."""
        self._count(pieces.lengths)
        self.counts.pieces += len(pieces.rows)
        has_end = pieces.ends_exactly | pieces.ends_nearly
        self._add_missing_ends(pieces.rows[pieces.is_inside & ~has_end])

    def finish(self) -> None:
        """Close the last document, which may be cut off: no row continues it."""
        if self._open and not self._open.has_end and not self._open.is_inside:
            self.counts.documents_cut += 1
            self._open.has_end = True
        self._close()

    def _close(self) -> None:
        if self._open is None:
            return
        self._count(np.array([self._open.length]))
        self.counts.documents_over_rows += self._open.num_pieces > 1
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
        assert self.counts.lengths is not None
        self.counts.lengths.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))


def _opened(pieces: DocumentPieces, has_end: np.ndarray, last: int, length: int, num_pieces: int) -> _OpenDocument:
    return _OpenDocument(
        length,
        num_pieces,
        row=int(pieces.rows[last]),
        last_length=int(pieces.lengths[last]),
        ends_exactly=bool(pieces.ends_exactly[last]),
        has_end=bool(has_end[last]),
        is_inside=bool(pieces.is_inside[last]),
    )


class SplitCheck:
    """A check of one split. Call ``add`` with its batches in order, ``begin_part`` before parts, ``finish`` last."""

    def __init__(self, split: str, expected: Expectation) -> None:
        self.split, self.expected = split, expected
        self._counts = Counts()
        self._documents = DocumentCounter(self._counts)
        self._has_borders = True
        self._found: dict[str, tuple[int, int]] = {}

    def add(self, batch: RowBatch) -> None:
        """Count and check the rows of the next batch."""
        supervised = np.ones(len(batch.input_ids), bool) if batch.labels is None else batch.labels != IGNORED_LABEL
        ends = content_ends(batch, self.expected)
        self._counts.rows += len(batch.offsets) - 1
        self._counts.tokens += int((ends - batch.offsets[:-1]).sum())
        self._counts.padding += int((batch.offsets[1:] - ends).sum())
        self._counts.supervised += int(supervised.sum())
        self._check_rows(batch, supervised)
        self._check_tokens(batch, supervised, ends)
        if batch.document_starts is None or batch.start_rows is None:
            self._has_borders = False
        else:
            self._follow_documents(batch, ends)

    def begin_part(self, expected: Expectation) -> None:
        """Start a part that was written separately: its first row continues no document."""
        self._documents.finish()
        self.expected = expected

    def finish(self) -> tuple[Counts, list[Problem]]:
        """Return the counts, and the problems in the order in which they were found."""
        self._documents.finish()
        if self._documents.first_without_end is not None:
            found = (self._documents.without_end, self._documents.first_without_end)
            self._found["documents without EOS at their end"] = found
        if not self._has_borders:
            self._counts.lengths = None
        unknown = self._found.get(_UNKNOWN, (0, 0))[0]
        if unknown <= self._counts.tokens * _TOLERATED_UNKNOWN:
            self._found.pop(_UNKNOWN, None)
        texts = {kind: f"{kind}: {count:,}" for kind, (count, _) in self._found.items()}
        if _UNKNOWN in texts:
            texts[_UNKNOWN] += f", {unknown / self._counts.tokens:.2%} of all"
        return self._counts, [Problem(self.split, text, self._found[kind][1]) for kind, text in texts.items()]

    def _note(self, kind: str, rows: np.ndarray) -> None:
        """Count a problem once for each element of ``rows``, the rows in which it occurs."""
        if len(rows):
            count, first = self._found.get(kind, (0, int(rows.min())))
            self._found[kind] = (count + len(rows), min(first, int(rows.min())))

    def _check_rows(self, batch: RowBatch, supervised: np.ndarray) -> None:
        lengths = np.diff(batch.offsets)
        if self.expected.max_length is not None:
            wrong = np.flatnonzero(lengths != self.expected.max_length)
            self._note(f"rows that are not {self.expected.max_length:,} tokens long", batch.first_row + wrong)
        running = np.concatenate(([0], np.cumsum(supervised)))
        # the first token of a row is never a target: no token predicts it
        second = np.minimum(batch.offsets[:-1] + 1, batch.offsets[1:])
        targets = running[batch.offsets[1:]] - running[second]
        self._note("rows without any supervised token", batch.first_row + np.flatnonzero(targets == 0))

    def _check_tokens(self, batch: RowBatch, supervised: np.ndarray, ends: np.ndarray) -> None:
        ids = batch.input_ids
        outside = ids < 0
        if self.expected.vocab_size is not None:
            outside |= ids >= self.expected.vocab_size
        self._note("ids outside the vocabulary", batch.first_row + _rows_at(batch, np.flatnonzero(outside)))
        if batch.labels is not None:
            rows = _rows_at(batch, np.flatnonzero(supervised & (batch.labels != ids)))
            self._note("labels of another token than the one at their position", batch.first_row + rows)
        if self.expected.unk_token_id is not None:
            unknown = np.flatnonzero(ids == self.expected.unk_token_id)
            rows = _rows_at(batch, unknown)
            self._note(_UNKNOWN, batch.first_row + rows[unknown < ends[rows]])

    def _follow_documents(self, batch: RowBatch, ends: np.ndarray) -> None:
        """Find the pieces between borders and ends of rows, and count them."""
        starts, start_rows = self._valid_starts(batch, ends)
        self._check_starts(batch, starts, start_rows)
        row_begins = batch.offsets[:-1]
        continues = np.flatnonzero((ends > row_begins) & ~np.isin(row_begins, starts))
        begins = np.concatenate([starts, row_begins[continues]])
        order = np.argsort(begins, kind="stable")
        begins = begins[order]
        rows = np.concatenate([start_rows, continues])[order]
        stops = np.minimum(np.append(begins[1:], len(batch.input_ids)), ends[rows])
        pieces = DocumentPieces(
            rows=batch.first_row + rows,
            lengths=stops - begins,
            begins=(np.arange(len(order)) < len(starts))[order],
            is_inside=stops < batch.offsets[1:][rows],
            ends_exactly=self._ends_document(batch.input_ids[stops - 1]),
            ends_nearly=self._ends_document(batch.input_ids[np.maximum(stops - 2, begins)]),
        )
        if self.expected.in_sequence:
            self._documents.add(pieces, self.expected.overlap)
        else:
            self._documents.add_unordered(pieces)

    def _ends_document(self, tokens: np.ndarray) -> np.ndarray:
        """Return whether each token ends documents, bool; all do if no such token is known."""
        return np.isin(tokens, self.expected.ends) if self.expected.ends else np.ones(len(tokens), bool)

    def _valid_starts(self, batch: RowBatch, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where documents start in the batch and in which rows, both int64; note impossible borders."""
        assert batch.document_starts is not None
        assert batch.start_rows is not None
        positions, rows = batch.document_starts.astype(np.int64), batch.start_rows
        begins = batch.offsets[:-1][rows]
        is_valid = (positions >= 0) & (begins + positions < ends[rows])
        is_valid[1:] &= (rows[1:] != rows[:-1]) | (positions[1:] > positions[:-1])
        self._note("document borders outside their row or out of order", batch.first_row + rows[~is_valid])
        starts = np.unique(begins[is_valid] + positions[is_valid])
        return starts, _rows_at(batch, starts)

    def _check_starts(self, batch: RowBatch, starts: np.ndarray, rows: np.ndarray) -> None:
        bos = self.expected.bos_token_id
        second = starts + 1
        # with overlap, the next row may repeat a BOS
        limits = batch.offsets[rows + 1] if self.expected.overlap else len(batch.input_ids)
        is_inside = (second < limits) & ~np.isin(second, starts)
        starts, second, rows = starts[is_inside], second[is_inside], rows[is_inside]
        if bos is not None:
            is_double = (batch.input_ids[starts] == bos) & (batch.input_ids[second] == bos)
            self._note("documents that begin with two BOS", batch.first_row + rows[is_double])


_UNKNOWN = "unknown tokens"


def content_ends(batch: RowBatch, expected: Expectation) -> np.ndarray:
    """Return where the padding of each of the R rows begins, int64 [R], counted from the batch's first token.

    Padding is the last run of one unsupervised filler. With filler ``P`` and unsupervised tokens in lower case, the row
    ``A B C p p`` has two tokens of padding, and ``A B P P P`` has none. If the filler is EOS and the token before the
    run does not end a document, the first token of the run ends it and is not padding.
    """
    begins, ends = batch.offsets[:-1], batch.offsets[1:]
    result = ends.copy()
    filled = np.flatnonzero(ends > begins)
    if batch.labels is None or not len(filled):
        return result
    last = np.full(len(ends), -1, dtype=batch.input_ids.dtype)
    last[filled] = batch.input_ids[ends[filled] - 1]
    if not (np.isin(last[filled], expected.fillers) & (batch.labels[ends[filled] - 1] == IGNORED_LABEL)).any():
        return result
    is_padding = (batch.labels == IGNORED_LABEL) & (batch.input_ids == np.repeat(last, ends - begins))
    content = np.where(is_padding, -1, np.arange(len(batch.input_ids)))
    is_filler = np.isin(last[filled], expected.fillers)
    stops = np.maximum(np.maximum.reduceat(content, begins[filled]) + 1, begins[filled])
    result[filled[is_filler]] = stops[is_filler]
    if expected.is_ended:
        row = np.flatnonzero((result < ends) & (result > begins) & np.isin(last, expected.ends))
        before = batch.input_ids[np.stack([result[row] - 1, np.maximum(result[row] - 2, begins[row])])]
        result[row] += ~np.isin(before, expected.ends).any(axis=0)
    return result


def _rows_at(batch: RowBatch, positions: np.ndarray) -> np.ndarray:
    """Return the rows in the batch, counted from 0, in which these positions lie."""
    return np.searchsorted(batch.offsets, positions, side="right") - 1
