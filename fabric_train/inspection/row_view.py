"""Show a row as the model sees it: pieces of documents with their tokens as text; and say what rows should be."""

from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from fabric_train.token_dataset.document_index import DocumentIndex
from fabric_train.token_dataset.token_folder import RowBatch
from fabric_train.tokenization.tokenizers.vocabulary import Vocabulary

Role = Literal["text", "bos", "eos", "special", "gap"]
IGNORED_LABEL = -100  # as in fabric_train.data.batch, which imports torch
SHOWN_BEGIN = 8192
SHOWN_END = 256
"""Tokens at both ends of a row that are shown. The middle of a longer row is left out, except of preference pairs."""


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
    has_pairs: bool = False  # whether two sequences in a row are a preference pair
    with_prompts: bool = True  # whether all that follows the prompt of a pair is supervised


@dataclass(frozen=True)
class Token:
    """A token, or several that share a character. ``position`` is where the first one is in the row.

    One with the role "gap" stands for the middle of a long row; its text says how many tokens are missing.
    """

    position: int
    ids: tuple[int, ...]
    text: str
    role: Role
    is_supervised: bool


@dataclass(frozen=True)
class RowPiece:
    """The part of a document in one row. ``begins``: whether the document begins there; None if unknown."""

    position: int
    begins: bool | None
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class PairView:
    """A preference pair in one row: the prompt, which both sequences begin with, and the other tokens of each.

    ``differs_at`` has the positions in the row of the first tokens that differ, of the chosen sequence and of the
    rejected one; each may be where the sequence ends.
    """

    prompt: RowPiece
    chosen: tuple[Token, ...]
    rejected: tuple[Token, ...]
    differs_at: tuple[int, int]

    def begins_to_differ(self, token: Token) -> bool:
        """Return whether the first token that differs is this one, or a part of it."""
        return any(0 <= position - token.position < len(token.ids) for position in self.differs_at)


@dataclass(frozen=True)
class RowView:
    index: int  # its number in the split, from 0
    num_tokens: int
    num_supervised: int
    pieces: tuple[RowPiece, ...]
    num_padding: int
    padding: str  # the text of the padding token
    continues: bool  # whether the next row continues its last document
    origins: tuple[str, ...] = ()  # where the document of each piece comes from; empty without a document index
    pairs: tuple[PairView, ...] = ()  # the pieces, two by two, if they are preference pairs


def content_ends(batch: RowBatch, expected: Expectation) -> np.ndarray:
    """Return where the padding of each of the R rows begins, int64 [R], counted from the batch's first token.

    Padding is the last run of one unsupervised filler. With filler ``P`` and unsupervised tokens in lower case, the row
    ``A B C p p`` has two tokens of padding, and ``A B P P P`` has none. If the filler is EOS and the token before the
    run does not end a document, the first token of the run ends it and is not padding.
    """
    begins = batch.offsets[:-1]
    ends = batch.offsets[1:]
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


def view_rows(batch: RowBatch, wanted: range, vocabulary: Vocabulary | None, expected: Expectation) -> list[RowView]:
    """Return the rows of the batch whose numbers in the split are ``wanted``, all with ``continues`` False."""
    inside = range(max(wanted.start - batch.first_row, 0), min(wanted.stop - batch.first_row, len(batch.offsets) - 1))
    ends = content_ends(batch, expected) if inside else batch.offsets[1:]
    views = [_view(batch, row, int(ends[row]), vocabulary, not expected.has_pairs) for row in inside]
    if not expected.has_pairs:
        return views
    return [replace(view, pairs=tuple(map(_pair, view.pieces[::2], view.pieces[1::2]))) for view in views]


def with_continuations(rows: list[RowView], wanted: range) -> list[RowView]:
    """Return the wanted rows with ``continues`` set, for which ``rows`` must have the row after the last one."""
    followed = {row.index - 1 for row in rows if row.pieces and row.pieces[0].begins is False}
    return [replace(row, continues=row.index in followed) for row in rows if row.index in wanted]


def with_origins(rows: list[RowView], index: DocumentIndex | None) -> list[RowView]:
    """Return the rows with source, file and line of each document; as they are without an index."""
    if index is None or not rows:
        return rows
    pieces = index.pieces(np.array([row.index for row in rows]))
    lines: list[list[str]] = [[] for _ in rows]
    columns = (pieces.rows, pieces.positions, pieces.documents, pieces.starts, pieces.lengths)
    for row, position, document, start, length in zip(*(column.tolist() for column in columns), strict=True):
        origin = index.origin(document)
        part = f"tokens {start:,} to {start + length - 1:,} of {origin.num_tokens:,}"
        lines[row].append(f"position {position:,}: {origin}, {part}, {origin.num_bytes:,} bytes")
    return [replace(row, origins=tuple(own)) for row, own in zip(rows, lines, strict=True)]


def _view(batch: RowBatch, row: int, end: int, vocabulary: Vocabulary | None, is_shortened: bool) -> RowView:
    begin = int(batch.offsets[row])
    stop = int(batch.offsets[row + 1])
    ids = batch.input_ids[begin:end].tolist()
    labels = batch.input_ids if batch.labels is None else batch.labels
    supervised = (labels[begin:end] != IGNORED_LABEL).tolist()
    starts = [] if batch.document_starts is None else batch.document_starts[batch.start_rows == row].tolist()
    borders = {start for start in starts if 0 <= start < len(ids)}
    gap = range(SHOWN_BEGIN, max(SHOWN_BEGIN, len(ids) - SHOWN_END)) if is_shortened else range(0)
    pieces = []
    for start, until in pairwise([*sorted({0, *borders, *gap[:1], *([gap.stop] if gap else [])}), len(ids)]):
        is_known = batch.document_starts is not None and (start not in (gap.start, gap.stop) or start in borders)
        if start == gap.start and gap:
            pieces.append(RowPiece(start, None, (_gap(gap, borders),)))
        elif start not in gap and until > start:
            tokens = tuple(_tokens(ids, supervised, start, until, vocabulary))
            pieces.append(RowPiece(start, start in borders if is_known else None, tokens))
    filler = int(batch.input_ids[stop - 1]) if stop > end else None
    return RowView(
        index=batch.first_row + row,
        num_tokens=stop - begin,
        num_supervised=sum(supervised),
        pieces=tuple(pieces),
        num_padding=stop - end,
        padding="" if filler is None else _text_of(filler, vocabulary),
        continues=False,
    )


def _gap(left_out: range, borders: Set[int]) -> Token:
    num_borders = len(borders & set(left_out))
    text = f" ⋯ {len(left_out):,} tokens left out here; documents that begin in them: {num_borders:,} ⋯ "
    return Token(left_out.start, (), text, "gap", is_supervised=True)


def _pair(chosen: RowPiece, rejected: RowPiece) -> PairView:
    ids = [[one for token in piece.tokens for one in token.ids] for piece in (chosen, rejected)]
    shorter = min(map(len, ids))
    num_common = next((at for at in range(shorter) if ids[0][at] != ids[1][at]), shorter)
    targets = (token.position - chosen.position for token in chosen.tokens if token.is_supervised)
    shared = min(num_common, next(targets, num_common))
    begins = [
        next(
            (at for at, token in enumerate(piece.tokens) if token.position - piece.position + len(token.ids) > shared),
            None,
        )
        for piece in (chosen, rejected)
    ]
    return PairView(
        prompt=replace(chosen, tokens=chosen.tokens[: begins[0]]),
        chosen=() if begins[0] is None else chosen.tokens[begins[0] :],
        rejected=() if begins[1] is None else rejected.tokens[begins[1] :],
        differs_at=(chosen.position + num_common, rejected.position + num_common),
    )


def _tokens(
    ids: list[int], supervised: list[bool], start: int, stop: int, vocabulary: Vocabulary | None
) -> Iterator[Token]:
    """Yield the tokens of a piece; those that share a character but differ in supervision stay separate."""
    position = start
    while position < stop:
        until = position + 1
        while until < stop and supervised[until] == supervised[position]:
            until += 1
        run = ids[position:until]
        spans = vocabulary.spans(run) if vocabulary else ((1, f"⟨{token}⟩") for token in run)
        for count, text in spans:
            group = tuple(ids[position : position + count])
            yield Token(position, group, text, _role(group[0], vocabulary), supervised[position])
            position += count


def _role(token: int, vocabulary: Vocabulary | None) -> Role:
    if vocabulary is None:
        return "text"
    if token == vocabulary.eos_token_id:
        return "eos"
    if token == vocabulary.bos_token_id:
        return "bos"
    return "special" if token in vocabulary.special else "text"


def _text_of(token: int, vocabulary: Vocabulary | None) -> str:
    return next(vocabulary.spans([token]))[1] if vocabulary else f"⟨{token}⟩"
