"""Encode a rendered chat: control tokens of the template become tokens, those in a message stay text.

Messages are *shielded* before they are rendered: a placeholder replaces the text of every control token in them. So
everything that looks like a control token in the rendering was written by the template:

    content      write <|eot_id|>!
    rendering    <|start_header_id|>user<|end_header_id|>\\n\\nwrite PLACEHOLDER!<|eot_id|>

tiktoken encodes the text between two control tokens if it gives the tokenizer's ids. Otherwise ids may depend on the
control tokens around a text, and the ``tokenizers`` library encodes the whole rendering (see ``aliased_tokenizer``).
"""

import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fabric_train.tokenization.chats.aliased_tokenizer import AliasedTokenizer
from fabric_train.tokenization.documents import BadRowError
from fabric_train.tokenization.tokenizers.byte_bpe import ByteBPE, UnsupportedTokenizerError, load_byte_bpe

Span = tuple[int, int]

_SHORT = 20  # characters; short texts such as headers and separators are cached


class _NeedsWholeTextError(Exception):
    """An error for a rendering that must be encoded as a whole."""


class ControlTokens:
    """An encoder of renderings in which only the template's control tokens become tokens.

    Args:
        tokenizer_file: the ``tokenizer.json``.
        control: the control tokens' ids by text.
        with_tiktoken: use tiktoken if it gives the tokenizer's ids.
    """

    def __init__(self, tokenizer_file: Path, control: Mapping[str, int], with_tiktoken: bool = True) -> None:
        self._tokenizer_file, self._control = tokenizer_file, control
        self._number = secrets.token_hex(8)  # random, so no text contains it
        self._placeholders = {text: f"{self._number}t{token_id}t" for text, token_id in control.items()}
        self._shielded_texts = {placeholder: text for text, placeholder in self._placeholders.items()}
        self._control_token, self._placeholder = _any_of(control), _any_of(self._shielded_texts)
        self._ids = {text: np.array([token_id], np.int32) for text, token_id in control.items()}
        self._tiktoken = _load_tiktoken(tokenizer_file) if with_tiktoken else None
        self._encode_short = lru_cache(maxsize=4096)(self._encode_text)
        # whether a control token is not special, so that tiktoken encodes it as a token in any text
        self._tiktoken_takes = self._tiktoken and any(control[text] in self._encode_text(text) for text in control)

    def shield(self, value: Any) -> Any:
        """Return ``value`` (JSON-like) with placeholders for the text of control tokens in all of its strings."""
        if isinstance(value, str):
            return self._control_token.sub(lambda match: self._placeholders[match[0]], value)
        if isinstance(value, dict):
            return {self.shield(key): self.shield(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.shield(item) for item in value]
        return value

    def encode(self, text: str, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
        """Encode a rendering.

        Args:
            text: the rendering of shielded messages.
            spans: (start, end) of the characters to mark, in order and without overlap.

        Returns:
            The ids, int32 [T], and which of them lie at least partly in a span, bool [T].

        Raises:
            BadRowError: the text has half of a surrogate pair, or the tokenizer makes a control token from text.
        """
        if not text.isascii():
            check_surrogates(text)
        borders = list(chain.from_iterable(spans))
        if self._tiktoken:
            try:
                return self._encode_by_parts(text, borders)
            except _NeedsWholeTextError:
                pass
        pieces = [text[begin:end] for begin, end in zip([0, *borders], [*borders, len(text)], strict=True)]
        ids, inside, has_made_control = self._as_whole.encode([self._with_aliases(piece) for piece in pieces])
        if has_made_control:
            raise BadRowError("the tokenizer makes a control token from text; leave the row out")
        return ids, inside

    def _encode_by_parts(self, text: str, borders: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Encode each text between two control tokens separately; ``borders`` are the spans' starts and ends."""
        ids: list[np.ndarray] = []
        inside: list[int] = []
        position = 0
        for match in self._control_token.finditer(text):
            self._encode_part(text, position, match.start(), borders, ids, inside)
            ids.append(self._ids[match[0]])
            inside.append(bisect_right(borders, match.start()) % 2)
            position = match.end()
        self._encode_part(text, position, len(text), borders, ids, inside)
        lengths = [len(part) for part in ids]
        return np.concatenate(ids), np.repeat(np.array(inside, dtype=bool), lengths)

    def _encode_part(
        self, text: str, begin: int, end: int, borders: Sequence[int], ids: list[np.ndarray], inside: list[int]
    ) -> None:
        """Append the ids of a text without control tokens to ``ids``, split at the borders in it."""
        if begin == end:
            return
        part = self._encode_shielded(text[begin:end])
        done = 0
        for index in range(bisect_right(borders, begin), bisect_left(borders, end)):
            head = self._encode_shielded(text[begin : borders[index]])
            if part[: len(head)].tobytes() != head.tobytes():
                raise _NeedsWholeTextError  # the border is within a token
            ids.append(part[done : len(head)])
            inside.append(index % 2)
            done = len(head)
        ids.append(part[done:])
        inside.append(bisect_left(borders, end) % 2)

    def _encode_shielded(self, text: str) -> np.ndarray:
        if self._number in text:
            if self._tiktoken_takes:
                raise _NeedsWholeTextError
            text = self._placeholder.sub(lambda match: self._shielded_texts[match[0]], text)
        return self._encode_short(text) if len(text) <= _SHORT else self._encode_text(text)

    def _encode_text(self, text: str) -> np.ndarray:
        assert self._tiktoken
        return self._tiktoken.encode_batch([text])[0]

    @cached_property
    def _as_whole(self) -> AliasedTokenizer:
        aliases = {text: f"{self._number}a{token_id}a" for text, token_id in self._control.items()}
        return AliasedTokenizer(self._tokenizer_file, self._control, aliases)

    def _with_aliases(self, text: str) -> str:
        text = self._control_token.sub(lambda match: self._as_whole.aliases[match[0]], text)
        return self._placeholder.sub(lambda match: self._shielded_texts[match[0]], text)


def _any_of(texts: Mapping[str, Any]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))


def check_surrogates(text: str) -> None:
    """Check that a text can be encoded.

    Raises:
        BadRowError: it has half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRowError("it has half of a surrogate pair, which is no character; write the file as UTF-8") from None


def _load_tiktoken(tokenizer_file: Path) -> ByteBPE | None:
    try:
        return load_byte_bpe(tokenizer_file, special_text_is_plain=True)
    except UnsupportedTokenizerError:
        return None
