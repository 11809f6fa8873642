"""Where a text of many megabytes can be cut so that the ids of its parts, one after the other, are the text's.

The ``tokenizers`` library is several times slower on such a text than on its parts.
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from fabric_train.tokenization.tokenizers.split_pattern import ends_pieces_with_lines
from fabric_train.tokenization.tokenizers.tokenizer_json import TokenizerJson

PART_CHARACTERS = 10_000
_SPACE = "▁"


@dataclass(frozen=True)
class Part:
    """A part of a text; the first ``num_dropped`` ids of its own are not the text's."""

    text: str
    num_dropped: int = 0


class Cutter(Protocol):
    """Cuts a text into parts."""

    def cut(self, text: str) -> list[Part]:
        """Return the parts of ``text``."""


class WholeTexts:
    """Cuts nothing."""

    def cut(self, text: str) -> list[Part]:
        """Return ``text`` as its only part."""
        return [Part(text)]


class AfterLines:
    """Cuts after a line break between two letters that are no blanks.

    Known split patterns end a piece there: the break is a piece of its own or the end of one, and the same at the end
    of a text, where a run of several blanks would not be.
    """

    _BORDER = re.compile(r"\S\n(?=\S)")

    def cut(self, text: str) -> list[Part]:
        """Return parts of some 10,000 characters."""
        return [Part(text[start:end]) for start, end in _between(_borders(text, self._BORDER))]


class BeforeBlanks:
    """Cuts a text for a SentencePiece BPE before a blank or a line break between two letters that are none.

    No token reaches across, since tokens have blanks only at their beginning, and line breaks nowhere. Every part is
    given a blank by the tokenizer: it stands for the one that was cut off, or is dropped before a line break.
    """

    _BORDER = re.compile(r"[^\s▁](?=[ \n][^\s▁])")

    def cut(self, text: str) -> list[Part]:
        """Return parts of some 10,000 characters."""
        pieces = [text[start:end] for start, end in _between(_borders(text, self._BORDER))]
        parts = [Part(piece[1:]) if piece[0] == " " else Part(piece, num_dropped=1) for piece in pieces[1:]]
        return [Part(pieces[0]), *parts]


def find_cutter(content: TokenizerJson, special_text_is_plain: bool) -> Cutter:
    """Return the cutter that is known not to change this tokenizer's ids."""
    if _ends_pieces_with_lines(content):
        return AfterLines()
    if special_text_is_plain and _begins_tokens_with_blanks(content):
        return BeforeBlanks()
    return WholeTexts()


def line_cutter(pre_tokenizer: dict[str, Any] | None) -> Cutter:
    """Return the cutter for what is left of a text once its added tokens are taken out and it is normalized."""
    return AfterLines() if ends_pieces_with_lines(pre_tokenizer) else WholeTexts()


def _borders(text: str, border: "re.Pattern[str]") -> list[int]:
    borders = [0]
    while match := border.search(text, borders[-1] + PART_CHARACTERS):
        borders.append(match.end())
    return [*borders, len(text)]


def _between(borders: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(borders))


def _ends_pieces_with_lines(content: TokenizerJson) -> bool:
    changes_borders = [token for token in content.added_tokens if token.has_conditions or "\n" in token.content]
    return (
        content.model.get("type", "BPE") == "BPE"
        and not content.model.get("dropout")
        and content.normalizer in (None, {"type": "NFC"})
        and not changes_borders
        and ends_pieces_with_lines(content.pre_tokenizer)
    )


def _begins_tokens_with_blanks(content: TokenizerJson) -> bool:
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
