"""Parse JSON text into dataclasses; pydantic checks every value's type."""

from typing import TypeVar

T = TypeVar("T")


def parse_json(text: str, kind: type[T]) -> T:
    """Return JSON text as ``kind``, a dataclass or a pydantic model; no value is converted, except int to float.

    Raises:
        ValueError: the text is not JSON, or a value is missing or has another type. The message has its path, such as
            ``ledger.splits.train.rows``.
    """
    from pydantic import TypeAdapter, ValidationError  # a slow import, not needed by tokenization

    try:
        parsed: T = TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path}: {first['msg']}" if path else first["msg"]) from None
    return parsed
