"""Encoded documents that lie on the disk until all are there and rows can be planned from their lengths."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class SpooledFile:
    """Documents one after another, without anything between them.

    ``tokens`` is a file of int32 and ``supervised`` one of as many bytes, 1 for a token that is a target and 0 for one
    that is not; None where all are.
    """

    tokens: Path
    supervised: Path | None = None


@dataclass(frozen=True)
class SpooledDocuments:
    """The documents of all files, numbered in the files' order; a document does not go on in the next file.

    Some hundred files of 64 MB or more are read fastest; there may be any number, of any size, empty ones too.

    Args:
        lengths: int64 [documents], tokens in each; 0 is allowed. Their sum is what the files hold.
        files: the files in order.
    """

    lengths: np.ndarray
    files: tuple[SpooledFile, ...]

    @property
    def has_masks(self) -> bool:
        """Whether a file says which tokens are supervised."""
        return any(file.supervised is not None for file in self.files)
