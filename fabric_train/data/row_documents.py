"""Name the documents of a row: source, file, place and first words."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np

from fabric_train.cli.errors import InputError
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.tokenization.inspect.row_view import visible
from fabric_train.tokenization.packing.document_index import DocumentIndex, DocumentOrigin, open_index
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


def find_source_rows(dataset: TokenDataset) -> dict[str, list[range]]:
    """Return the rows of the train split that each source has, as ranges in their order.

    A row is one of the source of its first token. Documents are in the order of the sources and their files, so the
    file of a row's first document never decreases, and binary search finds where each source begins. In a dataset of
    ``--packing concat`` a source's last row has the beginning of the next one, too.

    Raises:
        InputError: the dataset has no document index, or its sources were mixed with ``--weights``.
    """
    manifest = dataset.manifest
    index = open_index(dataset.folder, manifest, "train") if manifest else None
    if manifest is None or index is None:
        raise InputError(
            f"{dataset.folder} has no document index, so the rows of its sources are not known; tokenize again with "
            "tokenize_dataset.py"
        )
    settings = [part.settings for part in manifest.parts] or [manifest.settings]
    if any(one.weights for one in settings):
        raise InputError(
            f"{dataset.folder} was tokenized with --weights, which mixes the sources in its rows; tokenize again "
            "without --weights"
        )
    rows: dict[str, list[range]] = {name: [] for name in index.sources.names}
    first_files = np.cumsum([0, *(record.num_files for record in manifest.sources)])
    for record, borders in zip(manifest.sources, pairwise(_first_rows(index, first_files)), strict=True):
        if borders[0] < borders[1]:
            rows[record.name].append(range(*borders))
    return {name: ranges for name, ranges in rows.items() if ranges}


def _first_rows(index: DocumentIndex, files: np.ndarray) -> list[int]:
    """Return the first row whose first document is in a file or one after it, for each of some files [n]."""
    low, high = np.zeros(len(files), np.int64), np.full(len(files), len(index.rows) - 1)
    while (open_ := low < high).any():
        middle = (low + high)[open_] // 2
        is_before = _files_of(index, middle) < files[open_]
        low[open_] = np.where(is_before, middle + 1, low[open_])
        high[open_] = np.where(is_before, high[open_], middle)
    return low.tolist()


def _files_of(index: DocumentIndex, rows: np.ndarray) -> np.ndarray:
    """Return the file of the first document of each row."""
    pieces = index.pieces(rows)
    return index.documents["file"][pieces.documents[pieces.positions == 0]]
