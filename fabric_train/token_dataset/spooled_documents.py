"""Copy pieces of encoded documents from the files to which tokenization has written them."""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

_TOKEN_BYTES = 4
_MAX_OPEN_FILES = 128


@dataclass(frozen=True)
class SpooledFile:
    """Files with joined documents."""

    tokens: Path  # an int32 for each token
    supervised: Path | None = None  # a byte for each token, 1 for a target and 0 for others; None if all are targets


@dataclass(frozen=True)
class SpooledDocuments:
    """The documents of all files, numbered in order. Each is in one file; random order is fast for up to 128 files."""

    lengths: np.ndarray  # int64 [documents], tokens in each document; 0 is allowed
    files: tuple[SpooledFile, ...]  # with as many tokens as ``lengths`` adds up to
    rejected_at: np.ndarray | None = None  # of preference pairs: where the rejected sequence begins, int64 [documents]

    @property
    def has_masks(self) -> bool:
        return any(file.supervised is not None for file in self.files)


@dataclass(frozen=True)
class PiecesToCopy:
    """Pieces of documents, at least one; int64 [pieces] each."""

    documents: np.ndarray
    starts: np.ndarray  # the position of the first token in the document
    lengths: np.ndarray
    targets: np.ndarray  # the position in the target to which the first token is copied


@dataclass(frozen=True)
class _Runs:
    """Runs of tokens to copy from one file."""

    begins: list[int]  # the first token in the file
    lengths: list[int]
    targets: list[int]  # the position of the first token in the target


class SpoolReader:
    """Copies pieces of documents from the files without keeping them in memory."""

    def __init__(self, documents: SpooledDocuments) -> None:
        self._files = documents.files
        # positions count the tokens of all files
        self._document_begins = np.cumsum(documents.lengths) - documents.lengths
        file_lengths = [file.tokens.stat().st_size // _TOKEN_BYTES for file in self._files]
        file_borders = np.cumsum([0, *file_lengths], dtype=np.int64)
        assert documents.lengths.sum() == file_borders[-1], "the files hold more or less than the documents"
        self._file_begins = file_borders[:-1]
        self._map = lru_cache(_MAX_OPEN_FILES)(_map_file)

    def read(self, pieces: PiecesToCopy, input_ids: np.ndarray, supervised: np.ndarray | None) -> None:
        """Copy the tokens of pieces into ``input_ids``, int32, and masks, if any, into ``supervised``, uint8."""
        for file_index, runs in self._runs_by_file(pieces):
            file = self._files[file_index]
            self._copy(file.tokens, runs, input_ids)
            if supervised is not None and file.supervised is not None:
                self._copy(file.supervised, runs, supervised)

    def _runs_by_file(self, pieces: PiecesToCopy) -> Iterator[tuple[int, _Runs]]:
        """Join pieces that are adjacent in a file and in the target; yield the index of each file with its runs."""
        # find the pieces that continue the previous piece
        begins = self._document_begins[pieces.documents] + pieces.starts  # positions in all files
        files = np.searchsorted(self._file_begins, begins, side="right") - 1
        is_same_file = np.diff(files) == 0
        is_adjacent = (np.diff(begins) == pieces.lengths[:-1]) & (np.diff(pieces.targets) == pieces.lengths[:-1])
        starts_run = np.concatenate([[True], ~(is_same_file & is_adjacent)])

        # join them to runs
        first_pieces = np.flatnonzero(starts_run)
        files = files[first_pieces]
        begins_in_file = begins[first_pieces] - self._file_begins[files]
        lengths = np.add.reduceat(pieces.lengths, first_pieces)
        targets = pieces.targets[first_pieces]

        # group the runs by file
        by_file = np.argsort(files, kind="stable")
        file_borders = np.flatnonzero(np.diff(files[by_file])) + 1
        for runs in np.split(by_file, file_borders):
            file_index = int(files[runs[0]])
            yield file_index, _Runs(begins_in_file[runs].tolist(), lengths[runs].tolist(), targets[runs].tolist())

    def _copy(self, file: Path, runs: _Runs, target: np.ndarray) -> None:
        """Copy runs of a file into an array with the file's elements: int32 tokens or bytes."""
        mapped = self._map(file)
        element: Literal["i", "B"] = "i" if target.itemsize == _TOKEN_BYTES else "B"
        # slicing memoryviews takes half as long as slicing numpy arrays
        target_view = target.data
        with memoryview(mapped) as content, content.cast(element) as source_view:
            for begin, length, position in zip(runs.begins, runs.lengths, runs.targets, strict=True):
                target_view[position : position + length] = source_view[begin : begin + length]
        mapped.madvise(mmap.MADV_DONTNEED)  # otherwise the pages of the file count as memory of this process


def _map_file(file: Path) -> mmap.mmap:
    with file.open("rb") as opened_file:
        return mmap.mmap(opened_file.fileno(), 0, access=mmap.ACCESS_READ)
