"""Drop documents of low quality: ``--quality gopher,c4,fineweb``."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from fabric_train.tokenization.cleaning.cleaner import Dropped
from fabric_train.tokenization.cleaning.language import identifier_settings, load_identifier
from fabric_train.tokenization.cleaning.quality import c4, fineweb, gopher, repetition
from fabric_train.tokenization.cleaning.quality.measured_text import Fault, MeasuredText

_VERSION = 1  # of the rules here
# in the order in which they are applied, which is that of FineWeb's own pipeline (arXiv:2406.17557)
_LIMITS = {"gopher": gopher.LIMITS | repetition.LIMITS, "c4": c4.LIMITS, "fineweb": fineweb.LIMITS}


@dataclass(frozen=True)
class QualityFilter:
    """Drop the documents that break a rule of ``rules``; the first one decides. C4's remove lines, too."""

    rules: tuple[str, ...]

    def clean(self, text: str, edits: Counter[str]) -> str | Dropped:
        """Return the text, without the lines that C4's rules remove, or why it is dropped."""
        measured = MeasuredText(text)
        if "gopher" in self.rules:
            fault = gopher.find_fault(measured) or repetition.find_fault(measured)
            if fault is not None:
                return _dropped("gopher", fault)
            if (language := gopher.unchecked_language(text)) is not None:
                edits[f"no list of stop words: {language}"] += 1
        if "c4" in self.rules:
            result = c4.clean_lines(text, edits)
            if isinstance(result, Fault):
                return _dropped("c4", result)
            measured = MeasuredText(result)
        if "fineweb" in self.rules and (fault := fineweb.find_fault(measured)) is not None:
            return _dropped("fineweb", fault)
        return measured.text

    def settings(self) -> dict[str, Any]:
        """Return the rules with their limits, and the identifier that chooses the stop words."""
        limits = {name: _LIMITS[name] for name in self.rules}
        return {"version": _VERSION, "limits": limits} | (identifier_settings() if "gopher" in self.rules else {})


def open_quality_filter(given: str) -> QualityFilter:
    """Return the filter for a value of ``--quality`` such as ``gopher,c4``.

    Raises:
        InputError: the identifier of languages is not installed.
    """
    chosen = given.split(",")
    if "gopher" in chosen:
        load_identifier("--quality gopher")
    return QualityFilter(tuple(name for name in _LIMITS if name in chosen))


def _dropped(rules: str, fault: Fault) -> Dropped:
    return Dropped(f"low_quality: {rules}_{fault.rule}", fault.found)
