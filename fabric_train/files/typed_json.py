"""Read JSON that may be damaged or forged: the one place that decides what a JSON file may contain."""

import json
import os
from pathlib import Path
from typing import Any, TypeVar, cast

from fabric_train.cli.errors import InputError, first_line, raise_reached_limit
from fabric_train.files.regular_file import open_regular

T = TypeVar("T")

_MOST_BYTES = 1 << 30  # a manifest lists each file that was read
_MOST_LEVELS = 100  # libraries read some of the files again, and walk through them by recursion


def read_json(file: Path, kind: type[T], advice: str) -> T:
    """Return the content of a JSON file as ``kind``: ``dict``, a dataclass or a pydantic model.

    No value is converted, except int to float. ``advice`` ends the error message: how to fix a wrong file.

    Raises:
        InputError: in one line: the file is missing, no regular file, too large, not UTF-8 or not JSON, is nested too
            deeply, has an integer of more than 64 bits (128 in a ``dict``: tokenizers of the hub have a
            ``model_max_length`` of 1e30), or a value is missing or has another type.
    """
    try:
        with open_regular(file, advice) as opened:
            if os.fstat(opened.fileno()).st_size > _MOST_BYTES:
                raise InputError(f"{file}: larger than 1 GiB, so it is not what its name says; {advice}")
            raw = opened.read()
    except OSError as error:
        raise_reached_limit(error)
        raise InputError(f"{file}: {error.strerror}; {advice}") from None
    try:
        return parse_json(raw, kind)
    except ValueError as error:
        raise InputError(f"{file}: damaged ({error}); {advice}") from None


def parse_json(raw: bytes | str, kind: type[T]) -> T:
    """Return JSON as ``kind``; see :func:`read_json`.

    Raises:
        ValueError: in one line, with the path of a wrong value, such as ``ledger.splits.train.rows``.
    """
    content = _parse(raw, 128 if kind is dict else 64)
    if kind is dict:
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
        return cast("T", content)
    from pydantic import TypeAdapter, ValidationError  # a slow import, not needed by tokenization

    try:
        parsed: T = TypeAdapter(kind).validate_json(raw, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        reason = " ".join((f"{path}: {first['msg']}" if path else first["msg"]).split())
        raise ValueError(reason if reason.isprintable() else ascii(reason)) from None
    return parsed


def _parse(raw: bytes | str, most_bits: int) -> Any:
    """Parse JSON; all reasons to refuse it are in the line of a ValueError."""

    def parse_int(digits: str) -> int:
        half = 1 << (most_bits - 1)
        if len(digits) > most_bits or not -half <= (number := int(digits)) < half:
            raise ValueError(f"an integer of more than {most_bits} bits")
        return number

    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8")
        content = json.loads(text, parse_int=parse_int)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(first_line(error)) from None
    if _is_deeper(content, _MOST_LEVELS):
        raise ValueError("nested too deeply")
    if "\\ud" in text.lower():
        try:
            json.dumps(content, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("a text with half of a surrogate pair") from None
    return content


def _is_deeper(content: Any, most_levels: int) -> bool:
    level = [content]
    for _ in range(most_levels + 1):
        inner = (part for part in level if isinstance(part, dict | list))
        level = [part for one in inner for part in (one.values() if isinstance(one, dict) else one)]
    return bool(level)
