"""Find documents, their rows, and the rows of sources in a document index."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fabric_train.token_dataset.document_index import DocumentIndex, ShowSearched, SourceTable, chunks
from fabric_train.token_dataset.manifest import Manifest


@dataclass(frozen=True)
class TokensInRow:
    """The tokens of some documents in one row."""

    num_tokens: int
    num_repeated: int
    """How many of them are in an earlier row too: a piece may begin with the last tokens of the previous piece."""


def num_records(index: DocumentIndex) -> int:
    """Return the number of records that the search for a document and its rows reads."""
    return len(index.documents) + len(index.continuations)


def files_named(sources: SourceTable, name: str) -> dict[str, list[int]]:
    """Return the files with a name, as indices in the document index, by their full name.

    A file has the name if its full name is ``name`` or, if there is no such file, ends with ``/name``. The same file
    may occur several times.
    """
    files_with_name: dict[str, list[int]] = {}
    files_with_ending: dict[str, list[int]] = {}
    ending = f"/{name.removeprefix('./')}"
    for file in range(sources.num_files):
        file_name = sources.file_name(file)
        if file_name == name:
            files_with_name.setdefault(file_name, []).append(file)
        elif file_name.endswith(ending):
            files_with_ending.setdefault(file_name, []).append(file)
    return files_with_name or files_with_ending


def find_documents(index: DocumentIndex, files: Sequence[int], row: int, show: ShowSearched) -> list[int]:
    """Return the documents at a row of some files; there are several if a document is packed several times.

    Args:
        index: the document index of a split.
        files: indices of files.
        row: the row in the file, from 1.
        show: called with the number of records that were just searched.
    """
    found_documents: list[int] = []
    for first_document, documents in chunks(index.documents, show):
        at_row = np.flatnonzero(documents["row"] == row)
        in_files = at_row[np.isin(documents["file"][at_row], files)]
        found_documents += (first_document + in_files).tolist()
    return found_documents


def find_rows(index: DocumentIndex, documents: Sequence[int], show: ShowSearched) -> dict[int, TokensInRow]:
    """Return the rows that hold tokens of some documents, in ascending order, and count these tokens.

    Args:
        index: the document index of a split.
        documents: the numbers of the documents.
        show: called with the number of records that were just searched.
    """
    # find the rows in which the documents begin; a document that no row has is found after the last row
    rows = {_find_row(index.rows["documents"], document) for document in documents}
    rows.discard(index.num_rows)

    # find the rows in which they continue
    searched_documents = np.array(documents, dtype=np.uint64)
    for first_continuation, continuations in chunks(index.continuations, show):
        matches = np.flatnonzero(np.isin(continuations["document"], searched_documents))
        for continuation in (first_continuation + matches).tolist():
            rows.add(_find_row(index.rows["continuations"], continuation))

    # sum their tokens by row; ``pieces.rows`` are indices of ``sorted_rows``
    sorted_rows = sorted(rows)
    pieces = index.pieces(np.array(sorted_rows, dtype=np.int64))
    is_searched = np.isin(pieces.documents, documents)
    row_indices = pieces.rows[is_searched]
    token_sums = np.bincount(row_indices, pieces.lengths[is_searched], minlength=len(sorted_rows))
    repeated_sums = np.bincount(row_indices, pieces.repeated[is_searched], minlength=len(sorted_rows))
    tokens_by_row = {}
    for row, num_tokens, num_repeated in zip(sorted_rows, token_sums, repeated_sums, strict=True):
        tokens_by_row[row] = TokensInRow(int(num_tokens), int(num_repeated))
    return tokens_by_row


def _find_row(first_numbers: np.ndarray, number: int) -> int:
    """Return the row to which a document or continuation belongs.

    Args:
        first_numbers: the number of the first document, or of the first continuation, of each row, ascending.
        number: the number of the document or the continuation.
    """
    # bisect reads only a few records; numpy's search may copy all
    return bisect_right(first_numbers, number) - 1


def rows_of_sources(index: DocumentIndex, manifest: Manifest) -> dict[str, list[range]] | None:
    """Return the rows of each source as ranges, in order; None if ``--weights`` mixed the sources.

    A row belongs to the source of its first token. Documents are in the order of the sources and their files, so the
    file of a row's first document never decreases, and binary search finds where each source begins.
    """
    all_settings = [part.settings for part in manifest.parts] or [manifest.settings]
    if any(settings.weights for settings in all_settings):
        return None
    rows: dict[str, list[range]] = {name: [] for name in index.sources.names}
    first_files = np.cumsum([0, *(record.num_files for record in manifest.sources)])
    row_borders = _find_first_rows(index, first_files)
    for record, (start, end) in zip(manifest.sources, pairwise(row_borders), strict=True):
        if start < end:
            rows[record.name].append(range(start, end))
    return {name: ranges for name, ranges in rows.items() if ranges}


def _find_first_rows(index: DocumentIndex, files: np.ndarray) -> list[int]:
    """Return for each file [n] the first row whose first document is in that file or in a later one.

    The binary searches for all files run in parallel.
    """
    low = np.zeros(len(files), np.int64)
    high = np.full(len(files), index.num_rows)
    while True:
        is_open = low < high
        if not is_open.any():
            return low.tolist()
        middle = (low + high)[is_open] // 2
        pieces = index.pieces(middle)
        first_documents = pieces.documents[pieces.positions == 0]
        is_before = index.documents["file"][first_documents] < files[is_open]
        low[is_open] = np.where(is_before, middle + 1, low[is_open])
        high[is_open] = np.where(is_before, high[is_open], middle)
