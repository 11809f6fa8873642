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

    ``normalized`` says whether it is looked for after the normalizer; ``lstrip`` and ``rstrip`` take blanks along, and
    ``single_word`` asks for word borders around it.
    """

    id: int
    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool

    @property
    def has_conditions(self) -> bool:
        """Whether blanks or word borders around it matter."""
        return self.single_word or self.lstrip or self.rstrip


@dataclass(frozen=True)
class TokenizerJson:
    """The parts of the file: ``model``, ``normalizer`` and ``pre_tokenizer`` as they stand in it."""

    model: dict[str, Any]
    normalizer: dict[str, Any] | None
    pre_tokenizer: dict[str, Any] | None
    added_tokens: tuple[AddedToken, ...]


_kept: list[tuple[bytes, TokenizerJson]] = []  # one file's bytes and content, or none


def read_tokenizer_json(file: Path, *, keep: bool = False) -> TokenizerJson:
    """Read ``file``; with ``keep``, hold the content in memory for whoever reads the same next, also from a copy.

    Raises:
        ValueError: it is not JSON, or not of this format.
    """
    raw = file.read_bytes()
    content = next((content for kept, content in _kept if kept == raw), None) or _parse(raw)
    _kept[:] = [(raw, content)] if keep else []
    return content


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
        raise ValueError(f"it lacks what a tokenizer.json has: {error}") from None


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
