"""Decode a sample of a split's documents: spread evenly over the index, bounded, and the same every time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from fabric_train.cli.errors import InputError
from fabric_train.tokenization.packing.document_index import DocumentIndex
from fabric_train.tokenization.packing.document_search import find_rows
from fabric_train.tokenization.packing.token_folder import Split
from fabric_train.tokenization.tokenizers.vocabulary import Vocabulary

NUM_TOKENS = 1 << 20
FEWEST_DOCUMENTS, MOST_DOCUMENTS = 2000, 10_000
_DOCUMENTS_PER_DECODING = 64


@dataclass(frozen=True)
class SampledDocument:
    """A document of the sample.

    Args:
        tokens: of the whole document, BOS and EOS included.
        bytes: of the whole document's text.
        text: its beginning, without special tokens.
        tokens_read: tokens of that beginning, BOS and EOS included.
    """

    tokens: int
    bytes: int
    text: str
    tokens_read: int


def sample_size(index: DocumentIndex, num_tokens: int) -> int:
    """Return the number of documents to sample: as many as have 2^20 tokens together, from 2,000 to 10,000, or all.

    Args:
        index: of the split.
        num_tokens: of all its documents.
    """
    as_many = NUM_TOKENS * len(index.documents) // max(num_tokens, 1)
    return min(max(as_many, FEWEST_DOCUMENTS), MOST_DOCUMENTS, int(index.rows["documents"][-1]))


def sample_documents(
    index: DocumentIndex, count: int, split: Split, vocabulary: Vocabulary, advance: Callable[[int], None]
) -> Iterator[SampledDocument]:
    """Yield some documents, cut to one length so that together they have at most 2^20 tokens.

    The documents that begin in the rows are divided into ``count`` equal parts, and each part gives one document.

    Args:
        index: of the split.
        count: of documents, from ``sample_size``.
        split: its rows, of which only those with tokens of the sample are read.
        vocabulary: with which the documents were encoded.
        advance: called with the number of records of the index searched since the last call.

    Raises:
        InputError: the index or the rows are damaged.
    """
    chosen = _spread(int(index.rows["documents"][-1]), count)
    records = index.documents[chosen]
    limit = _common_limit(records["tokens"].astype(np.int64), NUM_TOKENS)
    ids = _read_beginnings(index, split, chosen, limit, advance)
    if not all(min(own) >= 0 and max(own) < vocabulary.size for own in ids.values() if own):
        raise InputError("rows have tokens that the tokenizer does not have; tokenize again")
    for first in range(0, len(chosen), _DOCUMENTS_PER_DECODING):
        part = slice(first, first + _DOCUMENTS_PER_DECODING)
        beginnings = [ids[document] for document in chosen[part].tolist()]
        texts = vocabulary.tokenizer.decode_batch(beginnings, skip_special_tokens=True)
        for record, text, own in zip(records[part], texts, beginnings, strict=True):
            yield SampledDocument(int(record["tokens"]), int(record["bytes"]), text, len(own))


def _spread(total: int, count: int) -> np.ndarray:
    """Return ``count`` different numbers below ``total``, which is not smaller, in ascending order; int64.

    Each is in its own of ``count`` equal ranges. The place in the range follows multiples of the golden ratio, so that
    no regular order of documents meets a regular step.
    """
    numbers = np.arange(count)
    return ((numbers + numbers * 0.6180339887498949 % 1) * (total / count)).astype(np.int64)


def _common_limit(lengths: np.ndarray, total: int) -> int:
    """Return the largest length so that the lengths, cut to it, have at most ``total`` as their sum."""
    ordered = np.sort(lengths)
    before = np.cumsum(ordered) - ordered
    limits = (total - before) // np.arange(len(ordered), 0, -1)
    too_long = np.flatnonzero(ordered > limits)
    return int(limits[too_long[0]] if len(too_long) else ordered[-1])


def _read_beginnings(
    index: DocumentIndex, split: Split, documents: np.ndarray, limit: int, advance: Callable[[int], None]
) -> dict[int, list[int]]:
    """Return the first ``limit`` tokens of some documents, by the documents' numbers."""
    rows = np.array(sorted(find_rows(index, documents.tolist(), advance)), dtype=np.int64)
    pieces = index.pieces(rows)
    wanted = np.flatnonzero(np.isin(pieces.documents, documents) & (pieces.starts + pieces.repeated < limit))
    needed, owners = np.unique(pieces.rows[wanted], return_inverse=True)
    bounds = np.searchsorted(owners, np.arange(len(needed) + 1))
    parts: dict[int, list[tuple[int, list[int]]]] = {document: [] for document in documents.tolist()}
    for number, ids in enumerate(split.read_rows(rows[needed])):
        for piece in wanted[bounds[number] : bounds[number + 1]].tolist():
            position, repeated = int(pieces.positions[piece]), int(pieces.repeated[piece])
            start = int(pieces.starts[piece]) + repeated
            stop = position + min(int(pieces.lengths[piece]), limit - start + repeated)
            parts[int(pieces.documents[piece])].append((start, ids[position + repeated : stop].tolist()))
    return {document: [token for _, own in sorted(found) for token in own] for document, found in parts.items()}
