"""Count the content of a split's rows, and find faults in them and in the document index, in one pass.

``SplitCheck`` reads the batches, ``DocumentCounter`` follows documents from row to row, and ``IndexCheck`` compares
the document index.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from fabric_train.inspection.row_view import IGNORED_LABEL, Expectation, content_ends
from fabric_train.token_dataset.document_index import DocumentIndex, altered_rows, chunks
from fabric_train.token_dataset.manifest import SplitLedger
from fabric_train.token_dataset.rows import joined_ranges
from fabric_train.token_dataset.token_folder import RowBatch

_TOLERATED_UNKNOWN = 0.001  # of all tokens
_UNKNOWN = "unknown tokens"
_COUNTED = ("documents", "bytes", "tokens_in", "tokens_repeated", "tokens_in_rows")  # attributes of SourceLedger


@dataclass(frozen=True)
class Problem:
    """Something that is wrong with a split, and how often."""

    split: str
    text: str
    first_row: int | None = None  # where it occurs first; None if not in a row

    def __str__(self) -> str:
        where = "" if self.first_row is None else f", first in row {self.first_row:,}"
        return f"{self.split}: {self.text}{where}"


@dataclass
class Counts:
    """What is counted in the rows of a split."""

    rows: int = 0
    tokens: int = 0  # without padding
    padding: int = 0
    supervised: int = 0
    lengths: Counter[int] | None = field(default_factory=Counter)  # documents by tokens; None if borders are not stored
    documents_over_rows: int = 0  # documents that are in several rows
    documents_cut: int = 0  # documents cut off at the end of the split or of a merged part
    pieces: int = 0  # pieces that may or may not be whole documents

    @property
    def documents(self) -> int | None:
        """The number of documents that begin in the split; None if unknown."""
        return None if self.lengths is None else sum(self.lengths.values())


# P pieces of documents in order; each is in one row
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
    """Follows the documents of a split from row to row, and counts them, and those that no token ends."""

    counts: Counts  # to which documents are added
    num_without_end: int = 0
    first_row_without_end: int | None = None
    # PIECE [any number] of the last document, which may go on in the next rows
    _open_pieces: np.ndarray = field(default_factory=lambda: np.empty(0, PIECE))
    _overlap: int = 0

    def add(self, pieces: np.ndarray, overlap: int) -> None:
        """Add the pieces of rows in sequence.

        Args:
            pieces: PIECE [P]; a piece that begins no document continues the document of the previous piece.
            overlap: number of tokens that a continuing piece repeats.
        """
        pieces = np.concatenate([self._open_pieces, pieces])
        self._overlap = overlap
        document_starts = np.flatnonzero(pieces["begins"])
        if len(document_starts):
            last_start = document_starts[-1]
            self._count_documents(pieces[document_starts[0] : last_start])
            self._open_pieces = pieces[last_start:]

    def add_unordered(self, pieces: np.ndarray) -> None:
        """Add pieces, PIECE [P], that any other row may continue.

        A piece at the end of its row may have its end in another row, so only pieces before it must have one.
        """
        self._count_lengths(pieces["length"])
        self.counts.pieces += len(pieces)
        has_end = pieces["ends_exactly"] | pieces["ends_nearly"]
        is_without_end = pieces["is_inside"] & ~has_end
        self._count_missing_ends(pieces["row"][is_without_end])

    def finish(self) -> None:
        """Count the last document, which may be cut off: no row continues it."""
        self._count_documents(self._open_pieces, may_be_cut=True)
        self._open_pieces = self._open_pieces[:0]

    def _count_documents(self, pieces: np.ndarray, *, may_be_cut: bool = False) -> None:
        """Count whole documents.

        Args:
            pieces: PIECE [P], of which the first begins a document.
            may_be_cut: whether the last document may be cut off at the end of the last row.
        """
        if not len(pieces):
            return
        previous = np.roll(pieces, 1)  # the piece before each piece; of no use for the first
        starts = np.flatnonzero(pieces["begins"])
        ends = np.append(starts[1:], len(pieces)) - 1  # the last piece of each document

        # a continuing piece repeats the last ``overlap`` tokens of the previous piece, or all of it if it is shorter
        num_repeated = np.where(pieces["begins"], 0, np.minimum(self._overlap, previous["length"]))
        self._count_lengths(np.add.reduceat(pieces["length"] - num_repeated, starts))
        self.counts.documents_over_rows += int((ends > starts).sum())

        # a document ends with its last token or with the one before, which may be in the previous row
        is_single_token = (pieces["length"] == 1) & ~pieces["begins"]
        ends_in_previous_row = is_single_token & previous["ends_exactly"]
        has_end = pieces["ends_exactly"] | pieces["ends_nearly"] | ends_in_previous_row
        last_pieces = pieces[ends]
        without_end = last_pieces[~has_end[ends]]
        if may_be_cut:
            self.counts.documents_cut += int((~without_end["is_inside"]).sum())
            without_end = without_end[without_end["is_inside"]]
        self._count_missing_ends(without_end["row"])

    def _count_missing_ends(self, rows: np.ndarray) -> None:
        if not len(rows):
            return
        self.num_without_end += len(rows)
        if self.first_row_without_end is None:
            self.first_row_without_end = int(rows[0])

    def _count_lengths(self, lengths: np.ndarray) -> None:
        # few lengths are distinct: k of them need k² / 2 tokens
        values, counts = np.unique(lengths, return_counts=True)
        assert self.counts.lengths is not None
        self.counts.lengths.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))


@dataclass
class _Occurrences:
    """How often a problem occurs, and the first row in which it does."""

    count: int
    first_row: int


class SplitCheck:
    """A check of one split. Call ``add`` with its batches in order, ``begin_part`` before parts, ``finish`` last."""

    def __init__(self, split: str, expected: Expectation) -> None:
        self.split = split
        self.expected = expected
        self._counts = Counts()
        self._documents = DocumentCounter(self._counts)
        self._has_borders = True
        self._problems: dict[str, _Occurrences] = {}  # in the order in which they were found

    def add(self, batch: RowBatch) -> None:
        """Count and check the rows of the next batch."""
        if batch.labels is None:
            is_supervised = np.ones(len(batch.input_ids), bool)
        else:
            is_supervised = batch.labels != IGNORED_LABEL
        row_starts = batch.offsets[:-1]
        row_ends = batch.offsets[1:]
        ends = content_ends(batch, self.expected)
        self._counts.rows += len(row_starts)
        self._counts.tokens += int((ends - row_starts).sum())
        self._counts.padding += int((row_ends - ends).sum())
        self._counts.supervised += int(is_supervised.sum())
        self._check_rows(batch, is_supervised)
        self._check_tokens(batch, is_supervised, ends)
        if batch.document_starts is None or batch.start_rows is None:
            self._has_borders = False
        else:
            self._follow_documents(batch, is_supervised, ends)

    def begin_part(self, expected: Expectation) -> None:
        """Start a part that was written separately: its first row continues no document."""
        self._documents.finish()
        self.expected = expected

    def finish(self) -> tuple[Counts, list[Problem]]:
        """Return the counts, and the problems in the order in which they were found."""
        self._documents.finish()
        if self._documents.first_row_without_end is not None:
            self._problems["documents that do not end with EOS"] = _Occurrences(
                self._documents.num_without_end, self._documents.first_row_without_end
            )
        if not self._has_borders:
            self._counts.lengths = None
        problems = []
        for kind, occurrences in self._problems.items():
            text = f"{kind}: {occurrences.count:,}"
            if kind == _UNKNOWN:
                # some characters are unknown to most vocabularies: a few are no problem
                if occurrences.count <= self._counts.tokens * _TOLERATED_UNKNOWN:
                    continue
                text += f", {occurrences.count / self._counts.tokens:.2%} of all"
            problems.append(Problem(self.split, text, occurrences.first_row))
        return self._counts, problems

    def _note(self, kind: str, rows: np.ndarray) -> None:
        """Count a problem once for each element of ``rows``, the rows of the split in which it occurs."""
        if not len(rows):
            return
        first_row = int(rows.min())
        occurrences = self._problems.setdefault(kind, _Occurrences(0, first_row))
        occurrences.count += len(rows)
        occurrences.first_row = min(occurrences.first_row, first_row)

    def _check_rows(self, batch: RowBatch, is_supervised: np.ndarray) -> None:
        """Check the length of rows, and that each has a target."""
        row_starts = batch.offsets[:-1]
        row_ends = batch.offsets[1:]
        max_length = self.expected.max_length
        if max_length is not None:
            wrong_rows = np.flatnonzero(row_ends - row_starts != max_length)
            self._note(f"rows that are not {max_length:,} tokens long", batch.first_row + wrong_rows)
        # the first token of a row is never a target: no token predicts it
        second_tokens = np.minimum(row_starts + 1, row_ends)
        num_supervised_before = np.concatenate(([0], np.cumsum(is_supervised)))
        num_targets = num_supervised_before[row_ends] - num_supervised_before[second_tokens]
        self._note("rows without any supervised token", batch.first_row + np.flatnonzero(num_targets == 0))

    def _check_tokens(self, batch: RowBatch, is_supervised: np.ndarray, ends: np.ndarray) -> None:
        """Check ids and labels; ``ends`` is where the padding of each row begins."""
        token_ids = batch.input_ids
        is_outside = token_ids < 0
        if self.expected.vocab_size is not None:
            is_outside |= token_ids >= self.expected.vocab_size
        rows = _rows_at(batch, np.flatnonzero(is_outside))
        self._note("ids outside the vocabulary", batch.first_row + rows)
        if batch.labels is not None:
            is_other_label = is_supervised & (batch.labels != token_ids)
            rows = _rows_at(batch, np.flatnonzero(is_other_label))
            self._note("labels that differ from the token at their position", batch.first_row + rows)
        if self.expected.unk_token_id is not None:
            positions = np.flatnonzero(token_ids == self.expected.unk_token_id)
            rows = _rows_at(batch, positions)
            rows = rows[positions < ends[rows]]  # not in the padding
            self._note(_UNKNOWN, batch.first_row + rows)

    def _follow_documents(self, batch: RowBatch, is_supervised: np.ndarray, ends: np.ndarray) -> None:
        """Find the pieces between borders and ends of rows, check and count them."""
        row_starts = batch.offsets[:-1]
        row_ends = batch.offsets[1:]
        document_starts, start_rows = self._valid_starts(batch, ends)
        self._check_starts(batch, document_starts, start_rows)

        # a piece begins at each document start, and at the start of each row that continues a document
        is_continued = (ends > row_starts) & ~np.isin(row_starts, document_starts)
        continuing_rows = np.flatnonzero(is_continued)
        piece_starts = np.concatenate([document_starts, row_starts[continuing_rows]])
        order = np.argsort(piece_starts, kind="stable")
        piece_starts = piece_starts[order]
        rows = np.concatenate([start_rows, continuing_rows])[order]
        # and ends where the next piece begins, or where the padding of its row does
        next_starts = np.append(piece_starts[1:], len(batch.input_ids))
        piece_ends = np.minimum(next_starts, ends[rows])

        pieces = np.empty(len(order), PIECE)
        pieces["row"] = batch.first_row + rows
        pieces["length"] = piece_ends - piece_starts
        pieces["begins"] = order < len(document_starts)
        pieces["is_inside"] = piece_ends < row_ends[rows]
        pieces["ends_exactly"] = self._is_end_token(batch.input_ids[piece_ends - 1])
        pieces["ends_nearly"] = self._is_end_token(batch.input_ids[np.maximum(piece_ends - 2, piece_starts)])
        if self.expected.compared is not None:
            sequences = PairSequences(piece_starts, piece_ends, rows)
            for kind, faulty_rows in pair_faults(
                batch, is_supervised, sequences, with_prompts=self.expected.with_prompts
            ):
                self._note(kind, batch.first_row + faulty_rows)
        if self.expected.in_sequence:
            self._documents.add(pieces, self.expected.overlap)
        else:
            self._documents.add_unordered(pieces)

    def _is_end_token(self, token_ids: np.ndarray) -> np.ndarray:
        """Return whether each token ends documents, bool; all do if no such token is known."""
        if not self.expected.end_token_ids:
            return np.ones(len(token_ids), bool)
        return np.isin(token_ids, self.expected.end_token_ids)

    def _valid_starts(self, batch: RowBatch, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Note impossible borders; return the others as positions in the batch, with their rows, both int64."""
        assert batch.document_starts is not None
        assert batch.start_rows is not None
        positions = batch.document_starts.astype(np.int64)  # in their rows
        rows = batch.start_rows
        row_starts = batch.offsets[:-1][rows]
        is_valid = (positions >= 0) & (row_starts + positions < ends[rows])
        # within a row, positions ascend
        is_valid[1:] &= (rows[1:] != rows[:-1]) | (positions[1:] > positions[:-1])
        self._note("document borders outside their row or out of order", batch.first_row + rows[~is_valid])
        starts = np.unique(row_starts[is_valid] + positions[is_valid])
        return starts, _rows_at(batch, starts)

    def _check_starts(self, batch: RowBatch, starts: np.ndarray, rows: np.ndarray) -> None:
        """Note the documents that begin with two BOS."""
        bos_token_id = self.expected.bos_token_id
        if bos_token_id is None:
            return
        second_tokens = starts + 1
        # the second token must belong to the same document; with overlap, the next row may repeat a BOS
        limits = batch.offsets[rows + 1] if self.expected.overlap else len(batch.input_ids)
        has_second = (second_tokens < limits) & ~np.isin(second_tokens, starts)
        starts = starts[has_second]
        second_tokens = second_tokens[has_second]
        rows = rows[has_second]
        is_double = (batch.input_ids[starts] == bos_token_id) & (batch.input_ids[second_tokens] == bos_token_id)
        self._note("documents that begin with two BOS", batch.first_row + rows[is_double])


@dataclass(frozen=True)
class PairSequences:
    """The sequences of preference pairs or of unpaired answers in a batch, in order: int64 [S] each."""

    starts: np.ndarray  # the position of the first token
    ends: np.ndarray  # the position after the last token
    rows: np.ndarray  # in the batch, from 0


def pair_faults(
    batch: RowBatch, is_supervised: np.ndarray, sequences: PairSequences, *, with_prompts: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each kind of fault with the rows of the batch that have it, once for each pair.

    The prompt of a sequence is the tokens before its first supervised token. Both prompts of a pair must be the same,
    except for the last token, which a tokenizer may join with the answer.

    Args:
        batch: rows that hold preference pairs or unpaired answers.
        is_supervised: bool [tokens of the batch].
        sequences: all sequences of the batch.
        with_prompts: compare the prompts; not possible if turns after the prompt are not supervised.
    """
    starts = sequences.starts
    rows = sequences.rows
    num_sequences = np.bincount(rows, minlength=len(batch.offsets) - 1)  # of each row
    yield "rows with half a pair of sequences", np.flatnonzero(num_sequences % 2)

    # indices of the sequences, two by two
    paired = np.flatnonzero(num_sequences[rows] % 2 == 0)
    chosen = paired[::2]
    rejected = paired[1::2]
    targets = np.append(np.flatnonzero(is_supervised), len(is_supervised))
    answer_starts = targets[np.searchsorted(targets, starts)]  # the first target from the start of the sequence on
    has_answer = answer_starts < sequences.ends
    has_answers = has_answer[chosen] & has_answer[rejected]
    chosen_without_answers = chosen[~has_answers]
    yield "pairs of sequences without two supervised answers", rows[chosen_without_answers]

    chosen = chosen[has_answers]
    rejected = rejected[has_answers]
    if not with_prompts or not len(chosen):
        return
    prompt_lengths = answer_starts - starts
    num_compared = np.minimum(prompt_lengths[chosen], prompt_lengths[rejected]) - 1
    num_compared = np.maximum(num_compared, 0)
    chosen_prompts = batch.input_ids[joined_ranges(starts[chosen], num_compared)]
    rejected_prompts = batch.input_ids[joined_ranges(starts[rejected], num_compared)]
    pair_of_token = np.repeat(np.arange(len(chosen)), num_compared)
    num_different = np.bincount(pair_of_token[chosen_prompts != rejected_prompts], minlength=len(chosen))
    length_differs = np.abs(prompt_lengths[chosen] - prompt_lengths[rejected]) > 1
    chosen_with_other_prompt = chosen[(num_different > 0) | length_differs]
    yield "pairs of sequences with different prompts", rows[chosen_with_other_prompt]


def _rows_at(batch: RowBatch, positions: np.ndarray) -> np.ndarray:
    """Return the rows in the batch, counted from 0, that contain these positions."""
    return np.searchsorted(batch.offsets, positions, side="right") - 1


class IndexCheck:
    """A check of one split's document index. Call ``add`` with all batches of rows, ``finish`` last.

    A preference pair or an unpaired answer has two borders: where it begins, which is where its first sequence does,
    and where its second sequence begins.
    """

    def __init__(self, split: str, index: DocumentIndex, *, sequences_per_document: int = 1) -> None:
        self._split = split
        self._index = index
        self._sequences_per_document = sequences_per_document
        self._faulty_rows: dict[str, list[int]] = {}
        num_sources = len(index.sources.names)
        self._sums = {name: np.zeros(num_sources, np.int64) for name in _COUNTED}  # of each source

    def add(self, batch: RowBatch, ends: np.ndarray) -> None:
        """Compare the index of some rows with their document borders and tokens.

        Args:
            batch: the rows.
            ends: where the padding of each row begins, from :func:`content_ends`.
        """
        num_rows = len(batch.offsets) - 1
        rows = np.arange(batch.first_row, batch.first_row + num_rows)
        pieces = self._index.pieces(rows)

        if batch.document_starts is not None and batch.start_rows is not None:
            # a border as one number: its row in the upper bits, its position in the lower 32
            begins_document = pieces.starts + pieces.repeated == 0
            is_border = (pieces.positions > 0) | begins_document
            borders_of_index = (pieces.rows << 32 | pieces.positions)[is_border]
            borders_of_rows = batch.start_rows << 32 | batch.document_starts.astype(np.int64)
            if self._sequences_per_document > 1:
                # the index does not know where second sequences begin: every second border of a row
                first_borders = np.searchsorted(batch.start_rows, batch.start_rows)
                indices_in_row = np.arange(len(borders_of_rows)) - first_borders
                borders_of_rows = borders_of_rows[indices_in_row % 2 == 0]
            faulty_rows = np.unique(np.setxor1d(borders_of_index, borders_of_rows) >> 32)
            self._note("documents begin at other positions in", batch.first_row + faulty_rows)

        num_tokens = np.bincount(pieces.rows, weights=pieces.lengths, minlength=num_rows).astype(np.int64)
        faulty_rows = np.flatnonzero(num_tokens != ends - batch.offsets[:-1])
        self._note("documents have a different number of tokens in", batch.first_row + faulty_rows)

        if self._index.checksums is not None:
            checksums = self._index.checksums[batch.first_row : batch.first_row + num_rows]
            altered = _find_altered(batch, checksums)
            self._note("the content has changed since it was written in", batch.first_row + altered)

        sources = self._index.source_numbers(pieces.documents)
        self._add_by_source("tokens_repeated", sources, pieces.repeated)
        self._add_by_source("tokens_in_rows", sources, pieces.lengths)

    def finish(self, split_ledger: SplitLedger) -> list[Problem]:
        """Compare the sums and the labels with the ledger of the split, and return all problems."""
        ledger = split_ledger.sources
        # what was found in the rows
        problems = []
        for fault, rows in self._faulty_rows.items():
            problems.append(Problem(self._split, f"document index: {fault} {len(rows):,} rows", rows[0]))
        if split_ledger.unpaired is not None and self._index.is_desirable is not None:
            in_ledger = split_ledger.unpaired.desirable
            in_index = int(np.count_nonzero(self._index.is_desirable[:]))
            if in_index != in_ledger:
                text = f"the ledger has {in_ledger:,} desirable answers, but the document index has {in_index:,}"
                problems.append(Problem(self._split, text))
        # the sums over all documents
        for _, documents in chunks(self._index.documents, lambda _: None):
            sources = self._index.sources.sources_of(documents["file"])
            self._add_by_source("documents", sources, np.ones(len(sources)))
            self._add_by_source("bytes", sources, documents["bytes"])
            self._add_by_source("tokens_in", sources, documents["tokens"])
        for source_index, name in enumerate(self._index.sources.names):
            for unit, sums in self._sums.items():
                in_ledger = getattr(ledger.get(name), unit, 0)
                in_index = int(sums[source_index])
                if in_ledger != in_index:
                    counted = f"{unit.replace('_', ' ')} of {name}"
                    text = f"the ledger has {in_ledger:,} {counted}, but the document index has {in_index:,}"
                    problems.append(Problem(self._split, text))
        return problems

    def _add_by_source(self, unit: str, sources: np.ndarray, values: np.ndarray) -> None:
        """Add the values, each to the sum of its source."""
        sums = self._sums[unit]
        sums += np.bincount(sources, weights=values, minlength=len(sums)).astype(np.int64)

    def _note(self, fault: str, rows: np.ndarray) -> None:
        if len(rows):
            self._faulty_rows.setdefault(fault, []).extend(rows.tolist())


def _find_altered(batch: RowBatch, checksums: np.ndarray) -> np.ndarray:
    """Return the rows of a batch, counted from 0, whose checksums differ from these."""
    cuts = batch.offsets[1:-1]
    num_rows = len(checksums)
    labels: Sequence[np.ndarray | None] = [None] * num_rows
    if batch.labels is not None:
        labels = np.split(batch.labels, cuts)
    document_starts: Sequence[np.ndarray | None] = [None] * num_rows
    if batch.document_starts is not None and batch.start_rows is not None:
        num_starts = np.bincount(batch.start_rows, minlength=num_rows)
        document_starts = np.split(batch.document_starts, np.cumsum(num_starts)[:-1])
    rows = zip(np.split(batch.input_ids, cuts), labels, document_starts, strict=True)
    return altered_rows(rows, checksums)
