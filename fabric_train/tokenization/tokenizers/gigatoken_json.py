"""Rewrite a ``tokenizer.json`` that gigatoken refuses, where that does not change ids.

Three things are rewritten. Texts for which the result would be another one are left to the ``tokenizers`` library:

- Special tokens whose text counts as plain text are left out.
- Bytes without a token get ids after the last one; ``tokenizers`` leaves such bytes out. (SmolLM2 lacks 21 of them.)
- Digits that are split off one by one, before all else, become added tokens, at which gigatoken splits first, too. It
  does so for the digits 0 to 9; other characters that are numbers are left to ``tokenizers``. (SmolLM2, StarCoder2.)
"""

import re
import sys
import unicodedata
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from fabric_train.tokenization.tokenizers.tokenizer_folder import AddedToken, TokenizerJson, read_tokenizer_json

# gigatoken 0.10 knows Unicode 17, tokenizers 0.23 knows Unicode 16: the letters, digits and marks that are new in 17
_NEW_CHARACTERS = (
    *(0x88F, 0xC5C, 0xCDC, *range(0x1ACF, 0x1AEC), *range(0xA7CE, 0xA7D5), 0xA7F1, *range(0x10940, 0x10960)),
    *(*range(0x10EC5, 0x10EC8), 0x10EFA, 0x10EFB, *range(0x11B60, 0x11B68), *range(0x11DB0, 0x11DEA)),
    *(*range(0x16EA0, 0x16ED4), *range(0x16FF2, 0x16FF7), *range(0x187F8, 0x18800), *range(0x18D09, 0x18D1F)),
    *(*range(0x18D80, 0x18DF3), *range(0x1E6C0, 0x1E700), *range(0x2B73A, 0x2B740), *range(0x2CEA2, 0x2CEAE)),
    *range(0x323B0, 0x3347A),
)
# the symbols that are new in 17, for split patterns with \p{S} (DeepSeek's)
_NEW_SYMBOLS = (
    *(0x20C1, 0x2B96, *range(0xFBC3, 0xFBD3), *range(0xFD90, 0xFD92), *range(0xFDC8, 0xFDCF)),
    *(*range(0x10ED0, 0x10ED9), *range(0x1CCFA, 0x1CCFD), *range(0x1CEBA, 0x1CED1), *range(0x1CEE0, 0x1CEF1)),
    *(0x1F6D8, *range(0x1F777, 0x1F77B), *range(0x1F8D0, 0x1F8D9), *range(0x1FA54, 0x1FA58), 0x1FA8A, 0x1FA8E),
    *(0x1FAC8, 0x1FACD, 0x1FAEA, 0x1FAEF, 0x1FBFA),
)
# marks, and letters that are composed with marks, which the older tables of tokenizers' NFC do not know
_NEW_IN_NFC = (
    *(0x7FD, *range(0x897, 0x8A0), *range(0x8CA, 0x8D4), 0x9FE, 0xC3C, *range(0xD3B, 0xD3D), 0xEBA, 0x1715),
    *(*range(0x1ABF, 0x1ACF), *range(0x1DF6, 0x1DFB), 0xA82C, 0x105D2, 0x105DA, *range(0x10D24, 0x10D28)),
    *(*range(0x10D69, 0x10D6E), *range(0x10EAB, 0x10EAD), *range(0x10EFD, 0x10F00), *range(0x10F46, 0x10F51)),
    *(*range(0x10F82, 0x10F86), 0x11070, 0x1133B, 0x11382, 0x11384, 0x1138B, 0x11390, 0x113C2),
    *(*range(0x113CE, 0x113D1), 0x1145E, *range(0x11839, 0x1183B), 0x11935, *range(0x1193D, 0x1193F), 0x11943),
    *(0x119E0, 0x11A34, 0x11A47, 0x11A99, 0x11D42, *range(0x11D44, 0x11D46), 0x11D97, *range(0x11F41, 0x11F43)),
    *(0x1611E, *range(0x16121, 0x16123), 0x16129, 0x1612F, 0x16D63, 0x16D67, 0x16D69, *range(0x16FF0, 0x16FF2)),
    *(0x1E08F, *range(0x1E130, 0x1E137), 0x1E2AE, *range(0x1E2EC, 0x1E2F0), *range(0x1E4EC, 0x1E4F0)),
    *range(0x1E5EE, 0x1E5F0),
)
# numbers that are newer than the Unicode version of the oldest supported Python
_NEWER_NUMBERS = (
    *(*range(0x10D40, 0x10D4A), *range(0x11BF0, 0x11BFA), *range(0x11F50, 0x11F5A), *range(0x116D0, 0x116E4)),
    *(*range(0x16130, 0x1613A), *range(0x16D70, 0x16D7A), *range(0x1CCF0, 0x1CCFA), *range(0x1D2C0, 0x1D2D4)),
    *(*range(0x1E4F0, 0x1E4FA), *range(0x1E5F1, 0x1E5FB)),
)
_SPLITS_DIGITS = {"type": "Digits", "individual_digits": True}


class CharacterFinder:
    """A search for ``characters``, code points from 128 on, in UTF-8.

    The first two bytes of a character decide for most texts; only the others are searched with a regular expression,
    which takes longer.
    """

    def __init__(self, characters: Iterable[int]) -> None:
        codes = sorted(set(characters))
        self._expression = re.compile(f"[{''.join(_ranges(codes))}]")
        # by the first byte: whether the second one may be that of a character
        self._seconds: dict[int, np.ndarray] = {}
        for first, second in {tuple(chr(code).encode()[:2]) for code in codes}:
            self._seconds.setdefault(first, np.zeros(256, dtype=bool))[second] = True

    def is_in(self, text: bytes) -> bool:
        if text.isascii():
            return False
        codes = np.frombuffer(text, np.uint8)
        for first, seconds in self._seconds.items():
            if first in text and seconds[codes[np.flatnonzero(codes == first) + 1]].any():
                return self._expression.search(text.decode()) is not None
        return False


def _ranges(codes: list[int]) -> list[str]:
    runs = (list(run) for _, run in groupby(enumerate(codes), key=lambda numbered: numbered[1] - numbered[0]))
    return [f"{re.escape(chr(run[0][1]))}-{re.escape(chr(run[-1][1]))}" for run in runs]


@dataclass(frozen=True)
class ReadableJson:
    """A ``tokenizer.json`` for gigatoken."""

    content: bytes  # the JSON
    has_all_bytes: bool  # whether each byte of UTF-8 has a token
    first_unknown_id: int  # if not, a text with this id or a larger one is left to `tokenizers`
    unknown: CharacterFinder  # a text with one of these characters is left to `tokenizers`
    # the text of each added token by id that may stand between documents, see `_separators`
    separators: dict[int, bytes]


def read_for_gigatoken(tokenizer_file: Path, special_text_is_plain: bool) -> ReadableJson:
    """Return the content of a ``tokenizer.json`` for gigatoken; ``special_text_is_plain`` as for ``TextEncoder``.

    Raises:
        InputError: it is a pipe, a folder or another kind of file.
        ValueError: it is not a ``tokenizer.json``, or gigatoken would find its added tokens elsewhere.
    """
    known = read_tokenizer_json(tokenizer_file)
    raw = tokenizer_file.read_bytes()
    added = [token for token in known.added_tokens if not (special_text_is_plain and token.special)]
    vocabulary = known.model["vocab"]
    is_nfc = b'"NFC"' in orjson.dumps(known.normalizer)
    if is_nfc and any(token.normalized for token in added):
        raise ValueError("it has added tokens that are matched after NFC")  # gigatoken matches them before
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
    unknown = [*_NEW_CHARACTERS, *(_numbers() if splits_digits else ()), *(_NEW_IN_NFC if is_nfc else ())]
    unknown += _NEW_SYMBOLS if rb"\\p{S}" in orjson.dumps(known.pre_tokenizer) else ()
    return ReadableJson(
        content=orjson.dumps({**orjson.loads(raw), **changes}) if changes else raw,
        has_all_bytes=not lacking,
        first_unknown_id=first_unknown_id,
        unknown=CharacterFinder(unknown),
        separators=_separators(known, added),
    )


def _separators(known: TokenizerJson, added: list[AddedToken]) -> dict[int, bytes]:
    """Return the text of each added token by id that splits joined documents into the texts that they are alone.

    It does so only if the start of the whole text is not treated differently (Llama-2's, Mistral's tokenizers), if
    nothing is done to the joined text before the token is found, and if no other match can overlap with its own.
    """
    if b'"prepend_scheme":"first"' in orjson.dumps(known.pre_tokenizer):
        return {}
    contents = [token.content for token in added]
    after_start = {letter for content in contents for letter in content[1:]}
    beginnings = {content[:length] for content in contents for length in range(len(content))}
    return {
        token.id: token.content.encode()
        for token in added
        if not (token.has_conditions or (token.normalized and known.normalizer))
        and token.content[:1] not in after_start
        and token.content not in beginnings
    }


@cache  # to look at every character takes a quarter of a second
def _numbers() -> tuple[int, ...]:
    known = [code for code in range(128, sys.maxunicode + 1) if unicodedata.category(chr(code))[0] == "N"]
    return (*known, *_NEWER_NUMBERS)


def _byte_letters() -> list[str]:
    """Return the letter that stands for each byte of UTF-8 in byte-level vocabularies, as GPT-2 introduced them."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in shown}
    hidden = (byte for byte in range(256) if byte not in letters)
    letters |= {byte: chr(256 + number) for number, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256) if byte < 0xF5 and byte not in (0xC0, 0xC1)]
