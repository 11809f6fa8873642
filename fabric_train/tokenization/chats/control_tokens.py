"""Text with control tokens to ids: those that a chat template writes become tokens, those in a turn's content do not.

A content is *shielded* before it is rendered: in it, the text of every control token is replaced by a placeholder. So
whatever looks like a control token in the rendering was written by the template:

    content      write <|eot_id|>!
    rendering    <|start_header_id|>user<|end_header_id|>\\n\\nwrite PLACEHOLDER!<|eot_id|>

Between two control tokens is text, which tiktoken encodes if it can have the tokenizer's ids. Otherwise the
``tokenizers`` library gets the rendering as a whole (see ``aliased_tokenizer``), for then ids may depend on the control
tokens around a text.
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
from fabric_train.tokenization.tokenizers.byte_bpe import ByteBPE, NotExpressibleError, load_byte_bpe

Span = tuple[int, int]

_SHORT = 20  # headers, and what stands between turns, come again and again


class _NotByPartsError(Exception):
    """A rendering that has to be encoded as a whole."""


class ControlTokens:
    """A tokenizer's control tokens and the way around them.

    Args:
        tokenizer_file: ``tokenizer.json``.
        control: the control tokens, text → id.
        with_tiktoken: use tiktoken if it can have the tokenizer's ids.
    """

    def __init__(self, tokenizer_file: Path, control: Mapping[str, int], with_tiktoken: bool = True) -> None:
        self._tokenizer_file, self._control = tokenizer_file, control
        self._number = secrets.token_hex(8)  # no text can hold it
        self._placeholders = {text: f"{self._number}t{token_id}t" for text, token_id in control.items()}
        self._shielded_texts = {placeholder: text for text, placeholder in self._placeholders.items()}
        self._control_token, self._placeholder = _any_of(control), _any_of(self._shielded_texts)
        self._ids = {text: np.array([token_id], np.int32) for text, token_id in control.items()}
        self._tiktoken = _load_tiktoken(tokenizer_file) if with_tiktoken else None
        self._encode_short = lru_cache(maxsize=4096)(self._encode_text)
        # control tokens that are not special, which tiktoken takes for tokens in any text
        self._tiktoken_takes = self._tiktoken and any(control[text] in self._encode_text(text) for text in control)

    def shield(self, value: Any) -> Any:
        """Return ``value`` with the text of control tokens replaced by placeholders in every text within it."""
        if isinstance(value, str):
            return self._control_token.sub(lambda match: self._placeholders[match[0]], value)
        if isinstance(value, dict):
            return {self.shield(key): self.shield(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.shield(item) for item in value]
        return value

    def encode(self, text: str, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a rendering, int32 [T], and which of them lie in ``spans`` of its characters, bool [T].

        A token that reaches across the border of a span lies in it. Spans are in order and do not overlap.

        Raises:
            BadRowError: the text is no Unicode, or the tokenizer makes a control token of it.
        """
        if not text.isascii():
            _refuse_half_characters(text)
        borders = list(chain.from_iterable(spans))
        if self._tiktoken:
            try:
                return self._encode_by_parts(text, borders)
            except _NotByPartsError:
                pass
        pieces = [text[begin:end] for begin, end in zip([0, *borders], [*borders, len(text)], strict=True)]
        ids, inside, has_made_control = self._as_whole.encode([self._with_aliases(piece) for piece in pieces])
        if has_made_control:
            raise BadRowError("the tokenizer makes a control token of its text; leave it out")
        return ids, inside

    def _encode_by_parts(self, text: str, borders: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Encode each text between two control tokens, or borders, on its own; every other border begins a span."""
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
        """Append the ids of text without control tokens, cut at the borders within, to ``ids``."""
        if begin == end:
            return
        part = self._encode_shielded(text[begin:end])
        done = 0
        for index in range(bisect_right(borders, begin), bisect_left(borders, end)):
            head = self._encode_shielded(text[begin : borders[index]])
            if part[: len(head)].tobytes() != head.tobytes():
                raise _NotByPartsError  # the border is within a token
            ids.append(part[done : len(head)])
            inside.append(index % 2)
            done = len(head)
        ids.append(part[done:])
        inside.append(bisect_left(borders, end) % 2)

    def _encode_shielded(self, text: str) -> np.ndarray:
        if self._number in text:
            if self._tiktoken_takes:
                raise _NotByPartsError
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


def _refuse_half_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRowError("it holds half of a surrogate pair, which is no character; write it anew as UTF-8") from None


def _load_tiktoken(tokenizer_file: Path) -> ByteBPE | None:
    try:
        return load_byte_bpe(tokenizer_file, special_text_is_plain=True)
    except NotExpressibleError:
        return None
