"""Split a document into lines and words once for all rules."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

_WORDS = re.compile(r"\w+(?:[.,:/@'’]+\w+)*")  # 1.000,50 and don't and example.com are one each


@dataclass(frozen=True)
class Fault:
    """Why a document is of low quality: the rule, and what was found, such as ``12 words``."""

    rule: str
    found: str


@dataclass(frozen=True)
class MeasuredText:
    """A document that is not blank, with what the rules count."""

    text: str

    @cached_property
    def lines(self) -> list[str]:
        """Return the lines that are not blank, without white space at their ends."""
        return [line for line in map(str.rstrip, self.text.split("\n")) if line]

    @cached_property
    def words(self) -> list[str]:
        """Return the words in their order, without punctuation marks."""
        return _WORDS.findall(self.text)

    @cached_property
    def counts(self) -> Counter[str]:
        """Return how often each word occurs."""
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
