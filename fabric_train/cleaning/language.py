"""Identify the language of a text with py3langid, and drop documents and paragraphs in other languages.

py3langid is naive Bayes on n-grams of bytes for 140 languages (Lui and Baldwin 2012, ACL P12-3005), with a model of its
own in its package. ``docs/cleaning.md`` compares it with other identifiers.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fabric_train.cleaning.dropped import Dropped
from fabric_train.cli.errors import InputError
from fabric_train.files.requirements import check_package

PIECES = 3
PIECE_CHARACTERS = (150, 300)
CERTAIN = 0.95
"""At most this number of pieces of a text are looked at, spaced evenly from its beginning to its end.

They are longer if the identifier is not certain of the short ones. Each stretch of white space counts as one character:
the identifier divides by the length of the text, so that wide margins make it less certain.
"""
_PIECE_WITH_MARGINS = 6_000  # where a piece of a long text is taken from
_WORD = re.compile(r"\w+")
_FORMS = Path(__file__).with_name("catalan_forms.txt").read_text(encoding="utf-8").split("\n\n")
VALENCIAN, GENERAL = (frozenset(forms.split()) for forms in _FORMS)
# reasons in the ledger
OTHER = "other_language"
UNCERTAIN = "uncertain_language"
DEFAULT_THRESHOLD = 0.65  # as in FineWeb (arXiv:2406.17557), which has another identifier
_BLANK_LINES = re.compile(r"(\n\s*\n)")
_LINES = re.compile(r"(\n)")


@lru_cache(maxsize=1)  # several steps ask for the same document
def identify(text: str) -> tuple[str, float]:
    """Return the most likely language of a text, and its probability between 0 and 1.

    The language is an ISO 639-1 code, or one of ISO 639-3 where there is none; ``zxx`` is no language. Valencian is
    ``ca``. A text without letters has a probability near 0.
    """
    words = _words(text)
    for characters in PIECE_CHARACTERS:
        language, probability = _identifier().classify(_sample(words, characters))
        if probability >= CERTAIN:
            break
    return language, probability


def language_probabilities(text: str) -> dict[str, float]:
    """Return the probability of each language that the identifier knows."""
    return dict(_identifier().rank(_sample(_words(text), PIECE_CHARACTERS[-1])))


def identifier_settings() -> dict[str, Any]:
    """Return what decides the result of ``identify``."""
    pieces = {"pieces": PIECES, "piece_characters": list(PIECE_CHARACTERS), "certain": CERTAIN}
    return {"identifier": f"py3langid {version('py3langid')}", **pieces}


def load_identifier(option: str) -> None:
    """Load the model, so that processes that are forked later share it; InputError if py3langid is not installed."""
    check_package("py3langid", option)
    _identifier()


@lru_cache(maxsize=1)
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    identifier.nb_ptc = identifier.nb_ptc.astype(np.float32)  # as float16, it would be converted for every text
    return identifier


def _words(text: str) -> list[str]:
    """Return the whole of a text, or parts of a long one, with a space for each stretch of white space."""
    is_long = len(text) > PIECES * _PIECE_WITH_MARGINS
    return [" ".join(part.split()) for part in (_evenly_spaced(text, _PIECE_WITH_MARGINS) if is_long else [text])]


def _sample(words: list[str], num_characters: int) -> str:
    if len(words) == 1 and len(words[0]) > PIECES * num_characters:
        words = _evenly_spaced(words[0], num_characters)
    elif len(words) > 1:
        words = [part[:num_characters] for part in words]
    return "\n".join(words)


def _evenly_spaced(text: str, num_characters: int) -> list[str]:
    step = (len(text) - num_characters) // (PIECES - 1)
    return [text[start : start + num_characters] for start in range(0, PIECES * step, step)]


@dataclass(frozen=True)
class LanguageFilter:
    """Drop the documents that are in another language, or whose language is not certain.

    It is certain if the probabilities of the languages to keep add up to ``threshold``, so a document that is half in
    one of them and half in another is kept.

    ``va`` in ``languages`` without ``ca`` keeps the Catalan documents with more Valencian word forms than forms of
    general Catalan; one that has neither, as short ones often do, is dropped. ``ca`` keeps all Catalan documents.

    By ``paragraph``, the paragraphs that are in another language with certainty are removed
    first. An uncertain one stays, because headings and names are. Blank lines separate paragraphs; in a text without
    any, each line is one.
    """

    languages: tuple[str, ...]
    threshold: float
    by: Literal["document", "paragraph"]

    def clean(self, text: str, edits: Counter[str]) -> str | Dropped:
        """Return the text, without paragraphs in other languages, or why it is dropped."""
        if self.by == "paragraph":
            text = self._without_other_paragraphs(text, edits)
            if not text:
                return Dropped(OTHER, "every paragraph")
        language, probability = identify(text)
        found = f"{language} {self._shown(probability)}"
        if probability >= self.threshold and not self._accepts(language):
            return Dropped(OTHER, found)
        if probability < self.threshold:
            to_keep = sum(value for code, value in language_probabilities(text).items() if self._accepts(code))
            if to_keep < self.threshold:
                return Dropped(UNCERTAIN, self._margin(found, to_keep))
        if language != "ca" or "ca" in self.languages or "va" not in self.languages:
            return text
        words = _WORD.findall(text.lower())
        valencian, general = (sum(word in forms for word in words) for forms in (VALENCIAN, GENERAL))
        if valencian > general:
            return text
        return Dropped(OTHER, f"{found}, forms: {valencian} Valencian, {general} of general Catalan")

    def settings(self) -> dict[str, Any]:
        return {"languages": list(self.languages), "threshold": self.threshold, "by": self.by} | identifier_settings()

    def _without_other_paragraphs(self, text: str, edits: Counter[str]) -> str:
        separator = _BLANK_LINES if _BLANK_LINES.search(text) else _LINES
        pieces = separator.split(text)  # paragraphs and separators in turns
        kept: list[str] = []
        for number in range(0, len(pieces), 2):
            language, probability = identify(pieces[number])
            if probability >= self.threshold and not self._accepts(language):
                edits[f"removed paragraph in {language}"] += 1
            else:
                kept += pieces[number : number + 2]
        return text if len(kept) == len(pieces) else "".join(kept).strip()

    def _margin(self, found: str, to_keep: float) -> str:
        """Return the language that was found, and how much the languages to keep are below the threshold."""
        kept = f"{','.join(self.languages)} {self._shown(to_keep)}"
        margin = self.threshold - float(self._shown(to_keep))
        below = f"{margin:.{self._num_decimals()}f} below {self.threshold:g}"
        return f"{kept}, {below}" if kept == found else f"{found}; {kept}, {below}"

    def _shown(self, probability: float) -> str:
        """Return a probability, rounded down: one that is below the threshold looks so."""
        scale = 10 ** self._num_decimals()
        return f"{math.floor(probability * scale) / scale:.{self._num_decimals()}f}"

    def _num_decimals(self) -> int:
        return max(2, len(f"{self.threshold:g}".partition(".")[2]))

    def _accepts(self, language: str) -> bool:
        return language in self.languages or (language == "ca" and "va" in self.languages)


def open_language_filter(given: str, by: Literal["document", "paragraph"]) -> LanguageFilter:
    """Return the filter for a value of ``--language`` such as ``es,ca:0.65``; InputError if a language is unknown."""
    load_identifier("--language")
    codes, _, threshold = given.partition(":")
    languages = tuple(dict.fromkeys(codes.split(",")))
    known = sorted(_identifier().labels)
    unknown = [code for code in languages if code not in (*known, "va")]
    if unknown:
        raise InputError(
            f"--language: py3langid does not know {', '.join(unknown)}; it knows {' '.join(known)}, and va"
        )
    return LanguageFilter(languages, float(threshold or DEFAULT_THRESHOLD), by)
