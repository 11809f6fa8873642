"""Hash the word n-grams of a text, so that case, punctuation, line breaks and other white space do not matter.

A word is a run of letters and digits, with the marks on them, in lower case after Unicode's NFKC. Scripts without
spaces between words (Chinese, Japanese, Thai) have one word for each stretch without punctuation: little is found.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

LONGEST = 13
"""Words of an n-gram, as in Brown et al. 2020 (arXiv:2005.14165), appendix C."""
_NUM_CODES = 0x110000
_SEPARATOR, _WORD, _IGNORED = 0, 1, 2
_SPACE = ord(" ")
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # an odd number with well spread bits, of splitmix64


@dataclass(frozen=True)
class Words:
    """The words of a text, joined by single spaces.

    Args:
        codes: uint32 [characters], the code points, a space after each word but perhaps the last.
        starts: int64 [words], where each word begins.
        ends: int64 [words], the character after each word.
    """

    codes: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    def text(self, first: int, count: int) -> str:
        """Return the words from number ``first`` on, joined by spaces."""
        codes = self.codes[self.starts[first] : self.ends[first + count - 1]]
        return codes.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


def split_words(text: str) -> Words:
    """Return the words of ``text``."""
    normal = unicodedata.normalize("NFKC", text).lower()
    codes = np.frombuffer(normal.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    kinds = _kinds()[codes]
    if (kinds == _IGNORED).any():  # soft hyphens and the like
        codes, kinds = codes[kinds != _IGNORED], kinds[kinds != _IGNORED]
    is_word = kinds == _WORD
    is_kept = is_word.copy()
    is_kept[1:] |= is_word[:-1]  # the first separator after each word
    codes, is_word = codes[is_kept], is_word[is_kept]
    codes = np.where(is_word, codes, np.uint32(_SPACE))
    ends = np.flatnonzero(~is_word)
    if len(is_word) and is_word[-1]:
        ends = np.append(ends, len(is_word))
    starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64) if len(ends) else ends
    return Words(codes, starts, ends)


def ngram_hashes(words: Words, lengths: Sequence[int]) -> dict[int, np.ndarray]:
    """Return 64-bit hashes of all n-grams by their length, uint64 [words - length + 1] each.

    Args:
        words: of a text.
        lengths: in ascending order; of those that are longer than the text there is none in the result.
    """
    num_words = len(words.starts)
    lengths = [length for length in lengths if length <= num_words]
    if not lengths:
        return {}
    hashes = _word_hashes(words)
    multipliers = _random_odd(LONGEST)
    total = np.zeros(num_words, dtype=np.uint64)
    result = {}
    for before, length in pairwise([0, *lengths]):
        for word in range(before, length):
            total[: num_words - word] += hashes[word:] * multipliers[word]
        result[length] = _mixed(total[: num_words - length + 1])
    return result


def _word_hashes(words: Words) -> np.ndarray:
    """Return a hash of each word, uint64 [words]."""
    lengths = np.diff(words.starts, append=len(words.codes))
    places = np.arange(len(words.codes)) - np.repeat(words.starts, lengths)
    table = _random_odd(1024)
    products = words.codes * table[places & 1023]
    products[words.ends[words.ends < len(products)]] = 0  # the spaces: the last word may have none
    return _mixed(np.add.reduceat(products, words.starts))


def _mixed(hashes: np.ndarray) -> np.ndarray:
    """Return the hashes with each bit depending on all bits, as in splitmix64's finalizer, shortened."""
    mixed = (hashes ^ (hashes >> np.uint64(32))) * _GOLDEN
    return mixed ^ (mixed >> np.uint64(29))


@cache
def _random_odd(count: int) -> np.ndarray:
    return np.random.default_rng(13).integers(0, 1 << 64, count, dtype=np.uint64, endpoint=False) | np.uint64(1)


@cache
def _kinds() -> np.ndarray:
    """Return for each code point whether it is part of a word, a separator or ignored, uint8 [code points]."""
    kinds = {"L": _WORD, "N": _WORD, "M": _WORD}
    of_category = {"Cf": _IGNORED}
    categories = (unicodedata.category(chr(code)) for code in range(_NUM_CODES))
    return np.fromiter(
        (of_category.get(one, kinds.get(one[0], _SEPARATOR)) for one in categories), np.uint8, _NUM_CODES
    )
