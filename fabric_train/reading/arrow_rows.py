"""Restore the keys that rows had before they were in an Arrow table, which gives every struct the keys of all rows.

A key that a row does not have is null. A tool call ``{"city": "Paris"}`` next to another row's ``{"a": 1}`` is read as
``{"city": "Paris", "a": null}``.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow


def nested_columns(schema: "pyarrow.Schema", columns: list[str]) -> dict[str, "pyarrow.DataType"]:
    """Return the types of the ``columns`` that are JSON, or are nested and may have structs in them."""
    from pyarrow import types

    kinds = {name: schema.field(name).type for name in columns}
    return {name: kind for name, kind in kinds.items() if types.is_nested(kind) or _is_json(kind)}


def without_filling(value: Any, kind: "pyarrow.DataType", *, parses_json: bool) -> Any:
    """Return a value of an Arrow type without the keys of structs that are null.

    Nulls in lists and in JSON come from the row itself and are kept. With ``parses_json``, values of type JSON are
    still text.
    """
    from pyarrow import types

    if types.is_struct(kind) and isinstance(value, Mapping):
        entries = {}
        for index in range(kind.num_fields):
            entry = kind.field(index)
            if value.get(entry.name) is not None:
                entries[entry.name] = without_filling(value[entry.name], entry.type, parses_json=parses_json)
        return entries
    if _is_list(kind) and isinstance(value, list):
        return [without_filling(item, kind.value_type, parses_json=parses_json) for item in value]
    if parses_json and _is_json(kind) and isinstance(value, str):
        return json.loads(value)
    return value


def without_nulls(value: Any) -> Any:
    """Return a value of a table with unknown types, without the keys that are null."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _is_list(kind: "pyarrow.DataType") -> bool:
    from pyarrow import types

    return any(
        is_kind(kind) for is_kind in (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view)
    )


def _is_json(kind: "pyarrow.DataType") -> bool:
    return getattr(kind, "extension_name", None) == "arrow.json"
