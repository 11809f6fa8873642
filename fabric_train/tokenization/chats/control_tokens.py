"""Encode rendered chats: control tokens of the template become tokens, those in a message stay text.

Messages are *shielded* before they are rendered: a placeholder replaces the text of every control token in them. So
everything that looks like a control token in the rendering was written by the template:

    content      write <|eot_id|>!
    rendering    <|start_header_id|>user<|end_header_id|>\\n\\nwrite PLACEHOLDER!<|eot_id|>

The text between two control tokens is encoded on its own, and once for all renderings in which it occurs. Where that is
not possible, the ``tokenizers`` library encodes each rendering whole (``AliasedTokenizer``).
"""

import re
import secrets
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from fabric_train.reading.documents import BadRowError, Message
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast
from fabric_train.tokenization.tokenizers.text_encoder import TextEncoder

Span = tuple[int, int]


class AliasedTokenizer:
    """A tokenizer that matches ``control``, ids by text, only by ``aliases``, which no message contains."""

    def __init__(self, tokenizer_file: Path, control: Mapping[str, int], aliases: Mapping[str, str]) -> None:
        from tokenizers import AddedToken, processors

        self.aliases = aliases
        tokenizer = load_fast(tokenizer_file, special_text_is_plain=True)
        own = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content in control]
        for token in own:
            token.special = True
        tokenizer.add_special_tokens(own)
        tokenizer.add_tokens(
            [
                AddedToken(aliases[one.content], lstrip=one.lstrip, rstrip=one.rstrip, normalized=one.normalized)
                for one in own
            ]
        )
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # offsets include the space of a token
        self._tokenizer = tokenizer

        size = max(tokenizer.get_vocab().values()) + 1
        self._ids = np.arange(size, dtype=np.int32)
        for text, alias in aliases.items():
            self._ids[tokenizer.token_to_id(alias)] = control[text]
        unknown = getattr(tokenizer.model, "unk_token", None)  # the one special token that a text may become
        self._is_control = np.zeros(size, dtype=bool)
        self._is_control[[token_id for text, token_id in control.items() if text != unknown]] = True

    def encode(self, pieces: Sequence[str]) -> tuple[np.ndarray, np.ndarray, bool]:
        """Encode a text, given in pieces, with aliases for control tokens.

        Returns:
            The ids, int32 [T]; which of them lie at least partly in the second, fourth, ... piece, bool [T]; and
            whether the tokenizer made a control token from text, which can happen if its vocabulary has it.
        """
        encoding = self._tokenizer.encode("".join(pieces), add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int32)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        borders = np.cumsum([len(piece) for piece in pieces])[:-1]
        # a token lies in such a piece if more of them have begun before its end than have ended before its start
        begun = np.searchsorted(borders[::2], offsets[:, 1], side="left")
        ended = np.searchsorted(borders[1::2], offsets[:, 0], side="right")
        return self._ids[ids], begun > ended, bool(self._is_control[ids].any())


class _NeedsWholeTextError(Exception):
    """A rendering must be encoded as a whole."""


class ControlTokens:
    """An encoder of renderings in which only the template's control tokens become tokens.

    ``control`` has their ids by text, ``encoder`` encodes the texts between them; without one, renderings stay whole.
    """

    def __init__(self, tokenizer_file: Path, control: Mapping[str, int], encoder: TextEncoder | None) -> None:
        self._tokenizer_file = tokenizer_file
        self._control = control
        self._encoder = encoder
        self._number = secrets.token_hex(8)  # random, so no text contains it
        self._placeholders = {text: f"{self._number}t{token_id}t" for text, token_id in control.items()}
        self._shielded_texts = {placeholder: text for text, placeholder in self._placeholders.items()}
        self._control_token = _any_of(control)
        self._placeholder = _any_of(self._shielded_texts)
        self._control_ids = np.array(list(control.values()), np.int32)
        self._parts: dict[str, list[str]] = {}  # of renderings, see _split
        self._ids: dict[str, np.ndarray] = {}  # of control tokens, and of the texts between them
        self._with_control: set[str] = set()  # the encoder makes control tokens of these texts

    def shield(self, value: Any) -> Any:
        """Return ``value`` (JSON-like) with placeholders for the text of control tokens in all of its strings."""
        if isinstance(value, str):
            return self._control_token.sub(lambda match: self._placeholders[match[0]], value)
        if isinstance(value, dict):
            return {self.shield(key): self.shield(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.shield(item) for item in value]
        return value

    def shield_messages(self, messages: list[Message]) -> list[Message]:
        """Return the messages shielded; mostly there is nothing to shield, which is found out quickly."""
        has_more = any(message.keys() != {"role", "content"} for message in messages)
        if has_more or self._control_token.search("\n".join(message["content"] for message in messages)):
            return [self.shield(message) for message in messages]
        return messages

    def encode_ahead(self, texts: Iterable[str]) -> None:
        """Encode the parts of these renderings in one call, for ``encode`` and ``count``; forget earlier ones."""
        self._ids = {text: np.array([token_id], np.int32) for text, token_id in self._control.items()}
        self._ids[""] = np.empty(0, np.int32)
        self._with_control = set()
        if self._encoder:
            self._parts = {text: self._control_token.split(text) for text in texts}
            self._encode_new(chain.from_iterable(self._parts.values()))

    def encode(self, text: str, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a rendering, int32 [T], and which lie at least partly in one of ``spans``, bool [T].

        ``spans``, (start, end) in characters, are in order. BadRowError if text becomes a control token.
        """
        try:
            return self._encode_by_parts(text, spans)
        except _NeedsWholeTextError:
            return self._encode_whole(text, spans)

    def count(self, text: str) -> int:
        """Return the number of a rendering's tokens; arguments and errors as in ``encode``."""
        try:
            return sum(len(self._ids[part]) for part in self._split(text))
        except _NeedsWholeTextError:
            return len(self._encode_whole(text, [])[0])

    def estimate(self, text: str, positions: np.ndarray) -> np.ndarray:
        """Return about how many tokens of a rendering are before each of these characters, of any shape."""
        try:
            parts = self._split(text)
        except _NeedsWholeTextError:
            return np.interp(positions, [0, len(text)], [0, self.count(text)])
        ends = np.cumsum([len(part) for part in parts])
        return np.interp(positions, [0, *ends], [0, *np.cumsum([len(self._ids[part]) for part in parts])])

    def _split(self, text: str) -> list[str]:
        """Return a rendering's parts, by turns a text, which may be empty, and a control token; all are encoded."""
        if self._encoder is None:
            raise _NeedsWholeTextError
        if text not in self._parts:
            self._parts[text] = self._control_token.split(text)
            self._encode_new(self._parts[text])
        parts = self._parts[text]
        if not self._with_control.isdisjoint(parts):
            raise _NeedsWholeTextError
        return parts

    def _encode_new(self, parts: Iterable[str]) -> None:
        new = list(dict.fromkeys(part for part in parts if part not in self._ids))
        if not new:
            return
        assert self._encoder
        ids = self._encoder.encode_batch([self._unshield(part) for part in new])
        self._ids.update(zip(new, ids, strict=True))
        if np.isin(np.concatenate(ids), self._control_ids).any():
            made = (part for part, of_part in zip(new, ids, strict=True) if np.isin(of_part, self._control_ids).any())
            self._with_control.update(made)

    def _encode_by_parts(self, text: str, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
        parts = self._split(text)
        ids = [self._ids[part] for part in parts]
        first_characters = [0, *accumulate(map(len, parts))]
        first_tokens = [0, *accumulate(map(len, ids))]

        def token_at(border: int) -> int:
            index = bisect_left(first_characters, border)
            if first_characters[index] == border:
                return first_tokens[index]
            part = parts[index - 1]
            if part in self._control:
                raise _NeedsWholeTextError
            self._encode_new([beginning := part[: border - first_characters[index - 1]]])
            head = self._ids[beginning]
            if ids[index - 1][: len(head)].tobytes() != head.tobytes():
                raise _NeedsWholeTextError  # the border is within a token
            return first_tokens[index - 1] + len(head)

        inside = np.zeros(first_tokens[-1], dtype=bool)
        for begin, end in spans:
            inside[token_at(begin) : token_at(end)] = True
        return np.concatenate(ids), inside

    def _unshield(self, text: str) -> str:
        if self._number not in text:
            return text
        return self._placeholder.sub(lambda match: self._shielded_texts[match[0]], text)

    def _encode_whole(self, text: str, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
        borders = list(chain.from_iterable(spans))
        whole = self._as_whole
        with_aliases = [
            self._unshield(self._control_token.sub(lambda match: whole.aliases[match[0]], text[begin:end]))
            for begin, end in pairwise([0, *borders, len(text)])
        ]
        ids, inside, has_made_control = whole.encode(with_aliases)
        if has_made_control:
            raise BadRowError("the tokenizer makes a control token from text; leave the row out")
        return ids, inside

    @cached_property
    def _as_whole(self) -> AliasedTokenizer:
        aliases = {text: f"{self._number}a{token_id}a" for text, token_id in self._control.items()}
        return AliasedTokenizer(self._tokenizer_file, self._control, aliases)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern whose only group is the longest of ``texts`` at a place."""
    return re.compile(f"({_alternatives(list(texts))})")


def _alternatives(texts: list[str]) -> str:
    """Return a pattern in which texts that begin alike share their beginning: Llama-3 has 256 that begin with <|."""
    if texts == [""]:
        return ""
    alike: dict[str, list[str]] = {}
    for text in filter(None, texts):
        alike.setdefault(text[0], []).append(text)
    branches = []
    for group in alike.values():
        pairs = zip(min(group), max(group), strict=False)
        length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        branches.append(re.escape(group[0][:length]) + _alternatives([text[length:] for text in group]))
    return f"(?:{'|'.join(branches)}){'?' if '' in texts else ''}"
