"""Rewrite a ``tokenizer.json`` for gigatoken, which refuses some files that it could read.

Texts whose ids this would change are left to the ``tokenizers`` library:

- Special tokens whose text counts as plain text are left out.
- Bytes without a token get ids after the last one; ``tokenizers`` leaves such bytes out. (SmolLM2 lacks 21 of them.)
- Digits that are split off one by one, before all else, become added tokens, at which gigatoken splits first, too. It
  does so for the digits 0 to 9; other characters that are numbers are left to ``tokenizers``. (SmolLM2, StarCoder2.)
"""

import re
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from fabric_train.tokenization.tokenizers.tokenizer_json import AddedToken, TokenizerJson, read_tokenizer_json


def _code_points(ranges: str) -> tuple[int, ...]:
    """Return the code points of hexadecimal numbers and ranges such as ``88F 1ACF-1AEB``."""
    code_points: list[int] = []
    for word in ranges.split():
        start, _, end = word.partition("-")
        code_points += range(int(start, 16), int(end or start, 16) + 1)
    return tuple(code_points)


# gigatoken 0.10 knows Unicode 17, tokenizers 0.23 Unicode 16. The file has letters, digits and marks that are new in
# 17; the symbols that are new, for split patterns with \p{S} (DeepSeek's); marks, and letters that are composed with
# marks, which the older tables of tokenizers' NFC do not know; numbers that the oldest supported Python does not know
_TABLES = Path(__file__).with_name("unicode_codes.txt").read_text(encoding="utf-8").split("\n\n")
_NEW_CHARACTERS, _NEW_SYMBOLS, _NEW_IN_NFC, _NEWER_NUMBERS = map(_code_points, _TABLES)
_SPLITS_DIGITS = {"type": "Digits", "individual_digits": True}


class CharacterFinder:
    """Finds out whether a UTF-8 text has one of ``characters``, which are code points from 128 on.

    Most texts have none of them, so the first two bytes of characters are looked for first, which is fast.
    """

    def __init__(self, characters: Iterable[int]) -> None:
        code_points = sorted(set(characters))
        ranges = [f"{re.escape(chr(start))}-{re.escape(chr(end))}" for start, end in _consecutive_ranges(code_points)]
        self._expression = re.compile(f"[{''.join(ranges)}]")
        # by first byte: whether each second byte belongs to a character, bool [256]
        self._is_second_byte: dict[int, np.ndarray] = {}
        for code_point in code_points:
            encoded = chr(code_point).encode()
            is_second_byte = self._is_second_byte.setdefault(encoded[0], np.zeros(256, dtype=bool))
            is_second_byte[encoded[1]] = True

    def is_in(self, text: bytes) -> bool:
        """Return whether one of the characters is in a UTF-8 text."""
        if text.isascii():
            return False
        text_bytes = np.frombuffer(text, np.uint8)
        for first_byte, is_second_byte in self._is_second_byte.items():
            if first_byte not in text:
                continue
            second_bytes = text_bytes[np.flatnonzero(text_bytes == first_byte) + 1]
            if is_second_byte[second_bytes].any():
                # other characters may begin with these two bytes
                return self._expression.search(text.decode()) is not None
        return False


def _consecutive_ranges(code_points: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last code point of each run of consecutive ``code_points``, which are ascending."""
    ranges: list[tuple[int, int]] = []
    for code_point in code_points:
        if ranges and ranges[-1][1] == code_point - 1:
            ranges[-1] = (ranges[-1][0], code_point)
        else:
            ranges.append((code_point, code_point))
    return ranges


@dataclass(frozen=True)
class ReadableJson:
    """A ``tokenizer.json`` for gigatoken, and the texts that gigatoken would encode differently."""

    content: bytes  # the JSON
    has_all_bytes: bool  # whether each byte of UTF-8 has a token
    first_unknown_id: int  # if not, a text with this id or a larger one is left to `tokenizers`
    unknown: CharacterFinder  # a text with one of these characters is left to `tokenizers`
    separators: dict[int, bytes]  # the text of each added token by id that may be put between documents


def read_for_gigatoken(tokenizer_file: Path, special_text_is_plain: bool) -> ReadableJson:
    """Rewrite a ``tokenizer.json`` for gigatoken; ValueError if gigatoken would give other ids.

    Args:
        tokenizer_file: the ``tokenizer.json``.
        special_text_is_plain: whether the text of a special token in a document is encoded as text.
    """
    tokenizer = read_tokenizer_json(tokenizer_file)
    raw = tokenizer_file.read_bytes()
    vocabulary = tokenizer.model["vocab"]
    changes: dict[str, Any] = {}  # of the JSON's top level
    unknown_characters = list(_NEW_CHARACTERS)

    # leave out special tokens whose text is plain
    added_tokens = [token for token in tokenizer.added_tokens if not (special_text_is_plain and token.special)]
    if len(added_tokens) < len(tokenizer.added_tokens):
        changes["added_tokens"] = [asdict(token) for token in added_tokens]

    # split off digits by making them added tokens
    splits: list[dict[str, Any]] = []
    if tokenizer.pre_tokenizer is not None:
        splits = tokenizer.pre_tokenizer.get("pretokenizers") or []
    splits_digits_first = splits[:1] == [_SPLITS_DIGITS]
    later_types = [later_split["type"] for later_split in splits[1:]]
    if splits_digits_first and later_types == ["ByteLevel"]:
        (changes["pre_tokenizer"],) = splits[1:]
        digits = [_digit_as_added_token(digit, vocabulary) for digit in "0123456789"]
        changes["added_tokens"] = [asdict(token) for token in (*added_tokens, *digits)]
        unknown_characters += _other_numbers()

    # give ids to bytes without a token
    first_unknown_id = max([*vocabulary.values(), *(token.id for token in added_tokens)]) + 1
    is_byte_level = tokenizer.pre_tokenizer is not None and not tokenizer.model.get("byte_fallback")
    missing_letters = []
    if is_byte_level:
        missing_letters = [letter for letter in _byte_letters() if letter not in vocabulary]
    if missing_letters:
        new_ids = {letter: first_unknown_id + index for index, letter in enumerate(missing_letters)}
        changes["model"] = {**tokenizer.model, "vocab": vocabulary | new_ids}

    # leave characters to the library that both treat differently
    is_nfc = b'"NFC"' in orjson.dumps(tokenizer.normalizer)
    if is_nfc:
        if any(token.normalized for token in added_tokens):  # gigatoken matches them before
            raise ValueError("it has added tokens that are matched after NFC")
        unknown_characters += _NEW_IN_NFC
    if rb"\\p{S}" in orjson.dumps(tokenizer.pre_tokenizer):
        unknown_characters += _NEW_SYMBOLS

    content = raw
    if changes:
        content = orjson.dumps({**orjson.loads(raw), **changes})
    return ReadableJson(
        content=content,
        has_all_bytes=not missing_letters,
        first_unknown_id=first_unknown_id,
        unknown=CharacterFinder(unknown_characters),
        separators=_find_separators(tokenizer, added_tokens),
    )


def _digit_as_added_token(digit: str, vocabulary: dict[str, int]) -> AddedToken:
    """Return the added token that makes gigatoken split off a digit wherever it occurs."""
    return AddedToken(
        id=vocabulary[digit],
        content=digit,
        single_word=False,
        lstrip=False,
        rstrip=False,
        normalized=False,
        special=False,
    )


def _find_separators(tokenizer: TokenizerJson, added_tokens: list[AddedToken]) -> dict[int, bytes]:
    """Return the text of each added token, by id, at which joined documents are split as if each were encoded alone.

    A token is such a separator if the tokenizer does not treat the start of the whole text differently (as Llama-2's
    and Mistral's do), if the joined text is not changed before the token is found, and if no other match can overlap
    with its own.
    """
    if b'"prepend_scheme":"first"' in orjson.dumps(tokenizer.pre_tokenizer):
        return {}
    # a match could begin within another token, or another token could begin with this one
    inner_letters: set[str] = set()
    beginnings: set[str] = set()
    for token in added_tokens:
        inner_letters.update(token.content[1:])
        beginnings.update(token.content[:length] for length in range(len(token.content)))
    separators = {}
    for token in added_tokens:
        depends_on_context = token.single_word or token.lstrip or token.rstrip
        is_changed = token.normalized and bool(tokenizer.normalizer)
        overlaps = token.content[:1] in inner_letters or token.content in beginnings
        if not (depends_on_context or is_changed or overlaps):
            separators[token.id] = token.content.encode()
    return separators


@cache
def _other_numbers() -> tuple[int, ...]:
    """Return the code points of all numbers from 128 on."""
    numbers = []
    # every number has a numeric value, and asking for it takes less time than asking for the category
    for letter in filter(str.isnumeric, map(chr, range(128, sys.maxunicode + 1))):
        if unicodedata.category(letter)[0] == "N":
            numbers.append(ord(letter))
    return (*numbers, *_NEWER_NUMBERS)


def _byte_letters() -> list[str]:
    """Return the letter that stands for each byte of UTF-8 in byte-level vocabularies, as GPT-2 introduced them.

    Printable bytes stand for themselves; the others are numbered from 256 on.
    """
    printable_bytes = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters = []
    num_unprintable = 0
    for byte in range(256):
        code_point = byte
        if byte not in printable_bytes:
            code_point = 256 + num_unprintable
            num_unprintable += 1
        is_in_utf8 = byte < 0xF5 and byte not in (0xC0, 0xC1)
        if is_in_utf8:
            letters.append(chr(code_point))
    return letters
