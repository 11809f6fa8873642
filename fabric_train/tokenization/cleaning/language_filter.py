"""Keep documents, or paragraphs, in given languages: ``--language es,ca,va:0.65``."""

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from fabric_train.cli.errors import InputError
from fabric_train.tokenization.cleaning.cleaner import Dropped
from fabric_train.tokenization.cleaning.language import (
    identifier_settings,
    identify,
    known_languages,
    language_probabilities,
    load_identifier,
)
from fabric_train.tokenization.cleaning.valencian import count_forms

OTHER, UNCERTAIN = "other_language", "uncertain_language"  # reasons in the ledger
DEFAULT_THRESHOLD = 0.65
"""As in FineWeb (arXiv:2406.17557), which has another identifier."""
_BLANK_LINES = re.compile(r"(\n\s*\n)")
_LINES = re.compile(r"(\n)")


@dataclass(frozen=True)
class LanguageFilter:
    """Drop the documents that are in another language, or of which the identifier is not certain.

    It is certain if the probabilities of the languages to keep add up to ``threshold``, so a document that is half in
    one of them and half in another is kept.

    ``va`` in ``languages`` without ``ca`` keeps the Catalan documents with more Valencian word forms than forms of
    general Catalan; one that has neither, as short ones often do, is dropped. ``ca`` keeps all Catalan documents.

    By ``paragraph``, the paragraphs of which the identifier is certain that they are in another language are removed
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
            to_keep = self._probability_to_keep(text)
            if to_keep < self.threshold:
                return Dropped(UNCERTAIN, self._margin(found, to_keep))
        if language != "ca" or "ca" in self.languages or "va" not in self.languages:
            return text
        valencian, general = count_forms(text)
        if valencian > general:
            return text
        return Dropped(OTHER, f"{found}, forms: {valencian} Valencian, {general} of general Catalan")

    def settings(self) -> dict[str, Any]:
        """Return the languages, the threshold and the identifier."""
        chosen = {"languages": list(self.languages), "threshold": self.threshold, "by": self.by}
        return chosen | identifier_settings()

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
        """Return what was found, and how much the languages to keep are below the threshold."""
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

    def _probability_to_keep(self, text: str) -> float:
        return sum(value for code, value in language_probabilities(text).items() if self._accepts(code))

    def _accepts(self, language: str) -> bool:
        return language in self.languages or (language == "ca" and "va" in self.languages)


def open_language_filter(given: str, by: Literal["document", "paragraph"]) -> LanguageFilter:
    """Return the filter for a value of ``--language`` such as ``es,ca:0.65``.

    Raises:
        InputError: the identifier is not installed, or does not know a language.
    """
    load_identifier("--language")
    codes, _, threshold = given.partition(":")
    languages = tuple(dict.fromkeys(codes.split(",")))
    known = known_languages()
    unknown = [code for code in languages if code not in (*known, "va")]
    if unknown:
        raise InputError(
            f"--language: py3langid does not know {', '.join(unknown)}; it knows {' '.join(known)}, and va"
        )
    return LanguageFilter(languages, float(threshold or DEFAULT_THRESHOLD), by)
