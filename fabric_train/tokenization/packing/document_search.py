"""Find documents in a document index by their file and line, and the rows that hold them."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from fabric_train.tokenization.packing.document_index import DocumentIndex, SourceTable

_RECORDS_PER_CHUNK = 1 << 20  # bounds memory, however large the index is

ShowSearched = Callable[[int], None]  # further records searched


def num_records(index: DocumentIndex) -> int:
    """Return how many records a search for a document and for its rows reads."""
    return len(index.documents) + len(index.continuations)


def files_named(sources: SourceTable, name: str) -> dict[str, list[int]]:
    """Return the files with a name, or if there is none, those whose name ends with ``/name``, by their whole name.

    The same file may have several numbers: it was given twice, or is in several parts of a merged token dataset.
    """
    exact, ending = dict[str, list[int]](), dict[str, list[int]]()
    for file in range(sources.num_files):
        whole = sources.file_name(file)
        if whole == name or whole.endswith(f"/{name.removeprefix('./')}"):
            (exact if whole == name else ending).setdefault(whole, []).append(file)
    return exact or ending


def find_documents(index: DocumentIndex, files: Sequence[int], row: int, show: ShowSearched) -> list[int]:
    """Return the numbers of the documents at a row, counted from 1, of some files.

    They are several if the document is packed several times. Reads all documents of the index, a part at a time.
    """
    found = list[int]()
    for first, part in _chunks(index.documents, show):
        places = np.flatnonzero(part["row"] == row)
        found += (first + places[np.isin(part["file"][places], files)]).tolist()
    return found


def find_rows(index: DocumentIndex, documents: Sequence[int], show: ShowSearched) -> dict[int, tuple[int, int]]:
    """Return the rows that hold tokens of some documents, with the number of these tokens and of the repeated ones.

    The rows in which they begin are found by binary search, the others by reading all continuations, a part at a time.
    """
    rows = {_row_with(index.rows["documents"], document) for document in documents}
    for first, part in _chunks(index.continuations, show):
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
    """Return the row whose range has a number; ``bisect`` reads only a few records, numpy's search may copy all."""
    return bisect_right(first_of_rows, number) - 1


def _chunks(records: np.ndarray, show: ShowSearched) -> Iterator[tuple[int, np.ndarray]]:
    for first in range(0, len(records), _RECORDS_PER_CHUNK):
        part = records[first : first + _RECORDS_PER_CHUNK]
        yield first, part
        show(len(part))
