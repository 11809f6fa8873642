"""Match regular expressions from users and adapters' files within a time limit.

Python's ``re`` can take years for an expression such as ``(.*)*x$`` and cannot be interrupted. ``regex`` has the same
syntax and a time limit, but compiling copies counted parts: ``((a{30}){30}){30}`` has 27,000 copies.
"""

import re
import time
from collections.abc import Callable, Iterable

import regex  # type: ignore[import-untyped]

from fabric_train.cli.errors import InputError

_SECONDS = 5.0
"""The time limit for all names of a model; a usual expression takes milliseconds."""
_MAX_CHARACTERS = 10_000
_MAX_COPIES = 10_000
_REPEAT_COUNT = re.compile(r"\{([0-9]{0,9}),?([0-9]{0,9})\}")
_MAX_SHOWN = 200  # characters of an expression in a message


class NamePattern:
    """A regular expression for names in a model.

    ``option`` is the argument that gives it, and ``example`` is a name, both for messages.

    Raises:
        InputError: it is not a regular expression, or is too large.
    """

    def __init__(self, option: str, pattern: str, example: str) -> None:
        """Compile the pattern; see the class."""
        self._option = option
        self._pattern = pattern
        self._example = example
        if len(pattern) > _MAX_CHARACTERS or _num_copies(pattern) > _MAX_COPIES:
            raise self._fault("the regular expression is too large")
        try:
            # checked alone: ``a)(b`` is no expression, but would be one within parentheses
            re.compile(pattern)
            self._whole_name = regex.compile(pattern)
            self._whole_components = regex.compile(rf"(?:^|\.)(?:{pattern})(?:\.|$)")
        except (re.error, regex.error, RecursionError, OverflowError) as error:
            raise self._fault(f"it is neither a name nor a regular expression ({error})") from None

    def matching_whole(self, names: Iterable[str]) -> set[str]:
        """Return the names that the pattern matches in full; InputError if this takes too long."""
        return self._select(self._whole_name.fullmatch, names)

    def matching_parts(self, names: Iterable[str]) -> set[str]:
        """Return the names in which the pattern matches whole parts between dots; InputError if this takes too long."""
        return self._select(self._whole_components.search, names)

    def _select(self, matches: Callable[..., object], names: Iterable[str]) -> set[str]:
        """Return the names that an expression matches with ``method``, all within the time limit."""
        deadline = time.monotonic() + _SECONDS
        selected = set()
        for name in names:
            seconds_left = max(deadline - time.monotonic(), 0.001)  # 0 would be no limit
            try:
                if matches(name, timeout=seconds_left):
                    selected.add(name)
            except (TimeoutError, MemoryError):
                raise self._fault(f"the regular expression takes longer than {_SECONDS:g} s") from None
        return selected

    def _fault(self, reason: str) -> InputError:
        shown = self._pattern
        if len(shown) >= _MAX_SHOWN:
            shown = f"{shown[:_MAX_SHOWN]}…"
        return InputError(f"{self._option} {shown}: {reason}; give names such as {self._example}")


def _num_copies(pattern: str) -> int:
    """Return an upper bound on the copies of a subexpression that nested counts such as ``{2,30}`` make."""
    num_copies = 1
    for match in _REPEAT_COUNT.finditer(pattern):
        largest = max(int(count or 0) for count in match.groups())
        num_copies *= max(largest, 1)
    return num_copies
