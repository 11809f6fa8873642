"""View rows as the model sees them: pieces of documents, with their tokens as text and without padding."""

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Literal

import numpy as np

from fabric_train.token_dataset.document_index import DocumentIndex
from fabric_train.token_dataset.token_folder import RowBatch
from fabric_train.tokenization.tokenizers.vocabulary import Vocabulary

Role = Literal["text", "bos", "eos", "special", "gap"]
IGNORED_LABEL = -100  # as in fabric_train.data.batch, which imports torch
# tokens at both ends of a row that are shown; the middle of a longer row is left out, except of preference pairs
SHOWN_BEGIN = 8192
SHOWN_END = 256


@dataclass(frozen=True)
class Expectation:
    """What the rows should be according to the manifest and the tokenizer; a field is None or empty if unknown."""

    max_length: int | None  # tokens of each row
    overlap: int  # tokens that a row repeats when it continues a document
    in_sequence: bool
    """Whether a row can only continue the document of the previous row. Otherwise any row can continue a long document,
    so only pieces can be counted.
    """
    vocab_size: int | None
    bos_token_id: int | None
    unk_token_id: int | None
    end_token_ids: tuple[int, ...]
    """The ids that end a document: EOS, and in chats the end of a turn, after which a template may write one more
    token, a line break.
    """
    is_ended: bool  # whether the documents are known to have been written with such an end
    padding_token_ids: tuple[int, ...]  # ids that padding may consist of
    compared: tuple[str, str] | None = None
    """The names of the two answers, such as chosen and rejected, if each document has two sequences."""
    with_prompts: bool = True  # whether all that follows the prompt of a pair is supervised


@dataclass(frozen=True)
class Token:
    """A token, or several that share a character."""

    position: int  # of the first token, in the row
    ids: tuple[int, ...]
    text: str
    role: Role  # "gap" stands for the middle of a long row; its text says how many tokens are missing
    is_supervised: bool


@dataclass(frozen=True)
class RowPiece:
    """The piece of a document that is in one row."""

    position: int  # of its first token, in the row
    begins: bool | None  # whether the document begins with it; None if unknown
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class PairView:
    """Two sequences of one document: the prompt, which both begin with, and the remaining tokens of each.

    They are a preference pair, or an unpaired answer and another row's answer to the same prompt.
    """

    names: tuple[str, str]
    """The names of the two answers."""
    prompt: RowPiece
    answers: tuple[tuple[Token, ...], tuple[Token, ...]]
    differs_at: tuple[int, int]
    """For each sequence, the position in the row of the first token that differs; it may be the end of the
    sequence.
    """

    def begins_to_differ(self, token: Token) -> bool:
        """Return whether ``token`` contains the first token that differs."""
        return any(0 <= position - token.position < len(token.ids) for position in self.differs_at)


@dataclass(frozen=True)
class RowView:
    """A row as it is shown."""

    index: int  # of the row in the split, from 0
    num_tokens: int
    num_supervised: int
    pieces: tuple[RowPiece, ...]
    num_padding: int
    padding: str  # the text of the padding token
    continues: bool  # whether the next row continues its last document
    origins: tuple[str, ...] = ()  # where the document of each piece comes from; empty without a document index
    pairs: tuple[PairView, ...] = ()  # the pieces, two by two, if each document has two sequences


def content_ends(batch: RowBatch, expected: Expectation) -> np.ndarray:
    """Return where the padding of each of the R rows begins, int64 [R], as positions in the batch.

    Padding is the last run of one unsupervised padding token. With the padding token ``P`` and unsupervised tokens in
    lower case, the row ``A B C p p`` has two tokens of padding, and ``A B P P P`` has none. If the padding token is EOS
    and the token before the run does not end a document, the first token of the run ends it and is not padding.
    """
    row_starts = batch.offsets[:-1]
    row_ends = batch.offsets[1:]
    ends = row_ends.copy()
    rows = np.flatnonzero(row_ends > row_starts)  # that are not empty
    if batch.labels is None or not len(rows):
        return ends

    # most batches have no padding: look at the last token of each row first
    last_positions = row_ends[rows] - 1
    last_tokens = np.full(len(row_ends), -1, dtype=batch.input_ids.dtype)
    last_tokens[rows] = batch.input_ids[last_positions]
    can_be_padding = np.isin(last_tokens[rows], expected.padding_token_ids)
    is_unsupervised = batch.labels[last_positions] == IGNORED_LABEL
    if not (can_be_padding & is_unsupervised).any():
        return ends

    # content ends after the last token that is supervised or differs from the last token of the row
    is_padding = (batch.labels == IGNORED_LABEL) & (batch.input_ids == np.repeat(last_tokens, row_ends - row_starts))
    content_positions = np.where(is_padding, -1, np.arange(len(batch.input_ids)))
    last_content = np.maximum.reduceat(content_positions, row_starts[rows])
    padding_starts = np.maximum(last_content + 1, row_starts[rows])
    ends[rows[can_be_padding]] = padding_starts[can_be_padding]

    # padding with EOS: its first token ends the document, unless one of the two tokens before it does
    if expected.is_ended:
        has_both = (ends < row_ends) & (ends > row_starts)  # content and padding
        padded_rows = np.flatnonzero(has_both & np.isin(last_tokens, expected.end_token_ids))
        content_end = ends[padded_rows]
        second_last = np.maximum(content_end - 2, row_starts[padded_rows])
        tokens_before = batch.input_ids[np.stack([content_end - 1, second_last])]  # [2, padded rows]
        is_document_ended = np.isin(tokens_before, expected.end_token_ids).any(axis=0)
        rows_ended_by_padding = padded_rows[~is_document_ended]
        ends[rows_ended_by_padding] += 1
    return ends


def view_rows(batch: RowBatch, rows: range, vocabulary: Vocabulary | None, expected: Expectation) -> list[RowView]:
    """View those rows of a batch that are in ``rows``, a range of rows of the split.

    ``continues`` is False in each view, since only the next row tells: see :func:`with_continuations`.
    """
    num_rows = len(batch.offsets) - 1
    start = max(rows.start - batch.first_row, 0)
    stop = min(rows.stop - batch.first_row, num_rows)
    if start >= stop:
        return []
    ends = content_ends(batch, expected)
    views = []
    for row in range(start, stop):
        # the middle of a pair is where its second sequence begins, so all of it is shown
        view = _view_row(batch, row, int(ends[row]), vocabulary, is_shortened=expected.compared is None)
        if expected.compared is not None:
            view_pair = partial(_view_pair, expected.compared)
            first_sequences = view.pieces[::2]
            second_sequences = view.pieces[1::2]
            view = replace(view, pairs=tuple(map(view_pair, first_sequences, second_sequences)))
        views.append(view)
    return views


def with_continuations(views: list[RowView], rows: range) -> list[RowView]:
    """Return the views of ``rows`` with ``continues`` set; ``views`` must include the row after the last of them."""
    continued_rows = set()
    for view in views:
        if view.pieces and view.pieces[0].begins is False:
            continued_rows.add(view.index - 1)
    return [replace(view, continues=view.index in continued_rows) for view in views if view.index in rows]


def with_origins(views: list[RowView], index: DocumentIndex | None) -> list[RowView]:
    """Return the views with the source, file and line of each document; unchanged without an index."""
    if index is None or not views:
        return views
    pieces = index.pieces(np.array([view.index for view in views]))
    origins: list[list[str]] = [[] for _ in views]
    for piece in range(len(pieces.rows)):
        origin = index.origin(int(pieces.documents[piece]))
        start = int(pieces.starts[piece])
        last_token = start + int(pieces.lengths[piece]) - 1
        tokens = f"tokens {start:,} to {last_token:,} of {origin.num_tokens:,}"
        line = f"position {int(pieces.positions[piece]):,}: {origin}, {tokens}, {origin.num_bytes:,} bytes"
        if index.is_desirable is not None:
            is_desirable = index.is_desirable[int(pieces.documents[piece])]
            line += ", desirable" if is_desirable else ", undesirable"
        origins[int(pieces.rows[piece])].append(line)
    return [replace(view, origins=tuple(lines)) for view, lines in zip(views, origins, strict=True)]


def _view_row(
    batch: RowBatch, row: int, content_end: int, vocabulary: Vocabulary | None, *, is_shortened: bool
) -> RowView:
    """View one row of a batch.

    Args:
        batch: rows of a split.
        row: the row in the batch, from 0.
        content_end: the position in the batch at which the padding of the row begins.
        vocabulary: the texts of tokens; None shows ids.
        is_shortened: leave out the middle of a long row.
    """
    # the content of the row, and the positions in it at which documents begin
    row_start = int(batch.offsets[row])
    row_end = int(batch.offsets[row + 1])
    token_ids = batch.input_ids[row_start:content_end].tolist()
    labels = batch.input_ids if batch.labels is None else batch.labels
    is_supervised = (labels[row_start:content_end] != IGNORED_LABEL).tolist()
    has_borders = batch.document_starts is not None
    borders: set[int] = set()
    if batch.document_starts is not None:
        document_starts = batch.document_starts[batch.start_rows == row].tolist()
        borders = {start for start in document_starts if 0 <= start < len(token_ids)}

    # cut the row at the borders, and around the middle that is left out
    gap = range(0)
    if is_shortened:
        gap = range(SHOWN_BEGIN, max(SHOWN_BEGIN, len(token_ids) - SHOWN_END))
    cuts = {0, *borders}
    if gap:
        cuts |= {gap.start, gap.stop}
    pieces = []
    for start, stop in pairwise([*sorted(cuts), len(token_ids)]):
        if gap and start == gap.start:
            pieces.append(RowPiece(start, begins=None, tokens=(_gap_token(gap, borders),)))
        elif start not in gap and stop > start:
            tokens = tuple(_view_tokens(token_ids, is_supervised, start, stop, vocabulary))
            is_border = start in borders
            is_cut_at_gap = start in (gap.start, gap.stop) and not is_border  # no border, and no new row
            begins = is_border if has_borders and not is_cut_at_gap else None
            pieces.append(RowPiece(start, begins, tokens))

    padding = ""
    if row_end > content_end:
        padding = _token_text(int(batch.input_ids[row_end - 1]), vocabulary)
    return RowView(
        index=batch.first_row + row,
        num_tokens=row_end - row_start,
        num_supervised=sum(is_supervised),
        pieces=tuple(pieces),
        num_padding=row_end - content_end,
        padding=padding,
        continues=False,
    )


def _gap_token(gap: range, borders: Set[int]) -> Token:
    """Return what stands for the positions that are left out."""
    num_borders = len(borders & set(gap))
    text = f" ⋯ {len(gap):,} tokens left out here; documents that begin in them: {num_borders:,} ⋯ "
    return Token(gap.start, (), text, "gap", is_supervised=True)


def _view_pair(names: tuple[str, str], chosen: RowPiece, rejected: RowPiece) -> PairView:
    """Divide two sequences into the prompt and two answers.

    The prompt ends at the first supervised token of the chosen sequence, or where the sequences differ if that is
    earlier.
    """
    num_common = _num_common_ids(chosen, rejected)
    num_prompt_ids = num_common
    for token in chosen.tokens:
        if token.is_supervised:
            num_prompt_ids = min(num_common, token.position - chosen.position)
            break
    chosen_prompt, chosen_answer = _split_tokens(chosen, num_prompt_ids)
    _, rejected_answer = _split_tokens(rejected, num_prompt_ids)
    return PairView(
        names=names,
        prompt=replace(chosen, tokens=chosen_prompt),
        answers=(chosen_answer, rejected_answer),
        differs_at=(chosen.position + num_common, rejected.position + num_common),
    )


def _num_common_ids(chosen: RowPiece, rejected: RowPiece) -> int:
    """Return the number of token ids with which both sequences begin."""
    chosen_ids = chain.from_iterable(token.ids for token in chosen.tokens)
    rejected_ids = chain.from_iterable(token.ids for token in rejected.tokens)
    num_common = 0
    for chosen_id, rejected_id in zip(chosen_ids, rejected_ids, strict=False):
        if chosen_id != rejected_id:
            break
        num_common += 1
    return num_common


def _split_tokens(piece: RowPiece, num_ids: int) -> tuple[tuple[Token, ...], tuple[Token, ...]]:
    """Return the tokens of the first ``num_ids`` ids, and the remaining ones; a token of several ids is not divided."""
    for index, token in enumerate(piece.tokens):
        end = token.position - piece.position + len(token.ids)
        if end > num_ids:
            return piece.tokens[:index], piece.tokens[index:]
    return piece.tokens, ()


def _view_tokens(
    token_ids: list[int], is_supervised: list[bool], start: int, stop: int, vocabulary: Vocabulary | None
) -> Iterator[Token]:
    """Yield the tokens at the positions from ``start`` to ``stop`` of a row.

    Tokens that share a character become one, unless they differ in supervision.
    """
    position = start
    while position < stop:
        # a run of tokens with the same supervision
        run_end = position + 1
        while run_end < stop and is_supervised[run_end] == is_supervised[position]:
            run_end += 1
        run = token_ids[position:run_end]
        spans: Iterable[tuple[int, str]]
        if vocabulary is None:
            spans = [(1, f"⟨{token_id}⟩") for token_id in run]
        else:
            spans = vocabulary.spans(run)
        for count, text in spans:
            ids = tuple(token_ids[position : position + count])
            yield Token(position, ids, text, _role(ids[0], vocabulary), is_supervised[position])
            position += count


def _role(token_id: int, vocabulary: Vocabulary | None) -> Role:
    if vocabulary is None:
        return "text"
    if token_id == vocabulary.eos_token_id:
        return "eos"
    if token_id == vocabulary.bos_token_id:
        return "bos"
    return "special" if token_id in vocabulary.special else "text"


def _token_text(token_id: int, vocabulary: Vocabulary | None) -> str:
    if vocabulary is None:
        return f"⟨{token_id}⟩"
    _, text = next(vocabulary.spans([token_id]))
    return text
