"""The added tokens of a tokenizer, found in a text as the ``tokenizers`` library finds them."""

import re
from collections.abc import Iterator
from itertools import takewhile

from fabric_train.tokenization.tokenizers.tokenizer_json import AddedToken
from fabric_train.tokenization.tokenizers.unsupported import NotExpressibleError


class AddedTokenSplitter:
    """Cuts texts at added tokens: the leftmost match and, of those that begin together, the longest.

    The contents in ``left_as_text`` are matched but stay text, like special tokens when their text is plain: what
    begins inside them is not matched either.
    """

    def __init__(self, ids: dict[str, int], left_as_text: frozenset[str]) -> None:
        self._ids = {content: index for content, index in ids.items() if content not in left_as_text}
        # a plain search for what all begin with is far quicker than the expression
        ends = zip(min(ids, default=""), max(ids, default=""), strict=False)
        self._beginning = "".join(first for first, last in takewhile(lambda pair: pair[0] == pair[1], ends))
        longest_first = sorted(ids, key=len, reverse=True)
        self._expression = re.compile("|".join(map(re.escape, longest_first))) if self._ids else None

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the parts of ``text`` in order: text that is not empty, and the ids of added tokens."""
        start = 0
        if self._expression is not None and self._beginning in text:
            for match in self._expression.finditer(text):
                index = self._ids.get(match[0])
                if index is not None:
                    if start < match.start():
                        yield text[start : match.start()]
                    yield index
                    start = match.end()
        if start < len(text):
            yield text[start:]


def refuse_unlike(tokens: tuple[AddedToken, ...], vocabulary: dict[str, int]) -> None:
    """Raise unless ``tokens`` are found by their content alone and get the ids that they have in the file.

    The ``tokenizers`` library gives a token that the vocabulary lacks the next id, whatever the file says.

    Raises:
        NotExpressibleError: there is such a token.
    """
    next_id = len(vocabulary)
    for token in tokens:
        if token.has_conditions:
            raise NotExpressibleError(f"its token {token.content!r} depends on blanks or words around it")
        expected = vocabulary.get(token.content, next_id)
        if token.id != expected:
            raise NotExpressibleError(f"its token {token.content!r} will not have the id {token.id}")
        next_id = max(next_id, token.id + 1)
