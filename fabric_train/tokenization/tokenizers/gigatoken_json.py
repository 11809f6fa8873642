"""Rewrite a ``tokenizer.json`` that gigatoken refuses, where that does not change ids.

Three things are rewritten. Texts for which the result would be another one are left to the ``tokenizers`` library:

- Special tokens whose text counts as plain text are left out.
- Bytes without a token get ids after the last one; ``tokenizers`` leaves such bytes out. (SmolLM2 lacks 21 of them.)
- Digits that are split off one by one, before all else, become added tokens, at which gigatoken splits first, too. It
  does so for the digits 0 to 9; other characters that are numbers are left to ``tokenizers``. (SmolLM2, StarCoder2.)
"""

import sys
import unicodedata
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from fabric_train.tokenization.tokenizers.character_finder import CharacterFinder
from fabric_train.tokenization.tokenizers.tokenizer_json import AddedToken, read_tokenizer_json

# gigatoken 0.10 knows Unicode 17, tokenizers 0.23 knows Unicode 16: the letters, digits and marks that are new in 17
_NEW_CHARACTERS = (
    *(0x88F, 0xC5C, 0xCDC, *range(0x1ACF, 0x1AEC), *range(0xA7CE, 0xA7D5), 0xA7F1, *range(0x10940, 0x10960)),
    *(*range(0x10EC5, 0x10EC8), 0x10EFA, 0x10EFB, *range(0x11B60, 0x11B68), *range(0x11DB0, 0x11DEA)),
    *(*range(0x16EA0, 0x16ED4), *range(0x16FF2, 0x16FF7), *range(0x187F8, 0x18800), *range(0x18D09, 0x18D1F)),
    *(*range(0x18D80, 0x18DF3), *range(0x1E6C0, 0x1E700), *range(0x2B73A, 0x2B740), *range(0x2CEA2, 0x2CEAE)),
    *range(0x323B0, 0x3347A),
)
# numbers that are newer than the Unicode version of the oldest supported Python
_NEWER_NUMBERS = (
    *(*range(0x10D40, 0x10D4A), *range(0x11BF0, 0x11BFA), *range(0x11F50, 0x11F5A), *range(0x116D0, 0x116E4)),
    *(*range(0x16130, 0x1613A), *range(0x16D70, 0x16D7A), *range(0x1CCF0, 0x1CCFA), *range(0x1D2C0, 0x1D2D4)),
    *(*range(0x1E4F0, 0x1E4FA), *range(0x1E5F1, 0x1E5FB)),
)
_SPLITS_DIGITS = {"type": "Digits", "individual_digits": True}


@dataclass(frozen=True)
class ReadableJson:
    """A ``tokenizer.json`` for gigatoken.

    Args:
        content: the JSON.
        has_all_bytes: whether each byte of UTF-8 has a token.
        first_unknown_id: if not, a text with this id or a larger one is left to ``tokenizers``.
        unknown: a text with one of these characters is left to ``tokenizers``.
        separators: the text of each added token by id that may stand between documents: its match does not depend on
            what is around it, and the start of the whole text is not treated differently (Llama-2's, Mistral's).
    """

    content: bytes
    has_all_bytes: bool
    first_unknown_id: int
    unknown: CharacterFinder
    separators: dict[int, bytes]


def read_for_gigatoken(tokenizer_file: Path, special_text_is_plain: bool) -> ReadableJson:
    """Return the content of a ``tokenizer.json`` for gigatoken.

    Args:
        tokenizer_file: the ``tokenizer.json``.
        special_text_is_plain: whether the text of a special token in a document is encoded as text, not as the token.

    Raises:
        InputError: it is a pipe, a folder or another kind of file.
        ValueError: it is not a ``tokenizer.json``.
    """
    known = read_tokenizer_json(tokenizer_file)
    raw = tokenizer_file.read_bytes()
    added = [token for token in known.added_tokens if not (special_text_is_plain and token.special)]
    vocabulary = known.model["vocab"]
    changes: dict[str, Any] = {}
    if len(added) < len(known.added_tokens):
        changes["added_tokens"] = [asdict(token) for token in added]
    split, *others = (known.pre_tokenizer or {}).get("pretokenizers") or [None]
    splits_digits = split == _SPLITS_DIGITS and [one["type"] for one in others] == ["ByteLevel"]
    if splits_digits:
        digits = [AddedToken(vocabulary[digit], digit, *[False] * 5) for digit in "0123456789"]
        changes |= {"pre_tokenizer": others[0], "added_tokens": [asdict(token) for token in (*added, *digits)]}
    first_unknown_id = max([*vocabulary.values(), *(token.id for token in added)]) + 1
    is_byte_level = known.pre_tokenizer is not None and not known.model.get("byte_fallback")
    lacking = [letter for letter in _byte_letters() if letter not in vocabulary] if is_byte_level else []
    if lacking:
        more = {letter: first_unknown_id + number for number, letter in enumerate(lacking)}
        changes["model"] = {**known.model, "vocab": vocabulary | more}
    differs_at_start = b'"prepend_scheme":"first"' in orjson.dumps(known.pre_tokenizer)
    return ReadableJson(
        content=orjson.dumps({**orjson.loads(raw), **changes}) if changes else raw,
        has_all_bytes=not lacking,
        first_unknown_id=first_unknown_id,
        unknown=CharacterFinder([*_NEW_CHARACTERS, *(_numbers() if splits_digits else ())]),
        separators={}
        if differs_at_start
        else {one.id: one.content.encode() for one in added if not one.has_conditions},
    )


def _numbers() -> list[int]:
    """Return the characters after ASCII that are numbers."""
    known = [code for code in range(128, sys.maxunicode + 1) if unicodedata.category(chr(code))[0] == "N"]
    return [*known, *_NEWER_NUMBERS]


def _byte_letters() -> list[str]:
    """Return the letter that stands for each byte of UTF-8 in byte-level vocabularies, as GPT-2 introduced them."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in shown}
    hidden = (byte for byte in range(256) if byte not in letters)
    letters |= {byte: chr(256 + number) for number, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256) if byte < 0xF5 and byte not in (0xC0, 0xC1)]
