"""Look up in ``foreign_names.yaml`` what other programs' names and values of arguments are here."""

import functools
import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from fabric_train.cli import yaml_core


def advice_for_name(program: str, name: str, known: Collection[str]) -> str | None:
    """Return what another program's argument is here, or what to do because there is none; None for unknown names.

    Args:
        program: the class of the program's arguments; a program that the table does not have gets no advice.
        name: the name that was given, with underscores. Of a.b, the table may have only a.
        known: the names of the program's own arguments.
    """
    if program not in read_table()["names"]:
        return None
    name = name.lower()
    for section in (program, "TrainArguments"):
        here = _arguments_by_name(section).get(name)
        if here is not None:
            argument = re.match(r"--(\w+)", here)  # None: it begins with the name of another program
            is_here = section == program or argument is None or argument[1] in known
            return f"here it is {here}" if is_here else f"in training it is {here}"
    absent = _absent()
    pattern = name if name in absent else next((one for one in absent if fnmatchcase(name, one)), None)
    if pattern is not None:
        return absent[pattern]
    first, dot, _ = name.partition(".")
    return advice_for_name(program, first, known) if dot else None


def advice_for_value(argument: str, kind: Any, value: Any) -> str | None:
    """Return what another program's value, or another spelling of our own, is here; None for unknown values.

    Args:
        argument: the name of the argument.
        kind: its type.
        value: what was given, of the command line or of YAML.
    """
    values = read_table()["values"]
    parts = _parts(kind)
    same = {_plain(choice): choice for part in parts if get_origin(part) is Literal for choice in get_args(part)}
    rows = [values.get(argument, {}), *([values["true or false"]] if bool in parts else [])]
    for one in value if isinstance(value, list) else [value]:
        here = next((ours for row in rows for ours, theirs in row.items() if _plain(one) in _words(theirs)), None)
        here = same.get(_plain(one), here)
        if here is not None and here != one:
            return f"here it is {here}"
    return None


@functools.cache
def read_table() -> dict[str, Any]:
    """Return the content of ``foreign_names.yaml``."""
    return yaml_core.load(yaml_core.read_text(str(Path(__file__).with_suffix(".yaml"))))


@functools.cache
def _arguments_by_name(program: str) -> dict[str, str]:
    return {name: here for here, names in read_table()["names"][program].items() for name in names.split()}


@functools.cache
def _absent() -> dict[str, str]:
    """Return what to do instead, by the name or pattern of names."""
    return {name: advice for advice, names in read_table()["absent"].items() for name in names.split()}


def _parts(kind: Any) -> list[Any]:
    """Return a type, and the types that a list or union of them has, at any depth."""
    inner = () if get_origin(kind) is Literal else get_args(kind)
    return [kind, *(part for one in inner for part in _parts(one))]


def _words(theirs: str) -> list[str]:
    return [_plain(word) for word in theirs.split()]


def _plain(value: Any) -> str:
    return str(value).lower().replace("-", "_")
