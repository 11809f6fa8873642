"""Find the rows of a source inside a token dataset, without reading rows."""

from itertools import pairwise

import numpy as np

from fabric_train.cli.errors import InputError
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.tokenization.packing.document_index import DocumentIndex, open_index


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
