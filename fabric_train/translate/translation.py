"""Collect what a translation has found: arguments of training and of tokenizing, and what has no counterpart."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from fabric_train.arguments import TrainArguments
from fabric_train.cli import argument_types
from fabric_train.cli.errors import InputError
from fabric_train.cli.foreign_names import value_here
from fabric_train.tokenization.arguments import TokenizeArguments
from fabric_train.translate.foreign_file import ForeignFile
from fabric_train.translate.run_length import RunLength

_LARGEST = 1e15
Outcome = Literal["training", "tokenizing", "no counterpart", "off"]
_TYPES: dict[str, dict[str, Any]] = {
    "training": argument_types.types_of(TrainArguments),
    "tokenizing": argument_types.types_of(TokenizeArguments),
}


@dataclass(frozen=True)
class Setting:
    """A value of one of our arguments, and what the file says instead of it."""

    value: Any
    comment: str
    """Where the value comes from, and how it differs."""


@dataclass(frozen=True)
class LengthSetting:
    """A value of one of our arguments that depends on the number of steps."""

    formula: str
    """How it follows from the number of ``steps``."""
    compute: Callable[[RunLength], float]
    comment: str


@dataclass
class Translation:
    """The translation of a file."""

    file: ForeignFile
    training: dict[str, Setting] = field(default_factory=dict)
    tokenizing: dict[str, Setting] = field(default_factory=dict)
    by_length: dict[str, LengthSetting] = field(default_factory=dict)
    """Arguments of training that the number of steps decides."""
    absent: dict[str, str] = field(default_factory=dict)
    """Names of the file without a counterpart, and what to do instead."""
    notes: list[str] = field(default_factory=list)
    """What the reader of the result has to know or to do."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """What became of each name in the file."""
    templates: dict[str, str] = field(default_factory=dict)
    """Chat templates to write next to the result, by the end of the file's name."""

    def train(self, argument: str, value: Any, *origins: str, comment: str = "") -> None:
        """Set an argument of training; an InputError if the value is not of its type."""
        self.training[argument] = self._setting("training", argument, value, origins, comment)
        self._account("training", origins)

    def tokenize(self, argument: str, value: Any, *origins: str, comment: str = "") -> None:
        """Set an argument of tokenizing; an InputError if the value is not of its type."""
        self.tokenizing[argument] = self._setting("tokenizing", argument, value, origins, comment)
        self._account("tokenizing", origins)

    def train_by_length(
        self, argument: str, formula: str, compute: Callable[[RunLength], float], *origins: str, comment: str = ""
    ) -> None:
        """Set an argument of training that is computed once the number of steps is known."""
        self.by_length[argument] = LengthSetting(formula, compute, _comment(self.file, argument, origins, comment))
        self._account("training", origins)

    def default(self, argument: str, value: Any, comment: str = "") -> None:
        """Set an argument of training to the other program's default, unless the file decides it."""
        if argument in self.training or argument in self.by_length:
            return
        words = f"the default of {self.file.program}"
        self.training[argument] = Setting(value, f"{words}; {comment}" if comment else words)

    def leave_out(self, why: str, *origins: str) -> None:
        """Say that settings have no counterpart."""
        for origin in origins:
            self.absent[origin] = why
        self._account("no counterpart", origins)

    def ignore(self, *origins: str) -> None:
        """Say that settings are off, or of a thing that is off."""
        self._account("off", origins)

    def fault(self, origin: str, words: str) -> InputError:
        """Return the error of a value that cannot be translated."""
        value = self.file.settings.get(origin)
        return InputError(f"{self.file.path}: {origin}: {value}: {words}")

    def number(self, *names: str) -> float | None:
        """Return the first of these settings that has a value, as a number; an InputError if it is none."""
        named = self.file.names(*names)
        return self.as_number(named[0], self.file.get(*named)) if named else None

    def as_number(self, name: str, value: Any) -> float:
        """Return a value of the setting ``name`` as a number; an InputError if it is none, or not finite."""
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if isinstance(value, bool) or not abs(number) <= _LARGEST:
            raise InputError(f"{self.file.path}: {name}: expected a number, got {value!r}")
        return number

    def texts(self, name: str) -> list[str]:
        """Return a setting as a list of texts: one that separates them by commas or blanks, or has a list."""
        value = self.file.get(name)
        if value is None:
            return []
        if isinstance(value, str):
            return value.replace(",", " ").split()
        if isinstance(value, list) and all(isinstance(element, str) for element in value):
            return value
        raise InputError(f"{self.file.path}: {name}: expected a text or a list of texts, got {value!r}")

    def _setting(self, where: str, argument: str, value: Any, origins: Iterable[str], comment: str) -> Setting:
        kind = _TYPES[where][argument]
        here = value_here(argument, kind, value)
        try:
            converted = argument_types.convert(kind, value if here is None else here)
        except argument_types.WrongValueError as error:
            place = ", ".join(origins) or f"--{argument}"
            raise InputError(f"{self.file.path}: {place}: expected {error}, got {value!r}") from None
        return Setting(converted, _comment(self.file, argument, origins, comment))

    def _account(self, outcome: Outcome, origins: Iterable[str]) -> None:
        for origin in origins:
            if origin in self.file.settings:
                self.outcomes.setdefault(origin, outcome)


def takes_value(argument: str, value: Any) -> bool:
    """Whether an argument of training takes a value, as it is or as the table translates it."""
    kind = _TYPES["training"][argument]
    here = value_here(argument, kind, value)
    try:
        argument_types.convert(kind, value if here is None else here)
    except argument_types.WrongValueError:
        return False
    return True


def _comment(file: ForeignFile, argument: str, origins: Iterable[str], comment: str) -> str:
    named = [name for name in origins if name in file.settings]
    says_more = named != [argument]
    return "; ".join(filter(None, (", ".join(named) if says_more else "", comment)))
