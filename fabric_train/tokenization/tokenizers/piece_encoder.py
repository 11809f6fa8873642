"""tiktoken on texts that it finds hard: very long ones, and those on which its expressions fail."""

import re

import numpy as np
import tiktoken

from fabric_train.tokenization.tokenizers.long_texts import Cutter
from fabric_train.tokenization.tokenizers.split_pattern import without_lookahead

# tiktoken's expressions overflow their stack on a run of half a million blanks
_LONG_RUN = 100_000
_LONG_BLANKS = re.compile(rf"(?<!\s)\s{{{_LONG_RUN}}}")
# all blanks but the space and the line breaks that the patterns know
_OTHER_BLANKS = (*"\t\v\f\x85\xa0\u1680", *map(chr, range(0x2000, 0x200B)), *"\u2028\u2029\u202f\u205f\u3000")
# tiktoken, which returns arrays only where it looks for special tokens, looks for this one, and then takes it as text
_NO_TEXT = "\U0010fffe\U0010ffff"
# the second encoding takes a tenth of a second to make, as much as it saves on so many characters
_WORTH_A_SECOND = 5_000_000


class UnlikelyTextError(Exception):
    """A text that tiktoken cannot encode as the tokenizer would, or not at all."""


class PieceEncoder:
    """Cuts texts into pieces by ``pattern`` and encodes these by ``ranks``.

    Once it pays, texts in which no blanks stand together are cut by a pattern that does not look ahead, which is a
    third faster.
    """

    def __init__(self, pattern: str, ranks: dict[bytes, int], cutter: Cutter) -> None:
        self._ranks = ranks
        self._cutter = cutter
        self._encoding = self._quick_encoding = _encoding(pattern, ranks)
        self._quick_pattern = without_lookahead(pattern)
        self._num_characters = 0

    def encode(self, text: str) -> np.ndarray:
        """Return the ranks of the text's tokens, int32.

        Raises:
            UnlikelyTextError: tiktoken cannot encode it.
        """
        parts = [self._encode_part(part.text) for part in self._cutter.cut(text)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def quicken(self) -> None:
        """Look ahead only where it matters from now on, as is done by itself after many texts."""
        if self._quick_pattern is not None:
            self._quick_encoding, self._quick_pattern = _encoding(self._quick_pattern, self._ranks), None

    def _encode_part(self, text: str) -> np.ndarray:
        if len(text) >= _LONG_RUN and _LONG_BLANKS.search(text):
            raise UnlikelyTextError
        self._num_characters += len(text)
        if self._num_characters > _WORTH_A_SECOND:
            self.quicken()
        encoding = self._encoding if _has_wide_blanks(text) else self._quick_encoding
        try:
            ranks = encoding.encode_to_numpy(text, disallowed_special=())
        except BaseException as error:
            # Rust's panic when an expression overflows; its class can be imported from nowhere
            if type(error).__name__ == "PanicException":
                raise UnlikelyTextError from None
            raise
        return ranks.view(np.int32)


def _encoding(pattern: str, ranks: dict[bytes, int]) -> tiktoken.Encoding:
    # to search for one of no special tokens would stop at every character
    return tiktoken.Encoding(
        "tokenizer.json", pat_str=pattern, mergeable_ranks=ranks, special_tokens={_NO_TEXT: len(ranks)}
    )


def _has_wide_blanks(text: str) -> bool:
    """Return whether two blanks that are no line breaks may stand together; plain searches are quicker than one."""
    return "  " in text or any(blank in text for blank in _OTHER_BLANKS)
