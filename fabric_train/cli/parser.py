"""Build a typed dataclass of arguments from argv or values of Python, a YAML file and the launcher's variables, or
report every fault.

Names may have hyphens or underscores, lists need no brackets, the last value of an argument counts, and a fault names
the nearest argument, also for the names and values that other programs have (``foreign_names.yaml``).
"""

import dataclasses
import difflib
import itertools
import keyword
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fabric_train.cli import argument_types, yaml_core
from fabric_train.cli.errors import InputError, print_errors
from fabric_train.cli.foreign_names import advice_for_name, advice_for_value
from fabric_train.cli.help import complete_words, print_help, print_version
from fabric_train.cli.installed_files import find_installed
from fabric_train.cli.launcher import GivenValue, GivenValues, global_rank
from fabric_train.cli.tables import load_extensions

_COMMAND_LINE_ONLY = ("config", "debug")  # arguments of every program that a file cannot set
# characters of what a user gave in an error message, and of the message
_LONGEST_VALUE = 100
_LONGEST_FAULT = 2000
T = TypeVar("T")


def parse_arguments(arguments: type[T], argv: list[str] | None = None, launcher: GivenValues | None = None) -> T:
    """Build ``arguments``, a dataclass of values or groups, from command line, file and launcher.

    ``argv`` is the command line without the program's name; None takes ``sys.argv``. It overrides the ``--config``
    file, and the values of the ``launcher`` override both. An InputError has a line for every unknown name, wrong
    value, missing value and invalid combination.
    """
    complete_words(arguments)
    argv = sys.argv[1:] if argv is None else argv
    if (words := _words_of_help(argv)) is not None:
        load_extensions(_extensions_on(argv))
        print_help(arguments, words)
        raise SystemExit(0)
    if "--version" in argv:
        print_version()
        raise SystemExit(0)
    types = argument_types.types_of(arguments)
    faults: list[str] = []
    on_line = _from_command_line(argv, types, argument_types.positional_of(arguments), faults)
    if "debug" in on_line:  # errors.is_debug reads it from argv
        _convert_given({"debug": on_line.pop("debug")}, {"debug": bool}, faults)
    return _build(arguments, on_line, launcher or {}, faults)


def build_arguments(arguments: type[T], values: Mapping[str, object], launcher: GivenValues | None = None) -> T:
    """Build ``arguments`` from values of Python by name, and the file that a value ``config`` names.

    Paths serve as texts, and tuples and other sequences as lists. The InputError is the same as on the command line.
    """
    given = {name: GivenValue(_as_text(value), f"--{name}", in_python=True) for name, value in values.items()}
    return _build(arguments, given, launcher or {}, [])


def _as_text(value: object) -> object:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_as_text(one) for one in value]
    return value


def _build(arguments: type[T], on_line: GivenValues, launcher: GivenValues, faults: list[str]) -> T:
    """Build ``arguments`` from values on the line, in the ``config`` file that it names, and by the launcher."""
    config = on_line.pop("config", None)
    num_faults = len(faults)
    in_file = _from_file(config, faults) if config is not None and config.value is not None else {}
    if len(faults) > num_faults and not in_file:  # nothing is known of the file, so what else is missing may be in it
        raise InputError(*map(_in_one_line, faults))
    given = _merge(in_file, on_line, launcher, faults)
    faults += _load_extensions(given, argument_types.types_of(arguments))
    values = _convert_given(given, argument_types.types_of(arguments), faults, arguments.__name__)
    built = _build_groups(arguments, given, values, faults)
    if faults:
        raise InputError(*map(_in_one_line, faults))
    return built[""] if "" in built else arguments(**built)


def _load_extensions(given: GivenValues, types: Mapping[str, Any]) -> list[str]:
    """Import the modules of ``--extensions``, whose names the other arguments may have; return faults."""
    item = given.get("extensions")
    if item is None or "extensions" not in types:
        return []
    try:
        names = argument_types.convert(types["extensions"], item.value)
    except argument_types.WrongValueError:
        return []  # which the conversion of all values reports
    return load_extensions(names or [])


def flatten(arguments: Any) -> dict[str, Any]:
    """Return a dict of the arguments of all groups by name."""
    return {name: value for group in dataclasses.asdict(arguments).values() for name, value in group.items()}


def to_yaml(arguments: Any) -> str:
    """Return the arguments as YAML that ``--config`` reads, group by group."""
    parts = []
    for group in dataclasses.fields(arguments):
        values = dataclasses.asdict(getattr(arguments, group.name))
        parts.append(f"# {argument_types.title_of(type(getattr(arguments, group.name)))}\n{yaml_core.dump(values)}")
    return "\n".join(parts)


def _extensions_on(argv: list[str]) -> list[str]:
    """Return the modules that a command line with ``--help`` names, so that the help has what they register."""
    if "--extensions" not in argv:
        return []
    following = argv[argv.index("--extensions") + 1 :]
    return list(itertools.takewhile(lambda word: not word.startswith("-"), following))


def _words_of_help(argv: list[str]) -> list[str] | None:
    """Return the words after ``--help``, which choose arguments; None if no help is asked for."""
    for number, token in enumerate(argv):
        flag, _, word = token.partition("=")
        if flag in ("-h", "--help"):
            following = [word] if word else argv[number + 1 :]
            end = next((place for place, next_ in enumerate(following) if next_.startswith("-")), len(following))
            return following[:end]
    return None


def _merge(in_file: GivenValues, on_line: GivenValues, launcher: GivenValues, faults: list[str]) -> GivenValues:
    """Let the command line override the file, and report where the launcher contradicts the user."""
    given = in_file | on_line
    for name, item in launcher.items():
        other = given.get(name) if item.is_default else on_line.get(name)
        if other and str(other.value) not in ("auto", str(item.value)):
            default = ""
            advice = "leave one of them out"
            if item.is_default:
                default = " (its default)"
                advice = f"give the launcher {item.where.split()[-1]} {other.value}, or leave {name} out"
            faults.append(f"{other.where} {other.value} contradicts {item.where} {item.value}{default}: {advice}")
        given[name] = item
    return given


def _convert_given(given: GivenValues, types: dict[str, Any], faults: list[str], program: str = "") -> dict[str, Any]:
    """Return the values that have their argument's type; report the others, and names that no argument has."""
    values = {}
    for name, item in given.items():
        is_mapping = isinstance(item.value, dict) and bool(item.value)
        if name not in types or (is_mapping and not argument_types.takes_dict(types[name])):
            faults += [_unknown(inner, item, types, program) for inner in _dotted(name, item.value)]
            continue
        try:
            values[name] = argument_types.convert(types[name], item.value)
        except argument_types.WrongValueError as error:
            here = advice_for_value(name, types[name], item.value)
            wrong = f"{item.where}: expected {error}, got {_shown(item, types[name])}"
            faults.append(f"{wrong}; {here}" if here else wrong)
    return values


def _unknown(name: str, item: GivenValue, types: dict[str, Any], program: str) -> str:
    """Return the fault of a name that no argument has; a.b is the key b of the mapping ``item`` with the name a."""
    known = [*types, *(_COMMAND_LINE_ONLY if item.where.startswith("--") else ())]
    positive = name.removeprefix("no_")
    is_negated = positive != name and types.get(positive) is bool
    here = f"write --{positive} false" if is_negated else advice_for_name(program, name, known)
    key = "".join(name.partition(".")[1:]) if isinstance(item.value, dict) else ""
    return f"{item.where}{key}: no such argument; {here or _nearest(name, known)}"


def _dotted(name: str, value: Any) -> list[str]:
    """Return ``name``, or of a mapping the name a.b of each value in it."""
    if not isinstance(value, dict) or not value:
        return [name]
    return [dotted for key, inner in value.items() for dotted in _dotted(f"{name}.{key}", inner)]


def _build_groups(arguments: type, given: GivenValues, values: dict[str, Any], faults: list[str]) -> dict[str, Any]:
    """Return the groups that have all required values; report values that are missing or contradict each other."""
    built: dict[str, Any] = {}
    for field_name, group in argument_types.groups_of(arguments).items():
        fields: tuple[dataclasses.Field, ...] = dataclasses.fields(group)
        missing = [field.name for field in fields if argument_types.is_required(field) and field.name not in values]
        shown = {one: one.upper() if one == argument_types.positional_of(arguments) else f"--{one}" for one in missing}
        faults += [f"{shown[name]} is required" for name in missing if name not in given]
        if not missing:
            built[field_name] = group(**{field.name: values[field.name] for field in fields if field.name in values})
            group_faults = list(built[field_name].faults()) if hasattr(group, "faults") else []
            if hasattr(group, "faults_on_line"):
                on_line = {name for name, item in given.items() if item.where.startswith("--")}
                group_faults += built[field_name].faults_on_line(on_line)
            # a wrong value is replaced by its default here: a fault that names it is not the user's
            wrong = "|".join(re.escape(name) for name in given if name not in values)
            faults += [fault for fault in group_faults if not (wrong and re.search(rf"--({wrong})\b", fault))]
    return built


def _from_command_line(
    argv: list[str], types: dict[str, Any], positional: str | None, faults: list[str]
) -> GivenValues:
    """Parse ``--a-b 1 --c x y --d`` into a_b "1", c ["x", "y"], d True; a flag without a value is true.

    A ``positional`` argument takes the values before any flag, and those that follow the value of a flag that takes
    only one. If an argument is given twice, the last value counts, with a note: scripts that wrap a program append.
    """
    items: list[tuple[str, list[str]]] = []  # in the order of the line
    flag: tuple[str, list[str]] | None = None
    unnamed: list[str] = []
    for token in argv:
        if re.match("--[^=]", token):
            name, equals, text = token[2:].partition("=")
            name = name.replace("-", "_")
            if keyword.iskeyword(name):  # such as --from, whose field in the dataclass is from_
                name += "_"
            flag = (name, [text] if equals else [])
            items.append(flag)
        elif positional and (flag is None or (flag[1] and not argument_types.takes_list(types.get(flag[0])))):
            if not unnamed:
                items.append((positional, unnamed))
            unnamed.append(token)
        elif flag:
            flag[1].append(token)
        else:
            faults.append(f"{_shortened(repr(token))} belongs to no argument: write --argument value")
    given: dict[str, GivenValue] = {}
    for name, values in items:
        value = values[0] if len(values) == 1 else (values or True)
        shown = argument_types.shown_name(name)
        if name in given and not global_rank():
            twice = f"{_in_words(given[name].value)}, then {_in_words(value)}, which is used"
            print_errors(_in_one_line(f"note: --{shown} is given twice: {twice}"))
        given[name] = GivenValue(value, f"--{shown}")
    return given


def _in_words(value: Any) -> str:
    return "true" if value is True else _shortened(" ".join(value) if isinstance(value, list) else value)


def _from_file(config: GivenValue, faults: list[str]) -> GivenValues:
    try:
        path = argument_types.convert(str, config.value)
    except argument_types.WrongValueError:
        faults.append("--config: expected one YAML file")
        return {}
    if path.startswith("configs/") and not Path(path).exists():  # this project's, a folder or installed
        path = str(find_installed(path) or path)
    try:
        content = yaml_core.load_file(path, "--config")
    except InputError as error:
        faults += error.faults
        return {}
    if content is None:
        return {}
    if not isinstance(content, dict):
        faults.append(f"--config {path}: expected lines of the form 'argument: value'")
        return {}
    given: dict[str, GivenValue] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in given:
            faults.append(f"{path}: {name} is given twice")
        given[name] = GivenValue(value, f"{path}: {name}")
    return given


def _shown(item: GivenValue, kind: Any) -> str:
    if item.where.startswith("--") and not item.in_python:
        if item.value is True or item.value == "":
            return "nothing"
        if isinstance(item.value, list) and not argument_types.takes_list(kind):
            return f"{_shortened(repr(' '.join(item.value)))}; put a value with spaces in quotes"
    if argument_types.describe(kind).startswith("text") and not isinstance(item.value, str | list | dict | None):
        return f"{item.value}; put it in quotes"
    return _shortened(repr(item.value))


def _in_one_line(text: str) -> str:
    """Escape line ends and other characters that a name in it may have and that cannot be printed."""
    return _shortened("".join(one if one.isprintable() else repr(one)[1:-1] for one in text), _LONGEST_FAULT)


def _shortened(text: str, length: int = _LONGEST_VALUE) -> str:
    return text if len(text) <= length else f"{text[:length]}…"


def _nearest(name: str, known: Collection[str]) -> str:
    initials = "".join(word[:1] for word in name.split("_"))
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if len(initials) > 1 and initials in known:  # learning_rate → lr
        nearest = [initials]
    return f"did you mean --{nearest[0]}?" if nearest else "--help lists them"
