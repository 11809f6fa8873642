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

from fabric_train.cleaning.dropped import Dropped
from fabric_train.cleaning.language import identifier_settings, identify, load_identifier

_WORDS = re.compile(r"\w+(?:[.,:/@'’]+\w+)*")  # 1.000,50 and don't and example.com are one each
_LISTS = Path(__file__).with_name("stop_words.txt").read_text(encoding="utf-8").splitlines()
STOP_WORDS = {language: frozenset(words.split()) for language, words in (line.split(": ") for line in _LISTS)}
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
_CERTAIN = 0.65
# shares of the paragraphs, of the lines, and for the others of the document's characters
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
# in the order in which they are applied, as in FineWeb's own pipeline (arXiv:2406.17557)
_RULES = {"gopher": GOPHER_LIMITS | REPETITION_LIMITS, "c4": C4_LIMITS, "fineweb": FINEWEB_LIMITS}


@dataclass(frozen=True)
class Fault:
    """Why a document is of low quality: the rule, and the finding, such as ``12 words``."""

    rule: str
    found: str


@dataclass(frozen=True)
class MeasuredText:
    """A document that is not blank, with what the rules count."""

    text: str

    @cached_property
    def lines(self) -> list[str]:
        """The lines that are not blank, without white space at their ends."""
        return [line for line in map(str.rstrip, self.text.split("\n")) if line]

    @cached_property
    def words(self) -> list[str]:
        return _WORDS.findall(self.text)

    @cached_property
    def counts(self) -> Counter[str]:
        return Counter(self.words)


def duplicates(parts: list[str]) -> tuple[int, int]:
    """Return how many parts are the same as an earlier one, and their characters."""
    if len(set(parts)) == len(parts):
        return 0, 0
    seen: set[str] = set()
    number = characters = 0
    for part in parts:
        if part in seen:
            number += 1
            characters += len(part)
        seen.add(part)
    return number, characters


def find_gopher_fault(measured: MeasuredText) -> Fault | None:
    """Return the first of Gopher's rules for words that the document breaks."""
    return _fault_of_words(measured) or _fault_of_symbols(measured) or _fault_of_stop_words(measured)


def _fault_of_words(measured: MeasuredText) -> Fault | None:
    counts = measured.counts
    num_words = len(measured.words)
    if not GOPHER_LIMITS["few_words"] <= num_words <= GOPHER_LIMITS["many_words"]:
        return Fault("few_words" if num_words < GOPHER_LIMITS["many_words"] else "many_words", f"{num_words} words")
    mean = sum(map(len, measured.words)) / num_words
    if not GOPHER_LIMITS["short_words"] <= mean <= GOPHER_LIMITS["long_words"]:
        rule = "short_words" if mean < GOPHER_LIMITS["long_words"] else "long_words"
        return Fault(rule, f"{mean:.1f} characters a word")
    without = sum(count for word, count in counts.items() if not word.isalpha() and not any(map(str.isalpha, word)))
    share = 1 - without / num_words
    if share < GOPHER_LIMITS["few_alphabetic_words"]:
        return Fault("few_alphabetic_words", f"{share:.0%} of words have a letter")
    return None


def _fault_of_symbols(measured: MeasuredText) -> Fault | None:
    text = measured.text
    num_words = len(measured.words)
    lines = measured.lines
    num_ellipses = text.count("...") + text.count("…")
    shares = {
        "hashes": text.count("#") / num_words,
        "ellipses": num_ellipses / num_words,
        "bullet_lines": sum(line.lstrip().startswith(("•", "-")) for line in lines) / len(lines),
        "ellipsis_lines": sum(line.endswith(("...", "…")) for line in lines) / len(lines) if num_ellipses else 0.0,
    }
    for rule, share in shares.items():
        if share > GOPHER_LIMITS[rule]:
            return Fault(rule, f"{share:.2f} to each {'line' if 'lines' in rule else 'word'}")
    return None


def _fault_of_stop_words(measured: MeasuredText) -> Fault | None:
    """Check the words of the document's language; of any language if the identifier is uncertain."""
    language, probability = identify(measured.text)
    languages = list(STOP_WORDS) if probability < _CERTAIN else [language]
    found = [sum(word in measured.counts for word in STOP_WORDS[one]) for one in languages if one in STOP_WORDS]
    if not found or max(found) >= GOPHER_LIMITS["few_stop_words"]:
        return None
    return Fault("few_stop_words", f"{max(found)} stop words, as {language} {probability:.2f}")


def find_repetition(measured: MeasuredText) -> Fault | None:
    """Return the first of Gopher's rules for repetition that the document breaks."""
    return _fault_of_lines(measured) or _fault_of_top_n_grams(measured) or _fault_of_duplicate_n_grams(measured)


def _fault_of_lines(measured: MeasuredText) -> Fault | None:
    paragraphs = [paragraph.strip() for paragraph in _PARAGRAPHS.split(measured.text.strip())]
    for rule, parts in (("duplicate_paragraph", paragraphs), ("duplicate_line", measured.lines)):
        number, characters = duplicates(parts)
        shares = {f"{rule}s": number / len(parts), f"{rule}_characters": characters / len(measured.text)}
        for name, share in shares.items():
            if share > REPETITION_LIMITS[name]:
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
        if n * most / len(measured.text) <= REPETITION_LIMITS[rule] or len(measured.words) < n:
            continue
        n_grams = zip(*(islice(measured.words, start, None) for start in range(n)), strict=False)
        n_gram, count = Counter(n_grams).most_common(1)[0]
        share = count * len(" ".join(n_gram)) / len(measured.text)
        if share > REPETITION_LIMITS[rule]:
            return Fault(rule, f"{share:.0%}, {count} times")
    return None


def _fault_of_duplicate_n_grams(measured: MeasuredText) -> Fault | None:
    """Check the characters in n-grams that occurred before, which begin where a repeated 5-gram does."""
    places = _repeated_5_grams(measured.words)
    for n in range(5, 11) if places else ():
        share = _characters_in_duplicates(measured.words, places, n) / len(measured.text)
        if share > REPETITION_LIMITS[f"duplicate_{n}_grams"]:
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


def clean_lines(text: str, edits: Counter[str]) -> str | Fault:
    """Return the lines that C4's rules keep, or the rule that the document breaks; count removed lines in ``edits``."""
    if "[" in text:
        text = _CITATION.sub("", text)
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    removed: dict[str, int] = {}

    def keep(rule: str, is_kept: Callable[[str], bool]) -> None:
        nonlocal lines
        kept = [line for line in lines if is_kept(line)]
        removed[rule] = len(lines) - len(kept)
        lines = kept

    keep("no_end_mark", lambda line: line.endswith(_END_MARKS) and not line.endswith("..."))
    keep("few_words", lambda line: len(line.split(None, C4_LIMITS["line_words"])) >= C4_LIMITS["line_words"])
    longest = C4_LIMITS["word_characters"]
    keep("long_word", lambda line: len(line) <= longest or max(map(len, line.split())) <= longest)
    lowered = "\n".join(lines).lower()
    if "lorem ipsum" in lowered:
        return Fault("lorem_ipsum", "lorem ipsum")
    if "javascript" in lowered:
        keep("javascript", lambda line: "javascript" not in line.lower())
    if any("{" in line for line in lines):
        return Fault("curly_bracket", "{")
    if any(phrase in lowered for phrase in _POLICIES):
        keep("policy", lambda line: not any(phrase in line.lower() for phrase in _POLICIES))
    num_sentences = sum(map(count_sentences, lines[: C4_LIMITS["few_sentences"]]))
    if num_sentences < C4_LIMITS["few_sentences"]:
        return Fault("few_sentences", f"{num_sentences} sentences")
    for rule, count in removed.items():
        if count:
            edits[f"c4 removed line: {rule}"] += count
    return "\n".join(lines)


def count_sentences(line: str) -> int:
    """Return the number of sentences in a line that is not blank, at least one."""
    return max(1, len(_SENTENCE_END.findall(line)))


def find_fineweb_fault(measured: MeasuredText) -> Fault | None:
    """Return the first of FineWeb's rules that the document breaks."""
    lines = measured.lines
    punctuated = sum(line.endswith(_LINE_END) for line in lines) / len(lines)
    if punctuated < FINEWEB_LIMITS["few_punctuated_lines"]:
        return Fault("few_punctuated_lines", f"{punctuated:.0%}")
    short = sum(len(line) <= _SHORT_LINE for line in lines) / len(lines)
    if short > FINEWEB_LIMITS["short_lines"]:
        return Fault("short_lines", f"{short:.0%}")
    repeated = duplicates(lines)[1] / sum(map(len, lines))
    if repeated > FINEWEB_LIMITS["duplicate_line_characters"]:
        return Fault("duplicate_line_characters", f"{repeated:.0%}")
    return None


@dataclass(frozen=True)
class QualityFilter:
    """Drop the documents that break a rule of ``rules``; the first one decides. C4's remove lines, too."""

    rules: tuple[str, ...]

    def clean(self, text: str, edits: Counter[str]) -> str | Dropped:
        """Return the text, without the lines that C4's rules remove, or why it is dropped."""
        measured = MeasuredText(text)
        if "gopher" in self.rules:
            fault = find_gopher_fault(measured) or find_repetition(measured)
            if fault is not None:
                return _dropped("gopher", fault)
            language, probability = identify(text)
            if probability >= _CERTAIN and language not in STOP_WORDS:  # their rule is left out
                edits[f"no list of stop words: {language}"] += 1
        if "c4" in self.rules:
            result = clean_lines(text, edits)
            if isinstance(result, Fault):
                return _dropped("c4", result)
            measured = MeasuredText(result)
        if "fineweb" in self.rules and (fault := find_fineweb_fault(measured)) is not None:
            return _dropped("fineweb", fault)
        return measured.text

    def settings(self) -> dict[str, Any]:
        limits = {name: _RULES[name] for name in self.rules}
        return {"version": _VERSION, "limits": limits} | (identifier_settings() if "gopher" in self.rules else {})


def open_quality_filter(given: str) -> QualityFilter:
    """Return the filter for a value of ``--quality`` such as ``gopher,c4``."""
    chosen = given.split(",")
    if "gopher" in chosen:
        load_identifier("--quality gopher")
    return QualityFilter(tuple(name for name in _RULES if name in chosen))


def _dropped(rules: str, fault: Fault) -> Dropped:
    return Dropped(f"low_quality: {rules}_{fault.rule}", fault.found)
