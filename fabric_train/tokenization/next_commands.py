"""The commands that follow a task of ``--shard``, to be shown to the user."""

import os
import re
import shlex
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from fabric_train.cli.fabric_command import command_from_here

if TYPE_CHECKING:
    from arguments import TokenizeArguments


def merge_command(arguments: "TokenizeArguments", output_dir: str) -> str:
    """Return the command that merges all slices into ``output_dir``, as their folders are called in a shell.

    Args:
        arguments: of one task.
        output_dir: the folder to write.
    """
    parent, name = os.path.split(os.path.normpath(arguments.output_dir))
    pattern, is_numbered = re.subn(rf"(?<!\d){_number(arguments)}(?!\d)", "*", name, count=1)
    folders = os.path.join(parent, pattern) if is_numbered else "SLICES"
    quoted = "*".join(shlex.quote(piece) if piece else "" for piece in folders.split("*"))
    return f"{command_from_here('merge')} {quoted} --output_dir {shlex.quote(output_dir)}"


def encode_command(arguments: "TokenizeArguments", lines: str) -> str:
    """Return the command of a task that encodes its slice without the lines of the folder ``lines``.

    Args:
        arguments: of the task that counted the lines of this slice.
        lines: see ``repeated_lines``.
    """
    output_dir = beside_slices(arguments, os.path.join("slices", _number(arguments)))
    changed = {"boilerplate": lines, "shard": arguments.shard, "output_dir": output_dir}
    given = {field.name: getattr(arguments, field.name) for field in fields(arguments) if _is_given(field, arguments)}
    same = {name: value for name, value in given.items() if name not in changed}
    words = [word for name, value in (same | changed).items() for word in (f"--{name}", *_words(value))]
    return f"{command_from_here('tokenize')} {shlex.join(words)}"


def beside_slices(arguments: "TokenizeArguments", name: str) -> str:
    """Return the path of ``name`` beside the folder of the slices, or beside the slices if they have no folder."""
    folder = os.path.normpath(arguments.output_dir)
    parent = os.path.dirname(folder)
    return os.path.join(os.path.dirname(parent) if os.path.basename(folder) == _number(arguments) else parent, name)


def _number(arguments: "TokenizeArguments") -> str:
    assert arguments.part is not None, "only tasks of --shard have others that follow"
    return str(arguments.part[0])


def _is_given(field: Any, arguments: "TokenizeArguments") -> bool:
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return bool(getattr(arguments, field.name) != default)


def _words(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [str(one).lower() if isinstance(one, bool) else str(one) for one in values]
