"""Encoded documents that lie on the disk until all are there and rows can be planned from their lengths."""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

_TOKEN_BYTES = 4
_MAX_OPEN_FILES = 128

_Runs = tuple[list[int], list[int], list[int]]  # begins in the file, lengths, begins in the target


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

    There may be any number of files, of any size; out of up to 128 of them documents are read fast in any order.

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


@dataclass(frozen=True)
class Pieces:
    """Pieces of documents and the places they are copied to, int64 [pieces] each, one piece or more.

    ``starts`` is the first token in the document, ``targets`` the first in what is copied to.
    """

    documents: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    targets: np.ndarray


class SpoolReader:
    """Copies pieces of documents out of the files, a batch at a time; what it has read does not stay in memory."""

    def __init__(self, documents: SpooledDocuments) -> None:
        self._begins = np.cumsum(documents.lengths) - documents.lengths
        self._files = documents.files
        ends = np.cumsum([0, *(file.tokens.stat().st_size // _TOKEN_BYTES for file in self._files)], dtype=np.int64)
        assert documents.lengths.sum() == ends[-1], "the files hold more or less than the documents"
        self._file_begins = ends[:-1]
        self._map = lru_cache(_MAX_OPEN_FILES)(_map)

    def read(self, pieces: Pieces, input_ids: np.ndarray, supervised: np.ndarray | None) -> None:
        """Copy the pieces' tokens into ``input_ids``, int32, and whether they are targets into ``supervised``, uint8.

        ``supervised`` is None where it is not asked for, and stays as it is where a file says nothing of its tokens.
        """
        for index, runs in self._runs_by_file(pieces):
            file = self._files[index]
            self._copy(file.tokens, runs, input_ids)
            if supervised is not None and file.supervised is not None:
                self._copy(file.supervised, runs, supervised)

    def _runs_by_file(self, pieces: Pieces) -> Iterator[tuple[int, _Runs]]:
        """Join pieces that follow each other in a file and in the target; yield each file's."""
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
            for begin, length, at in zip(*runs, strict=True):  # slices of memoryviews: half the time of numpy's
                target[at : at + length] = source[begin : begin + length]
        mapped.madvise(mmap.MADV_DONTNEED)  # else the files' pages count as this process's memory


def _map(file: Path) -> mmap.mmap:
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
