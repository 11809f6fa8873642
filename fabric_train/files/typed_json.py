"""Read JSON that other users may have written as a value of a type, and never trust its size, nesting or types."""

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fabric_train.cli.errors import InputError, first_line, raise_if_limit_reached
from fabric_train.files.regular_file import open_regular

if TYPE_CHECKING:
    from collections.abc import Hashable

    from pydantic import TypeAdapter

T = TypeVar("T")

_MAX_JSON_BYTES = 1 << 30  # a manifest lists each file that was read, so it may be large
_MAX_JSON_LEVELS = 100  # libraries read some of the files again, by recursion


def read_json(file: Path, kind: type[T], advice: str) -> T:
    """Return the content of a JSON file as a value of a type.

    No value is converted, except int to float. An integer may have 64 bits, or 128 in a ``dict``: tokenizers on the hub
    have a ``model_max_length`` of 1e30.

    Args:
        file: The file.
        kind: ``dict``, a dataclass or a pydantic model.
        advice: The end of the error message, which says how to fix a wrong file.

    Raises:
        InputError: in one line: the file is missing, not a regular file, too large, not UTF-8 or not JSON, is nested
            too deeply, has an integer of too many bits, or a value is missing or has another type.
    """
    try:
        with open_regular(file, advice) as opened:
            if os.fstat(opened.fileno()).st_size > _MAX_JSON_BYTES:
                raise InputError(f"{file}: larger than 1 GiB, so it cannot be what its name says; {advice}")
            content = opened.read()
    except OSError as error:
        raise_if_limit_reached(error)
        raise InputError(f"{file}: {error.strerror}; {advice}") from None
    try:
        return parse_json(content, kind)
    except ValueError as error:
        raise InputError(f"{file}: damaged ({error}); {advice}") from None


def read_json_lines(file: Path, kind: type[T], advice: str) -> Iterator[T]:
    """Yield each line of a file as ``kind``, or nothing if there is no file.

    A last line without a line break was cut off, so it is left out. Errors are as in :func:`read_json`, with the number
    of the line.
    """
    if not file.exists():
        return
    with open_regular(file, advice) as lines:
        for line_number, line in enumerate(lines, 1):
            is_complete = line.endswith(b"\n")
            try:
                value = parse_json(line, kind)
            except ValueError as error:
                if not is_complete:
                    return
                raise InputError(f"{file}, line {line_number}: damaged ({error}); {advice}") from None
            if is_complete:
                yield value


def parse_json(text: bytes | str, kind: type[T]) -> T:
    """Return JSON as ``kind``, see :func:`read_json`; a ValueError in one line names the path of a wrong value."""
    content = _parse(text, max_bits=128 if kind is dict else 64)
    if kind is dict:
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
        return cast("T", content)
    from pydantic import ValidationError  # a slow import, not needed by tokenization

    try:
        value: T = type_adapter(cast("Hashable", kind)).validate_json(text, strict=True)
    except ValidationError as error:
        first_error = error.errors()[0]
        path = ".".join(str(key) for key in first_error["loc"])
        reason = f"{path}: {first_error['msg']}" if path else first_error["msg"]
        reason = " ".join(reason.split())  # in one line
        raise ValueError(reason if reason.isprintable() else ascii(reason)) from None
    return value


@cache
def type_adapter(kind: "Hashable") -> "TypeAdapter[Any]":
    """Return the validator of a type of :func:`parse_json`; building one takes milliseconds, so it is kept."""
    from pydantic import TypeAdapter

    return TypeAdapter(cast("Any", kind))


def _parse(text: bytes | str, *, max_bits: int) -> Any:
    """Parse JSON; raise a ValueError that says in one line why it is refused."""
    limit = 1 << (max_bits - 1)

    def parse_int(digits: str) -> int:
        # A number of ``max_bits`` bits has fewer decimal digits. Python takes long to convert millions of them.
        if len(digits) <= max_bits:
            number = int(digits)
            if -limit <= number < limit:
                return number
        raise ValueError(f"an integer of more than {max_bits} bits")

    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
        content = json.loads(decoded, parse_int=parse_int)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(first_line(error)) from None
    if _is_deeper(content, _MAX_JSON_LEVELS):
        raise ValueError("nested too deeply")

    # json accepts an escape such as \ud800 alone, which no file can store
    if "\\ud" in decoded.lower():
        try:
            json.dumps(content, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("a string with half a surrogate pair") from None
    return content


def _is_deeper(content: Any, max_levels: int) -> bool:
    """Return whether JSON is nested more deeply than ``max_levels``, level by level and without recursion."""
    values = [content]
    for _ in range(max_levels + 1):
        inner_values: list[Any] = []
        for value in values:
            if isinstance(value, dict):
                inner_values += value.values()
            elif isinstance(value, list):
                inner_values += value
        values = inner_values
    return bool(values)
