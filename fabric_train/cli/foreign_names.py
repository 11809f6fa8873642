"""Look up another program's arguments and values in ``foreign_names.yaml``, to find ours."""

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from fabric_train.cli import yaml_core
from fabric_train.cli.argument_types import NameIn

_TRAINING = "TrainArguments"


def advice_for_name(program: str, name: str, argument_names: Collection[str]) -> str | None:
    """Return the name of another program's argument here, or what to do without it.

    Args:
        program: the name of this program's class of arguments.
        name: the other program's name. If the table does not have a.b.c, c and then a are looked up.
        argument_names: the arguments of this program.

    Returns:
        The advice; None if the table does not have the name.
    """
    if program not in read_table()["names"]:
        return None
    name = name.lower()

    # The name is in the table, perhaps as an argument of training.
    for section in (program, _TRAINING):
        translated_name = name_here(section, name)
        if translated_name is not None:
            option = re.match(r"--(\w+)", translated_name)  # None if it begins with the name of another program
            is_argument = section == program or option is None or option[1] in argument_names
            return f"here it is {translated_name}" if is_argument else f"in training it is {translated_name}"
    advice = instead_of(name)
    if advice is not None or "." not in name:
        return advice

    # A component of it is.
    first_component = name.partition(".")[0]
    last_component = name.rpartition(".")[2]
    if last_component in argument_names:
        return f"here it is --{last_component}"
    advice = advice_for_name(program, last_component, argument_names)
    return advice or advice_for_name(program, first_component, argument_names)


def name_here(program: str, name: str) -> str | None:
    """Return the argument of ``program`` for another program's argument, such as ``--lr``; None if it has none."""
    return _read_names(program).get(name)


def instead_of(name: str) -> str | None:
    """Return what to do without an argument that does not exist here; None if the table does not have it."""
    advice_by_pattern = _read_advice()
    if name in advice_by_pattern:
        return advice_by_pattern[name]
    for pattern, advice in advice_by_pattern.items():
        if fnmatchcase(name, pattern):
            return advice
    return None


def advice_for_value(argument: str, kind: Any, value: Any) -> str | None:
    """Return advice on the value here for another program's value, or another spelling; None for unknown values."""
    translated_value = value_here(argument, kind, value)
    return None if translated_value is None else f"here it is {translated_value}"


def value_here(argument: str, kind: Any, value: Any) -> str | None:
    """Return the value here for another program's value; None if that is unknown, or valid unchanged.

    ``kind`` is the argument's type. In a list, the first element that has another value here is translated.
    """
    nested_types = _list_nested_types(kind)

    # Values that are spelled as here except for case and hyphens.
    spellings: dict[str, str] = {}
    for nested_type in nested_types:
        choices: Sequence[str] = ()
        if get_origin(nested_type) is Literal:
            choices = get_args(nested_type)
        elif isinstance(nested_type, NameIn):
            choices = nested_type.names
        for choice in choices:
            spellings[_normalize(choice)] = choice

    # Values of other programs.
    table = read_table()["values"]
    foreign_values: dict[str, Any] = {}
    _add_foreign_values(foreign_values, table.get(argument, {}))
    if bool in nested_types:
        _add_foreign_values(foreign_values, table["true or false"])

    for element in value if isinstance(value, list) else [value]:
        spelling = _normalize(element)
        translated_value = spellings.get(spelling, foreign_values.get(spelling))
        if translated_value is not None and translated_value != element:
            return str(translated_value)
    return None


def _add_foreign_values(foreign_values: dict[str, Any], rows: Mapping[Any, str]) -> None:
    """Add the values of other programs in ``rows`` with ours; the first row with a value applies."""
    for our_value, texts in rows.items():
        for text in _normalize(texts).split():
            foreign_values.setdefault(text, our_value)


@functools.cache
def read_table() -> dict[str, Any]:
    """Return the names and values of other programs."""
    table: dict[str, Any] = yaml_core.load(yaml_core.read_text(str(Path(__file__).with_name("foreign_names.yaml"))))
    return table


@functools.cache
def _read_names(program: str) -> dict[str, str]:
    """Return the arguments of ``program`` by the names of other programs."""
    names: dict[str, str] = {}
    for our_name, foreign_names in read_table()["names"].get(program, {}).items():
        for foreign_name in foreign_names.split():
            names.setdefault(foreign_name, our_name)
    return names


@functools.cache
def _read_advice() -> dict[str, str]:
    """Return what to do without arguments that do not exist here, by the pattern of their names."""
    advice_by_pattern: dict[str, str] = {}
    for advice, patterns in read_table()["absent"].items():
        for pattern in patterns.split():
            advice_by_pattern[pattern] = advice
    return advice_by_pattern


def _list_nested_types(kind: Any) -> list[Any]:
    """Return a type, and at any depth the types in a list, union or Annotated."""
    nested_types = [kind]
    if get_origin(kind) is not Literal:  # whose arguments are values
        for inner_type in get_args(kind):
            nested_types += _list_nested_types(inner_type)
    return nested_types


def _normalize(value: Any) -> str:
    return str(value).lower().replace("-", "_")
