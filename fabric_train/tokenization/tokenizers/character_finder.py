"""Find out quickly whether a text has one of some rare characters."""

import re
from collections.abc import Iterable
from itertools import groupby

import numpy as np


class CharacterFinder:
    """A search for ``characters``, code points from 128 on, in UTF-8.

    The first two bytes of a character decide for most texts; only the others are searched with a regular expression,
    which takes longer.
    """

    def __init__(self, characters: Iterable[int]) -> None:
        codes = sorted(set(characters))
        self._expression = re.compile(f"[{''.join(_ranges(codes))}]")
        self._seconds: dict[
            int, np.ndarray
        ] = {}  # by the first byte: whether the second one may be that of a character
        for first, second in {tuple(chr(code).encode()[:2]) for code in codes}:
            self._seconds.setdefault(first, np.zeros(256, dtype=bool))[second] = True

    def is_in(self, text: bytes) -> bool:
        """Return whether a text in UTF-8 has one of the characters."""
        if text.isascii():
            return False
        codes = np.frombuffer(text, np.uint8)
        for first, seconds in self._seconds.items():
            if first in text and seconds[codes[np.flatnonzero(codes == first) + 1]].any():
                return self._expression.search(text.decode()) is not None
        return False


def _ranges(codes: list[int]) -> list[str]:
    runs = (list(run) for _, run in groupby(enumerate(codes), key=lambda numbered: numbered[1] - numbered[0]))
    return [f"{re.escape(chr(run[0][1]))}-{re.escape(chr(run[-1][1]))}" for run in runs]
