"""Compute a checksum of the content of each row, by which a row that has changed since is found."""

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from xxhash import xxh3_64

CHECKSUM = np.dtype("<u8")


def row_checksum(input_ids: np.ndarray, labels: np.ndarray | None, document_starts: np.ndarray | None) -> int:
    """Return the XXH3-64 hash of a row's tokens, its labels and the positions at which its documents begin.

    Labels count only if some differ from ``input_ids``. So a split whose tokens are all supervised has the same
    checksums with and without the column, which a merge may add.

    Args:
        input_ids: int32 [T].
        labels: int32 [T]; None if each token is its own label.
        document_starts: int32 [any number]; None if the split has no such column.
    """
    digest = xxh3_64(np.ascontiguousarray(input_ids).data)
    if labels is not None and not np.array_equal(input_ids, labels):
        digest.update(np.ascontiguousarray(labels).data)
    if document_starts is not None:
        digest.update(np.ascontiguousarray(document_starts).data)
    return digest.intdigest()


def altered_rows(
    rows: Iterable[tuple[np.ndarray, np.ndarray | None, np.ndarray | None]], checksums: np.ndarray
) -> np.ndarray:
    """Return the indices of the rows that do not have their checksum, int64 [any number].

    Args:
        rows: what :func:`row_checksum` takes, for each row.
        checksums: CHECKSUM [rows], those that they were written with.
    """
    return np.flatnonzero(np.array([row_checksum(*row) for row in rows], dtype=CHECKSUM) != checksums)


def row_checksums(
    input_ids: np.ndarray, labels: np.ndarray | None, document_starts: np.ndarray, offsets: np.ndarray
) -> np.ndarray:
    """Return the checksums of rows of equal length, CHECKSUM [R].

    Args:
        input_ids: int32 [R * T], the rows joined.
        labels: int32 [R * T]; None if each token is its own label.
        document_starts: int32 [any number], positions within a row.
        offsets: integers [R + 1]; row r has ``document_starts[offsets[r] : offsets[r + 1]]``.
    """
    num_rows = len(offsets) - 1
    rows = input_ids.reshape(num_rows, -1)
    of_labels = [None] * num_rows if labels is None else labels.reshape(num_rows, -1)
    starts = (document_starts[begin:end] for begin, end in pairwise(offsets))
    return np.array([row_checksum(*row) for row in zip(rows, of_labels, starts, strict=True)], dtype=CHECKSUM)
