"""Look up what another program's argument or value is here, in ``foreign_names.yaml``."""

import functools
import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from fabric_train.cli import yaml_core
from fabric_train.cli.argument_types import NameIn

_TRAINING = "TrainArguments"


def advice_for_name(program: str, name: str, known: Collection[str]) -> str | None:
    """Return what another program's argument is here, or what to do without one; None if the table does not have it.

    ``program`` is the name of the class of arguments. Of a ``name`` such as a.b, the table may have only b or a.
    """
    if program not in read_table()["names"]:
        return None
    name = name.lower()
    for section in (program, _TRAINING):
        here = name_here(section, name)
        if here is not None:
            argument = re.match(r"--(\w+)", here)  # None: it begins with the name of another program
            is_here = section == program or argument is None or argument[1] in known
            return f"here it is {here}" if is_here else f"in training it is {here}"
    absent = instead_of(name)
    if absent is not None:
        return absent
    first, dot, rest = name.partition(".")
    last = rest.rpartition(".")[2]
    if last in known:
        return f"here it is --{last}"
    return (advice_for_name(program, last, known) or advice_for_name(program, first, known)) if dot else None


def name_here(program: str, name: str) -> str | None:
    """Return what another program's argument is among those of ``program``, such as ``--lr``; None if nothing."""
    return _names_here(program).get(name)


def instead_of(name: str) -> str | None:
    """Return what to do without an argument that does not exist here; None if the table does not have it."""
    absent = _absent()
    if name in absent:
        return absent[name]
    return next((advice for pattern, advice in absent.items() if fnmatchcase(name, pattern)), None)


def advice_for_value(argument: str, kind: Any, value: Any) -> str | None:
    """Return what another program's value, or another spelling of our own, is here; None for unknown values."""
    here = value_here(argument, kind, value)
    return None if here is None else f"here it is {here}"


def value_here(argument: str, kind: Any, value: Any) -> str | None:
    """Return the value of our argument that another program's value means; None if it is unknown, or ours already.

    Of a list, the first value that has another one here counts.
    """
    values = read_table()["values"]
    parts = _parts(kind)
    choices = [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]
    choices += [name for part in parts if isinstance(part, NameIn) for name in part.names]
    own_spelling = {_plain(choice): choice for choice in choices}
    rows = [values.get(argument, {})]
    if bool in parts:
        rows.append(values["true or false"])
    for element in value if isinstance(value, list) else [value]:
        here = None
        for row in rows:
            for ours, theirs in row.items():
                if here is None and _plain(element) in _plain(theirs).split():
                    here = ours
        here = own_spelling.get(_plain(element), here)
        if here is not None and here != element:
            return str(here)
    return None


@functools.cache
def read_table() -> dict[str, Any]:
    """Return the names and values of other programs."""
    table: dict[str, Any] = yaml_core.load(yaml_core.read_text(str(Path(__file__).with_name("foreign_names.yaml"))))
    return table


@functools.cache
def _names_here(program: str) -> dict[str, str]:
    names: dict[str, str] = {}
    for ours, theirs in read_table()["names"].get(program, {}).items():
        for name in theirs.split():
            names.setdefault(name, ours)
    return names


@functools.cache
def _absent() -> dict[str, str]:
    absent: dict[str, str] = {}
    for advice, patterns in read_table()["absent"].items():
        for pattern in patterns.split():
            absent[pattern] = advice
    return absent


def _parts(kind: Any) -> list[Any]:
    """Return a type, and the types that a list or union of them has, at any depth."""
    inner = () if get_origin(kind) is Literal else get_args(kind)
    return [kind, *(part for one in inner for part in _parts(one))]


def _plain(value: Any) -> str:
    return str(value).lower().replace("-", "_")
