"""Find a tokenizer's added tokens in a text, as the ``tokenizers`` library does."""

import re
from collections.abc import Iterator
from itertools import takewhile

from fabric_train.tokenization.tokenizers.tokenizer_json import AddedToken
from fabric_train.tokenization.tokenizers.unsupported import UnsupportedTokenizerError


class AddedTokenSplitter:
    """A splitter of texts at added tokens: at the leftmost match, and the longest if several begin there.

    Args:
        ids: id by the token's content.
        left_as_text: contents that are matched but stay text, such as special tokens that count as plain text. No
            other token is matched inside them.
    """

    def __init__(self, ids: dict[str, int], left_as_text: frozenset[str]) -> None:
        self._ids = {content: index for content, index in ids.items() if content not in left_as_text}
        # searching for the common prefix is far faster than the regular expression
        ends = zip(min(ids, default=""), max(ids, default=""), strict=False)
        self._prefix = "".join(first for first, last in takewhile(lambda pair: pair[0] == pair[1], ends))
        longest_first = sorted(ids, key=len, reverse=True)
        self._expression = re.compile("|".join(map(re.escape, longest_first))) if self._ids else None

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the parts of ``text`` in order: non-empty strings, and the ids of added tokens."""
        start = 0
        if self._expression is not None and self._prefix in text:
            for match in self._expression.finditer(text):
                index = self._ids.get(match[0])
                if index is not None:
                    if start < match.start():
                        yield text[start : match.start()]
                    yield index
                    start = match.end()
        if start < len(text):
            yield text[start:]


def check_added_tokens(tokens: tuple[AddedToken, ...], vocabulary: dict[str, int]) -> None:
    """Check that ``tokens`` are matched by content alone and have the ids that the ``tokenizers`` library assigns.

    The library gives a token that is not in the vocabulary the next free id, whatever the file says.

    Raises:
        UnsupportedTokenizerError: a token fails the check.
    """
    next_id = len(vocabulary)
    for token in tokens:
        if token.has_conditions:
            raise UnsupportedTokenizerError(f"its token {token.content!r} depends on the whitespace or words around it")
        expected = vocabulary.get(token.content, next_id)
        if token.id != expected:
            raise UnsupportedTokenizerError(f"its token {token.content!r} gets another id than {token.id}")
        next_id = max(next_id, token.id + 1)
