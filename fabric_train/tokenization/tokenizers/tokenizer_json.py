"""Read a ``tokenizer.json``: its model, its normalizer and its added tokens."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from fabric_train.files.regular_file import open_regular


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched in the text itself, before the model gets it."""

    id: int
    content: str
    single_word: bool  # whether it must have word borders around it
    lstrip: bool  # whether it includes the whitespace before it
    rstrip: bool  # whether it includes the whitespace after it
    normalized: bool  # whether it is matched after normalization
    special: bool


@dataclass(frozen=True)
class TokenizerJson:
    """The parts of a ``tokenizer.json``; all but ``added_tokens`` are the parsed JSON."""

    model: dict[str, Any]
    normalizer: dict[str, Any] | None
    pre_tokenizer: dict[str, Any] | None
    added_tokens: tuple[AddedToken, ...]


def read_tokenizer_json(file: Path, *, keep: bool = False) -> TokenizerJson:
    """Read a ``tokenizer.json``; ValueError if it is not one.

    With ``keep``, the content stays in memory until this file, or a copy of it, is read again: parsing takes a second
    for a large vocabulary, and the content takes memory.
    """
    with open_regular(file, "download the file again") as opened_file:
        raw = opened_file.read()
    content = _parse(raw)
    if not keep:
        _parse.cache_clear()
    return content


@lru_cache(maxsize=1)
def _parse(raw: bytes) -> TokenizerJson:
    with _without_garbage_collection():
        content = orjson.loads(raw)
    try:
        return TokenizerJson(
            model=dict(content["model"]),
            normalizer=content.get("normalizer"),
            pre_tokenizer=content.get("pre_tokenizer"),
            added_tokens=tuple(AddedToken(**token) for token in content.get("added_tokens") or ()),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is not a tokenizer.json: {error}") from None


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Turn off garbage collection, which doubles the time to parse 280,000 merges: it visits each list many times."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
