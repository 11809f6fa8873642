"""Compare the document index of a split with its rows, and with the ledger of its sources."""

from collections.abc import Sequence

import numpy as np

from fabric_train.tokenization.inspect.split_check import Problem
from fabric_train.tokenization.manifest import SourceLedger
from fabric_train.tokenization.packing.document_index import DocumentIndex, chunks
from fabric_train.tokenization.packing.token_folder import RowBatch, altered_rows

_COUNTED = ("documents", "bytes", "tokens_in", "tokens_repeated", "tokens_in_rows")


class IndexCheck:
    """A check of one split's index. Call ``add`` with all batches of rows, ``finish`` last."""

    def __init__(self, split: str, index: DocumentIndex) -> None:
        self._split, self._index = split, index
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
                said, found = getattr(ledger.get(name), what, 0), int(totals[number])
                if said != found:
                    text = f"the ledger has {said:,} {what.replace('_', ' ')} of {name}, the document index {found:,}"
                    problems.append(Problem(self._split, text))
        return problems

    def _count(self, what: str, sources: np.ndarray, values: np.ndarray) -> None:
        counts = np.bincount(sources, weights=values, minlength=len(self._found[what]))
        self._found[what] += counts.astype(np.int64)

    def _note(self, what: str, rows: np.ndarray) -> None:
        if len(rows):
            self._wrong_rows.setdefault(what, []).extend(rows.tolist())


def _altered(batch: RowBatch, checksums: np.ndarray) -> np.ndarray:
    """Return which rows of a batch do not have these checksums, counted from the first of the batch."""
    cuts, nothing = batch.offsets[1:-1], [None] * len(checksums)
    labels = nothing if batch.labels is None else np.split(batch.labels, cuts)
    starts: Sequence[np.ndarray | None] = nothing
    if batch.document_starts is not None and batch.start_rows is not None:
        counts = np.bincount(batch.start_rows, minlength=len(checksums))
        starts = np.split(batch.document_starts, np.cumsum(counts)[:-1])
    return altered_rows(zip(np.split(batch.input_ids, cuts), labels, starts, strict=True), checksums)
