"""Identify the language of a text with py3langid, and drop documents and paragraphs in other languages.

py3langid is naive Bayes on n-grams of bytes for 140 languages (Lui and Baldwin 2012, ACL P12-3005); its package
contains the model. ``docs/contributing/cleaning.md`` compares it with other identifiers.
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

from fabric_train.cleaning.results import Dropped
from fabric_train.cli.errors import InputError
from fabric_train.files.requirements import check_package

PIECES = 3
"""The most pieces of a text that are looked at, evenly spaced from its beginning to its end."""
PIECE_CHARACTERS = (150, 300)
"""The length of a piece, and the length to try next if the identifier is not certain.

Each stretch of white space counts as one character: the identifier divides by the length of the text, so that wide
margins make it less certain.
"""
CERTAIN = 0.95
"""The lowest probability at which the identifier counts as certain."""
_PIECE_WITH_MARGINS = 6_000  # characters of a long text from which a piece is taken, so that only these are split
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

    The language is an ISO 639-1 code, or an ISO 639-3 code if there is none; ``zxx`` means no language. Valencian is
    ``ca``. A text without letters has a probability near 0.
    """
    excerpts = _normalize_words(text)
    for num_characters in PIECE_CHARACTERS:
        language, probability = _identifier().classify(_sample(excerpts, num_characters))
        if probability >= CERTAIN:
            break
    return language, probability


def language_probabilities(text: str) -> dict[str, float]:
    """Return the probability of each language that the identifier knows."""
    return dict(_identifier().rank(_sample(_normalize_words(text), PIECE_CHARACTERS[-1])))


def identifier_settings() -> dict[str, Any]:
    """Return everything that determines the result of :func:`identify`."""
    return {
        "identifier": f"py3langid {version('py3langid')}",
        "pieces": PIECES,
        "piece_characters": list(PIECE_CHARACTERS),
        "certain": CERTAIN,
    }


def load_identifier(option: str) -> None:
    """Load the model before processes are forked, so that they share it; InputError if py3langid is not installed."""
    check_package("py3langid", option)
    _identifier()


@lru_cache(maxsize=1)
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    identifier.nb_ptc = identifier.nb_ptc.astype(np.float32)  # as float16, it would be converted for every text
    return identifier


def _normalize_words(text: str) -> list[str]:
    """Return the text, or excerpts of a long one, with a single space for each run of white space."""
    is_long = len(text) > PIECES * _PIECE_WITH_MARGINS
    excerpts = _evenly_spaced(text, _PIECE_WITH_MARGINS) if is_long else [text]
    return [" ".join(excerpt.split()) for excerpt in excerpts]


def _sample(excerpts: list[str], num_characters: int) -> str:
    """Return the text for the identifier: up to three pieces of ``num_characters``, each on its own line.

    ``excerpts`` is the result of :func:`_normalize_words`: a text, or three excerpts of a long one.
    """
    if len(excerpts) > 1:
        pieces = [excerpt[:num_characters] for excerpt in excerpts]
    elif len(excerpts[0]) > PIECES * num_characters:
        pieces = _evenly_spaced(excerpts[0], num_characters)
    else:
        pieces = excerpts
    return "\n".join(pieces)


def _evenly_spaced(text: str, num_characters: int) -> list[str]:
    """Return three pieces of a text: at its beginning, in the middle and at its end."""
    step = (len(text) - num_characters) // (PIECES - 1)
    return [text[start : start + num_characters] for start in range(0, PIECES * step, step)]


@dataclass(frozen=True)
class LanguageFilter:
    """Drop the documents that are in another language, or whose language is not certain.

    The language is certain if the probabilities of the kept languages add up to ``threshold``, so a document that is
    half in one kept language and half in another is kept.

    ``va`` in ``languages`` without ``ca`` keeps the Catalan documents that have more Valencian word forms than forms of
    general Catalan. A document with neither, as is common for short ones, is dropped. ``ca`` keeps all Catalan
    documents.

    With ``by`` paragraph, paragraphs that are certainly in another language are removed first. An uncertain
    paragraph stays, because headings and names are uncertain. Blank lines separate paragraphs; in a text without blank
    lines, each line is a paragraph.
    """

    languages: tuple[str, ...]  # codes of ISO 639, and va
    threshold: float
    by: Literal["document", "paragraph"]

    def clean(self, text: str, edits: Counter[str]) -> str | Dropped:
        """Return the text, without paragraphs in other languages, or why it is dropped.

        ``edits`` counts the removed paragraphs by language.
        """
        if self.by == "paragraph":
            text = self._remove_paragraphs(text, edits)
            if not text:
                return Dropped(OTHER, "every paragraph")

        # the language is certain, or the languages to keep together are
        language, probability = identify(text)
        finding = f"{language} {self._format(probability)}"
        if probability >= self.threshold and not self._accepts(language):
            return Dropped(OTHER, finding)
        if probability < self.threshold:
            probabilities = language_probabilities(text).items()
            accepted_probability = sum(value for code, value in probabilities if self._accepts(code))
            if accepted_probability < self.threshold:
                return Dropped(UNCERTAIN, self._describe_margin(finding, accepted_probability))

        # Valencian is Catalan with other forms of some words; ``ca`` keeps both
        keeps_only_valencian = "va" in self.languages and "ca" not in self.languages
        if language != "ca" or not keeps_only_valencian:
            return text
        words = _WORD.findall(text.lower())
        num_valencian = sum(word in VALENCIAN for word in words)
        num_general = sum(word in GENERAL for word in words)
        if num_valencian > num_general:
            return text
        return Dropped(OTHER, f"{finding}, forms: {num_valencian} Valencian, {num_general} general Catalan")

    def settings(self) -> dict[str, Any]:
        return {"languages": list(self.languages), "threshold": self.threshold, "by": self.by} | identifier_settings()

    def _remove_paragraphs(self, text: str, edits: Counter[str]) -> str:
        """Return the text without the paragraphs that are certainly in another language."""
        separator = _BLANK_LINES if _BLANK_LINES.search(text) else _LINES
        pieces = separator.split(text)  # a paragraph, the separator after it, the next paragraph, …
        remaining_pieces: list[str] = []
        for index in range(0, len(pieces), 2):
            language, probability = identify(pieces[index])
            if probability >= self.threshold and not self._accepts(language):
                edits[f"removed paragraph in {language}"] += 1
            else:
                remaining_pieces += pieces[index : index + 2]
        if len(remaining_pieces) == len(pieces):
            return text
        return "".join(remaining_pieces).strip()

    def _describe_margin(self, finding: str, accepted_probability: float) -> str:
        """Return the most likely language, and how much the languages to keep are below the threshold.

        Args:
            finding: the most likely language and its probability.
            accepted_probability: the sum of the probabilities of the languages to keep.
        """
        accepted = f"{','.join(self.languages)} {self._format(accepted_probability)}"
        margin = self.threshold - float(self._format(accepted_probability))
        margin_below = f"{margin:.{self._num_decimals()}f} below {self.threshold:g}"
        if accepted == finding:
            return f"{accepted}, {margin_below}"
        return f"{finding}; {accepted}, {margin_below}"

    def _format(self, probability: float) -> str:
        """Format a probability, rounded down so that a value below the threshold does not look like the threshold."""
        scale = 10 ** self._num_decimals()
        rounded = math.floor(probability * scale) / scale
        return f"{rounded:.{self._num_decimals()}f}"

    def _num_decimals(self) -> int:
        _, _, decimals = f"{self.threshold:g}".partition(".")
        return max(2, len(decimals))

    def _accepts(self, language: str) -> bool:
        return language in self.languages or (language == "ca" and "va" in self.languages)


def open_language_filter(switch: str, by: Literal["document", "paragraph"]) -> LanguageFilter:
    """Return the filter for a value of ``--language`` such as ``es,ca:0.65``.

    Raises:
        InputError: a language is unknown.
    """
    load_identifier("--language")
    codes, _, threshold = switch.partition(":")
    languages = tuple(dict.fromkeys(codes.split(",")))
    identifier_languages = sorted(_identifier().labels)
    unknown = [code for code in languages if code not in (*identifier_languages, "va")]
    if unknown:
        raise InputError(
            f"--language: py3langid does not support {', '.join(unknown)}; it supports "
            f"{' '.join(identifier_languages)}, and va"
        )
    return LanguageFilter(languages, float(threshold or DEFAULT_THRESHOLD), by)
