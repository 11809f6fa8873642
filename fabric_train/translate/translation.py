"""Collect the results of a translation: arguments of training and of tokenizing, and what has no counterpart."""

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
    """A value of one of our arguments, with its comment in the training file."""

    value: Any
    comment: str
    """The origin of the value, and how it differs."""


@dataclass(frozen=True)
class LengthSetting:
    """A value of one of our arguments that depends on the number of steps."""

    formula: str
    """The formula with the number of ``steps``, for the reader."""
    compute: Callable[[RunLength], float]
    comment: str


@dataclass
class Translation:
    """The translation of a file, to which the modules of this package add one after the other.

    ``origins`` are always the names of the file's settings from which an argument of ours follows.
    ``set_training("lora_rank", 8, "lora_r")`` sets our --lora_rank, which follows from the file's lora_r.
    """

    file: ForeignFile
    training: dict[str, Setting] = field(default_factory=dict)
    tokenizing: dict[str, Setting] = field(default_factory=dict)
    by_length: dict[str, LengthSetting] = field(default_factory=dict)
    """The arguments of training whose values depend on the number of steps."""
    absent: dict[str, str] = field(default_factory=dict)
    """The settings of the file without a counterpart, with what to do instead."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user, on what to know or to do."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """The outcome of each setting of the file; the first outcome applies."""
    templates: dict[str, str] = field(default_factory=dict)
    """The chat templates to write next to the result, by the suffix of the file's name."""

    def set_training(self, argument: str, value: Any, *origins: str, comment: str = "") -> None:
        """Set an argument of training.

        Raises:
            InputError: the value does not have the argument's type.
        """
        self.training[argument] = self._convert("training", argument, value, origins, comment)
        self._record("training", origins)

    def set_tokenizing(self, argument: str, value: Any, *origins: str, comment: str = "") -> None:
        """Set an argument of tokenizing.

        Raises:
            InputError: the value does not have the argument's type.
        """
        self.tokenizing[argument] = self._convert("tokenizing", argument, value, origins, comment)
        self._record("tokenizing", origins)

    def set_training_by_length(
        self, argument: str, formula: str, compute: Callable[[RunLength], float], *origins: str, comment: str = ""
    ) -> None:
        """Set an argument of training that is computed once the number of steps is known."""
        self.by_length[argument] = LengthSetting(formula, compute, _join_comment(self.file, argument, origins, comment))
        self._record("training", origins)

    def set_default(self, argument: str, value: Any, comment: str = "") -> None:
        """Set an argument of training to the other program's default, unless the file sets it."""
        if argument in self.training or argument in self.by_length:
            return
        words = f"the default of {self.file.program}"
        self.training[argument] = Setting(value, f"{words}; {comment}" if comment else words)

    def leave_out(self, advice: str, *origins: str) -> None:
        """Record that settings have no counterpart, and the reason or what to do instead."""
        for origin in origins:
            self.absent[origin] = advice
        self._record("no counterpart", origins)

    def ignore(self, *origins: str) -> None:
        """Record that settings are off, belong to something that is off, or describe what always happens here."""
        self._record("off", origins)

    def fault(self, origin: str, words: str) -> InputError:
        """Return the error of a value that cannot be translated."""
        value = self.file.settings.get(origin)
        return InputError(f"{self.file.path}: {origin}: {value}: {words}")

    def number(self, *names: str) -> float | None:
        """Return the first of these settings that has a value, as a number; None if no setting has a value.

        Raises:
            InputError: the value is not a finite number.
        """
        names_with_values = self.file.names(*names)
        if not names_with_values:
            return None
        name = names_with_values[0]
        return self.as_number(name, self.file.get(name))

    def whole_number(self, *names: str) -> int | None:
        """Return the first of these settings that has a value, as a whole number; None if no setting has a value.

        Raises:
            InputError: the value is not a whole number.
        """
        number = self.number(*names)
        if number is None:
            return None
        if not number.is_integer():
            name = self.file.names(*names)[0]
            raise InputError(f"{self.file.path}: {name}: expected a whole number, got {number:g}")
        return int(number)

    def as_number(self, name: str, value: Any) -> float:
        """Return a value of the setting ``name`` as a number.

        Raises:
            InputError: the value is not a finite number.
        """
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if isinstance(value, bool) or not abs(number) <= _LARGEST:  # not: NaN fails every comparison
            raise InputError(f"{self.file.path}: {name}: expected a number, got {value!r}")
        return number

    def texts(self, name: str) -> list[str]:
        """Return a setting as a list of texts; it may be a list, or a text with commas or spaces between them."""
        value = self.file.get(name)
        if value is None:
            return []
        if isinstance(value, str):
            return value.replace(",", " ").split()
        if isinstance(value, list) and all(isinstance(element, str) for element in value):
            return value
        raise InputError(f"{self.file.path}: {name}: expected a text or a list of texts, got {value!r}")

    def _convert(self, program: str, argument: str, value: Any, origins: Iterable[str], comment: str) -> Setting:
        """Convert a value of the file to a setting of ``program``, "training" or "tokenizing"."""
        try:
            converted_value = _convert_value(program, argument, value)
        except argument_types.WrongValueError as error:
            name = ", ".join(origins) or f"--{argument}"
            raise InputError(f"{self.file.path}: {name}: expected {error}, got {value!r}") from None
        return Setting(converted_value, _join_comment(self.file, argument, origins, comment))

    def _record(self, outcome: Outcome, origins: Iterable[str]) -> None:
        for origin in origins:
            if origin in self.file.settings:
                self.outcomes.setdefault(origin, outcome)


def takes_value(argument: str, value: Any) -> bool:
    """Return whether an argument of training accepts a value, unchanged or translated by the table of names."""
    try:
        _convert_value("training", argument, value)
    except argument_types.WrongValueError:
        return False
    return True


def _convert_value(program: str, argument: str, value: Any) -> Any:
    kind = _TYPES[program][argument]
    translated_value = value_here(argument, kind, value)
    if translated_value is not None:
        value = translated_value
    return argument_types.convert(kind, value)


def _join_comment(file: ForeignFile, argument: str, origins: Iterable[str], comment: str) -> str:
    """Join the file's names from which an argument follows, unless they are the argument's name, and a comment."""
    names = [name for name in origins if name in file.settings]
    texts = []
    if names and names != [argument]:
        texts.append(", ".join(names))
    if comment:
        texts.append(comment)
    return "; ".join(texts)
