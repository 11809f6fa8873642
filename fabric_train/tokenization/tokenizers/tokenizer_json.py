"""Read a ``tokenizer.json`` as plain data."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from fabric_train.files.regular_file import open_regular


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched in the text itself, before the model gets it.

    Attributes:
        single_word: whether it must have word borders around it.
        lstrip: whether it includes the whitespace before it; ``rstrip``: after it.
        normalized: whether it is matched after normalization.
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
        """Whether a match depends on the whitespace or words around it."""
        return self.single_word or self.lstrip or self.rstrip


@dataclass(frozen=True)
class TokenizerJson:
    """The parts of a ``tokenizer.json``; all but ``added_tokens`` are the parsed JSON."""

    model: dict[str, Any]
    normalizer: dict[str, Any] | None
    pre_tokenizer: dict[str, Any] | None
    added_tokens: tuple[AddedToken, ...]


_kept: list[tuple[bytes, TokenizerJson]] = []  # at most one file's bytes and content


def read_tokenizer_json(file: Path, *, keep: bool = False) -> TokenizerJson:
    """Read ``file``.

    Args:
        file: the ``tokenizer.json``.
        keep: whether to keep the content in memory until the same content is read again, also from a copy.

    Raises:
        InputError: it is a pipe, a folder or another kind of file.
        ValueError: the file is not JSON, or not of this format.
    """
    with open_regular(file, "fetch the file again") as opened:
        raw = opened.read()
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
        raise ValueError(f"it is not a tokenizer.json: {error}") from None


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Halve the time to parse 280,000 merges: each is a list, which the collector would visit again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
