"""Sum up a split by its document index: documents, tokens and bytes of each source, and the lengths of documents."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fabric_train.tokenization.packing.document_index import DocumentIndex

_DOCUMENTS_PER_READ = 1 << 20  # bounds memory, however large the index is


@dataclass(frozen=True)
class TextTotals:
    """Some documents: their number, their tokens with BOS and EOS, and the UTF-8 bytes of their text."""

    documents: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class CorpusTotals:
    """The totals of a split by source, and the number of documents by length in tokens and in bytes."""

    sources: dict[str, TextTotals]
    token_lengths: Counter[int]
    byte_lengths: Counter[int]

    @property
    def all(self) -> TextTotals:
        """The sums over the sources."""
        sources = self.sources.values()
        return TextTotals(
            sum(source.documents for source in sources),
            sum(source.tokens for source in sources),
            sum(source.bytes for source in sources),
        )


def sum_up(index: DocumentIndex, advance: Callable[[int], None]) -> CorpusTotals:
    """Return the totals of all documents of a split, in one pass over its index.

    Args:
        index: of the split.
        advance: called with the number of documents read since the last call.

    Raises:
        InputError: the index is damaged.
    """
    names = index.sources.names
    sums = np.zeros((len(TextTotals.__dataclass_fields__), len(names)), dtype=np.int64)
    lengths = {"tokens": Counter[int](), "bytes": Counter[int]()}
    for begin in range(0, len(index.documents), _DOCUMENTS_PER_READ):
        documents = index.documents[begin : begin + _DOCUMENTS_PER_READ]
        sources = index.sources.sources_of(documents["file"])
        columns = (np.ones(len(documents)), documents["tokens"], documents["bytes"])
        sums += [np.bincount(sources, column, len(names)).astype(np.int64) for column in columns]
        for unit, counts in lengths.items():
            values, times = np.unique(documents[unit], return_counts=True)
            for value, number in zip(values.tolist(), times.tolist(), strict=True):
                counts[value] += number
        advance(len(documents))
    by_source = zip(names, sums.T.tolist(), strict=True)
    return CorpusTotals({name: TextTotals(*values) for name, values in by_source if values[0]}, *lengths.values())
