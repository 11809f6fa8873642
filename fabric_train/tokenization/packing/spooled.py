"""Read encoded documents from disk, where they wait until all lengths are known and rows are planned."""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

_TOKEN_BYTES = 4
_MAX_OPEN_FILES = 128

_Runs = tuple[list[int], list[int], list[int]]  # first positions in the file, lengths, first positions in the target


@dataclass(frozen=True)
class SpooledFile:
    """Files with the joined documents.

    ``tokens`` holds one int32 per token. ``supervised`` holds one byte per token, 1 if it is a target and 0 if not; it
    is None if all are.
    """

    tokens: Path
    supervised: Path | None = None


@dataclass(frozen=True)
class SpooledDocuments:
    """The documents of all files, numbered in the order of the files; each document is in one file.

    There may be any number of files of any size. Reading in random order is fast for up to 128 files.

    Args:
        lengths: int64 [documents], tokens in each document; 0 is allowed.
        files: in order; together they hold as many tokens as ``lengths`` adds up to.
    """

    lengths: np.ndarray
    files: tuple[SpooledFile, ...]

    @property
    def has_masks(self) -> bool:
        """Whether some tokens may not be supervised."""
        return any(file.supervised is not None for file in self.files)


@dataclass(frozen=True)
class PiecesToCopy:
    """One or more pieces of documents and where to copy them, int64 [pieces] each.

    ``starts`` are the first positions in the documents, ``targets`` the first positions in the target array.
    """

    documents: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    targets: np.ndarray


class SpoolReader:
    """A reader that copies pieces of documents from the files, and does not keep them in memory."""

    def __init__(self, documents: SpooledDocuments) -> None:
        self._begins = np.cumsum(documents.lengths) - documents.lengths
        self._files = documents.files
        ends = np.cumsum([0, *(file.tokens.stat().st_size // _TOKEN_BYTES for file in self._files)], dtype=np.int64)
        assert documents.lengths.sum() == ends[-1], "the files hold more or less than the documents"
        self._file_begins = ends[:-1]
        self._map = lru_cache(_MAX_OPEN_FILES)(_map)

    def read(self, pieces: PiecesToCopy, input_ids: np.ndarray, supervised: np.ndarray | None) -> None:
        """Copy pieces.

        Args:
            pieces: what to copy, and where.
            input_ids: int32, receives the tokens.
            supervised: uint8, receives 1 for targets and 0 for other tokens. It is not changed for the tokens of a file
                without masks. None if it is not needed.
        """
        for index, runs in self._runs_by_file(pieces):
            file = self._files[index]
            self._copy(file.tokens, runs, input_ids)
            if supervised is not None and file.supervised is not None:
                self._copy(file.supervised, runs, supervised)

    def _runs_by_file(self, pieces: PiecesToCopy) -> Iterator[tuple[int, _Runs]]:
        """Join pieces that are adjacent in a file and in the target, and yield the runs of each file."""
        sources = self._begins[pieces.documents] + pieces.starts
        files = np.searchsorted(self._file_begins, sources, side="right") - 1
        follows = (np.diff(files) == 0) & (np.diff(sources) == pieces.lengths[:-1])
        follows &= np.diff(pieces.targets) == pieces.lengths[:-1]
        firsts = np.flatnonzero(np.concatenate([[True], ~follows]))
        files = files[firsts]
        begins = sources[firsts] - self._file_begins[files]
        lengths = np.add.reduceat(pieces.lengths, firsts)
        targets = pieces.targets[firsts]
        by_file = np.argsort(files, kind="stable")
        for group in np.split(by_file, np.flatnonzero(np.diff(files[by_file])) + 1):
            yield int(files[group[0]]), (begins[group].tolist(), lengths[group].tolist(), targets[group].tolist())

    def _copy(self, file: Path, runs: _Runs, into: np.ndarray) -> None:
        mapped, target = self._map(file), into.data
        with memoryview(mapped) as content, content.cast("i" if into.itemsize == _TOKEN_BYTES else "B") as source:
            for begin, length, at in zip(*runs, strict=True):  # slicing memoryviews takes half as long as numpy arrays
                target[at : at + length] = source[begin : begin + length]
        mapped.madvise(mmap.MADV_DONTNEED)  # otherwise the pages of the file count as memory of this process


def _map(file: Path) -> mmap.mmap:
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
