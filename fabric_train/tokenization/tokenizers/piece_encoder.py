"""Encode with tiktoken, also very long texts and texts on which its regular expressions fail."""

import re

import numpy as np
import tiktoken

from fabric_train.tokenization.tokenizers.long_texts import TextSplitter
from fabric_train.tokenization.tokenizers.split_pattern import without_lookahead

# tiktoken's regular expressions overflow their stack on half a million spaces in a row
_LONG_RUN = 100_000
_LONG_WHITESPACE = re.compile(rf"(?<!\s)\s{{{_LONG_RUN}}}")
# all whitespace except the space and the line breaks in the patterns
_OTHER_WHITESPACE = (*"\t\v\f\x85\xa0\u1680", *map(chr, range(0x2000, 0x200B)), *"\u2028\u2029\u202f\u205f\u3000")
# tiktoken returns arrays only when it looks for special tokens; if this one occurs in a text, it is encoded as text
_NO_TEXT = "\U0010fffe\U0010ffff"
# building the second encoding takes 0.1 s, as long as it saves on this many characters
_WORTH_A_SECOND = 5_000_000


class UnencodableTextError(Exception):
    """An error for a text that tiktoken cannot encode, or not with the tokenizer's ids."""


class PieceEncoder:
    """An encoder that splits texts into pieces by ``pattern`` and encodes these by ``ranks``.

    After many texts, those without consecutive whitespace are split by a pattern without lookahead, which is a third
    faster.
    """

    def __init__(self, pattern: str, ranks: dict[bytes, int], splitter: TextSplitter) -> None:
        self._ranks = ranks
        self._splitter = splitter
        self._encoding = self._quick_encoding = _encoding(pattern, ranks)
        self._quick_pattern = without_lookahead(pattern)
        self._num_characters = 0

    def encode(self, text: str) -> np.ndarray:
        """Return the ranks of the text's tokens, int32.

        Raises:
            UnencodableTextError: tiktoken cannot encode it.
        """
        parts = [self._encode_part(part.text) for part in self._splitter.split(text)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def use_quick_pattern(self) -> None:
        """Use the pattern without lookahead where it is safe. ``encode`` calls this after many texts."""
        if self._quick_pattern is not None:
            self._quick_encoding, self._quick_pattern = _encoding(self._quick_pattern, self._ranks), None

    def _encode_part(self, text: str) -> np.ndarray:
        if len(text) >= _LONG_RUN and _LONG_WHITESPACE.search(text):
            raise UnencodableTextError
        self._num_characters += len(text)
        if self._num_characters > _WORTH_A_SECOND:
            self.use_quick_pattern()
        encoding = self._encoding if _may_have_consecutive_spaces(text) else self._quick_encoding
        try:
            ranks = encoding.encode_to_numpy(text, disallowed_special=())
        except BaseException as error:
            # Rust's panic when a regular expression overflows; its class cannot be imported
            if type(error).__name__ == "PanicException":
                raise UnencodableTextError from None
            raise
        return ranks.view(np.int32)


def _encoding(pattern: str, ranks: dict[bytes, int]) -> tiktoken.Encoding:
    # with no special token at all, the search for one would stop at every character
    return tiktoken.Encoding(
        "tokenizer.json", pat_str=pattern, mergeable_ranks=ranks, special_tokens={_NO_TEXT: len(ranks)}
    )


def _may_have_consecutive_spaces(text: str) -> bool:
    """Return whether the text may have consecutive whitespace other than line breaks, by fast plain searches."""
    return "  " in text or any(space in text for space in _OTHER_WHITESPACE)
