"""Name the documents of a row: source, file, place and first words."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from fabric_train.data.token_dataset import TokenDataset
from fabric_train.tokenization.inspect.row_view import visible
from fabric_train.tokenization.packing.document_index import DocumentOrigin
from fabric_train.tokenization.tokenizers.vocabulary import Vocabulary, load_vocabulary

_DECODED_TOKENS = 32
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class RowDocument:
    """A document, or the part of one, in a row.

    ``start`` is the position in the document of the first of its ``num_tokens`` in the row, and ``text`` are the first
    words of these. ``origin`` is None without a document index: then it is the whole row.
    """

    origin: DocumentOrigin | None
    start: int
    num_tokens: int
    text: str


def documents_in(dataset: TokenDataset, row: int, vocabulary: Vocabulary | None) -> Iterator[RowDocument]:
    """Yield the documents of a row of the train split, in their order.

    Args:
        dataset: the token dataset.
        row: its number.
        vocabulary: the dataset's; without it, the text is token ids.

    Raises:
        InputError: the document index is damaged.
    """
    ids = dataset.train.read([row])[0][0].tolist()
    index = dataset.train.index
    if index is None:
        yield RowDocument(None, 0, len(ids), _first_words(ids, vocabulary))
        return
    pieces = index.pieces(np.array([row]))
    columns = (pieces.positions, pieces.documents, pieces.starts, pieces.lengths)
    for position, document, start, length in zip(*(column.tolist() for column in columns), strict=True):
        text = _first_words(ids[position : position + length], vocabulary)
        yield RowDocument(index.origin(document), start, length, text)


def describe_piece(dataset: TokenDataset, row: int, piece: int) -> str | None:
    """Return where the document of a piece comes from, and the piece's first words; None without a document index.

    Args:
        dataset: the token dataset.
        row: of its train split.
        piece: its number in the row, from 0.

    Raises:
        InputError: the document index or the tokenizer is damaged.
    """
    if dataset.train.index is None:
        return None
    vocabulary = load_vocabulary(dataset.folder / "tokenizer")
    document = next(islice(documents_in(dataset, row, vocabulary), piece, None))
    return f"{document.origin} “{document.text}”"


def _first_words(ids: list[int], vocabulary: Vocabulary | None) -> str:
    """Return the beginning of the text of some tokens, in one line that cannot control a terminal."""
    begin = ids[:_DECODED_TOKENS]
    if vocabulary is None:
        return " ".join(map(str, begin))[:_SHOWN_CHARACTERS]
    text = vocabulary.tokenizer.decode(begin, skip_special_tokens=True).strip("\ufffd")
    line = visible(" ".join(text.split()))
    return line if len(line) <= _SHOWN_CHARACTERS and len(begin) == len(ids) else f"{line[:_SHOWN_CHARACTERS]}…"
