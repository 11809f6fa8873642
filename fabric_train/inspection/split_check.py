"""Count the content of a split's rows, and find faults in them and in the document index, in one pass.

``SplitCheck`` gets the batches, ``DocumentCounter`` follows documents from row to row, ``IndexCheck`` has the index.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from fabric_train.inspection.row_view import IGNORED_LABEL, Expectation, content_ends
from fabric_train.token_dataset.document_index import DocumentIndex, altered_rows, chunks
from fabric_train.token_dataset.manifest import SourceLedger
from fabric_train.token_dataset.rows import joined_ranges
from fabric_train.token_dataset.token_folder import RowBatch

_TOLERATED_UNKNOWN = 0.001
_COUNTED = ("documents", "bytes", "tokens_in", "tokens_repeated", "tokens_in_rows")


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


# P pieces of documents in order; each lies in one row
PIECE = np.dtype(
    [
        ("row", np.int64),  # in the split
        ("length", np.int64),  # in tokens
        ("begins", bool),  # whether the document begins with the piece
        ("is_inside", bool),  # whether the piece ends before its row does
        ("ends_exactly", bool),  # whether its last token ends documents
        ("ends_nearly", bool),  # whether its second-last token ends documents
    ]
)


@dataclass
class DocumentCounter:
    """A counter of the documents of a split, which fills ``counts``, and of those without a token that ends them."""

    counts: Counts
    without_end: int = 0
    first_without_end: int | None = None
    _open: np.ndarray = field(default_factory=lambda: np.empty(0, PIECE))  # of the last document, which may continue
    _overlap: int = 0

    def add(self, pieces: np.ndarray, overlap: int) -> None:
        """Add the pieces of rows in sequence, PIECE [P]: one that begins no document continues the one before it."""
        pieces = np.concatenate([self._open, pieces])
        self._overlap = overlap
        firsts = np.flatnonzero(pieces["begins"])
        if len(firsts):
            self._count_documents(pieces[firsts[0] : firsts[-1]])
            self._open = pieces[firsts[-1] :]

    def add_unordered(self, pieces: np.ndarray) -> None:
        """Add pieces that any other row may continue; the end of a piece at a row's end may be in another row."""
        self._count_lengths(pieces["length"])
        self.counts.pieces += len(pieces)
        has_end = pieces["ends_exactly"] | pieces["ends_nearly"]
        self._add_missing_ends(pieces["row"][pieces["is_inside"] & ~has_end])

    def finish(self) -> None:
        """Count the last document, which may be cut off: no row continues it."""
        self._count_documents(self._open, may_be_cut=True)
        self._open = self._open[:0]

    def _count_documents(self, pieces: np.ndarray, may_be_cut: bool = False) -> None:
        """Count whole documents; a piece repeats the last ``overlap`` tokens of the one before, or all."""
        if not len(pieces):
            return
        firsts = np.flatnonzero(pieces["begins"])
        before = np.roll(pieces, 1)
        lasts = np.append(firsts[1:], len(pieces)) - 1
        repeated = np.where(pieces["begins"], 0, np.minimum(self._overlap, before["length"]))
        self._count_lengths(np.add.reduceat(pieces["length"] - repeated, firsts))
        self.counts.documents_over_rows += int((lasts > firsts).sum())
        crosses = (pieces["length"] == 1) & ~pieces["begins"]  # the second-last token is in the row before
        has_end = pieces["ends_exactly"] | pieces["ends_nearly"] | (crosses & before["ends_exactly"])
        without_end = pieces[lasts][~has_end[lasts]]
        if may_be_cut:
            self.counts.documents_cut += int((~without_end["is_inside"]).sum())
            without_end = without_end[without_end["is_inside"]]
        self._add_missing_ends(without_end["row"])

    def _add_missing_ends(self, rows: np.ndarray) -> None:
        if len(rows):
            self.without_end += len(rows)
            self.first_without_end = int(rows[0]) if self.first_without_end is None else self.first_without_end

    def _count_lengths(self, lengths: np.ndarray) -> None:
        # few lengths are distinct: k of them need k² / 2 tokens
        values, counts = np.unique(lengths, return_counts=True)
        assert self.counts.lengths is not None
        self.counts.lengths.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))


class SplitCheck:
    """A check of one split. Call ``add`` with its batches in order, ``begin_part`` before parts, ``finish`` last."""

    def __init__(self, split: str, expected: Expectation) -> None:
        self.split = split
        self.expected = expected
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
            self._follow_documents(batch, supervised, ends)

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

    def _follow_documents(self, batch: RowBatch, supervised: np.ndarray, ends: np.ndarray) -> None:
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
        pieces = np.empty(len(order), PIECE)
        pieces["row"] = batch.first_row + rows
        pieces["length"] = stops - begins
        pieces["begins"] = (np.arange(len(order)) < len(starts))[order]
        pieces["is_inside"] = stops < batch.offsets[1:][rows]
        pieces["ends_exactly"] = self._ends_document(batch.input_ids[stops - 1])
        pieces["ends_nearly"] = self._ends_document(batch.input_ids[np.maximum(stops - 2, begins)])
        if self.expected.has_pairs:
            for kind, found in pair_faults(batch, supervised, begins, stops, rows, self.expected.with_prompts):
                self._note(kind, batch.first_row + found)
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
        positions = batch.document_starts.astype(np.int64)
        rows = batch.start_rows
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
        starts = starts[is_inside]
        second = second[is_inside]
        rows = rows[is_inside]
        if bos is not None:
            is_double = (batch.input_ids[starts] == bos) & (batch.input_ids[second] == bos)
            self._note("documents that begin with two BOS", batch.first_row + rows[is_double])


_UNKNOWN = "unknown tokens"


def pair_faults(
    batch: RowBatch, supervised: np.ndarray, begins: np.ndarray, stops: np.ndarray, rows: np.ndarray, with_prompts: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each kind of fault with the rows of the batch that have it, once for each pair.

    ``begins`` and ``stops``, int64 [S], are where the sequences of the batch begin and end, and ``rows`` are their
    rows. ``supervised`` is bool [tokens]. Both prompts must have the same tokens if ``with_prompts``: the tokens before
    the first supervised token, but for one token at its end, which a tokenizer may join with the answer.
    """
    counts = np.bincount(rows, minlength=len(batch.offsets) - 1)
    yield "rows with half a preference pair", np.flatnonzero(counts % 2)
    is_whole = counts[rows] % 2 == 0
    chosen = np.flatnonzero(is_whole)[::2]
    rejected = np.flatnonzero(is_whole)[1::2]
    targets = np.append(np.flatnonzero(supervised), len(supervised))
    answers = targets[np.searchsorted(targets, begins)]
    has_answers = (answers < stops)[chosen] & (answers < stops)[rejected]
    yield "preference pairs without two supervised answers", rows[chosen[~has_answers]]
    chosen = chosen[has_answers]
    rejected = rejected[has_answers]
    if not with_prompts or not len(chosen):
        return
    lengths = answers - begins
    shared = np.maximum(np.minimum(lengths[chosen], lengths[rejected]) - 1, 0)
    one, other = (batch.input_ids[joined_ranges(begins[half], shared)] for half in (chosen, rejected))
    different = np.bincount(np.repeat(np.arange(len(chosen)), shared)[one != other], minlength=len(chosen)) > 0
    different |= np.abs(lengths[chosen] - lengths[rejected]) > 1
    yield "preference pairs with two prompts", rows[chosen[different]]


def _rows_at(batch: RowBatch, positions: np.ndarray) -> np.ndarray:
    """Return the rows in the batch, counted from 0, in which these positions lie."""
    return np.searchsorted(batch.offsets, positions, side="right") - 1


class IndexCheck:
    """A check of one split's index. Call ``add`` with all batches of rows, ``finish`` last.

    Each document ``has_pairs`` of borders: one where it begins and another one.
    """

    def __init__(self, split: str, index: DocumentIndex, has_pairs: bool = False) -> None:
        self._split = split
        self._index = index
        self._has_pairs = has_pairs
        self._wrong_rows: dict[str, list[int]] = {}
        self._found = {name: np.zeros(len(index.sources.names), np.int64) for name in _COUNTED}

    def add(self, batch: RowBatch, ends: np.ndarray) -> None:
        """Compare the index of some rows with their document borders and tokens; ``ends`` is from ``content_ends``."""
        num_rows = len(batch.offsets) - 1
        pieces = self._index.pieces(np.arange(batch.first_row, batch.first_row + num_rows))
        if batch.document_starts is not None and batch.start_rows is not None:
            is_border = (pieces.positions > 0) | (pieces.starts + pieces.repeated == 0)
            expected = (pieces.rows << 32 | pieces.positions)[is_border]
            found = batch.start_rows << 32 | batch.document_starts.astype(np.int64)
            if self._has_pairs:  # the index does not know where rejected sequences begin
                found = found[(np.arange(len(found)) - np.searchsorted(batch.start_rows, batch.start_rows)) % 2 == 0]
            self._note("documents begin elsewhere in", batch.first_row + np.unique(np.setxor1d(expected, found) >> 32))
        num_tokens = np.bincount(pieces.rows, weights=pieces.lengths, minlength=num_rows).astype(np.int64)
        wrong = np.flatnonzero(num_tokens != ends - batch.offsets[:-1])
        self._note("documents have more or fewer tokens in", batch.first_row + wrong)
        if self._index.checksums is not None:
            stored = self._index.checksums[batch.first_row : batch.first_row + num_rows]
            self._note("the content has changed since it was written in", batch.first_row + _altered(batch, stored))
        sources = self._index.source_numbers(pieces.documents)
        self._count("tokens_repeated", sources, pieces.repeated)
        self._count("tokens_in_rows", sources, pieces.lengths)

    def finish(self, ledger: dict[str, SourceLedger]) -> list[Problem]:
        """Compare the sums with the ledger of the split's sources, and return all problems."""
        problems = [
            Problem(self._split, f"document index: {what} {len(rows):,} rows", rows[0])
            for what, rows in self._wrong_rows.items()
        ]
        for _, documents in chunks(self._index.documents, lambda _: None):
            sources = self._index.sources.sources_of(documents["file"])
            self._count("documents", sources, np.ones(len(sources)))
            self._count("bytes", sources, documents["bytes"])
            self._count("tokens_in", sources, documents["tokens"])
        for number, name in enumerate(self._index.sources.names):
            for what, totals in self._found.items():
                said = getattr(ledger.get(name), what, 0)
                found = int(totals[number])
                if said != found:
                    text = f"the ledger has {said:,} {what.replace('_', ' ')} of {name}, the document index {found:,}"
                    problems.append(Problem(self._split, text))
        return problems

    def _count(self, what: str, sources: np.ndarray, values: np.ndarray) -> None:
        self._found[what] += np.bincount(sources, weights=values, minlength=len(self._found[what])).astype(np.int64)

    def _note(self, what: str, rows: np.ndarray) -> None:
        if len(rows):
            self._wrong_rows.setdefault(what, []).extend(rows.tolist())


def _altered(batch: RowBatch, checksums: np.ndarray) -> np.ndarray:
    """Return which rows of a batch do not have these checksums, counted from the first of the batch."""
    cuts = batch.offsets[1:-1]
    nothing = [None] * len(checksums)
    labels = nothing if batch.labels is None else np.split(batch.labels, cuts)
    starts: Sequence[np.ndarray | None] = nothing
    if batch.document_starts is not None and batch.start_rows is not None:
        counts = np.bincount(batch.start_rows, minlength=len(checksums))
        starts = np.split(batch.document_starts, np.cumsum(counts)[:-1])
    return altered_rows(zip(np.split(batch.input_ids, cuts), labels, starts, strict=True), checksums)
