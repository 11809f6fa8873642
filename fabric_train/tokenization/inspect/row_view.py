"""A row as the model sees it: its documents' pieces, and their tokens as text with label and role."""

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from fabric_train.tokenization.inspect.examination import IGNORED_LABEL, Expectation, content_ends
from fabric_train.tokenization.packing.token_folder import RowBatch
from fabric_train.tokenization.tokenizers.vocabulary import Vocabulary

Role = Literal["text", "bos", "eos", "special"]


@dataclass(frozen=True)
class Token:
    """A token, or several that only together are a text: position of the first in the row, ids, text, role, label."""

    position: int
    ids: tuple[int, ...]
    text: str
    role: Role
    is_supervised: bool


@dataclass(frozen=True)
class Piece:
    """What lies in the row of one document; whether it ``begins`` there is None where borders are not stored."""

    position: int
    begins: bool | None
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class RowView:
    """A row; ``goes_on`` says whether the next row goes on with its last document.

    ``padding`` is the text of the padding's token, of which there are ``num_padding``.
    """

    index: int
    num_tokens: int
    num_supervised: int
    pieces: tuple[Piece, ...]
    num_padding: int
    padding: str
    goes_on: bool


def view_rows(batch: RowBatch, wanted: range, vocabulary: Vocabulary | None, expected: Expectation) -> list[RowView]:
    """Return the rows of the batch whose number in the split is ``wanted``; not yet whether documents go on."""
    inside = range(max(wanted.start - batch.first_row, 0), min(wanted.stop - batch.first_row, len(batch.offsets) - 1))
    ends = content_ends(batch, expected) if inside else batch.offsets[1:]
    return [_view(batch, row, int(ends[row]), vocabulary) for row in inside]


def with_continuations(rows: list[RowView], wanted: range) -> list[RowView]:
    """Say of each row whether the one that follows it goes on with its document; leave those not wanted away."""
    followed = {row.index - 1 for row in rows if row.pieces and row.pieces[0].begins is False}
    return [replace(row, goes_on=row.index in followed) for row in rows if row.index in wanted]


def visible(text: str) -> str:
    """Make line ends, tabs and what has no look of its own visible; a terminal takes no command from the result."""
    return "".join(_SIGNS.get(character) or _by_number(character) for character in text)


_SIGNS = {"\n": "↵", "\r": "␍", "\t": "⇥", " ": " "}


def _by_number(character: str) -> str:
    is_invisible = unicodedata.category(character) in ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs")
    return f"⟨U+{ord(character):04X}⟩" if is_invisible else character


def _view(batch: RowBatch, row: int, end: int, vocabulary: Vocabulary | None) -> RowView:
    begin, stop = int(batch.offsets[row]), int(batch.offsets[row + 1])
    ids = batch.input_ids[begin:end].tolist()
    labels = batch.input_ids if batch.labels is None else batch.labels
    supervised = (labels[begin:end] != IGNORED_LABEL).tolist()
    borders = _borders(batch, row, len(ids))

    def begins(start: int) -> bool | None:
        return None if batch.document_starts is None else start in borders

    pieces = [
        Piece(start, begins(start), tuple(_tokens(ids, supervised, start, until, vocabulary)))
        for start, until in _pairs(sorted({0, *borders}), len(ids))
    ]
    filler = int(batch.input_ids[stop - 1]) if stop > end else None
    return RowView(
        index=batch.first_row + row,
        num_tokens=stop - begin,
        num_supervised=sum(supervised),
        pieces=tuple(pieces),
        num_padding=stop - end,
        padding="" if filler is None else _text_alone(filler, vocabulary),
        goes_on=False,
    )


def _borders(batch: RowBatch, row: int, length: int) -> set[int]:
    if batch.document_starts is None or batch.start_rows is None:
        return set()
    starts = batch.document_starts[batch.start_rows == row].tolist()
    return {start for start in starts if 0 <= start < length}


def _pairs(starts: list[int], end: int) -> list[tuple[int, int]]:
    return [(start, stop) for start, stop in zip(starts, [*starts[1:], end], strict=True) if stop > start]


def _tokens(
    ids: list[int], supervised: list[bool], start: int, stop: int, vocabulary: Vocabulary | None
) -> Iterator[Token]:
    """Yield the tokens of a piece; those that share a character but not the label stay apart."""
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
    if token == vocabulary.bos_token_id and token != vocabulary.eos_token_id:
        return "bos"
    if token == vocabulary.eos_token_id:
        return "eos"
    return "special" if token in vocabulary.special else "text"


def _text_alone(token: int, vocabulary: Vocabulary | None) -> str:
    return next(vocabulary.spans([token]))[1] if vocabulary else f"⟨{token}⟩"
