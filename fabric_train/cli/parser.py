"""Build a typed dataclass of arguments from argv or values of Python, a YAML file and the launcher's variables, or
report every fault.

Names may have hyphens or underscores, lists need no brackets, the last value of an argument applies, and a fault names
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


def parse_arguments(
    arguments: type[T],
    argv: list[str] | None = None,
    launcher: GivenValues | None = None,
    program: str | None = None,
) -> T:
    """Build ``arguments`` from the command line, a file and the launcher; print help or version if asked, and exit.

    Args:
        arguments: a dataclass of values, or of groups of values.
        argv: the command line without the program's name; None for this process's. It overrides the
            ``--config`` file.
        launcher: values that the launcher has set, which override both.
        program: the words that call the program, for the help; None for how this process was started.

    Raises:
        InputError: has a line for every unknown name, wrong value, missing value and invalid combination.
    """
    # Help, version and completion exit.
    complete_words(arguments, program)
    argv = sys.argv[1:] if argv is None else argv
    help_words = _parse_help_words(argv)
    if help_words is not None:
        load_extensions(_parse_extensions(argv))
        print_help(arguments, help_words, program)
        raise SystemExit(0)
    if "--version" in argv:
        print_version()
        raise SystemExit(0)

    types = argument_types.types_of(arguments)
    faults: list[str] = []
    line_values = _parse_command_line(argv, types, argument_types.positional_of(arguments), faults)
    if "debug" in line_values:  # only its value is checked here: errors.is_debug reads it from argv
        _convert_values({"debug": line_values.pop("debug")}, {"debug": bool}, faults)
    return _build(arguments, line_values, launcher or {}, faults)


def build_arguments(arguments: type[T], values: Mapping[str, object], launcher: GivenValues | None = None) -> T:
    """Build ``arguments`` from Python values by name, and from the file in the value ``config``.

    Paths are accepted as texts, and any sequences as lists. The InputError is the same as on the command line.
    """
    given_values = {}
    for name, value in values.items():
        given_values[name] = GivenValue(_convert_paths(value), f"--{name}", in_python=True)
    return _build(arguments, given_values, launcher or {}, [])


def _convert_paths(value: object) -> object:
    """Return a value with paths converted to texts and sequences to lists."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_convert_paths(element) for element in value]
    return value


def _build(arguments: type[T], line_values: GivenValues, launcher_values: GivenValues, faults: list[str]) -> T:
    """Build ``arguments`` from values of the line, of the ``config`` file that it names, and of the launcher.

    Raises:
        InputError: there are earlier or new ``faults``.
    """
    # Read the file. If it cannot be read, values that seem to be missing may be in it, so nothing more is checked.
    config = line_values.pop("config", None)
    file_values: GivenValues = {}
    if config is not None and config.value is not None:
        num_faults = len(faults)
        file_values = _read_config(config, faults)
        if len(faults) > num_faults and not file_values:
            raise InputError(*map(_in_one_line, faults))

    # Extensions register names that are valid values of other arguments, so they are loaded before the conversion.
    given_values = _merge(file_values, line_values, launcher_values, faults)
    types = argument_types.types_of(arguments)
    faults += _load_extensions(given_values, types)
    values = _convert_values(given_values, types, faults, arguments.__name__)
    groups = _build_groups(arguments, given_values, values, faults)
    if faults:
        raise InputError(*map(_in_one_line, faults))
    if "" in groups:  # the arguments are a single group
        return groups[""]
    return arguments(**groups)


def _load_extensions(given_values: GivenValues, types: Mapping[str, Any]) -> list[str]:
    """Import the modules of ``--extensions``; return a fault for each that cannot be imported."""
    extensions = given_values.get("extensions")
    if extensions is None or "extensions" not in types:
        return []
    try:
        modules = argument_types.convert(types["extensions"], extensions.value)
    except argument_types.WrongValueError:
        return []  # _convert_values reports it
    return load_extensions(modules or [])


def flatten(arguments: Any) -> dict[str, Any]:
    """Return a dict of the arguments of all groups by name."""
    values: dict[str, Any] = {}
    for group in dataclasses.asdict(arguments).values():
        values |= group
    return values


def to_yaml(arguments: Any) -> str:
    """Return the arguments as YAML that ``--config`` reads, with each group's title above its arguments."""
    sections = []
    for field in dataclasses.fields(arguments):
        group = getattr(arguments, field.name)
        title = argument_types.title_of(type(group))
        sections.append(f"# {title}\n{yaml_core.dump(dataclasses.asdict(group))}")
    return "\n".join(sections)


def _parse_extensions(argv: list[str]) -> list[str]:
    """Return the modules after ``--extensions``, so that ``--help`` also lists what they register."""
    if "--extensions" not in argv:
        return []
    return _words_before_flag(argv[argv.index("--extensions") + 1 :])


def _parse_help_words(argv: list[str]) -> list[str] | None:
    """Return the words after ``--help``, which select arguments; None if the line has no ``--help``."""
    for index, word in enumerate(argv):
        flag, _, value = word.partition("=")
        if flag in ("-h", "--help"):
            return _words_before_flag([value] if value else argv[index + 1 :])
    return None


def _words_before_flag(words: list[str]) -> list[str]:
    return list(itertools.takewhile(lambda word: not word.startswith("-"), words))


def _merge(
    file_values: GivenValues, line_values: GivenValues, launcher_values: GivenValues, faults: list[str]
) -> GivenValues:
    """Return all values: the line overrides the file, and the launcher overrides both. Report contradictions.

    A value from the launcher silently overrides the file, unless it is the launcher's default, which the user has not
    asked for.
    """
    merged_values = file_values | line_values
    for name, launcher_value in launcher_values.items():
        user_values = merged_values if launcher_value.is_default else line_values
        user_value = user_values.get(name)
        if user_value and str(user_value.value) not in ("auto", str(launcher_value.value)):
            faults.append(_describe_contradiction(name, user_value, launcher_value))
        merged_values[name] = launcher_value
    return merged_values


def _describe_contradiction(name: str, user_value: GivenValue, launcher_value: GivenValue) -> str:
    contradiction = f"{user_value.where} {user_value.value} contradicts {launcher_value.where} {launcher_value.value}"
    if not launcher_value.is_default:
        return f"{contradiction}; leave one of them out"
    option = launcher_value.where.split()[-1]
    return f"{contradiction} (its default); give the launcher {option} {user_value.value}, or leave {name} out"


def _convert_values(
    given_values: GivenValues, types: dict[str, Any], faults: list[str], program: str = ""
) -> dict[str, Any]:
    """Return the values that have their argument's type; report the others, and unknown names.

    ``program`` is the name of the class of arguments, for advice about other programs' names.
    """
    values = {}
    for name, given_value in given_values.items():
        is_mapping = isinstance(given_value.value, dict) and bool(given_value.value)
        if name not in types or (is_mapping and not argument_types.takes_dict(types[name])):
            for dotted_name in _list_dotted_names(name, given_value.value):
                faults.append(_describe_unknown_name(dotted_name, given_value, types, program))
            continue
        kind = types[name]
        try:
            values[name] = argument_types.convert(kind, given_value.value)
        except argument_types.WrongValueError as error:
            fault = f"{given_value.where}: expected {error}, got {_format_given_value(given_value, kind)}"
            advice = advice_for_value(name, kind, given_value.value)
            faults.append(f"{fault}; {advice}" if advice else fault)
    return values


def _describe_unknown_name(name: str, given_value: GivenValue, types: dict[str, Any], program: str) -> str:
    """Return the fault for an unknown name; a.b is the key b of a mapping with the name a."""
    names = list(types)
    if given_value.where.startswith("--"):
        names += _COMMAND_LINE_ONLY
    positive_name = name.removeprefix("no_")
    if positive_name != name and types.get(positive_name) is bool:
        advice: str | None = f"write --{positive_name} false"
    else:
        advice = advice_for_name(program, name, names)
    where = given_value.where
    if isinstance(given_value.value, dict):  # of a mapping, ``where`` names only the a of a.b
        mapping_name = name.partition(".")[0]
        where += name.removeprefix(mapping_name)
    return f"{where}: no such argument; {advice or _suggest_name(name, names)}"


def _list_dotted_names(name: str, value: Any) -> list[str]:
    """Return the name a.b of each value in a mapping a, at any depth; ``name`` if the value is not a mapping."""
    if not isinstance(value, dict) or not value:
        return [name]
    dotted_names = []
    for key, inner_value in value.items():
        dotted_names += _list_dotted_names(f"{name}.{key}", inner_value)
    return dotted_names


def _build_groups(
    arguments: type, given_values: GivenValues, values: dict[str, Any], faults: list[str]
) -> dict[str, Any]:
    """Return the groups that have all required values; report values that are missing or contradict one another.

    ``values`` are the ``given_values`` that could be converted.
    """
    groups: dict[str, Any] = {}
    positional = argument_types.positional_of(arguments)
    wrong_names = "|".join(re.escape(name) for name in given_values if name not in values)
    for field_name, group_type in argument_types.groups_of(arguments).items():
        fields: tuple[dataclasses.Field, ...] = dataclasses.fields(group_type)

        # A required value that was given, but is wrong, has been reported.
        missing = [field.name for field in fields if argument_types.is_required(field) and field.name not in values]
        for name in missing:
            if name not in given_values:
                shown_name = name.upper() if name == positional else f"--{name}"
                faults.append(f"{shown_name} is required")
        if missing:
            continue

        # Build the group, which checks how its values go together.
        group = group_type(**{field.name: values[field.name] for field in fields if field.name in values})
        groups[field_name] = group
        group_faults = list(group.faults()) if hasattr(group_type, "faults") else []
        if hasattr(group_type, "faults_on_line"):
            names_on_line = {name for name, item in given_values.items() if item.where.startswith("--")}
            group_faults += group.faults_on_line(names_on_line)

        # In the group a wrong value is replaced by its default, so a fault that names it is not the user's.
        for fault in group_faults:
            if not wrong_names or not re.search(rf"--({wrong_names})\b", fault):
                faults.append(fault)
    return groups


@dataclasses.dataclass
class _LineArgument:
    """An argument on the command line, and the words that are its values."""

    name: str
    words: list[str]

    @property
    def value(self) -> str | list[str] | bool:
        """The only word, several words as a list, or True without a word."""
        if not self.words:
            return True
        return self.words[0] if len(self.words) == 1 else self.words


def _parse_command_line(
    argv: list[str], types: dict[str, Any], positional: str | None, faults: list[str]
) -> GivenValues:
    """Parse ``--a-b 1 --c x y --d`` into a_b "1", c ["x", "y"], d True; a flag without a value is true.

    A ``positional`` argument gets the values before any flag, and those that follow the value of a flag that takes
    only one. If an argument is given twice, the last value applies, with a note: scripts that wrap a program append.
    """
    # Assign each word to the flag before it, or to the positional argument.
    line_arguments: list[_LineArgument] = []  # in the order of the line
    flag: _LineArgument | None = None
    positional_words: list[str] = []
    for word in argv:
        if re.match("--[^=]", word):
            name, equals, text = word[2:].partition("=")
            name = name.replace("-", "_")
            if keyword.iskeyword(name):  # such as --from, whose field in the dataclass is from_
                name += "_"
            flag = _LineArgument(name, [text] if equals else [])
            line_arguments.append(flag)
            continue
        is_flag_complete = flag is None or (bool(flag.words) and not argument_types.takes_list(types.get(flag.name)))
        if positional and is_flag_complete:
            if not positional_words:
                line_arguments.append(_LineArgument(positional, positional_words))
            positional_words.append(word)
        elif flag:
            flag.words.append(word)
        else:
            faults.append(f"{_shortened(repr(word))} does not belong to an argument; write --argument value")

    # Take the last value of each argument.
    line_values: GivenValues = {}
    for argument in line_arguments:
        option = f"--{argument_types.shown_name(argument.name)}"
        previous = line_values.get(argument.name)
        if previous is not None and not global_rank():
            both_values = (
                f"{_format_words(previous.value)}, then {_format_words(argument.value)}; the last value is used"
            )
            print_errors(_in_one_line(f"note: {option} is given twice: {both_values}"))
        line_values[argument.name] = GivenValue(argument.value, option)
    return line_values


def _format_words(value: Any) -> str:
    """Return a value from the command line as it was written, shortened; "true" for a flag without a value."""
    if value is True:
        return "true"
    return _shortened(" ".join(value) if isinstance(value, list) else value)


def _read_config(config: GivenValue, faults: list[str]) -> GivenValues:
    """Return the values of a YAML file; report why it cannot be read, and names that it has twice."""
    try:
        path = argument_types.convert(str, config.value)
    except argument_types.WrongValueError:
        faults.append("--config: expected one YAML file")
        return {}
    if path.startswith("configs/") and not Path(path).exists():  # a file of this project, called from another folder
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
    file_values: GivenValues = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in file_values:  # lr-schedule and lr_schedule are two keys of YAML, but one argument
            faults.append(f"{path}: {name} is given twice")
        file_values[name] = GivenValue(value, f"{path}: {name}")
    return file_values


def _format_given_value(given_value: GivenValue, kind: Any) -> str:
    """Return a wrong value for an error message, with advice on quotes if these would help."""
    value = given_value.value
    is_on_line = given_value.where.startswith("--") and not given_value.in_python
    if is_on_line:
        if value is True or value == "":
            return "nothing"
        if isinstance(value, list) and not argument_types.takes_list(kind):
            return f"{_shortened(repr(' '.join(value)))}; put a value with spaces in quotes"
    # YAML reads a number or true where the argument is a text
    if argument_types.describe(kind).startswith("text") and not isinstance(value, str | list | dict | None):
        return f"{value}; put it in quotes"
    return _shortened(repr(value))


def _in_one_line(text: str) -> str:
    """Escape line ends and other unprintable characters, which names from the user may have."""
    escaped = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return _shortened(escaped, _LONGEST_FAULT)


def _shortened(text: str, length: int = _LONGEST_VALUE) -> str:
    return text if len(text) <= length else f"{text[:length]}…"


def _suggest_name(name: str, names: Collection[str]) -> str:
    """Return a hint at the argument that an unknown name may mean."""
    initials = "".join(word[:1] for word in name.split("_"))
    if len(initials) > 1 and initials in names:  # learning_rate → lr
        return f"did you mean --{initials}?"
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean --{nearest[0]}?" if nearest else "--help lists them"
