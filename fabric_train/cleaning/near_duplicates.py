"""Find documents that nearly repeat an earlier one: MinHash signatures, and clusters of similar documents.

A document is the set of its 5-grams of words. For a random hash function, the probability that two sets have the same
smallest value is their Jaccard similarity, shared 5-grams / all 5-grams (Broder, On the resemblance and containment of
documents, 1997). It is estimated by the share of 112 functions with the same smallest value, with a standard error of
at most 0.05. The functions are ``(multiplier * x + addend) mod 2**64`` with odd multipliers, ``affine64`` of
datasketch. Words are lower-cased runs of letters and digits, so case, punctuation and line breaks do not count. In
scripts written without spaces, each character is a word.

Documents with the same hash of a band (:func:`choose_bands`) are candidates. A candidate pair counts if its full
signatures are similar enough. Pairs are joined to clusters, so a document can be in a cluster through another one, as
in FineWeb and in Lee et al., Deduplicating training data makes language models better, arXiv:2107.06499.

Memory does not grow with the text. It is a fixed amount plus 8 bytes a document for the clusters: the hashes of a
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

from fabric_train.cli.progress import ShowShare, progress_of

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
_WORD_MULTIPLIERS = np.random.PCG64(2).random_raw(_WORDS_PER_SHINGLE) | np.uint64(1)
_HALF = np.uint64(32)
_SIGNATURES_AT_ONCE = 1 << 15  # 14 MiB
_RECORDS_AT_ONCE = 1 << 22  # 64 MiB
_NEIGHBOURS = 16  # documents before a document that it is compared with, besides the first of its group
_RECORD = np.dtype([("hash", np.uint64), ("document", np.int64)])


def signature(text: str) -> np.ndarray:
    """Return the signature of a text, uint32 [112]; all values are ``NO_WORDS`` if it has no words."""
    # hash the words, in pieces of the text
    starts = range(0, max(1, len(text)), _CHARACTERS_AT_ONCE)
    words = np.concatenate([_hash_words(text[start : start + _CHARACTERS_AT_ONCE]) for start in starts])
    if not len(words):
        return np.full(NUM_HASHES, NO_WORDS)

    # keep the smallest value of each hash function over all 5-grams of words
    shingles = _hash_shingles(words)
    smallest = np.full(NUM_HASHES, np.iinfo(np.uint64).max)
    for start in range(0, len(shingles), _SHINGLES_AT_ONCE):
        values = _MULTIPLIERS * shingles[start : start + _SHINGLES_AT_ONCE]  # [112, shingles]
        values += _ADDENDS
        np.minimum(smallest, values.min(axis=1), out=smallest)
    return (smallest >> _HALF).astype(np.uint32)  # the upper bits: the lower ones of a product are less random


def _hash_words(text: str) -> np.ndarray:
    """Return a hash of each word, uint64 [words]: a polynomial of its characters' code points, mixed.

    The polynomial of the word from ``start`` to ``end`` is the sum of ``code[i] * base**(i - start)`` modulo 2**64. All
    words are hashed at once: by differences of the cumulated sum of ``code[i] * base**i``, divided by ``base**start``.
    """
    # find where words start and end: where the kind of the characters changes, and around a character that is a word
    codes = np.frombuffer(text.lower().encode("utf-32-le", "surrogatepass"), np.uint32)
    kinds = np.zeros(len(codes) + 2, dtype=np.uint8)  # with a _BETWEEN at both ends
    kinds[1:-1] = _kinds_of_characters()[codes]
    is_border = (kinds[1:] != kinds[:-1]) | (kinds[1:] == _IS_WORD)
    borders = np.flatnonzero(is_border)
    starting_borders = np.flatnonzero(kinds[borders + 1] != _BETWEEN)
    starts = borders[starting_borders]
    ends = borders[starting_borders + 1]

    # hash the characters of each word
    powers, inverse_powers = _powers(3 * _CHARACTERS_AT_ONCE)  # a character has up to 3 in lower case
    sums = np.zeros(len(codes) + 1, dtype=np.uint64)
    np.cumsum(codes * powers[: len(codes)], out=sums[1:])
    return _mix((sums[ends] - sums[starts]) * inverse_powers[starts])


@cache
def _kinds_of_characters() -> np.ndarray:
    """Return the kind of each code point, uint8 [code points]; letters, digits and their accents form words."""
    is_in_word = [unicodedata.category(chr(code))[0] in ("L", "M", "N") for code in range(0x110000)]
    kinds = np.array(is_in_word, dtype=np.uint8)  # _BETWEEN or _IN_WORD
    for smallest, largest in (*_UNSPACED, (0x20000, 0x3FFFF)):
        kinds_in_range = kinds[smallest : largest + 1]
        kinds_in_range[kinds_in_range == _IN_WORD] = _IS_WORD
    return kinds


@cache
def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the powers 0, 1, … of an odd number modulo 2**64, and their inverses, uint64 [count] each."""
    base = int(np.random.PCG64(3).random_raw()) | 1
    inverse = pow(base, -1, 1 << 64)
    powers = np.multiply.accumulate(np.array([1] + [base] * (count - 1), dtype=np.uint64))
    inverse_powers = np.multiply.accumulate(np.array([1] + [inverse] * (count - 1), dtype=np.uint64))
    return powers, inverse_powers


def _hash_shingles(words: np.ndarray) -> np.ndarray:
    """Return the hashes of the 5-grams of hashed words, uint64; a text of fewer words is one shingle."""
    num_shingles = max(1, len(words) - _WORDS_PER_SHINGLE + 1)
    shingles = np.zeros(num_shingles, dtype=np.uint64)
    for position, multiplier in enumerate(_WORD_MULTIPLIERS[: len(words)]):
        shingles += words[position : position + num_shingles] * multiplier
    return _mix(shingles)  # the sum alone is linear, and so are the hash functions


def _mix(hashes: np.ndarray) -> np.ndarray:
    """Return the hashes, uint64, after the last step of MurmurHash3: each bit of the input changes half of the bits."""
    shift = np.uint64(33)
    hashes = (hashes ^ (hashes >> shift)) * np.uint64(0xFF51AFD7ED558CCD)
    hashes = (hashes ^ (hashes >> shift)) * np.uint64(0xC4CEB9FE1A85EC53)
    return hashes ^ (hashes >> shift)


def similarities(left_signatures: np.ndarray, right_signatures: np.ndarray) -> np.ndarray:
    """Return the estimated Jaccard similarity of each pair of signatures, uint32 [pairs, 112] each; float64 [pairs]."""
    return (left_signatures == right_signatures).sum(axis=1) / NUM_HASHES


def choose_bands(threshold: float) -> tuple[int, int]:
    """Return the number of bands, and the number of rows (values of the signature) in each.

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
    """Return a hash of each band, uint64 [documents, bands].

    Args:
        signatures: uint32 [documents, 112].
        bands: number of bands.
        rows: number of consecutive values of the signature in a band.
    """
    values = signatures[:, : bands * rows].reshape(len(signatures), bands, rows).astype(np.uint64)
    hashes = np.zeros((len(signatures), bands), dtype=np.uint64)
    for row in range(rows):
        hashes = _mix(hashes + values[:, :, row])
    return hashes


def settings(threshold: float) -> dict[str, Any]:
    """Return everything that determines which documents are near duplicates, as JSON."""
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
        self._first_documents = np.cumsum([0, *counts])
        self.num_documents = int(self._first_documents[-1])

    def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the signatures in chunks, uint32 [documents, 112], each with the number of its first document."""
        dtype = np.dtype((np.uint32, NUM_HASHES))
        for file, first_document in zip(self._files, self._first_documents.tolist(), strict=False):
            document = first_document
            for signatures in _read_chunks(file, dtype, _SIGNATURES_AT_ONCE):
                yield document, signatures
                document += len(signatures)

    def similarities(self, left_documents: np.ndarray, right_documents: np.ndarray) -> np.ndarray:
        """Return the estimated Jaccard similarity of pairs of documents, int64 [pairs] each, as float64 [pairs]."""
        # read each document's signature once, file by file
        documents, positions = np.unique(np.concatenate([left_documents, right_documents]), return_inverse=True)
        signatures = np.empty((len(documents), NUM_HASHES), dtype=np.uint32)
        borders = np.searchsorted(documents, self._first_documents)  # where each file's documents begin
        for file_index, (start, end) in enumerate(pairwise(borders)):
            if start < end:
                mapped = np.memmap(self._files[file_index], np.uint32, "r").reshape(-1, NUM_HASHES)
                rows = documents[start:end] - self._first_documents[file_index]
                signatures[start:end] = mapped[rows]
        left_positions = positions[: len(left_documents)]
        right_positions = positions[len(left_documents) :]
        return similarities(signatures[left_positions], signatures[right_positions])


class _Clusters:
    """Disjoint sets of documents, as a forest of parents; the root of a set is its first document."""

    def __init__(self, num_documents: int) -> None:
        self._parents = np.arange(num_documents)

    def roots(self, documents: np.ndarray) -> np.ndarray:
        """Return the first document of each document's cluster, int64 like ``documents``."""
        roots = self._parents[documents]
        while True:
            parents = self._parents[roots]
            if (parents == roots).all():
                break
            roots = parents
        self._parents[documents] = roots  # path compression: the next search is one step
        return roots

    def all_roots(self) -> np.ndarray:
        """Return the first document of every document's cluster, int64 [documents], without a copy."""
        num_documents = len(self._parents)
        for start in range(0, num_documents, _RECORDS_AT_ONCE):
            end = min(start + _RECORDS_AT_ONCE, num_documents)
            self.roots(np.arange(start, end))  # makes the root of each its parent
        return self._parents

    def join(self, left_documents: np.ndarray, right_documents: np.ndarray) -> None:
        """Join the clusters of pairs of documents, int64 [pairs] each.

        A pass joins all pairs at once. If several pairs have the same root, only one takes effect, so passes are
        repeated until the roots of all pairs agree.
        """
        left_roots = left_documents
        right_roots = right_documents
        while len(left_roots):
            left_roots = self.roots(left_roots)
            right_roots = self.roots(right_roots)
            is_separate = left_roots != right_roots
            left_roots = left_roots[is_separate]
            right_roots = right_roots[is_separate]
            # a parent is never above its child, so no cycle can arise
            children = np.maximum(left_roots, right_roots)
            np.minimum.at(self._parents, children, np.minimum(left_roots, right_roots))


@dataclass(frozen=True)
class NearDuplicates:
    """The documents that nearly repeat one another."""

    cluster_roots: np.ndarray  # int64 [documents], the first document of each document's cluster; mostly itself
    signatures: SignatureFiles

    def is_repeat(self, first_document: int, count: int) -> np.ndarray:
        """Return whether each of ``count`` documents, beginning with ``first_document``, nearly repeats an earlier one.

        Returns:
            bool [count].
        """
        end = first_document + count
        return self.cluster_roots[first_document:end] != np.arange(first_document, end)


def find_near_duplicates(files: Sequence[Path], threshold: float, folder: Path) -> NearDuplicates:
    """Cluster the documents whose signatures are similar.

    Args:
        files: the signatures of all documents, uint32 [documents, 112] each.
        threshold: smallest estimated similarity of two documents that are joined.
        folder: a folder to create for temporary files.
    """
    folder.mkdir()
    signatures = SignatureFiles(files)
    with progress_of("near duplicates") as show_share:
        clusters = _find_clusters(signatures, threshold, folder, show_share)
    shutil.rmtree(folder)
    return NearDuplicates(clusters.all_roots(), signatures)


def _find_clusters(signatures: SignatureFiles, threshold: float, folder: Path, show_share: ShowShare) -> _Clusters:
    """Write the hashes of all bands to ``folder``, then compare the documents that have the same hash of a band."""
    bands, rows = choose_bands(threshold)
    num_documents = signatures.num_documents
    num_ranges = -(-num_documents // _RECORDS_AT_ONCE)  # rounded up
    num_phases = 1 + bands  # writing takes about as long as the comparisons of a band

    for first_document, values in signatures.chunks():
        _write_bands(folder, first_document, values, bands=bands, rows=rows, num_ranges=num_ranges)
        num_written = first_document + len(values)
        show_share(num_written / num_documents / num_phases)

    clusters = _Clusters(num_documents)
    for band in range(bands):
        for range_index in range(num_ranges):
            file = _band_file(folder, band, range_index)
            if file.exists():
                for earlier, later in _candidate_pairs(file):
                    _join_similar(clusters, signatures, earlier, later, threshold)
            num_bands_done = band + (range_index + 1) / num_ranges
            show_share((1 + num_bands_done) / num_phases)
    return clusters


def _band_file(folder: Path, band: int, range_index: int) -> Path:
    return folder / f"{band}-{range_index}"


def _write_bands(
    folder: Path, first_document: int, signatures: np.ndarray, bands: int, rows: int, num_ranges: int
) -> None:
    """Append the hash of each band of each document to the file of its band and its range of hashes.

    Documents without words are left out, because they do not repeat one another.

    Args:
        folder: the folder of the files.
        first_document: the number of the first document.
        signatures: uint32 [documents, 112].
        bands: number of bands.
        rows: values of the signature in a band.
        num_ranges: number of files of a band.
    """
    with_words = np.flatnonzero((signatures != NO_WORDS).any(axis=1))
    hashes = band_hashes(signatures[with_words], bands, rows)
    for band in range(bands):
        records = np.empty(len(with_words), dtype=_RECORD)
        records["hash"] = hashes[:, band]
        records["document"] = with_words + first_document
        # the upper 32 bits of a hash, scaled from 0 … 2**32 - 1 to 0 … num_ranges - 1
        ranges = (records["hash"] >> _HALF) * np.uint64(num_ranges) >> _HALF
        order = np.argsort(ranges, kind="stable")
        borders = np.searchsorted(ranges[order], np.arange(num_ranges + 1))
        for range_index, (start, end) in enumerate(pairwise(borders)):
            if start < end:
                with _band_file(folder, band, range_index).open("ab") as file:
                    file.write(records[order[start:end]].data)


def _candidate_pairs(file: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs of documents with the same hash: the earlier documents and the later ones, int64 [pairs] each.

    Each document is paired with the first document that has its hash and with some shortly before it: all pairs of a
    large group would be too many. The file is read in chunks. The first document of each hash in earlier chunks is put
    before a chunk, so that groups continue.
    """
    group_firsts = np.empty(0, dtype=_RECORD)
    for chunk in _read_chunks(file, _RECORD, _RECORDS_AT_ONCE):
        records = np.concatenate([group_firsts, chunk])
        records = records[np.argsort(records["hash"], kind="stable")]  # so documents of one hash stay in order
        begins_group = np.concatenate([[True], records["hash"][1:] != records["hash"][:-1]])
        group_firsts = records[begins_group]
        # leave out the documents that are alone with their hash
        is_grouped = ~begins_group
        is_grouped[:-1] |= ~begins_group[1:]
        yield from _pairs_in_groups(records["document"][is_grouped], begins_group[is_grouped])


def _pairs_in_groups(documents: np.ndarray, begins_group: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs of documents of one group: the earlier documents and the later ones, int64 [pairs] each.

    Each document is paired with the first document of its group, and with up to 16 documents directly before it.

    Args:
        documents: int64 [documents], ordered by groups.
        begins_group: bool [documents], True where a group begins.
    """
    positions = np.arange(len(documents))
    group_starts = np.maximum.accumulate(np.where(begins_group, positions, 0))  # of each document's group
    is_later = ~begins_group
    yield documents[group_starts[is_later]], documents[is_later]
    for distance in range(1, _NEIGHBOURS + 1):
        later_positions = np.flatnonzero(positions - distance > group_starts)
        if not len(later_positions):
            return
        yield documents[later_positions - distance], documents[later_positions]


def _join_similar(
    clusters: _Clusters, signatures: SignatureFiles, earlier: np.ndarray, later: np.ndarray, threshold: float
) -> None:
    """Join the pairs of documents, int64 [pairs] each, whose similarity is at least ``threshold``."""
    for start in range(0, len(earlier), _SIGNATURES_AT_ONCE):
        end = start + _SIGNATURES_AT_ONCE
        left_documents = earlier[start:end]
        right_documents = later[start:end]
        # signatures are read from disk, so pairs that are in one cluster already are left out
        is_separate = clusters.roots(left_documents) != clusters.roots(right_documents)
        left_documents = left_documents[is_separate]
        right_documents = right_documents[is_separate]
        is_similar = signatures.similarities(left_documents, right_documents) >= threshold
        clusters.join(left_documents[is_similar], right_documents[is_similar])


def _read_chunks(file: Path, dtype: np.dtype, count: int) -> Iterator[np.ndarray]:
    """Yield the content of a file as arrays of up to ``count`` elements."""
    with file.open("rb") as opened_file:
        while True:
            chunk = np.fromfile(opened_file, dtype, count)
            if not len(chunk):
                return
            yield chunk
