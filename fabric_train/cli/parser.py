"""Build a typed dataclass of arguments from argv, a YAML file and the launcher's variables, or report every fault.

jsonargparse checks the types, prints the help and supplies the defaults. This module adds what users expect of a
command line together with a YAML file: hyphens or underscores, lists without brackets, the nearest name for a misspelt
one, and all faults at once.
"""

import dataclasses
import difflib
import functools
import math
import re
import sys
from collections.abc import Collection
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from fabric_train.cli.errors import InputError
from fabric_train.cli.launcher import GivenValue

set_parsing_settings(docstring_parse_attribute_docstrings=True)

_COMMAND_LINE_ONLY = ("config", "debug")  # arguments of every program that a file cannot set

POSITIONAL = {"positional": True}
"""Metadata of the one field of a dataclass that may be given on the command line without its name."""

T = TypeVar("T")


def parse_arguments(
    arguments: type[T],
    argv: list[str] | None = None,
    launcher: dict[str, GivenValue] | None = None,
) -> T:
    """Build ``arguments`` from the command line, the ``--config`` file and the launcher.

    Args:
        arguments: a dataclass of values, or a dataclass whose fields are such groups.
        argv: the command line without the program's name; None takes ``sys.argv``. It overrides the file.
        launcher: values that the launcher has set; they override both.

    Raises:
        InputError: one line for every unknown name, wrong value, missing value and invalid combination.
        SystemExit: after ``--help``.
    """
    argv = sys.argv[1:] if argv is None else argv
    groups = _groups(arguments)
    types = {name: kind for group in groups.values() for name, kind in get_type_hints(group).items()}
    if "-h" in argv or "--help" in argv:
        _print_help(groups, arguments.__doc__ or "")
        raise SystemExit(0)
    faults: list[str] = []
    on_line = _from_command_line(argv, types, _positional(groups), faults)
    _check_debug(on_line.pop("debug", None), faults)
    given = _from_file(on_line.pop("config").value, faults) if "config" in on_line else {}
    given = _merge(given, on_line, launcher or {}, faults)

    values: dict[str, Any] = {}
    for name, item in given.items():
        if name not in types:
            known = [*types, *(_COMMAND_LINE_ONLY if item.where.startswith("--") else ())]
            faults.append(f"{item.where}: no such argument{_nearest(name, known)}")
            continue
        try:
            values[name] = _convert(types[name], item.value)
        except (ArgumentError, ValueError):
            faults.append(f"{item.where}: expected {describe(types[name])}, got {_shown(item, types[name])}")

    built: dict[str, Any] = {}
    for field_name, group in groups.items():
        fields: tuple[dataclasses.Field, ...] = dataclasses.fields(group)
        missing = [field.name for field in fields if _is_required(field) and field.name not in values]
        shown = {name: name.upper() if name == _positional(groups) else f"--{name}" for name in missing}
        faults += [f"{shown[name]} is required" for name in missing if name not in given]
        if not missing:
            built[field_name] = group(**{field.name: values[field.name] for field in fields if field.name in values})
            group_faults = built[field_name].faults() if hasattr(group, "faults") else []
            # a wrong value is replaced by its default here: a fault that names it is not the user's
            wrong = "|".join(re.escape(name) for name in given if name not in values)
            faults += [fault for fault in group_faults if not (wrong and re.search(rf"--({wrong})\b", fault))]
    if faults:
        raise InputError(*faults)
    return built[""] if "" in built else arguments(**built)


def flatten(arguments: Any) -> dict[str, Any]:
    """Return a dict of the arguments of all groups by name."""
    return {name: value for group in dataclasses.asdict(arguments).values() for name, value in group.items()}


def to_yaml(arguments: Any) -> str:
    """Return the arguments as YAML that ``--config`` reads, group by group."""
    parts = []
    for group in dataclasses.fields(arguments):
        values = dataclasses.asdict(getattr(arguments, group.name))
        title = _title(type(getattr(arguments, group.name)))
        parts.append(f"# {title}\n{yaml.safe_dump(values, sort_keys=False, allow_unicode=True)}")
    return "\n".join(parts)


def describe(kind: Any) -> str:
    """Return in words what a value of this type looks like."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        words = [describe(part) for part in get_args(kind) if part is not type(None)]
        return " or ".join(words) + (" or null" if type(None) in get_args(kind) else "")
    if get_origin(kind) is list:
        return f"a list, each {describe(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return "names with values, such as {name: 1}"
    return _WORDS[kind.__name__]


_WORDS = {
    "str": "text",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "PositiveInt": "a whole number above 0",
    "NonNegativeInt": "a whole number, 0 or more",
    "PositiveFloat": "a number above 0",
    "NonNegativeFloat": "a number, 0 or more",
    "ClosedUnitInterval": "a number from 0 to 1",
}


def _groups(arguments: type) -> dict[str, type]:
    """Return the groups of a dataclass of groups by field name; a single group has an empty name."""
    hints = get_type_hints(arguments)
    return hints if all(dataclasses.is_dataclass(kind) for kind in hints.values()) else {"": arguments}


def _positional(groups: dict[str, type]) -> str | None:
    """Return the argument that may be given without its name."""
    fields = [field for group in groups.values() for field in dataclasses.fields(group)]
    return next((field.name for field in fields if field.metadata.get("positional")), None)


def _merge(
    in_file: dict[str, GivenValue], on_line: dict[str, GivenValue], launcher: dict[str, GivenValue], faults: list[str]
) -> dict[str, GivenValue]:
    """Let the command line override the file, and report where the launcher contradicts the user."""
    given = in_file | on_line
    for name, item in launcher.items():
        other = given.get(name) if item.is_default else on_line.get(name)
        if other and str(other.value) not in ("auto", str(item.value)):
            default, advice = "", "leave one of them out"
            if item.is_default:
                default = " (its default)"
                advice = f"give the launcher {item.where.split()[-1]} {other.value}, or leave {name} out"
            faults.append(f"{other.where} {other.value} contradicts {item.where} {item.value}{default}: {advice}")
        given[name] = item
    return given


def _print_help(groups: dict[str, type], description: str) -> None:
    positional = _positional(groups)
    usage = f"%(prog)s {f'{positional.upper()} ' if positional else ''}[--config FILE.yaml] [--argument value ...]"
    parser = ArgumentParser(description=description.strip().splitlines()[0], usage=usage)
    parser.add_argument("--config", help="A YAML file of arguments; the command line overrides it.")
    parser.add_argument(
        "--debug", type=bool, default=False, help="Show the traceback of an error that ends the program."
    )
    for group in groups.values():
        parser.add_class_arguments(group, nested_key=None)
    parser.print_help()


def _convert(kind: Any, value: Any) -> Any:
    """Convert one value to its type; values are parsed one at a time, because a parser stops at its first fault.

    Raises:
        ArgumentError, ValueError: the value is not of that type.
    """
    if value is None and type(None) not in get_args(kind):  # jsonargparse would take it for "not given"
        raise ValueError("null")
    if _takes_list(kind) and isinstance(value, str) and not value.startswith("[") and value != "null":
        value = [value]  # a list may be given without brackets, also when it has one element
    if isinstance(value, str) and set(get_args(kind)) == {str, type(None)}:
        return None if value == "null" else value  # jsonargparse reads it as YAML, where "#1" is a comment
    value = _parser(kind).parse_object({"value": value})["value"]
    if "\0" in str(value):
        raise ValueError("a zero byte, which no name or text may contain")
    if isinstance(value, float) and math.isinf(value):
        raise ValueError("infinite")
    plain = next((base for base in (bool, int, float) if isinstance(value, base)), None)
    return plain(value) if plain else value  # jsonargparse's restricted numbers are subclasses that YAML cannot write


@functools.cache
def _parser(kind: Any) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=kind)
    return parser


def _takes_list(kind: Any) -> bool:
    """Whether values of this type are lists, or lists or None."""
    return get_origin(kind) is list or any(get_origin(choice) is list for choice in get_args(kind))


def _from_command_line(
    argv: list[str], types: dict[str, Any], positional: str | None, faults: list[str]
) -> dict[str, GivenValue]:
    """Parse ``--a-b 1 --c x y --d`` into a_b "1", c ["x", "y"], d True; a flag without a value is true.

    If there is a ``positional`` argument, it takes the values before any flag, and those that follow the value of a
    flag that takes only one.
    """
    given: dict[str, GivenValue] = {}
    name, values = "", list[str]()
    unnamed = list[str]()

    def finish() -> None:
        if name:
            given[name] = GivenValue(values[0] if len(values) == 1 else (values or True), f"--{name}")

    for token in argv:
        if re.match("--[^=]", token):
            finish()
            flag, equals, value = token[2:].partition("=")
            name, values = flag.replace("-", "_"), [value] if equals else []
            if name in given:
                faults.append(f"--{name} is given twice")
        elif positional and (not name or (values and not _takes_list(types.get(name)))):
            unnamed.append(token)
        elif name:
            values.append(token)
        else:
            faults.append(f"{token!r} belongs to no argument: write --argument value")
    finish()
    if positional and unnamed:
        if positional in given:
            faults.append(f"--{positional} is given twice")
        given[positional] = GivenValue(unnamed[0] if len(unnamed) == 1 else unnamed, f"--{positional}")
    return given


def _check_debug(given: GivenValue | None, faults: list[str]) -> None:
    """Check that the value of ``--debug`` is true or false; ``errors.is_debug`` reads it from argv."""
    try:
        _convert(bool, given.value if given else False)
    except (ArgumentError, ValueError):
        assert given is not None
        faults.append(f"{given.where}: expected {describe(bool)}, got {_shown(given, bool)}")


def _from_file(path: Any, faults: list[str]) -> dict[str, GivenValue]:
    if not isinstance(path, str):
        faults.append("--config: expected one YAML file")
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        document: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        faults.append(f"--config {path}: {error.strerror}")
        return {}
    except UnicodeDecodeError as error:
        faults.append(
            f"--config {path}: byte {error.start} is not UTF-8 (0x{error.object[error.start]:02x}); "
            "save the file as UTF-8"
        )
        return {}
    except yaml.YAMLError as error:
        faults.append(f"--config {path}: not a YAML file: {' '.join(str(error).split())}")
        return {}
    if content is None:
        return {}
    if not isinstance(content, dict):
        faults.append(f"--config {path}: expected lines of the form 'argument: value'")
        return {}
    names = [key.value.replace("-", "_") for key, _ in document.value]  # YAML keeps only the last of equal keys
    faults += [f"{path}: {name} is given twice" for name in sorted(set(names)) if names.count(name) > 1]
    named = {str(name).replace("-", "_"): value for name, value in content.items()}
    return {name: GivenValue(value, f"{path}: {name}") for name, value in named.items()}


def _shown(item: GivenValue, kind: Any) -> str:
    """Return a wrong value as the user wrote it, with a hint if its cause is known."""
    if item.where.startswith("--"):
        if item.value is True:
            return "nothing"
        if isinstance(item.value, list) and not _takes_list(kind):
            return f"{' '.join(item.value)!r}; put a value with spaces in quotes"
    if describe(kind).startswith("text") and not isinstance(item.value, str | list | dict | None):
        return f"{item.value}; put it in quotes"
    return repr(item.value)


def _nearest(name: str, known: Collection[str]) -> str:
    initials = "".join(word[:1] for word in name.split("_"))
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if len(initials) > 1 and initials in known:  # learning_rate → lr
        nearest = [initials]
    return f"; did you mean --{nearest[0]}?" if nearest else "; --help lists them"


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _title(group: type) -> str:
    return (group.__doc__ or group.__name__).strip().splitlines()[0]
