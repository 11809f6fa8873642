"""Text with control tokens to ids: those that a chat template writes become tokens, those in a turn's content do not.

A content is *shielded* before it is rendered: in it, the text of every control token is replaced by a placeholder. In
the rendering, the text of a control token is then one that the template wrote. It is replaced by an *alias*, and the
placeholders by the text they stood for; the tokenizer knows the aliases and takes the control tokens' own text as
ordinary:

    content             write <|eot_id|>!
    rendering           <|start_header_id|>user<|end_header_id|>\\n\\nwrite PLACEHOLDER!<|eot_id|>
    to the tokenizer    ALIAS1 user ALIAS2 \\n\\nwrite <|eot_id|>! ALIAS3

Aliases and placeholders hold a random number, so that no text can hold one. The rendering goes through the tokenizer in
one piece, so that ids and blanks around control tokens are those of ``apply_chat_template``.
"""

import re
import secrets
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric_train.corpus.documents import BadRowError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Span = tuple[int, int]


class ControlTokens:
    """A tokenizer's control tokens and the way around them.

    Args:
        tokenizer: is changed and must not be used for anything else afterwards.
        control: the control tokens, text → id.
    """

    def __init__(self, tokenizer: "Tokenizer", control: Mapping[str, int]) -> None:
        number = secrets.token_hex(8)
        aliases = {text: f"{number}c{token_id}c" for text, token_id in control.items()}
        self._placeholders = {text: f"{number}t{token_id}t" for text, token_id in control.items()}
        self._shielded = _any_of(control)
        self._replacements = aliases | {placeholder: text for text, placeholder in self._placeholders.items()}
        self._replaced = _any_of(self._replacements)
        self._tokenizer = tokenizer
        _add_aliases(tokenizer, aliases)

        size = max(tokenizer.get_vocab().values()) + 1
        self._ids = np.arange(size, dtype=np.int32)
        for text, alias in aliases.items():
            self._ids[tokenizer.token_to_id(alias)] = control[text]
        self._from_text = np.zeros(size, dtype=bool)
        unknown = getattr(tokenizer.model, "unk_token", None)
        self._from_text[[token_id for text, token_id in control.items() if text != unknown]] = True

    def shield(self, value: Any) -> Any:
        """Return ``value`` with the text of control tokens replaced by placeholders in every text within it."""
        if isinstance(value, str):
            return self._shielded.sub(lambda match: self._placeholders[match[0]], value)
        if isinstance(value, dict):
            return {self.shield(key): self.shield(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.shield(item) for item in value]
        return value

    def encode(self, text: str, spans: Iterable[Span]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a rendering, int32 [T], and which of them lie in ``spans`` of its characters, bool [T].

        A token that reaches across the border of a span lies in it. Spans are in order and do not overlap.

        Raises:
            BadRowError: ordinary text has become a control token, as with a tokenizer that merges to one.
        """
        borders = [0, *(border for span in spans for border in span), len(text)]
        pieces = [self._replaced.sub(self._replacement, text[begin:end]) for begin, end in pairwise(borders)]
        encoding = self._tokenizer.encode("".join(pieces), add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int32)
        if self._from_text[ids].any():
            raise BadRowError("the tokenizer makes a control token of ordinary text in it; leave the row out")
        inside = np.zeros(len(ids), dtype=bool)
        if len(pieces) > 1:
            offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            # a token lies in a span where it begins before the span's end and ends after its beginning: the spans that
            # have begun at the token's end are one more than those that have ended at its beginning
            ends = np.cumsum([len(piece) for piece in pieces])
            begun = np.searchsorted(ends[0:-1:2], offsets[:, 1], side="left")
            ended = np.searchsorted(ends[1::2], offsets[:, 0], side="right")
            inside = begun > ended
        return self._ids[ids], inside

    def _replacement(self, match: re.Match[str]) -> str:
        return self._replacements[match[0]]


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)")


def _add_aliases(tokenizer: "Tokenizer", aliases: Mapping[str, str]) -> None:
    """Let ``tokenizer`` take aliases for tokens and all special tokens' own text for text."""
    from tokenizers import AddedToken, processors

    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    own = [added[text] for text in aliases]
    for token in own:
        token.special = True
    tokenizer.add_special_tokens(own)
    tokenizer.add_tokens(
        [
            AddedToken(aliases[token.content], lstrip=token.lstrip, rstrip=token.rstrip, normalized=token.normalized)
            for token in own
        ]
    )
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # a blank is a part of its token
