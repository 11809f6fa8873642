"""The arguments of a program: a dataclass of values, or a dataclass whose fields are groups of values."""

import dataclasses
from typing import Any, get_type_hints

POSITIONAL = {"positional": True}
"""Metadata of the one field of a dataclass that may be given on the command line without its name."""


def groups_of(arguments: type) -> dict[str, type]:
    """Return the groups of a program's arguments by field name; a single group has an empty name."""
    hints = get_type_hints(arguments)
    return hints if all(dataclasses.is_dataclass(kind) for kind in hints.values()) else {"": arguments}


def types_of(arguments: type) -> dict[str, Any]:
    """Return the types of all arguments by name, number ranges included."""
    return {
        name: kind
        for group in groups_of(arguments).values()
        for name, kind in get_type_hints(group, include_extras=True).items()
    }


def positional_of(arguments: type) -> str | None:
    """Return the argument that may be given without its name."""
    fields = [field for group in groups_of(arguments).values() for field in dataclasses.fields(group)]
    return next((field.name for field in fields if field.metadata.get("positional")), None)


def is_required(field: dataclasses.Field) -> bool:
    """Whether an argument has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def title_of(group: type) -> str:
    """Return the first line of a group's docstring."""
    return (group.__doc__ or group.__name__).strip().splitlines()[0]
