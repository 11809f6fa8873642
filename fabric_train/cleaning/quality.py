"""Drop documents of low quality by the published rules of Gopher, C4 and FineWeb, see ``docs/cleaning.md``."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np

from fabric_train.cleaning.language import identifier_settings, identify, load_identifier
from fabric_train.cleaning.results import Dropped

_WORDS = re.compile(r"\w+(?:[.,:/@'’]+\w+)*")  # 1.000,50 and don't and example.com are one each


def _read_stop_words() -> dict[str, frozenset[str]]:
    text = Path(__file__).with_name("stop_words.txt").read_text(encoding="utf-8")
    stop_words = {}
    for line in text.splitlines():
        language, _, words = line.partition(": ")
        stop_words[language] = frozenset(words.split())
    return stop_words


STOP_WORDS = _read_stop_words()
"""Stop words by language."""
GOPHER_LIMITS = {
    "few_words": 50,
    "many_words": 100_000,
    "short_words": 3,  # characters, mean
    "long_words": 10,
    "hashes": 0.1,  # to each word
    "ellipses": 0.1,
    "bullet_lines": 0.9,  # of the lines
    "ellipsis_lines": 0.3,
    "few_alphabetic_words": 0.8,  # of the words
    "few_stop_words": 2,
}
_CERTAIN = 0.65  # the probability of a language from which on only its stop words count
# shares of the paragraphs, of the lines, and for all other rules of the document's characters
REPETITION_LIMITS = {
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
C4_LIMITS = {"few_sentences": 5, "line_words": 3, "word_characters": 1000}
_END_MARKS = (".", "?", "!", '"', "'", "”", "»")
_POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_SENTENCE_END = re.compile(r"[.?!…]+[\"'”’»)\]]*(?=\s|$)")
FINEWEB_LIMITS = {
    "few_punctuated_lines": 0.12,  # of the lines
    "duplicate_line_characters": 0.1,  # of the characters in lines
    "short_lines": 0.67,  # of the lines
}
_SHORT_LINE = 30  # characters
_LINE_END = tuple(".!?։؟۔।॥።፧፨။។៕‼‽⁇⁈⁉。﹒﹖﹗！．？｡")  # of Unicode's Sentence_Terminal, those in wide use
_VERSION = 1  # of the rules here
# in the order in which they are applied, as in FineWeb's pipeline (arXiv:2406.17557)
_RULES = {"gopher": GOPHER_LIMITS | REPETITION_LIMITS, "c4": C4_LIMITS, "fineweb": FINEWEB_LIMITS}


@dataclass(frozen=True)
class Fault:
    """Why a document is of low quality."""

    rule: str
    finding: str  # in the document, such as ``12 words``


@dataclass(frozen=True)
class MeasuredText:
    """A document that is not blank, split into the words and lines that the rules count."""

    text: str

    @cached_property
    def lines(self) -> list[str]:
        """The lines that are not blank, without white space at their ends."""
        return [line for line in map(str.rstrip, self.text.split("\n")) if line]

    @cached_property
    def words(self) -> list[str]:
        return _WORDS.findall(self.text)

    @cached_property
    def word_counts(self) -> Counter[str]:
        return Counter(self.words)


def count_duplicates(texts: list[str]) -> tuple[int, int]:
    """Return how many lines or paragraphs repeat an earlier one, and the number of characters in them."""
    if len(set(texts)) == len(texts):
        return 0, 0
    earlier_texts: set[str] = set()
    num_duplicates = 0
    num_characters = 0
    for text in texts:
        if text in earlier_texts:
            num_duplicates += 1
            num_characters += len(text)
        earlier_texts.add(text)
    return num_duplicates, num_characters


def find_gopher_fault(document: MeasuredText) -> Fault | None:
    """Return the first of Gopher's rules for words that the document breaks."""
    return _check_words(document) or _check_symbols(document) or _check_stop_words(document)


def _check_words(document: MeasuredText) -> Fault | None:
    """Check the number of words, their mean length, and how many have a letter."""
    num_words = len(document.words)
    if num_words < GOPHER_LIMITS["few_words"]:
        return Fault("few_words", f"{num_words} words")
    if num_words > GOPHER_LIMITS["many_words"]:
        return Fault("many_words", f"{num_words} words")

    mean_length = sum(map(len, document.words)) / num_words
    if mean_length < GOPHER_LIMITS["short_words"]:
        return Fault("short_words", f"{mean_length:.1f} characters a word")
    if mean_length > GOPHER_LIMITS["long_words"]:
        return Fault("long_words", f"{mean_length:.1f} characters a word")

    num_without_letter = 0
    for word, count in document.word_counts.items():
        # most words have letters only, which is the faster test
        if not word.isalpha() and not any(map(str.isalpha, word)):
            num_without_letter += count
    share = 1 - num_without_letter / num_words
    if share < GOPHER_LIMITS["few_alphabetic_words"]:
        return Fault("few_alphabetic_words", f"{share:.0%} of words have a letter")
    return None


def _check_symbols(document: MeasuredText) -> Fault | None:
    """Check the ratios of hashes and ellipses to words, and the shares of bullet lines and unfinished lines."""
    text = document.text
    lines = document.lines
    num_words = len(document.words)
    num_ellipses = text.count("...") + text.count("…")
    num_bullet_lines = sum(line.lstrip().startswith(("•", "-")) for line in lines)
    num_ellipsis_lines = 0
    if num_ellipses:
        num_ellipsis_lines = sum(line.endswith(("...", "…")) for line in lines)
    ratios = {
        "hashes": text.count("#") / num_words,
        "ellipses": num_ellipses / num_words,
        "bullet_lines": num_bullet_lines / len(lines),
        "ellipsis_lines": num_ellipsis_lines / len(lines),
    }
    for rule, ratio in ratios.items():
        if ratio > GOPHER_LIMITS[rule]:
            unit = "line" if "lines" in rule else "word"
            return Fault(rule, f"{ratio:.2f} to each {unit}")
    return None


def _check_stop_words(document: MeasuredText) -> Fault | None:
    """Check the stop words of the document's language, or of all languages if the identifier is uncertain.

    The rule does not apply to a language without a list of stop words.
    """
    language, probability = identify(document.text)
    languages = list(STOP_WORDS) if probability < _CERTAIN else [language]
    nums_found = []
    for candidate in languages:
        if candidate in STOP_WORDS:
            nums_found.append(sum(word in document.word_counts for word in STOP_WORDS[candidate]))
    if not nums_found or max(nums_found) >= GOPHER_LIMITS["few_stop_words"]:
        return None
    return Fault("few_stop_words", f"{max(nums_found)} stop words, as {language} {probability:.2f}")


def find_repetition(document: MeasuredText) -> Fault | None:
    """Return the first of Gopher's rules for repetition that the document breaks."""
    return _check_lines(document) or _check_top_n_grams(document) or _check_duplicate_n_grams(document)


def _check_lines(document: MeasuredText) -> Fault | None:
    """Check the shares of repeated paragraphs and of repeated lines, and of the characters in them."""
    paragraphs = [paragraph.strip() for paragraph in _PARAGRAPHS.split(document.text.strip())]
    for unit, texts in (("duplicate_paragraph", paragraphs), ("duplicate_line", document.lines)):
        num_duplicates, num_characters = count_duplicates(texts)
        shares = {
            f"{unit}s": num_duplicates / len(texts),
            f"{unit}_characters": num_characters / len(document.text),
        }
        for rule, share in shares.items():
            if share > REPETITION_LIMITS[rule]:
                return Fault(rule, f"{share:.0%}")
    return None


def _check_top_n_grams(document: MeasuredText) -> Fault | None:
    """Check the characters in the most frequent n-gram, for n from 2 to 4.

    An n-gram is not more frequent than any of its words. So its characters, with a space after each word, are at most n
    times the most that a word has in the document, and n-grams are counted only if that exceeds the limit.
    """
    word_counts = document.word_counts
    characters_by_word = map(mul, word_counts.values(), map(len, word_counts))
    most_characters = max(characters_by_word) + max(word_counts.values())  # the second is the spaces
    for n in (2, 3, 4):
        rule = f"top_{n}_gram"
        upper_bound = n * most_characters / len(document.text)
        if upper_bound <= REPETITION_LIMITS[rule] or len(document.words) < n:
            continue
        shifted_words = [islice(document.words, start, None) for start in range(n)]
        n_grams = zip(*shifted_words, strict=False)
        top_n_gram, count = Counter(n_grams).most_common(1)[0]
        share = count * len(" ".join(top_n_gram)) / len(document.text)
        if share > REPETITION_LIMITS[rule]:
            return Fault(rule, f"{share:.0%}, {count} times")
    return None


def _check_duplicate_n_grams(document: MeasuredText) -> Fault | None:
    """Check the characters in n-grams that occurred earlier in the document, for n from 5 to 10."""
    positions = _find_repeated_5_grams(document.words)  # a longer n-gram that repeats must begin at one of these
    if not positions:
        return None
    for n in range(5, 11):
        rule = f"duplicate_{n}_grams"
        share = _count_characters_in_duplicates(document.words, positions, n) / len(document.text)
        if share > REPETITION_LIMITS[rule]:
            return Fault(rule, f"{share:.0%}")
    return None


def _find_repeated_5_grams(words: list[str]) -> list[int]:
    """Return where the 5-grams begin that occur more than once: indices of their first words.

    5-grams are compared by hash. An extra position does no harm, because the words are compared later.
    """
    word_hashes = np.fromiter(map(hash, words), np.int64, len(words))
    num_5_grams = len(words) - 4
    hashes = word_hashes[:-4]
    for offset in range(1, 5):
        hashes = hashes * _PRIME + word_hashes[offset : num_5_grams + offset]  # wraps around
    _, indices, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    positions: list[int] = np.flatnonzero(counts[indices] > 1).tolist()
    return positions


def _count_characters_in_duplicates(words: list[str], positions: list[int], n: int) -> int:
    """Return the number of characters in n-grams that occurred earlier; n-grams that overlap a counted one are skipped.

    Args:
        words: the words of the document.
        positions: the indices of words at which a repeated n-gram may begin, in ascending order.
        n: the number of words in an n-gram.
    """
    earlier_n_grams: set[tuple[str, ...]] = set()
    num_characters = 0
    end = 0  # of the last n-gram that was counted
    for position in positions:
        if position < end or position > len(words) - n:
            continue
        n_gram = tuple(words[position : position + n])
        if n_gram in earlier_n_grams:
            num_characters += sum(map(len, n_gram))
            end = position + n
        else:
            earlier_n_grams.add(n_gram)
    return num_characters


def clean_lines(text: str, edits: Counter[str]) -> str | Fault:
    """Remove the lines that break one of C4's rules, or return the rule for documents that the text breaks.

    Removed lines are added to ``edits``, by rule.
    """
    if "[" in text:
        text = _CITATION.sub("", text)
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    num_removed: dict[str, int] = {}

    def filter_lines(rule: str, is_good: Callable[[str], bool]) -> None:
        nonlocal lines
        good_lines = [line for line in lines if is_good(line)]
        num_removed[rule] = len(lines) - len(good_lines)
        lines = good_lines

    def has_enough_words(line: str) -> bool:
        min_words = C4_LIMITS["line_words"]
        return len(line.split(maxsplit=min_words)) >= min_words

    def has_short_words(line: str) -> bool:
        max_characters = C4_LIMITS["word_characters"]
        # a shorter line needs no look at its words
        return len(line) <= max_characters or max(map(len, line.split())) <= max_characters

    # rules for lines
    filter_lines("no_end_mark", lambda line: line.endswith(_END_MARKS) and not line.endswith("..."))
    filter_lines("few_words", has_enough_words)
    filter_lines("long_word", has_short_words)

    # rules for the words of a document, which also remove lines
    lowered = "\n".join(lines).lower()
    if "lorem ipsum" in lowered:
        return Fault("lorem_ipsum", "lorem ipsum")
    if "javascript" in lowered:
        filter_lines("javascript", lambda line: "javascript" not in line.lower())
    if any("{" in line for line in lines):
        return Fault("curly_bracket", "{")
    if any(phrase in lowered for phrase in _POLICIES):
        filter_lines("policy", lambda line: not any(phrase in line.lower() for phrase in _POLICIES))

    # a line has a sentence at least, so these lines are enough to count five
    min_sentences = C4_LIMITS["few_sentences"]
    num_sentences = sum(map(count_sentences, lines[:min_sentences]))
    if num_sentences < min_sentences:
        return Fault("few_sentences", f"{num_sentences} sentences")
    for rule, count in num_removed.items():
        if count:
            edits[f"c4 removed line: {rule}"] += count
    return "\n".join(lines)


def count_sentences(line: str) -> int:
    """Return the number of sentences in a line that is not blank, at least one."""
    return max(1, len(_SENTENCE_END.findall(line)))


def find_fineweb_fault(document: MeasuredText) -> Fault | None:
    """Return the first of FineWeb's rules that the document breaks."""
    lines = document.lines
    punctuated_share = sum(line.endswith(_LINE_END) for line in lines) / len(lines)
    if punctuated_share < FINEWEB_LIMITS["few_punctuated_lines"]:
        return Fault("few_punctuated_lines", f"{punctuated_share:.0%}")
    short_share = sum(len(line) <= _SHORT_LINE for line in lines) / len(lines)
    if short_share > FINEWEB_LIMITS["short_lines"]:
        return Fault("short_lines", f"{short_share:.0%}")
    _, num_characters = count_duplicates(lines)
    duplicate_share = num_characters / sum(map(len, lines))
    if duplicate_share > FINEWEB_LIMITS["duplicate_line_characters"]:
        return Fault("duplicate_line_characters", f"{duplicate_share:.0%}")
    return None


@dataclass(frozen=True)
class QualityFilter:
    """Drop the documents that break a rule; the first rule that is broken decides. C4's rules remove lines, too."""

    rules: tuple[str, ...]  # names of published sets of rules, keys of ``_RULES``

    def clean(self, text: str, edits: Counter[str]) -> str | Dropped:
        """Return the text, without the lines that C4's rules remove, or why it is dropped.

        ``edits`` counts the removed lines by rule.
        """
        document = MeasuredText(text)
        if "gopher" in self.rules:
            fault = find_gopher_fault(document) or find_repetition(document)
            if fault is not None:
                return _dropped("gopher", fault)
            language, probability = identify(text)
            if probability >= _CERTAIN and language not in STOP_WORDS:
                # the rule for stop words could not be applied
                edits[f"no list of stop words: {language}"] += 1
        if "c4" in self.rules:
            result = clean_lines(text, edits)
            if isinstance(result, Fault):
                return _dropped("c4", result)
            document = MeasuredText(result)
        if "fineweb" in self.rules:
            fault = find_fineweb_fault(document)
            if fault is not None:
                return _dropped("fineweb", fault)
        return document.text

    def settings(self) -> dict[str, Any]:
        """Return the version of the rules, their limits, and for Gopher's the language identifier."""
        settings: dict[str, Any] = {"version": _VERSION, "limits": {name: _RULES[name] for name in self.rules}}
        if "gopher" in self.rules:
            settings |= identifier_settings()
        return settings


def open_quality_filter(switch: str) -> QualityFilter:
    """Return the filter for a value of ``--quality`` such as ``gopher,c4``."""
    names = switch.split(",")
    if "gopher" in names:
        load_identifier("--quality gopher")
    return QualityFilter(tuple(name for name in _RULES if name in names))


def _dropped(rules: str, fault: Fault) -> Dropped:
    return Dropped(f"low_quality: {rules}_{fault.rule}", fault.finding)
