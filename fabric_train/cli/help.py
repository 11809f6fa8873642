"""The help of a program, and the completion of its arguments by the shell, from the docstrings of its dataclass."""

import argparse
import ast
import dataclasses
import inspect
import itertools
import os
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import fabric_train
from fabric_train.cli import fabric_command
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
from fabric_train.cli.errors import InputError
from fabric_train.cli.launcher import global_rank

PROGRAM = "PROGRAM"
"""Stands for the program's name in the examples of a dataclass."""

_OF_EVERY_PROGRAM = "Every program"
_SWITCH = {"choices": ("true", "false"), "metavar": "true|false", "nargs": "?"}
_EVERY_PROGRAM: dict[str, dict[str, Any]] = {
    "config": {"metavar": "FILE.yaml", "help": "A YAML file of arguments; the command line overrides it."},
    "debug": {**_SWITCH, "help": "Show the traceback of an error that ends the program."},
    "help": {"metavar": "WORD", "nargs": "?", "help": "Show only the arguments that have WORD in their name or text."},
    "version": {"action": "store_true", "help": "Show the version."},
}


def print_version() -> None:
    """Print the version, on one rank."""
    if not global_rank():
        print(f"fabric-train {fabric_train.__version__}")


def print_help(arguments: type, words: Sequence[str] = ()) -> None:
    """Print, on one rank, how to use a program, or only its arguments that have ``words``; some must."""
    sections = _sections(arguments, words)
    if not any(sections.values()):
        raise InputError(f"--help {' '.join(words)}: no argument has it in its name or text; --help lists them all")
    lines = [f"  {example.replace(PROGRAM, program_name())}" for example in examples_of(arguments)]
    introduction = "\n".join([f"{title_of(arguments)}.", "", "examples:", *lines])
    if not global_rank():
        _parser(arguments, sections, "" if words else introduction).print_help()


def search_help(programs: Mapping[str, type], words: Sequence[str]) -> None:
    """Print the arguments of all programs, by their names, that have ``words``; some must."""
    searched = " ".join(words)
    has_some = False
    for name, arguments in programs.items():
        sections = _sections(arguments, words)
        del sections[_OF_EVERY_PROGRAM]
        if not any(sections.values()):
            continue
        fabric_command.called_as = f"fabric-train {name}"
        _parser(arguments, sections).print_help()
        print()
        has_some = True
    if not has_some:
        raise InputError(f"--help {searched}: no program has an argument with it in its name or text")


def complete_words(arguments: type) -> None:
    """If the shell asks for it (``activate-global-python-argcomplete``), print what may follow and exit."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    import argcomplete

    line = os.environ["COMP_LINE"].split()
    if fabric_command.called_as:
        os.environ["_ARGCOMPLETE"] = str(len(fabric_command.called_as.split()))
    elif line[1:2] == ["run"]:  # fabric run ... fabric_train: the arguments of the script begin after its name
        place = next((place for place, word in enumerate(line) if Path(word).name == "fabric_train"), 0)
        os.environ["_ARGCOMPLETE"] = str(place + 1)
    argcomplete.autocomplete(_parser(arguments, _sections(arguments)))


def complete_choice(name: str, choices: Iterable[str]) -> None:
    """Print which of ``choices`` may come next on the line that the shell asks about, and exit."""
    import argcomplete

    if fabric_command.called_as:
        os.environ["_ARGCOMPLETE"] = str(len(fabric_command.called_as.split()))
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(name, choices=list(choices))
    argcomplete.autocomplete(parser)


def program_name() -> str:
    """Return how this program was started, without its arguments; a script's path is from the current folder."""
    module = sys.modules["__main__"].__spec__
    if Path(sys.argv[0]).resolve() == Path(__file__).resolve().parents[1]:  # a folder: only fabric run starts that
        return "fabric run fabric_train"
    if fabric_command.called_as:
        return fabric_command.called_as
    if module is None:
        return f"python {fabric_command.shortest_path(Path(sys.argv[0]))}"
    return f"python -m {module.name.removesuffix('.__main__')}"


def examples_of(arguments: type) -> list[str]:
    """Return the lines after the first one of a program's docstring."""
    return [line.strip() for line in inspect.cleandoc(arguments.__doc__ or "").splitlines()[1:] if line.strip()]


def _parser(
    arguments: type, sections: dict[str, dict[str, dict[str, Any]]], introduction: str = ""
) -> argparse.ArgumentParser:
    """Return an argparse parser, which formats the help and knows what may follow a word; ``parser.py`` parses."""
    place = f"{positional.upper()} " if (positional := positional_of(arguments)) else ""
    parser = argparse.ArgumentParser(
        usage=f"{program_name()} {place}[--argument value ...] [--config FILE.yaml]",
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
    """Return the fields of a program's arguments with their help texts, by name and by the title of their group."""
    sections = {}
    for group in groups_of(arguments).values():
        for owner in filter(dataclasses.is_dataclass, group.__mro__):  # a group that several programs share is a base
            texts = texts_of(owner)
            sections["Arguments" if owner is arguments else title_of(owner)] = {
                field.name: (field, texts[field.name]) for field in dataclasses.fields(group) if field.name in texts
            }
    return sections


def _sections(arguments: type, words: Sequence[str] = ()) -> dict[str, dict[str, dict[str, Any]]]:
    """Return what argparse is told about each argument that has all ``words``, by name and by title of its group."""
    types = types_of(arguments)
    sections: dict[str, dict[str, dict[str, Any]]] = {
        title: {
            name: {"help": f"{text}{_default(field)}", **_form(types[name])} for name, (field, text) in fields.items()
        }
        for title, fields in fields_by_section(arguments).items()
    }
    sections[_OF_EVERY_PROGRAM] = _EVERY_PROGRAM
    return {
        title: {
            name: settings | {"help": settings["help"].replace("%", "%%")}
            for name, settings in options.items()
            if _has_words(name, f"{settings['help']} {settings.get('metavar')}", words)
        }
        for title, options in sections.items()
    }


def _has_words(name: str, text: str, words: Sequence[str]) -> bool:
    """Return whether an argument has each of ``words`` in its name or in its help text."""
    return all(word.replace("-", "_").strip("_").lower() in name or word.lower() in text.lower() for word in words)


def texts_of(group: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, which Python does not keep."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(group))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: " ".join(below.value.value.split())
        for field, below in itertools.pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


def _default(field: dataclasses.Field) -> str:
    if is_required(field):
        return " (required)"
    shown = shown_default(field)
    return f" (default: {shown})" if shown else ""


def shown_default(field: dataclasses.Field) -> str:
    """Return a default as the command line takes it; of one that is null, which is in the help text, ''."""
    value = default_of(field)
    if isinstance(value, bool):
        value = str(value).lower()
    shown = " ".join(value) if isinstance(value, list) else f"{value:g}" if isinstance(value, float) else value
    return "" if value is None else str(shown)


def _form(kind: Any) -> dict[str, Any]:
    """Return what argparse is told about the values of a type: their name, number and choices."""
    if takes_list(kind):
        elements = next(part for part in (kind, *get_args(kind)) if get_origin(part) is list)
        return {**_form(get_args(elements)[0]), "nargs": "+"}
    if get_origin(kind) in (Union, UnionType):
        forms = [_form(part) for part in get_args(kind) if part is not type(None)]
        if all("choices" in form for form in forms):
            choices = [choice for form in forms for choice in form["choices"]]
            return {"choices": choices, "metavar": "|".join(choices)}
        return forms[0]
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind), "metavar": "|".join(get_args(kind))}
    if kind is bool:
        return _SWITCH
    if get_origin(kind) is Annotated and isinstance(get_args(kind)[1], NameIn):
        names = tuple(get_args(kind)[1].names)
        return {"choices": names, "metavar": "|".join(names)} if names else {"metavar": "NAME"}
    if get_origin(kind) is Annotated:
        return {"metavar": "N" if get_args(kind)[0] is int else "NUMBER"}
    return {"metavar": {int: "N", dict: "{NAME: VALUE}"}.get(get_origin(kind) or kind, "TEXT")}
