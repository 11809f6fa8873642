"""Split long texts into parts whose ids, concatenated, are the ids of the whole text.

The ``tokenizers`` library is several times slower on a text of many megabytes than on its parts.
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from fabric_train.tokenization.tokenizers.split_pattern import ends_pieces_with_lines
from fabric_train.tokenization.tokenizers.tokenizer_json import TokenizerJson

MIN_PART_CHARACTERS = 10_000
_SPACE = "▁"


@dataclass(frozen=True)
class TextPart:
    """A part of a text. The first ``num_dropped`` of its ids do not belong to the text."""

    text: str
    num_dropped: int = 0


class TextSplitter(Protocol):
    """A splitter of texts into parts."""

    def split(self, text: str) -> list[TextPart]:
        """Return the parts of ``text``."""


class NoSplitter:
    """A splitter that leaves texts whole."""

    def split(self, text: str) -> list[TextPart]:
        """Return ``text`` as the only part."""
        return [TextPart(text)]


class LineSplitter:
    """A splitter after line breaks between two non-whitespace characters.

    Known split patterns end a piece there: the line break is a piece or the end of one. The same holds for a line
    break at the end of a text, but not for a longer run of whitespace.
    """

    _BORDER = re.compile(r"\S\n(?=\S)")

    def split(self, text: str) -> list[TextPart]:
        """Return parts of about 10,000 characters."""
        return [TextPart(part) for part in _split_at(self._BORDER, text)]


class SpaceSplitter:
    """A splitter for SentencePiece BPE: before a space or a line break between two other characters.

    No token crosses such a place, because tokens have spaces only at their start and never have line breaks. The
    tokenizer puts a space before every part: it replaces the space that was removed, or is dropped before a line break.
    """

    _BORDER = re.compile(r"[^\s▁](?=[ \n][^\s▁])")

    def split(self, text: str) -> list[TextPart]:
        """Return parts of about 10,000 characters."""
        first, *others = _split_at(self._BORDER, text)
        parts = [TextPart(part[1:]) if part[0] == " " else TextPart(part, num_dropped=1) for part in others]
        return [TextPart(first), *parts]


def find_splitter(content: TokenizerJson, special_text_is_plain: bool) -> TextSplitter:
    """Return the splitter that does not change this tokenizer's ids."""
    if _ends_pieces_with_lines(content):
        return LineSplitter()
    if special_text_is_plain and _has_spaces_only_at_token_starts(content):
        return SpaceSplitter()
    return NoSplitter()


def line_splitter(pre_tokenizer: dict[str, Any] | None) -> TextSplitter:
    """Return the splitter for normalized text without added tokens."""
    return LineSplitter() if ends_pieces_with_lines(pre_tokenizer) else NoSplitter()


def _split_at(border: "re.Pattern[str]", text: str) -> list[str]:
    ends = [0]
    while match := border.search(text, ends[-1] + MIN_PART_CHARACTERS):
        ends.append(match.end())
    return [text[start:end] for start, end in pairwise([*ends, len(text)])]


def _ends_pieces_with_lines(content: TokenizerJson) -> bool:
    changes_borders = [token for token in content.added_tokens if token.has_conditions or "\n" in token.content]
    return (
        content.model.get("type", "BPE") == "BPE"
        and not content.model.get("dropout")
        and content.normalizer in (None, {"type": "NFC"})
        and not changes_borders
        and ends_pieces_with_lines(content.pre_tokenizer)
    )


def _has_spaces_only_at_token_starts(content: TokenizerJson) -> bool:
    steps = [
        {"type": "Prepend", "prepend": _SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
    ]
    model = content.model
    return (
        model.get("type", "BPE") == "BPE"
        and bool(model.get("byte_fallback"))
        and not model.get("dropout")
        and content.normalizer == {"type": "Sequence", "normalizers": steps}
        and content.pre_tokenizer is None
        and all(token.special for token in content.added_tokens)
        and _SPACE in model["vocab"]
        and not any("\n" in token or _SPACE in token.lstrip(_SPACE) for token in model["vocab"])
    )
