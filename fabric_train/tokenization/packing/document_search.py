"""Search a document index: a document by its file and line, its rows, and the rows of each source."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from fabric_train.tokenization.manifest import Manifest
from fabric_train.tokenization.packing.document_index import DocumentIndex, ShowSearched, SourceTable, chunks


def num_records(index: DocumentIndex) -> int:
    """Return how many records a search for a document and for its rows reads."""
    return len(index.documents) + len(index.continuations)


def files_named(sources: SourceTable, name: str) -> dict[str, list[int]]:
    """Return, by whole name, the numbers of files called ``name`` or else ending with ``/name``; one may come again."""
    exact, ending = dict[str, list[int]](), dict[str, list[int]]()
    for file in range(sources.num_files):
        whole = sources.file_name(file)
        if whole == name or whole.endswith(f"/{name.removeprefix('./')}"):
            (exact if whole == name else ending).setdefault(whole, []).append(file)
    return exact or ending


def find_documents(index: DocumentIndex, files: Sequence[int], row: int, show: ShowSearched) -> list[int]:
    """Return the numbers of the documents at a row, from 1, of some files: several if it is packed several times."""
    found = list[int]()
    for first, part in chunks(index.documents, show):
        places = np.flatnonzero(part["row"] == row)
        found += (first + places[np.isin(part["file"][places], files)]).tolist()
    return found


def find_rows(index: DocumentIndex, documents: Sequence[int], show: ShowSearched) -> dict[int, tuple[int, int]]:
    """Return the rows that hold tokens of some documents, each with the number of these tokens and of repeated ones."""
    rows = {_row_with(index.rows["documents"], document) for document in documents}
    for first, part in chunks(index.continuations, show):
        places = np.flatnonzero(np.isin(part["document"], np.array(documents, dtype=np.uint64)))
        rows |= {_row_with(index.rows["continuations"], place) for place in (first + places).tolist()}
    chosen = np.array(sorted(rows - {len(index.rows) - 1}), dtype=np.int64)  # those in no row follow the last one
    pieces = index.pieces(chosen)
    own = np.isin(pieces.documents, documents)
    tokens, repeated = (
        np.bincount(pieces.rows[own], weights=values[own], minlength=len(chosen)).astype(int).tolist()
        for values in (pieces.lengths, pieces.repeated)
    )
    return dict(zip(chosen.tolist(), zip(tokens, repeated, strict=True), strict=True))


def _row_with(first_of_rows: np.ndarray, number: int) -> int:
    return bisect_right(first_of_rows, number) - 1  # reads only a few records; numpy's search may copy all


def rows_of_sources(index: DocumentIndex, manifest: Manifest) -> dict[str, list[range]] | None:
    """Return the rows that each source has, as ranges in their order; None if ``--weights`` mixed the sources.

    A row is one of the source of its first token. Documents are in the order of the sources and their files, so the
    file of a row's first document never decreases, and binary search finds where each source begins.
    """
    settings = [part.settings for part in manifest.parts] or [manifest.settings]
    if any(one.weights for one in settings):
        return None
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
        pieces = index.pieces(middle)
        is_before = index.documents["file"][pieces.documents[pieces.positions == 0]] < files[open_]
        low[open_] = np.where(is_before, middle + 1, low[open_])
        high[open_] = np.where(is_before, high[open_], middle)
    return low.tolist()
