"""A ``tokenizer.json`` as plain data."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson


@dataclass(frozen=True)
class AddedToken:
    """A token that is looked for in the text itself, before the model sees it.

    ``normalized`` says whether it is looked for after the normalizer. ``has_conditions`` is true where blanks or word
    borders around it matter.
    """

    content: str
    id: int
    special: bool
    normalized: bool
    has_conditions: bool


@dataclass(frozen=True)
class TokenizerJson:
    """The parts of the file: ``model``, ``normalizer`` and ``pre_tokenizer`` as they stand in it."""

    model: dict[str, Any]
    normalizer: dict[str, Any] | None
    pre_tokenizer: dict[str, Any] | None
    added_tokens: tuple[AddedToken, ...]


def read_tokenizer_json(file: Path) -> TokenizerJson:
    """Read ``file``.

    Raises:
        ValueError: it is not JSON, or not of this format.
    """
    with _without_garbage_collection():
        content = orjson.loads(file.read_bytes())
    try:
        return TokenizerJson(
            model=dict(content["model"]),
            normalizer=content.get("normalizer"),
            pre_tokenizer=content.get("pre_tokenizer"),
            added_tokens=tuple(map(_added_token, content.get("added_tokens") or ())),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it lacks what a tokenizer.json has: {error}") from None


def _added_token(token: dict[str, Any]) -> AddedToken:
    return AddedToken(
        content=token["content"],
        id=token["id"],
        special=token["special"],
        normalized=token["normalized"],
        has_conditions=token["single_word"] or token["lstrip"] or token["rstrip"],
    )


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Halve the time that a list of 280,000 merges takes: each is a list that the collector would visit again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
