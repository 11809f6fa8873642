"""Read and change the texts of a chat's or an instruction's row, in all formats of ``chats/chat_format.py``."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_NO_TEXT = frozenset(["role", "from", "type", "id", "name", "tool_call_id", "tools"])  # what a program reads
_JSON_TEXT = "arguments"  # of a tool call, if it is text: a change of the text may leave no JSON


def change_texts(row: Mapping[str, Any], columns: Sequence[str], change: Callable[[str], str]) -> dict[str, Any]:
    """Return the row with ``change`` of each text in ``columns``: contents, and the values of a tool call's arguments.

    A row that is nested too deeply is returned as it is: it is bad, and reported as such when it is encoded.
    """
    try:
        return {name: _changed(name, value, change) if name in columns else value for name, value in row.items()}
    except RecursionError:
        return dict(row)


def text_of_chat(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """Return all texts in ``columns``, one after the other on lines of their own.

    Half of a surrogate pair becomes ``?``; a row with one is bad, and reported as such if it is encoded.
    """
    texts: list[str] = []

    def take(text: str) -> str:
        texts.append(text)
        return text

    change_texts(row, columns, take)
    return "\n".join(texts).encode(errors="replace").decode()


def _changed(name: str, value: Any, change: Callable[[str], str]) -> Any:
    if name in _NO_TEXT:
        return value
    if name == _JSON_TEXT and isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return value  # the row is bad, and reported as such when it is encoded
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_changed("", part, change) for part in value]
    if isinstance(value, Mapping):
        return {key: _changed(key, part, change) for key, part in value.items()}
    return value
