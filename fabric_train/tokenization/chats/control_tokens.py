"""Encode rendered chats: control tokens from the template become tokens, control tokens in a message stay text.

Messages are *shielded* before they are rendered: a placeholder replaces the text of every control token in them. So
everything that looks like a control token in the rendering was written by the template:

    content      write <|eot_id|>!
    rendering    <|start_header_id|>user<|end_header_id|>\\n\\nwrite PLACEHOLDER!<|eot_id|>

The text between two control tokens is encoded separately, and once for all renderings in which it occurs. Where this is
not possible, the ``tokenizers`` library encodes each rendering in full (``AliasedTokenizer``).
"""

import re
import secrets
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fabric_train.reading.documents import BadRowError, Message
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast
from fabric_train.tokenization.tokenizers.text_encoder import TextEncoder

Span = tuple[int, int]


@dataclass(frozen=True)
class EncodedPieces:
    """A text of T tokens that was given in pieces."""

    ids: np.ndarray  # int32 [T]
    is_in_even_piece: np.ndarray  # bool [T], whether a token is at least partly in the second, fourth, ... piece
    has_made_control: bool
    """Whether the tokenizer made a control token from text, which is possible if its vocabulary has the token."""


class AliasedTokenizer:
    """A tokenizer that matches ``control``, ids by text, only by ``aliases``, which no message contains."""

    def __init__(self, tokenizer_file: Path, control: Mapping[str, int], aliases: Mapping[str, str]) -> None:
        from tokenizers import AddedToken, processors

        # the control tokens are special, so that text is plain; their aliases are not, so that they are matched
        self.aliases = aliases
        tokenizer = load_fast(tokenizer_file, special_text_is_plain=True)
        control_tokens = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content in control]
        for token in control_tokens:
            token.special = True
        tokenizer.add_special_tokens(control_tokens)
        alias_tokens: list[AddedToken] = []
        for token in control_tokens:
            alias = aliases[token.content]
            alias_token = AddedToken(alias, lstrip=token.lstrip, rstrip=token.rstrip, normalized=token.normalized)
            alias_tokens.append(alias_token)
        tokenizer.add_tokens(alias_tokens)
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # offsets include the space of a token
        self._tokenizer = tokenizer

        # by id of this tokenizer: the id in the dataset, and whether it is that of a control token
        size = max(tokenizer.get_vocab().values()) + 1
        self._ids = np.arange(size, dtype=np.int32)
        for text, alias in aliases.items():
            self._ids[tokenizer.token_to_id(alias)] = control[text]
        unknown_token = getattr(tokenizer.model, "unk_token", None)  # the one special token that a text may become
        self._is_control = np.zeros(size, dtype=bool)
        for text, token_id in control.items():
            if text != unknown_token:
                self._is_control[token_id] = True

    def encode(self, pieces: Sequence[str]) -> EncodedPieces:
        """Encode a text, given in pieces, with aliases for control tokens."""
        encoding = self._tokenizer.encode("".join(pieces), add_special_tokens=False)
        alias_ids = np.array(encoding.ids, dtype=np.int32)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)  # [T, 2], start and end in characters
        borders = np.cumsum([len(piece) for piece in pieces])[:-1]
        starts_of_even_pieces = borders[::2]
        ends_of_even_pieces = borders[1::2]
        # a token is in such a piece if more of them have begun before its end than have ended before its start
        num_begun = np.searchsorted(starts_of_even_pieces, offsets[:, 1], side="left")
        num_ended = np.searchsorted(ends_of_even_pieces, offsets[:, 0], side="right")
        return EncodedPieces(
            ids=self._ids[alias_ids],
            is_in_even_piece=num_begun > num_ended,
            has_made_control=bool(self._is_control[alias_ids].any()),
        )


class _NeedsWholeTextError(Exception):
    """Raised if a rendering must be encoded in full."""


class ControlTokens:
    """An encoder of renderings that turns only the template's control tokens into tokens.

    ``control`` has their ids by text. ``encoder`` encodes the texts between them; without it, renderings are encoded in
    full.
    """

    def __init__(self, tokenizer_file: Path, control: Mapping[str, int], encoder: TextEncoder | None) -> None:
        self._tokenizer_file = tokenizer_file
        self._control = control
        self._encoder = encoder
        self._secret = secrets.token_hex(8)  # random, so no text contains it
        self._placeholders = {text: f"{self._secret}t{token_id}t" for text, token_id in control.items()}
        self._shielded_texts = {placeholder: text for text, placeholder in self._placeholders.items()}
        self._control_pattern = _any_of(control)
        self._placeholder_pattern = _any_of(self._shielded_texts)
        self._control_ids = np.array(list(control.values()), np.int32)
        self._segments: dict[str, list[str]] = {}  # of renderings, see _split
        self._ids: dict[str, np.ndarray] = {}  # of control tokens, and of the texts between them
        self._texts_with_control: set[str] = set()  # the encoder makes control tokens of these texts

    def shield(self, value: Any) -> Any:
        """Return a JSON-like ``value`` with placeholders for the text of control tokens in all its strings."""
        if isinstance(value, str):
            return self._control_pattern.sub(lambda match: self._placeholders[match[0]], value)
        if isinstance(value, dict):
            return {self.shield(key): self.shield(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.shield(item) for item in value]
        return value

    def shield_messages(self, messages: list[Message]) -> list[Message]:
        """Return the shielded messages; usually there is nothing to shield, which one search of all contents shows."""
        is_plain = all(message.keys() == {"role", "content"} for message in messages)
        if is_plain and not self._control_pattern.search("\n".join(message["content"] for message in messages)):
            return messages
        return [self.shield(message) for message in messages]

    def encode_ahead(self, texts: Iterable[str]) -> None:
        """Encode the segments of these renderings in one call, for ``encode`` and ``count``; drop earlier ones."""
        self._ids = {text: np.array([token_id], np.int32) for text, token_id in self._control.items()}
        self._ids[""] = np.empty(0, np.int32)
        self._texts_with_control = set()
        if self._encoder:
            self._segments = {text: self._control_pattern.split(text) for text in texts}
            self._encode_segments(chain.from_iterable(self._segments.values()))

    def encode(self, text: str, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a rendering, int32 [T], and which are at least partly in one of ``spans``, bool [T].

        ``spans``, (start, end) in characters, are in order. BadRowError if text becomes a control token.
        """
        try:
            return self._encode_by_segments(text, spans)
        except _NeedsWholeTextError:
            return self._encode_whole(text, spans)

    def count(self, text: str) -> int:
        """Return the number of a rendering's tokens; arguments and errors as in ``encode``."""
        try:
            return sum(len(self._ids[segment]) for segment in self._split(text))
        except _NeedsWholeTextError:
            token_ids, _ = self._encode_whole(text, spans=[])
            return len(token_ids)

    def estimate(self, text: str, positions: np.ndarray) -> np.ndarray:
        """Return approximately how many tokens of a rendering are before each of these characters, of any shape."""
        try:
            segments = self._split(text)
        except _NeedsWholeTextError:
            return np.interp(positions, [0, len(text)], [0, self.count(text)])
        character_ends = np.cumsum([len(segment) for segment in segments])
        token_ends = np.cumsum([len(self._ids[segment]) for segment in segments])
        return np.interp(positions, [0, *character_ends], [0, *token_ends])

    def _split(self, text: str) -> list[str]:
        """Return a rendering's segments, all encoded: a text, which may be empty, and a control token in turn."""
        if self._encoder is None:
            raise _NeedsWholeTextError
        if text not in self._segments:
            self._segments[text] = self._control_pattern.split(text)
            self._encode_segments(self._segments[text])
        segments = self._segments[text]
        if not self._texts_with_control.isdisjoint(segments):
            raise _NeedsWholeTextError
        return segments

    def _encode_segments(self, segments: Iterable[str]) -> None:
        """Encode the segments that have not been encoded yet, each once."""
        new_segments = list(dict.fromkeys(segment for segment in segments if segment not in self._ids))
        if not new_segments:
            return
        assert self._encoder
        ids_by_segment = self._encoder.encode_batch([self._unshield(segment) for segment in new_segments])
        self._ids.update(zip(new_segments, ids_by_segment, strict=True))
        # one test of all ids, as mostly no text becomes a control token
        if np.isin(np.concatenate(ids_by_segment), self._control_ids).any():
            for segment, ids in zip(new_segments, ids_by_segment, strict=True):
                if np.isin(ids, self._control_ids).any():
                    self._texts_with_control.add(segment)

    def _encode_by_segments(self, text: str, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
        """Return the result of ``encode`` from the rendering's segments; _NeedsWholeTextError if this is impossible."""
        segments = self._split(text)
        ids_by_segment = [self._ids[segment] for segment in segments]
        first_characters = [0, *accumulate(map(len, segments))]
        first_tokens = [0, *accumulate(map(len, ids_by_segment))]

        def find_token(border: int) -> int:
            """Return the token that begins at a character."""
            next_segment = bisect_left(first_characters, border)
            if first_characters[next_segment] == border:
                return first_tokens[next_segment]
            # the border is within a segment: encode its beginning, whose ids must be the first ids of the segment
            index = next_segment - 1
            segment = segments[index]
            if segment in self._control:
                raise _NeedsWholeTextError
            beginning = segment[: border - first_characters[index]]
            self._encode_segments([beginning])
            ids = self._ids[beginning]
            if ids_by_segment[index][: len(ids)].tobytes() != ids.tobytes():
                raise _NeedsWholeTextError  # the border is within a token
            return first_tokens[index] + len(ids)

        is_inside = np.zeros(first_tokens[-1], dtype=bool)
        for begin, end in spans:
            is_inside[find_token(begin) : find_token(end)] = True
        return np.concatenate(ids_by_segment), is_inside

    def _unshield(self, text: str) -> str:
        if self._secret not in text:
            return text
        return self._placeholder_pattern.sub(lambda match: self._shielded_texts[match[0]], text)

    def _encode_whole(self, text: str, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
        """Return the result of ``encode`` from the full rendering, encoded in one call."""
        tokenizer = self._aliased_tokenizer
        # the spans are the second, fourth, ... piece
        borders = [0, *chain.from_iterable(spans), len(text)]
        pieces: list[str] = []
        for begin, end in pairwise(borders):
            # first the control tokens get aliases, then the placeholders become text again
            piece = self._control_pattern.sub(lambda match: tokenizer.aliases[match[0]], text[begin:end])
            pieces.append(self._unshield(piece))
        encoded = tokenizer.encode(pieces)
        if encoded.has_made_control:
            raise BadRowError("the tokenizer turns text into a control token; remove the row")
        return encoded.ids, encoded.is_in_even_piece

    @cached_property
    def _aliased_tokenizer(self) -> AliasedTokenizer:
        aliases = {text: f"{self._secret}a{token_id}a" for text, token_id in self._control.items()}
        return AliasedTokenizer(self._tokenizer_file, self._control, aliases)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern whose only group matches the longest of ``texts`` at a position."""
    return re.compile(f"({_alternatives(list(texts))})")


def _alternatives(texts: list[str]) -> str:
    """Return a pattern in which texts that begin alike share their beginning: Llama-3 has 256 that begin with <|.

    ab, ac and ab1 become ``(?:a(?:b(?:1)?|c))``.
    """
    if texts == [""]:
        return ""
    groups: dict[str, list[str]] = {}  # by first character
    for text in texts:
        if text:
            groups.setdefault(text[0], []).append(text)
    branches: list[str] = []
    for group in groups.values():
        # what the least and the greatest have in common, all have
        smallest = min(group)
        largest = max(group)
        length = 0
        while length < len(smallest) and smallest[length] == largest[length]:
            length += 1
        prefix = smallest[:length]
        endings = [text[length:] for text in group]
        branches.append(re.escape(prefix) + _alternatives(endings))
    pattern = f"(?:{'|'.join(branches)})"
    if "" in texts:  # the shortest text ends here
        pattern += "?"
    return pattern
