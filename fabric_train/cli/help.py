"""Print a program's help, and complete its arguments in a shell, from the docstrings of its dataclass."""

import argparse
import ast
import dataclasses
import inspect
import itertools
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

import fabric_train
from fabric_train.cli.argument_types import (
    NameIn,
    default_of,
    groups_of,
    is_required,
    positional_of,
    shown_name,
    takes_list,
    title_of,
    types_of,
)
from fabric_train.cli.commands import called_as, program_name
from fabric_train.cli.errors import InputError
from fabric_train.cli.launcher import global_rank

PROGRAM = "PROGRAM"
"""The placeholder for the program's name in the examples of a dataclass."""
Sections: TypeAlias = dict[str, dict[str, dict[str, Any]]]
"""The keyword arguments of ``add_argument`` by an argument's name, by the title of its group."""

_COMMON_SECTION = "Every program"
_SWITCH = {"choices": ("true", "false"), "metavar": "true|false", "nargs": "?"}
_COMMON_ARGUMENTS: dict[str, dict[str, Any]] = {
    "config": {"metavar": "FILE.yaml", "help": "YAML file of arguments; the command line overrides it."},
    "debug": {**_SWITCH, "help": "Show the traceback of an error that ends the program."},
    "help": {"metavar": "WORD", "nargs": "?", "help": "Show only the arguments whose name or help text contains WORD."},
    "version": {"action": "store_true", "help": "Show the version."},
}


def print_version() -> None:
    """Print the version, on one rank."""
    if not global_rank():
        print(f"fabric-train {fabric_train.__version__}")


def print_help(arguments: type, words: Sequence[str] = (), program: str | None = None) -> None:
    """Print on one rank how to use a program, or only its arguments that match ``words``.

    Args:
        arguments: the program's dataclass.
        words: texts that an argument's name or help must contain, all of them; () prints the whole help.
        program: how the program is called; None for how this process was started.

    Raises:
        InputError: no argument matches.
    """
    sections = _build_sections(arguments, words)
    if not any(sections.values()):
        raise InputError(
            f"--help {' '.join(words)}: no argument's name or help text contains it; --help lists all arguments"
        )
    program = program or program_name()
    introduction = ""
    if not words:
        examples = [f"  {example.replace(PROGRAM, program)}" for example in examples_of(arguments)]
        introduction = "\n".join([f"{title_of(arguments)}.", "", "examples:", *examples])
    if not global_rank():
        _build_parser(arguments, sections, program, introduction).print_help()


def search_help(programs: Mapping[str, type], words: Sequence[str]) -> None:
    """Print the arguments of all ``programs`` that match ``words``.

    Raises:
        InputError: no program has such an argument.
    """
    has_match = False
    for name, arguments in programs.items():
        sections = _build_sections(arguments, words)
        del sections[_COMMON_SECTION]
        if any(sections.values()):
            _build_parser(arguments, sections, f"fabric-train {name}").print_help()
            print()
            has_match = True
    if not has_match:
        raise InputError(f"--help {' '.join(words)}: no argument's name or help text contains it in any program")


def complete_words(arguments: type, program: str | None = None) -> None:
    """If the shell asks for it, print what may come next on the command line and exit; otherwise return.

    A shell with ``activate-global-python-argcomplete`` starts the program with the line in COMP_LINE. argcomplete takes
    from _ARGCOMPLETE the number of words that call the program, which it does not count itself. ``program`` has these
    words; None for how this process was started.
    """
    if "_ARGCOMPLETE" not in os.environ:
        return
    import argcomplete

    command = program or called_as()
    line_words = os.environ["COMP_LINE"].split()
    if command:
        os.environ["_ARGCOMPLETE"] = str(len(command.split()))
    elif line_words[1:2] == ["run"]:  # fabric run ... fabric_train: the arguments of the script begin after its name
        names = [Path(word).name for word in line_words]
        script_index = names.index("fabric_train") if "fabric_train" in names else 0
        os.environ["_ARGCOMPLETE"] = str(script_index + 1)
    argcomplete.autocomplete(_build_parser(arguments, _build_sections(arguments), command or program_name()))


def complete_choice(name: str, choices: Iterable[str]) -> None:
    """Print which of ``choices`` may come next on the shell's line, and exit."""
    import argcomplete

    command = called_as()
    if command:
        os.environ["_ARGCOMPLETE"] = str(len(command.split()))
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(name, choices=list(choices))
    argcomplete.autocomplete(parser)


def examples_of(arguments: type) -> list[str]:
    """Return the examples of a program: the lines of its docstring after the first."""
    lines = inspect.cleandoc(arguments.__doc__ or "").splitlines()
    return [line.strip() for line in lines[1:] if line.strip()]


def _build_parser(arguments: type, sections: Sections, program: str, introduction: str = "") -> argparse.ArgumentParser:
    """Return an argparse parser, which only formats the help and completes words; ``parser.py`` parses."""
    usage = program
    positional = positional_of(arguments)
    if positional:
        usage += f" {positional.upper()}"
    parser = argparse.ArgumentParser(
        usage=f"{usage} [--argument value ...] [--config FILE.yaml]",
        description=introduction,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    for title, options in sections.items():
        section = parser.add_argument_group(title)
        for name, settings in options.items():
            section.add_argument(f"--{shown_name(name)}", **settings)
    return parser


def fields_by_section(arguments: type) -> dict[str, dict[str, tuple[dataclasses.Field, str]]]:
    """Return the fields of a program's arguments with their help texts, by name and by the title of their group.

    A group that several programs share is a base class of the program's group; its fields form a separate section.
    """
    sections = {}
    for group in groups_of(arguments).values():
        fields = dataclasses.fields(group)
        for owner in filter(dataclasses.is_dataclass, group.__mro__):
            title = "Arguments" if owner is arguments else title_of(owner)
            texts = texts_of(owner)
            sections[title] = {field.name: (field, texts[field.name]) for field in fields if field.name in texts}
    return sections


def _build_sections(arguments: type, words: Sequence[str] = ()) -> Sections:
    """Return the arguments of a program, and of every program, that match all ``words``; without words, all of them."""
    types = types_of(arguments)
    all_sections: Sections = {}
    for title, fields in fields_by_section(arguments).items():
        all_sections[title] = {}
        for name, (field, text) in fields.items():
            all_sections[title][name] = {"help": text + _default_note(field), **_value_format(types[name])}
    all_sections[_COMMON_SECTION] = _COMMON_ARGUMENTS

    matching_sections: Sections = {}
    for title, options in all_sections.items():
        matching_sections[title] = {}
        for name, settings in options.items():
            help_text = settings["help"]
            if _matches(name, f"{help_text} {settings.get('metavar')}", words):
                # argparse formats the help with the % operator
                matching_sections[title][name] = settings | {"help": help_text.replace("%", "%%")}
    return matching_sections


def _matches(name: str, text: str, words: Sequence[str]) -> bool:
    """Return whether an argument has each of ``words`` in its name or in its help text."""
    for word in words:
        is_in_name = word.replace("-", "_").strip("_").lower() in name
        if not is_in_name and word.lower() not in text.lower():
            return False
    return True


def texts_of(group: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass by the field's name, in one line.

    Python does not keep these docstrings, so they are read from the source.
    """
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(group))).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for statement, next_statement in itertools.pairwise(definition.body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(next_statement, ast.Expr) and isinstance(next_statement.value, ast.Constant):
            docstring = next_statement.value.value
            if isinstance(docstring, str):
                texts[statement.target.id] = " ".join(docstring.split())
    return texts


def _default_note(field: dataclasses.Field) -> str:
    if is_required(field):
        return " (required)"
    default = shown_default(field)
    return f" (default: {default})" if default else ""


def shown_default(field: dataclasses.Field) -> str:
    """Return a default as it is written on the command line; empty for null, which the help text explains."""
    default = default_of(field)
    if default is None:
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, list):
        return " ".join(default)
    if isinstance(default, float):
        return f"{default:g}"
    return str(default)


def _value_format(kind: Any) -> dict[str, Any]:
    """Return keyword arguments of ``add_argument`` for values of a type: their metavar, nargs and choices."""
    if takes_list(kind):
        list_type = kind
        if get_origin(kind) is not list:  # a union with None
            list_type = next(member for member in get_args(kind) if get_origin(member) is list)
        return {**_value_format(get_args(list_type)[0]), "nargs": "+"}
    if get_origin(kind) in (Union, UnionType):
        formats = [_value_format(member) for member in get_args(kind) if member is not type(None)]
        if not all("choices" in member_format for member_format in formats):
            return formats[0]
        choices: list[str] = []
        for member_format in formats:
            choices += member_format["choices"]
        return _format_of_choices(choices)
    if get_origin(kind) is Literal:
        return _format_of_choices(get_args(kind))
    if kind is bool:
        return _SWITCH
    if get_origin(kind) is Annotated:
        base, limits = get_args(kind)
        if isinstance(limits, NameIn):
            return _format_of_choices(limits.names) if limits.names else {"metavar": "NAME"}
        return {"metavar": "N" if base is int else "NUMBER"}
    if kind is int:
        return {"metavar": "N"}
    if get_origin(kind) is dict:
        return {"metavar": "{NAME: VALUE}"}
    return {"metavar": "TEXT"}


def _format_of_choices(choices: Sequence[str]) -> dict[str, Any]:
    return {"choices": choices, "metavar": "|".join(choices)}
