"""Apply the cleaning steps to one document after another, in a fixed order."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from fabric_train.cli.errors import InputError

if TYPE_CHECKING:
    from arguments import TokenizeArguments


@dataclass(frozen=True)
class Dropped:
    """A document that is left out.

    Args:
        reason: the key in the ledger's ``documents_skipped``, such as ``other_language``.
        detail: what was found in this document, such as ``ca 0.91``.
    """

    reason: str
    detail: str


@dataclass(frozen=True)
class Cleaned:
    """A document that is kept: its text, and the number of changes by kind, such as ``redacted email``."""

    text: str
    edits: dict[str, int]


class CleaningStep(Protocol):
    """One switch. It has plain settings only, because processes may get it by pickle; models load on first use."""

    def clean(self, text: str, edits: Counter[str]) -> str | Dropped:
        """Return the text, changed or not, or why it is dropped; count the changes in ``edits`` by kind."""

    def settings(self) -> dict[str, Any]:
        """Return everything that decides the result, as JSON: thresholds, versions of packages, hashes of files."""


@dataclass(frozen=True)
class Cleaner:
    """Steps by the names of their switches, in the order in which they are applied."""

    steps: dict[str, CleaningStep]

    def clean(self, text: str) -> Cleaned | Dropped:
        """Return the text that all steps leave, or why one of them drops it; the first that does decides."""
        edits: Counter[str] = Counter()
        for step in self.steps.values():
            result = step.clean(text, edits)
            if isinstance(result, Dropped):
                return result
            text = result
        return Cleaned(text, dict(edits))

    def settings(self) -> dict[str, Any]:
        """Return the settings of each step, by switch."""
        return {name: step.settings() for name, step in self.steps.items()}


def open_cleaner(arguments: "TokenizeArguments", kinds: Sequence[str]) -> Cleaner | None:
    """Return the cleaner for the switches that are given; None if there are none.

    Args:
        arguments: the command line of ``tokenize_dataset.py``.
        kinds: the data format of each source.

    Raises:
        InputError: a switch cannot be used, or a source has chats.
    """
    steps: dict[str, CleaningStep] = {}
    if arguments.language is not None:
        from fabric_train.tokenization.cleaning.language_filter import open_language_filter

        steps["language"] = open_language_filter(arguments.language, arguments.language_by)
    if arguments.quality is not None:
        from fabric_train.tokenization.cleaning.quality.quality_filter import open_quality_filter

        steps["quality"] = open_quality_filter(arguments.quality)
    chats = [kind for kind in kinds if kind != "text"]
    if steps and chats:
        given = ", ".join(f"--{name}" for name in steps)
        raise InputError(f"{given}: cleaning is for text, and a source has {chats[0]}; tokenize it without, then merge")
    return Cleaner(steps) if steps else None
