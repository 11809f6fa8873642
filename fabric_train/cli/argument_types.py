"""Types of arguments, and the conversion of values from the command line or YAML to them."""

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fabric_train.cli import yaml_core

_INT32 = 2**31 - 1
_INT64 = 2**63 - 1
_NULL = ("null", "None")
POSITIONAL = {"positional": True}
"""The metadata of a dataclass's only field that may be given on the command line without its name."""
_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True)
class NumberRange:
    """The range of a number argument; ``words`` describe a number in the range."""

    words: str
    lowest: float
    highest: float
    excludes_lowest: bool = False
    thousand: int | None = None  # what k after the number stands for, in lengths 1024; m and b are its square and cube

    def check(self, number: float) -> None:
        """Raise a WrongValueError if a number is not in the range."""
        if not math.isfinite(number) or number < self.lowest:
            raise WrongValueError(self.words)
        if self.excludes_lowest and number == self.lowest:
            raise WrongValueError(self.words)
        if number > self.highest:
            if self.highest == 1:  # the words of these ranges name the limit
                raise WrongValueError(self.words)
            raise WrongValueError(f"at most {int(self.highest):,}")


@dataclass(frozen=True, eq=False)
class NameIn:
    """A text that is a name in ``table``, such as a table of ``cli.tables``, to which extensions add names.

    ``fixed_names`` such as auto are listed before the table's.
    """

    table: Collection[str]
    fixed_names: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All currently registered names."""
        return (*self.fixed_names, *self.table)

    @property
    def words(self) -> str:
        """A description of a valid value, for messages."""
        if not self.names:
            return "a name that --extensions adds"
        return f"one of {', '.join(self.names)} (--extensions adds names)"


PositiveInt = Annotated[int, NumberRange("a whole number above 0", 1, _INT32)]
NonNegativeInt = Annotated[int, NumberRange("a whole number, 0 or more", 0, _INT32)]
PositiveInt64 = Annotated[int, NumberRange("a whole number above 0", 1, _INT64)]
NonNegativeInt64 = Annotated[int, NumberRange("a whole number, 0 or more", 0, _INT64)]
NumProcesses = Annotated[int, NumberRange("a whole number above 0", 1, 1024)]
NumLayers = Annotated[int, NumberRange("a whole number above 0", 1, 1000)]
LayerSize = Annotated[int, NumberRange("a whole number above 0", 1, 2**24)]
"""A model's width, heads or vocabulary; the bytes of a matrix with two sides of this size fit into int64."""
NumWorkers = Annotated[int, NumberRange("a whole number, 0 or more", 0, 1024)]
RowLength = Annotated[int, NumberRange("a whole number above 0, such as 8192 or 8k", 1, 2**24, thousand=1024)]
"""The tokens of a row or a text; 2**24 is ten times the longest context of any model."""
Overlap = Annotated[int, NumberRange("a whole number, 0 or more", 0, 2**24, thousand=1024)]
TokenCount = Annotated[int, NumberRange("a whole number above 0, such as 200k, 5m or 1.5b", 1, _INT64, thousand=1000)]
"""The tokens of a corpus, which are counted in thousands, millions and billions."""
PositiveFloat = Annotated[float, NumberRange("a number above 0", 0, 1e9, excludes_lowest=True)]
NonNegativeFloat = Annotated[float, NumberRange("a number, 0 or more", 0, 1e9)]
Temperature = Annotated[float, NumberRange("a number, 0.01 or more", 0.01, 1e9)]
"""A divisor of logits. With a lower one, differences of logits overflow."""
UnitInterval = Annotated[float, NumberRange("a number from 0 to 1", 0, 1)]
PositiveShare = Annotated[float, NumberRange("a number above 0 and at most 1", 0, 1, excludes_lowest=True)]
Seconds = Annotated[float, NumberRange("a number, 0 or more", 0, 1e8)]
"""A timeout of at most three years; torch and the system can count the nanoseconds of ten times as much."""
TeacherWeights = Literal["16bit", "nf4", "nf4_double"]
"""How a teacher's decoder layers are held, see ``model.nf4``."""


class WrongValueError(ValueError):
    """Raised for a value that does not have an argument's type; the message names the expected type."""


def convert(kind: Any, value: Any) -> Any:
    """Convert a value from YAML, or a word of the command line, to an argument's type.

    Args:
        kind: str, bool, int, a type of this module, a Literal, a list or dict of these, or a union with None.
        value: a parsed YAML value, or a text, which is parsed as a plain scalar of YAML.

    Raises:
        WrongValueError: the value does not have that type, or is outside its range.
    """
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return _convert_to_union(get_args(kind), value)
    if origin is Annotated:
        base, limits = get_args(kind)
        if isinstance(limits, NameIn):
            return _convert_to_name(limits, value)
        return _convert_to_number(base, limits, value)
    if origin is list:
        return _convert_to_list(kind, value)

    if origin is dict:
        if isinstance(value, str):
            value = _parse_yaml(yaml_core.load, value, describe(kind))
        is_valid = isinstance(value, dict) and _is_json_value(value)
    elif origin is Literal:
        is_valid = isinstance(value, str) and value in get_args(kind)
    elif kind is str:
        is_valid = isinstance(value, str) and _is_text(value)
    else:
        if isinstance(value, str):
            value = _parse_yaml(yaml_core.plain_scalar, value, describe(kind))
        is_valid = type(value) is kind  # not isinstance: for Python True is an int, for users it is no number
    if not is_valid:
        raise WrongValueError(describe(kind))
    return value


def describe(kind: Any) -> str:
    """Describe a value of this type, for messages."""
    origin = get_origin(kind)
    if origin is Literal:
        choices = ", ".join(get_args(kind))
        return f"one of {choices}" if len(get_args(kind)) > 1 else choices
    if origin in (Union, UnionType):
        words = " or ".join(describe(member) for member in get_args(kind) if member is not type(None))
        return f"{words} or null" if type(None) in get_args(kind) else words
    if origin is Annotated:
        limits: NumberRange | NameIn = get_args(kind)[1]
        return limits.words
    if origin is list:
        return f"a list, each {describe(get_args(kind)[0])}"
    if origin is dict:
        return "names with values, such as {name: 1}"
    return {str: "text", bool: "true or false", int: "a whole number"}[kind]


def takes_dict(kind: Any) -> bool:
    """Return whether values of this type may be mappings or lists of mappings."""
    return get_origin(kind) is dict or any(takes_dict(choice) for choice in get_args(kind))


def takes_list(kind: Any) -> bool:
    """Return whether values of this type are lists, or either lists or None."""
    return get_origin(kind) is list or any(get_origin(choice) is list for choice in get_args(kind))


def _convert_to_union(members: tuple[Any, ...], value: Any) -> Any:
    """Convert a value to the first type of a union that accepts it; the error names what all types expect."""
    takes_none = type(None) in members
    if takes_none and (value is None or (isinstance(value, str) and value in _NULL)):
        return None
    expected = []
    for member in members:
        if member is type(None):
            continue
        try:
            return convert(member, value)
        except WrongValueError as error:
            expected.append(str(error))
    if takes_none:
        expected.append("null")
    raise WrongValueError(" or ".join(expected))


def _convert_to_name(name_in: NameIn, value: Any) -> str:
    if not isinstance(value, str) or value not in name_in.names:
        raise WrongValueError(name_in.words)
    return value


def _convert_to_number(base: Any, number_range: NumberRange, value: Any) -> Any:
    """Return a value as a number of type ``base`` (int or float) in the range; a text may end in a unit k, m or b."""
    if isinstance(value, str):
        value = _parse_number(value, number_range)
    is_valid = type(value) is base or (base is float and type(value) is int)
    if not is_valid:
        raise WrongValueError(number_range.words)
    number_range.check(value)
    return base(value)


def _parse_number(text: str, number_range: NumberRange) -> Any:
    """Parse a text such as 4096, 1e-5 or 1.5k; 1.5k must be a whole number."""
    if number_range.thousand is None:
        return _parse_yaml(yaml_core.plain_scalar, text, number_range.words)
    match = re.fullmatch(r"([0-9]{1,9})(?:\.([0-9]{1,9}))?([kmb])", text, re.I)
    if match is None:
        return _parse_yaml(yaml_core.plain_scalar, text, number_range.words)

    # In integers, which are exact: 1.5k is 15 * 1000 / 10.
    digits = match[1]
    decimals = match[2] or ""
    exponent = "kmb".index(match[3].lower()) + 1
    numerator = int(digits + decimals) * number_range.thousand**exponent
    number, remainder = divmod(numerator, 10 ** len(decimals))
    if remainder:
        raise WrongValueError(number_range.words)
    return number


def _convert_to_list(kind: Any, value: Any) -> list[Any]:
    if isinstance(value, str):
        if value.startswith("[") and value.endswith("]"):
            value = _parse_yaml(yaml_core.load, value, describe(kind))
        else:  # a word without brackets is the only element
            value = [value]
    if not isinstance(value, list):
        raise WrongValueError(describe(kind))
    element_kind = get_args(kind)[0]
    try:
        return [convert(element_kind, element) for element in value]
    except WrongValueError as error:
        raise WrongValueError(f"a list, each {error}") from None


def _is_json_value(value: Any) -> bool:
    """Return whether JSON can hold a value that was parsed from YAML."""
    if isinstance(value, dict):
        are_names = all(isinstance(key, str) and _is_text(key) for key in value)
        return are_names and all(map(_is_json_value, value.values()))
    if isinstance(value, list):
        return all(map(_is_json_value, value))
    if isinstance(value, str):
        return not value or _is_text(value)
    if value is None or type(value) is bool:
        return True
    if type(value) is int:
        return abs(value) <= _INT64
    return type(value) is float and math.isfinite(value)


def _is_text(value: str) -> bool:
    """Return whether a text can be printed, written to a file and used as a name.

    Empty texts, zero bytes, and lone surrogates (which UTF-8 cannot encode) are refused.
    """
    return bool(value) and "\0" not in value and not re.search("[\ud800-\udfff]", value)


def _parse_yaml(parse: Callable[[str], Any], text: str, expected: str) -> Any:
    """Return ``parse(text)``; if it refuses the text, the error says what was ``expected``."""
    try:
        return parse(text)
    except ValueError as error:
        raise WrongValueError(expected) from error


def groups_of(arguments: type) -> dict[str, type]:
    """Return the groups of a program's arguments by field name; a single group has an empty name."""
    hints = get_type_hints(arguments)
    has_groups = all(dataclasses.is_dataclass(kind) for kind in hints.values())
    return hints if has_groups else {"": arguments}


def types_of(arguments: type) -> dict[str, Any]:
    """Return the types of all arguments by name, including number ranges."""
    types: dict[str, Any] = {}
    for group in groups_of(arguments).values():
        types |= get_type_hints(group, include_extras=True)
    return types


def shown_name(name: str) -> str:
    """Return an argument's name as users write it.

    The dataclass adds a trailing _ if the name is a keyword of Python: its field ``from_`` is the argument ``from``.
    """
    return name.rstrip("_")


def positional_of(arguments: type) -> str | None:
    """Return the argument that may be given without its name; None if the program has none."""
    for group in groups_of(arguments).values():
        for field in dataclasses.fields(group):
            if field.metadata.get("positional"):
                return field.name
    return None


def is_required(field: dataclasses.Field) -> bool:
    """Return whether an argument has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def default_of(field: dataclasses.Field) -> Any:
    """Return the default of an argument that has one."""
    if field.default_factory is dataclasses.MISSING:
        return field.default
    return field.default_factory()


def title_of(group: type) -> str:
    """Return the first line of a group's docstring."""
    return (group.__doc__ or group.__name__).strip().splitlines()[0]


def parse_size(text: str) -> int | None:
    """Return the bytes of a size such as 80GB (1e9 each), 80GiB (2**30 each) or 25GB/s; None if it is not a size."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?)?B(?:/s)?", text.strip())
    if match is None:
        return None
    num_bytes = float(match[1]) * _UNITS[match[2] or ""]
    return round(num_bytes) if 1 <= num_bytes < 2**63 else None


def parse_ranges(text: str) -> list[tuple[int, int]] | None:
    """Return the first and last number of ranges such as 0-11,16,20-31; None if the text is something else."""
    ranges = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part)
        if match is None:
            return None
        first = int(match[1])
        last = int(match[2] or match[1])
        if last < first:
            return None
        ranges.append((first, last))
    return ranges


def show_size(num_bytes: float) -> str:
    """Return bytes as GB, or as MB below one GB."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:,.1f} GB"
    return f"{num_bytes / 1e6:,.1f} MB"


def nearest_name(name: str, names: Collection[str]) -> str:
    """Return a hint at the most similar of ``names``, such as "; did you mean train?"; "" if none is similar."""
    nearest = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, such as 1 step or 2,000 steps."""
    return f"1 {noun}" if count == 1 else f"{count:,} {noun}s"


def given_twice(folders: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each folder that is given again, by the same or another path, with the fault.

    The folder is yielded as it was written the first time, once for every repetition.
    """
    first_spellings: dict[str, str] = {}  # by the real path
    for folder in folders:
        path = os.path.realpath(os.path.expanduser(folder))
        if path not in first_spellings:
            first_spellings[path] = folder
            continue
        first_spelling = first_spellings[path]
        alias = "" if folder == first_spelling else f", also as {folder}"
        yield first_spelling, f"{first_spelling} is given twice{alias}; give it once"


def range_of_steps(text: str) -> tuple[int, int] | None:
    """Return the first and the last step of a text such as 10:12; None if the text is not such a range."""
    match = re.fullmatch(r"([1-9][0-9]{0,8}):([1-9][0-9]{0,8})", text)
    if match is None:
        return None
    first_step = int(match[1])
    last_step = int(match[2])
    return (first_step, last_step) if first_step <= last_step else None


REWARD = "reward"
"""The figure of completions that decides which checkpoint is the best, unless ``--best_by`` names another."""
_HIGHER_IS_BETTER = ("accuracy", "margin", "reward_chosen", "reward_desirable", "agreement")


def is_higher_better(figure: str, *, of_completions: bool) -> bool:
    """Return whether a higher value of a figure of an evaluation is better, for programs without the run's objective.

    Args:
        figure: A figure that ``--best_by`` may name, such as accuracy, not a loss.
        of_completions: Whether the figure is one of sampled completions, whose rewards may have any name. Otherwise,
            reward_rejected is better if it is lower.
    """
    if of_completions:
        return figure == REWARD or figure.startswith(f"{REWARD}_")
    return figure in _HIGHER_IS_BETTER


def planned_steps(
    max_step: int | None, number_epochs: int | None, rows: tuple[int, int] | None, after_step: int = 0
) -> float:
    """Return the number of steps that ``--max_step`` and ``--number_epochs`` allow; infinite if neither limits it.

    Args:
        max_step: the last step; None for no limit.
        number_epochs: passes over the rows; None for no limit.
        rows: the rows of an epoch and of a step; None if epochs do not limit the steps, as for a stream and with
            phases.
        after_step: the step after which the first epoch begins.
    """
    limits = [math.inf if max_step is None else max_step]
    if number_epochs is not None and rows is not None:
        rows_per_epoch, rows_per_step = rows
        steps_per_epoch = math.ceil(rows_per_epoch / rows_per_step)
        limits.append(after_step + steps_per_epoch * number_epochs)
    return min(limits)
