"""Find the documents that nearly repeat an earlier one: MinHash signatures, and clusters of documents whose are alike.

A document is the set of its 5-grams of words. For a random hash function, the probability that two sets have the same
smallest value is their Jaccard similarity, shared 5-grams / all 5-grams (Broder, On the resemblance and containment of
documents, 1997). The share of 112 functions for which it is the same estimates it, with a standard error of at most
0.05. The functions are ``(multiplier * x + addend) mod 2**64`` with odd multipliers, ``affine64`` of datasketch.
Words are lower-cased runs of letters and digits, so case, punctuation and line breaks do not count. In scripts written
without spaces, each character is a word.

Documents with the same hash of a band (:func:`choose_bands`) are candidates. A candidate pair counts if its whole
signatures are similar enough. Pairs are joined to clusters, so a document can be in a cluster through another one, as
in FineWeb and in Lee et al., Deduplicating training data makes language models better, arXiv:2107.06499.

Memory does not grow with the text. Besides 8 bytes a document for the clusters it is a fixed amount: the hashes of a
band are written to disk in ranges of hashes, and one range is read at a time, in pieces.
"""

import shutil
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fabric_train.workers import ShowShare, progress_of

NUM_HASHES = 112
SIGNATURE_BYTES = 4 * NUM_HASHES
NO_WORDS = np.uint32(0xFFFFFFFF)  # the values of a document without words, which repeats no other
_WORDS_PER_SHINGLE = 5
_MIN_RECALL = 0.9  # of the pairs whose similarity is the threshold
_FORMAT = 1  # raise it when the values change
_SHINGLES_AT_ONCE = 1024  # their values are 900 KiB
_CHARACTERS_AT_ONCE = 1 << 16  # a word across the end counts as two

# Thai and Lao, Myanmar, Khmer, kana, Chinese
_UNSPACED = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF))
_BETWEEN, _IN_WORD, _IS_WORD = range(3)  # kinds of characters

# random_raw, because numpy keeps its numbers the same in all versions
_RANDOM = np.random.PCG64(1).random_raw((2, NUM_HASHES, 1))
_MULTIPLIERS = _RANDOM[0] | np.uint64(1)
_ADDENDS = _RANDOM[1]
_PLACES = np.random.PCG64(2).random_raw(_WORDS_PER_SHINGLE) | np.uint64(1)
_HALF = np.uint64(32)
_SIGNATURES_AT_ONCE = 1 << 15  # 14 MiB
_RECORDS_AT_ONCE = 1 << 22  # 64 MiB
_NEIGHBOURS = 16  # earlier candidates that each is compared with, besides the first one
_RECORD = np.dtype([("hash", np.uint64), ("document", np.int64)])


def signature(text: str) -> np.ndarray:
    """Return the signature of a text, uint32 [112]; all values are ``NO_WORDS`` if it has no words."""
    pieces = range(0, max(1, len(text)), _CHARACTERS_AT_ONCE)
    words = np.concatenate([_words(text[start : start + _CHARACTERS_AT_ONCE]) for start in pieces])
    if not len(words):
        return np.full(NUM_HASHES, NO_WORDS)
    shingles = _shingles(words)
    smallest = np.full(NUM_HASHES, np.iinfo(np.uint64).max)
    for start in range(0, len(shingles), _SHINGLES_AT_ONCE):
        values = _MULTIPLIERS * shingles[start : start + _SHINGLES_AT_ONCE]
        values += _ADDENDS
        np.minimum(smallest, values.min(axis=1), out=smallest)
    return (smallest >> _HALF).astype(np.uint32)


def _words(text: str) -> np.ndarray:
    """Return a hash of each word, uint64 [words]: a polynomial of its characters' code points, mixed."""
    codes = np.frombuffer(text.lower().encode("utf-32-le", "surrogatepass"), np.uint32)
    kinds = np.zeros(len(codes) + 2, dtype=np.uint8)
    kinds[1:-1] = _kinds()[codes]
    borders = np.flatnonzero((kinds[1:] != kinds[:-1]) | (kinds[1:] == _IS_WORD))
    of_words = np.flatnonzero(kinds[borders + 1] != _BETWEEN)
    starts = borders[of_words]
    ends = borders[of_words + 1]
    powers, inverses = _powers(3 * _CHARACTERS_AT_ONCE)  # a character has up to 3 in lower case
    sums = np.zeros(len(codes) + 1, dtype=np.uint64)
    np.cumsum(codes * powers[: len(codes)], out=sums[1:])
    return _mix((sums[ends] - sums[starts]) * inverses[starts])


@cache
def _kinds() -> np.ndarray:
    """Return the kind of each code point, uint8 [code points]; letters, digits and their accents are words."""
    of_words = ("L", "M", "N")
    kinds = np.array([unicodedata.category(chr(code))[0] in of_words for code in range(0x110000)], dtype=np.uint8)
    for first, last in (*_UNSPACED, (0x20000, 0x3FFFF)):
        kinds[first : last + 1] *= _IS_WORD
    return kinds


@cache
def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the powers of an odd number modulo 2**64 and their inverses, uint64 [count] each."""
    base = int(np.random.PCG64(3).random_raw()) | 1
    powers, inverses = (
        np.multiply.accumulate(np.array([1] + [one] * (count - 1), dtype=np.uint64))
        for one in (base, pow(base, -1, 1 << 64))
    )
    return powers, inverses


def _shingles(words: np.ndarray) -> np.ndarray:
    """Return the hashes of the 5-grams of hashed words, uint64; a text of fewer words is one shingle."""
    count = max(1, len(words) - _WORDS_PER_SHINGLE + 1)
    shingles = np.zeros(count, dtype=np.uint64)
    for place, multiplier in enumerate(_PLACES[: len(words)]):
        shingles += words[place : place + count] * multiplier
    return _mix(shingles)  # the sum alone is linear, and so are the hash functions


def _mix(hashes: np.ndarray) -> np.ndarray:
    """Return the hashes, uint64, after the last step of MurmurHash3: each bit of the input changes half of the bits."""
    shift = np.uint64(33)
    hashes = (hashes ^ (hashes >> shift)) * np.uint64(0xFF51AFD7ED558CCD)
    hashes = (hashes ^ (hashes >> shift)) * np.uint64(0xC4CEB9FE1A85EC53)
    return hashes ^ (hashes >> shift)


def similarities(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the estimated Jaccard similarity of each pair of signatures, uint32 [pairs, 112] each; float64 [pairs]."""
    return (left == right).sum(axis=1) / NUM_HASHES


def choose_bands(threshold: float) -> tuple[int, int]:
    """Return the number of bands and the rows (values of the signature) of each.

    Two documents are compared if they have all values of a band in common. That happens with probability
    ``1 - (1 - similarity**rows)**bands`` (Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, chapter 3). More
    rows mean fewer needless comparisons, so this is the largest number of rows with which pairs at the threshold are
    found with a probability of 0.9 or more. At 0.8 it is 14 bands of 8 rows, as in FineWeb (arXiv:2406.17557).
    """
    for rows in range(NUM_HASHES, 1, -1):
        bands = NUM_HASHES // rows
        if 1 - (1 - threshold**rows) ** bands >= _MIN_RECALL:
            return bands, rows
    return NUM_HASHES, 1


def band_hashes(signatures: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """Return a hash of each band of ``rows`` values of signatures, uint32 [N, 112], as uint64 [N, bands]."""
    values = signatures[:, : bands * rows].reshape(len(signatures), bands, rows).astype(np.uint64)
    hashes = np.zeros((len(signatures), bands), dtype=np.uint64)
    for row in range(rows):
        hashes = _mix(hashes + values[:, :, row])
    return hashes


def settings(threshold: float) -> dict[str, Any]:
    """Return everything that decides which documents are near duplicates, as JSON."""
    bands, rows = choose_bands(threshold)
    return {
        "threshold": threshold,
        "words_per_shingle": _WORDS_PER_SHINGLE,
        "hashes": NUM_HASHES,
        "bands": bands,
        "rows": rows,
        "format": _FORMAT,
    }


class SignatureFiles:
    """The signatures of all documents, numbered in the order of the files, which hold uint32 [documents, 112] each."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        counts = [file.stat().st_size // SIGNATURE_BYTES for file in files]
        self._firsts = np.cumsum([0, *counts])
        self.num_documents = int(self._firsts[-1])

    def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the first document's number and the signatures, uint32 [documents, 112], of one chunk after another."""
        for first, file in zip(self._firsts.tolist(), self._files, strict=False):
            for values in _read_pieces(file, np.dtype((np.uint32, NUM_HASHES)), _SIGNATURES_AT_ONCE):
                yield first, values
                first += len(values)

    def similarities(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return the estimated Jaccard similarity of pairs of documents, int64 [pairs] each, as float64 [pairs]."""
        documents, places = np.unique(np.concatenate([left, right]), return_inverse=True)
        signatures = np.empty((len(documents), NUM_HASHES), dtype=np.uint32)
        borders = np.searchsorted(documents, self._firsts)
        for file, first, (start, end) in zip(self._files, self._firsts, pairwise(borders), strict=False):
            if start < end:
                mapped = np.memmap(file, np.uint32, "r").reshape(-1, NUM_HASHES)
                signatures[start:end] = mapped[documents[start:end] - first]
        return similarities(signatures[places[: len(left)]], signatures[places[len(left) :]])


class _Clusters:
    """Disjoint sets of documents; the root of each is its first document."""

    def __init__(self, num_documents: int) -> None:
        self._parents = np.arange(num_documents)

    def roots(self, documents: np.ndarray) -> np.ndarray:
        """Return the first document of each one's cluster, int64 like ``documents``."""
        roots = self._parents[documents]
        while ((above := self._parents[roots]) != roots).any():
            roots = above
        self._parents[documents] = roots
        return roots

    def all_roots(self) -> np.ndarray:
        """Return the first document of every document's cluster, int64 [documents], not a copy."""
        for start in range(0, len(self._parents), _RECORDS_AT_ONCE):
            self.roots(np.arange(start, min(start + _RECORDS_AT_ONCE, len(self._parents))))
        return self._parents

    def join(self, left: np.ndarray, right: np.ndarray) -> None:
        """Join the clusters of pairs of documents, int64 [pairs] each."""
        while len(left):
            left = self.roots(left)
            right = self.roots(right)
            differ = left != right
            left = left[differ]
            right = right[differ]
            # a parent is never above its child, so no cycle can arise
            np.minimum.at(self._parents, np.maximum(left, right), np.minimum(left, right))


@dataclass(frozen=True)
class NearDuplicates:
    """Which documents nearly repeat each other."""

    firsts: np.ndarray  # int64 [documents], the first document of each one's cluster; mostly it is itself
    signatures: SignatureFiles

    def repeats(self, first: int, count: int) -> np.ndarray:
        """Return whether each of ``count`` documents from ``first`` on nearly repeats an earlier one, bool [count]."""
        return self.firsts[first : first + count] != np.arange(first, first + count)


def find_near_duplicates(files: Sequence[Path], threshold: float, folder: Path) -> NearDuplicates:
    """Find documents whose signatures in ``files`` are like an earlier one's; ``folder`` is for the bands."""
    folder.mkdir()
    signatures = SignatureFiles(files)
    with progress_of("near duplicates") as show:
        clusters = _find_clusters(signatures, threshold, folder, show)
    shutil.rmtree(folder)
    return NearDuplicates(clusters.all_roots(), signatures)


def _find_clusters(signatures: SignatureFiles, threshold: float, folder: Path, show: ShowShare) -> _Clusters:
    bands, rows = choose_bands(threshold)
    num_documents = signatures.num_documents
    num_ranges = -(-num_documents // _RECORDS_AT_ONCE)
    clusters = _Clusters(num_documents)
    for first, values in signatures.chunks():
        _write_bands(folder, first, values, bands, rows, num_ranges)
        show((first + len(values)) / num_documents / (1 + bands))
    files = [folder / f"{band}-{number}" for band in range(bands) for number in range(num_ranges)]
    for done, file in enumerate(files):
        if file.exists():
            for left, right in _candidates(file):
                _join_similar(clusters, signatures, left, right, threshold)
        show((1 + (done + 1) / num_ranges) / (1 + bands))
    return clusters


def _write_bands(folder: Path, first: int, signatures: np.ndarray, bands: int, rows: int, num_ranges: int) -> None:
    """Append the hashes of each band to the files ``BAND-RANGE``."""
    with_words = np.flatnonzero((signatures != NO_WORDS).any(axis=1))
    hashes = band_hashes(signatures[with_words], bands, rows)
    for band in range(bands):
        records = np.empty(len(with_words), dtype=_RECORD)
        records["hash"] = hashes[:, band]
        records["document"] = with_words + first
        ranges = (records["hash"] >> np.uint64(32)) * np.uint64(num_ranges) >> np.uint64(32)
        order = np.argsort(ranges, kind="stable")
        borders = np.searchsorted(ranges[order], np.arange(num_ranges + 1))
        for number, (start, end) in enumerate(pairwise(borders)):
            if start < end:
                with (folder / f"{band}-{number}").open("ab") as file:
                    file.write(records[order[start:end]].data)


def _candidates(file: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs of documents with the same hash, int64 [pairs] each: the earlier ones and the later ones.

    Each document is paired with the first one that has its hash and with some that are shortly before it: all pairs of
    a large group would be too many. A later piece of the file starts with the first documents of those before it.
    """
    first_ones = np.empty(0, dtype=_RECORD)
    for piece in _read_pieces(file, _RECORD, _RECORDS_AT_ONCE):
        records = np.concatenate([first_ones, piece])
        records = records[np.argsort(records["hash"], kind="stable")]  # so documents of one hash stay in order
        is_first = np.concatenate([[True], records["hash"][1:] != records["hash"][:-1]])
        first_ones = records[is_first]
        grouped = ~is_first
        grouped[:-1] |= ~is_first[1:]
        yield from _pairs(records["document"][grouped], is_first[grouped])


def _pairs(documents: np.ndarray, is_first: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the pairs of documents that are ordered by groups; ``is_first`` is True where a group begins."""
    places = np.arange(len(documents))
    begins = np.maximum.accumulate(np.where(is_first, places, 0))
    yield documents[begins[~is_first]], documents[~is_first]
    for distance in range(1, _NEIGHBOURS + 1):
        later = np.flatnonzero(places - distance > begins)
        if not len(later):
            return
        yield documents[later - distance], documents[later]


def _join_similar(
    clusters: _Clusters, signatures: SignatureFiles, left: np.ndarray, right: np.ndarray, threshold: float
) -> None:
    """Join the pairs that are similar enough and not in one cluster already."""
    for start in range(0, len(left), _SIGNATURES_AT_ONCE):
        ours = left[start : start + _SIGNATURES_AT_ONCE]
        others = right[start : start + _SIGNATURES_AT_ONCE]
        differ = clusters.roots(ours) != clusters.roots(others)
        ours = ours[differ]
        others = others[differ]
        similar = signatures.similarities(ours, others) >= threshold
        clusters.join(ours[similar], others[similar])


def _read_pieces(file: Path, dtype: np.dtype, count: int) -> Iterator[np.ndarray]:
    """Yield the content of a file as arrays of up to ``count`` elements."""
    with file.open("rb") as opened:
        while len(piece := np.fromfile(opened, dtype, count)):
            yield piece
