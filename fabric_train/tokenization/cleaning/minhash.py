"""Compute MinHash signatures, which estimate how much of their text two documents share.

A document is the set of its 5-grams of words. For a random hash function, the probability that two sets have the same
smallest value is their Jaccard similarity, shared 5-grams / all 5-grams (Broder, On the resemblance and containment of
documents, 1997). The share of 112 functions for which it is the same estimates it, with a standard error of at most
0.05. The functions are ``(multiplier * x + addend) mod 2**64`` with odd multipliers, ``affine64`` of datasketch.

Words are lower-cased runs of letters and digits, so case, punctuation and line breaks do not count. In scripts written
without spaces, each character is a word.
"""

import unicodedata
from functools import cache
from typing import Any

import numpy as np

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
_MULTIPLIERS, _ADDENDS = _RANDOM[0] | np.uint64(1), _RANDOM[1]
_PLACES = np.random.PCG64(2).random_raw(_WORDS_PER_SHINGLE) | np.uint64(1)
_HALF = np.uint64(32)


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
    starts, ends = borders[of_words], borders[of_words + 1]
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
