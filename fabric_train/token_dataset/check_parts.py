"""Check, before their rows are used, that the files of all parts are as long as when they were merged.

Sizes are in ``parts.json``, so no row is read. For each part, only its manifest, the sizes of its files of rows and the
headers of its index are read. Changed content of the same size is found by the checksum of a row, when the row is read.
"""

import os
from pathlib import Path

import numpy as np

from fabric_train.cli.errors import InputError, raise_if_limit_reached
from fabric_train.token_dataset.document_index import ARRAYS, CHECKSUM, CHECKSUMS, FOLDER
from fabric_train.token_dataset.parts import TOKENIZE_AGAIN, Parts, PartSplit, map_array


def check_parts(parts: Parts) -> None:
    """Raise an InputError that names the first file of a part that is missing, damaged, or of a different size."""
    for part_index, part in enumerate(parts.record.parts):
        parts.check(part_index)
        for split_name, split in part.splits.items():
            folder = parts.folder_of(part_index) / split_name
            for file in split.files:
                _check_size(folder / file.name, file.bytes)
            _check_index(folder / FOLDER, split, has_checksums=parts.record.has_checksums)


def _check_size(file: Path, expected: int) -> None:
    try:
        size = os.stat(file).st_size
    except OSError as error:
        raise_if_limit_reached(error)
        raise InputError(f"{file}: {error.strerror}; restore it, or {TOKENIZE_AGAIN}") from None
    if size != expected:
        raise InputError(f"{file} has {size:,} bytes instead of {expected:,}; {TOKENIZE_AGAIN}")


def _check_index(folder: Path, split: PartSplit, *, has_checksums: bool) -> None:
    """Compare the number of records in each array of an index with ``parts.json``."""
    lengths = {"documents": split.documents, "rows": split.rows + 1, "continuations": split.continuations}
    for name, dtype in ARRAYS.items():
        _check_length(folder / f"{name}.npy", dtype, lengths[name])
    if has_checksums:
        _check_length(folder / CHECKSUMS, CHECKSUM, split.rows)


def _check_length(file: Path, dtype: np.dtype, expected: int) -> None:
    num_records = len(map_array(file, dtype, TOKENIZE_AGAIN))
    if num_records != expected:
        raise InputError(f"{file}: {num_records:,} records instead of {expected:,}; {TOKENIZE_AGAIN}")
