"""Apply the repetition rules of Gopher (Rae et al. 2021, arXiv:2112.11446, appendix A.1.1, table A1)."""

import re
from collections import Counter
from itertools import islice
from operator import mul

import numpy as np

from fabric_train.tokenization.cleaning.quality.measured_text import Fault, MeasuredText, duplicates

# shares of the paragraphs, of the lines, and for the others of the document's characters
LIMITS = {
    "duplicate_paragraphs": 0.3,
    "duplicate_paragraph_characters": 0.2,
    "duplicate_lines": 0.3,
    "duplicate_line_characters": 0.2,
    "top_2_gram": 0.2,
    "top_3_gram": 0.18,
    "top_4_gram": 0.16,
    "duplicate_5_grams": 0.15,
    "duplicate_6_grams": 0.14,
    "duplicate_7_grams": 0.13,
    "duplicate_8_grams": 0.12,
    "duplicate_9_grams": 0.11,
    "duplicate_10_grams": 0.10,
}
_PRIME = 1_000_003
_PARAGRAPHS = re.compile(r"\n\s*\n")


def find_fault(measured: MeasuredText) -> Fault | None:
    """Return the first rule that the document breaks; None if there is none."""
    return _fault_of_lines(measured) or _fault_of_top_n_grams(measured) or _fault_of_duplicate_n_grams(measured)


def _fault_of_lines(measured: MeasuredText) -> Fault | None:
    paragraphs = [paragraph.strip() for paragraph in _PARAGRAPHS.split(measured.text.strip())]
    for rule, parts in (("duplicate_paragraph", paragraphs), ("duplicate_line", measured.lines)):
        number, characters = duplicates(parts)
        shares = {f"{rule}s": number / len(parts), f"{rule}_characters": characters / len(measured.text)}
        for name, share in shares.items():
            if share > LIMITS[name]:
                return Fault(name, f"{share:.0%}")
    return None


def _fault_of_top_n_grams(measured: MeasuredText) -> Fault | None:
    """Check the characters in the most frequent n-grams.

    An n-gram is no more frequent than each of its words. So its characters, with a space after each word, are at most n
    times the most that a word has in the document, and n-grams are counted only if that is too many.
    """
    counts = measured.counts
    most = max(map(mul, counts.values(), map(len, counts))) + max(counts.values())
    for n in (2, 3, 4):
        rule = f"top_{n}_gram"
        if n * most / len(measured.text) <= LIMITS[rule] or len(measured.words) < n:
            continue
        n_gram, count = Counter(_n_grams(measured.words, n)).most_common(1)[0]
        share = count * len(" ".join(n_gram)) / len(measured.text)
        if share > LIMITS[rule]:
            return Fault(rule, f"{share:.0%}, {count} times")
    return None


def _fault_of_duplicate_n_grams(measured: MeasuredText) -> Fault | None:
    """Check the characters in n-grams that occurred before.

    Every longer n-gram that occurs twice begins with a 5-gram that does, so only those places are looked at.
    """
    places = _repeated_5_grams(measured.words)
    for n in range(5, 11) if places else ():
        share = _characters_in_duplicates(measured.words, places, n) / len(measured.text)
        if share > LIMITS[f"duplicate_{n}_grams"]:
            return Fault(f"duplicate_{n}_grams", f"{share:.0%}")
    return None


def _repeated_5_grams(words: list[str]) -> list[int]:
    """Return the places of the 5-grams that occur more than once, by hash: a place too many does no harm."""
    hashes = np.fromiter(map(hash, words), np.int64, len(words))
    combined = hashes[:-4]
    for offset in range(1, 5):
        combined = combined * _PRIME + hashes[offset : len(hashes) - 4 + offset]
    _, numbers, counts = np.unique(combined, return_inverse=True, return_counts=True)
    places: list[int] = np.flatnonzero(counts[numbers] > 1).tolist()
    return places


def _n_grams(words: list[str], n: int) -> "zip[tuple[str, ...]]":
    return zip(*(islice(words, start, None) for start in range(n)), strict=False)


def _characters_in_duplicates(words: list[str], places: list[int], n: int) -> int:
    """Return the characters of the n-grams at ``places`` that occurred before; they do not overlap."""
    seen: set[tuple[str, ...]] = set()
    characters = end = 0
    for place in places:
        if place < end or place > len(words) - n:
            continue
        n_gram = tuple(words[place : place + n])
        if n_gram in seen:
            characters += sum(map(len, n_gram))
            end = place + n
        else:
            seen.add(n_gram)
    return characters
