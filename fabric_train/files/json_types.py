"""What JSON holds against the type that it should have: files that others wrote, or edited, may hold anything."""

from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

_PLAIN: dict[Any, Any] = {float: (int, float), **{kind: kind for kind in (str, int, bool, list, tuple, dict)}}


def check_types(value: Any, kind: Any, name: str) -> None:
    """Compare a value, in depth, with a type: a dataclass's, or one of JSON's with None as the only other choice.

    Raises:
        TypeError: naming what has another type.
        ValueError: text holds half a surrogate pair, which JSON can write and no file can hold.
    """
    inner = get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        for field in fields(kind):
            check_types(getattr(value, field.name), hints[field.name], field.name)
    elif get_origin(kind) in (Union, UnionType):
        if value is not None:
            check_types(value, inner[0], name)
    elif not isinstance(value, _PLAIN.get(get_origin(kind) or kind, object)):
        raise TypeError(f"{name} is {value!r}")
    elif isinstance(value, str):
        value.encode()
    elif isinstance(value, dict):
        for key, item in value.items():
            check_types(item, inner[1] if inner else Any, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for item in value:
            check_types(item, inner[0] if inner else Any, name)
