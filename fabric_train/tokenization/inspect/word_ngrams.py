"""Find the word n-grams that one corpus has more often than another, by the method of Monroe et al. (2008)."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split as SplitText

SIZES = (1, 2, 3)
CLEAR_Z = 1.96  # 95 % of a normal distribution
_MOST_WORDS = 1 << 20  # of a corpus; two corpora have at most 2^21 different words, and three of them fit 63 bits
_BITS_PER_WORD = 21
_BORDER = -1  # between documents

# a character of a script without spaces is a word; a mark belongs to the letter before it
_WORD = SplitText(
    Regex(
        r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]\p{M}*"
        r"|[\p{L}\p{M}\p{N}]+(?:['’][\p{L}\p{M}]+)*"
    ),
    behavior="removed",
    invert=True,
)


@dataclass(frozen=True)
class NgramScore:
    """An n-gram that is over-represented in one of two corpora.

    Args:
        text: its words in lower case, with spaces.
        counts: how often it is in the first and in the second corpus.
        per_million: the same for a million n-grams of its size.
        documents: documents of each corpus that have it.
        z: the z-score of its log-odds ratio; positive.
    """

    text: str
    counts: tuple[int, int]
    per_million: tuple[float, float]
    documents: tuple[int, int]
    z: float


class WordStream:
    """The words of one corpus, document by document, as numbers that two corpora share.

    Args:
        numbers: of the words; shared and extended.
    """

    def __init__(self, numbers: dict[str, int]) -> None:
        self._numbers = numbers
        self._words = array("i")
        self.num_words = 0

    def add(self, text: str) -> int:
        """Add a document and return the number of its words, of which the first 2^20 of a corpus are kept."""
        words = [word for word, _ in _WORD.pre_tokenize_str(text.lower())]
        kept = words[: _MOST_WORDS - self.num_words]
        self._words.extend(self._numbers.setdefault(word, len(self._numbers)) for word in kept)
        self._words.append(_BORDER)
        self.num_words += len(kept)
        return len(words)

    def ngrams(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return all n-grams of ``size`` words within documents as codes, and the document of each, int64 [N] each."""
        words = np.frombuffer(self._words, dtype=np.int32).astype(np.int64)
        num_windows = max(len(words) - size + 1, 0)
        codes, is_inside = np.zeros(num_windows, np.int64), np.ones(num_windows, bool)
        for place in range(size):
            shifted = words[place : place + num_windows]
            codes = codes << _BITS_PER_WORD | shifted
            is_inside &= shifted != _BORDER
        documents = np.cumsum(words == _BORDER)[:num_windows]
        return codes[is_inside], documents[is_inside]


def over_represented(
    first: WordStream, second: WordStream, numbers: dict[str, int], size: int, most: int
) -> tuple[list[NgramScore], list[NgramScore]]:
    """Return the n-grams that each of two corpora has clearly more often than the other, with the largest z first.

    If one corpus has none of this size, nothing can be compared.

    The score is the log-odds ratio with an informative Dirichlet prior, divided by its standard deviation: equations
    16, 20 and 22 of Monroe, Colaresi, Quinn, "Fightin' Words: Lexical Feature Selection and Evaluation for Identifying
    the Content of Political Conflict", Political Analysis 16 (2008). The prior has the frequencies of both corpora
    together, and the weight of the smaller corpus: with more, the larger would decide what is usual in the smaller.

    Args:
        first: words of a corpus.
        second: words of the other.
        numbers: those of both.
        size: number of words in an n-gram.
        most: the longest list.
    """
    found = (first.ngrams(size), second.ngrams(size))
    if not all(len(of_corpus) for of_corpus, _ in found):
        return [], []
    codes, places = np.unique(np.concatenate([of_corpus for of_corpus, _ in found]), return_inverse=True)
    split = (places[: len(found[0][0])], places[len(found[0][0]) :])
    counts = np.stack([np.bincount(own, minlength=len(codes)) for own in split])
    z = _z_scores(counts)
    words = list(numbers)
    rates = 1e6 * counts / counts.sum(axis=1, keepdims=True)

    def ranked(sign: int) -> list[NgramScore]:
        best = np.argsort(-sign * z, kind="stable")[:most]
        return [score(place, sign * float(z[place])) for place in best.tolist() if sign * z[place] >= CLEAR_Z]

    def score(place: int, value: float) -> NgramScore:
        in_both = [documents[own == place] for (_, documents), own in zip(found, split, strict=True)]
        return NgramScore(
            text=_text(int(codes[place]), size, words),
            counts=(int(counts[0, place]), int(counts[1, place])),
            per_million=(float(rates[0, place]), float(rates[1, place])),
            documents=(len(np.unique(in_both[0])), len(np.unique(in_both[1]))),
            z=value,
        )

    return ranked(1), ranked(-1)


def _z_scores(counts: np.ndarray) -> np.ndarray:
    """Return the z-scores of n-grams, positive if the first corpus has more; float64 [N].

    Args:
        counts: integers [2, N], of each n-gram in each corpus; none of both corpora is empty.
    """
    prior = counts.sum(axis=0) * (counts.sum(axis=1).min() / counts.sum())
    posterior = (counts + prior).astype(np.float64)
    others = np.maximum(posterior.sum(axis=1, keepdims=True) - posterior, 0.5)  # 0 if there is only one n-gram
    log_odds = np.log(posterior) - np.log(others)
    return (log_odds[0] - log_odds[1]) / np.sqrt((1 / posterior).sum(axis=0))


def _text(code: int, size: int, words: Sequence[str]) -> str:
    mask = (1 << _BITS_PER_WORD) - 1
    return " ".join(words[code >> _BITS_PER_WORD * place & mask] for place in reversed(range(size)))
