"""Encode texts: by gigatoken if it gives the tokenizer's ids, otherwise by the ``tokenizers`` library.

Three things are rewritten in a ``tokenizer.json`` that gigatoken refuses. Texts whose ids this would change are left to
the ``tokenizers`` library:

- Special tokens whose text counts as plain text are left out.
- Bytes without a token get ids after the last one; ``tokenizers`` leaves such bytes out. (SmolLM2 lacks 21 of them.)
- Digits that are split off one by one, before all else, become added tokens, at which gigatoken splits first, too. It
  does so for the digits 0 to 9; other characters that are numbers are left to ``tokenizers``. (SmolLM2, StarCoder2.)
"""

import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import orjson

from fabric_train.cli.errors import InputError, first_line
from fabric_train.distributed.memory import process_memory
from fabric_train.tokenization.tokenizers.tokenizer import AddedToken, TokenizerJson, read_tokenizer_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SHOWN_CHARACTERS = 60


def _codes(ranges: str) -> tuple[int, ...]:
    """Return the code points of hexadecimal numbers and ranges such as ``88F 1ACF-1AEB``."""
    pairs = (word.split("-") for word in ranges.split())
    return tuple(code for pair in pairs for code in range(int(pair[0], 16), int(pair[-1], 16) + 1))


# gigatoken 0.10 knows Unicode 17, tokenizers 0.23 Unicode 16. The file has letters, digits and marks that are new in
# 17; the symbols that are new, for split patterns with \p{S} (DeepSeek's); marks, and letters that are composed with
# marks, which the older tables of tokenizers' NFC do not know; numbers that the oldest supported Python does not know
_TABLES = Path(__file__).with_name("unicode_codes.txt").read_text(encoding="utf-8").split("\n\n")
_NEW_CHARACTERS, _NEW_SYMBOLS, _NEW_IN_NFC, _NEWER_NUMBERS = map(_codes, _TABLES)
_SPLITS_DIGITS = {"type": "Digits", "individual_digits": True}


@dataclass(frozen=True)
class Borders:
    """The ids of BOS and EOS; a tokenizer without BOS has None, and none is added."""

    bos_token_id: int | None
    eos_token_id: int


def add_borders(ids: np.ndarray, borders: Borders) -> np.ndarray:
    """Return ``ids``, int32 [T], with exactly one BOS at the start and one EOS at the end, also if they are there."""
    begin = 0
    end = len(ids)
    while begin < end and ids[begin] == borders.bos_token_id:
        begin += 1
    while end > begin and ids[end - 1] == borders.eos_token_id:
        end -= 1
    bos = [] if borders.bos_token_id is None else [borders.bos_token_id]
    return np.concatenate((bos, ids[begin:end], [borders.eos_token_id]), dtype=np.int32, casting="unsafe")


def join_documents(documents: list[np.ndarray], borders: Borders) -> tuple[np.ndarray, np.ndarray]:
    """Return the joined ids with BOS and EOS, int32 [T], and the documents' lengths, int64 [documents]."""
    bordered = [add_borders(ids, borders) for ids in documents]
    return np.concatenate(bordered), np.fromiter(map(len, bordered), np.int64, len(bordered))


class TextEncoder(Protocol):
    """An encoder of texts on one core; with ``special_text_is_plain``, the text of a special token is no token."""

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return each text's ids, int32 [T], without BOS and EOS; InputError if the tokenizer cannot encode one."""

    def encode_documents(self, texts: Sequence[bytes], borders: Borders) -> tuple[np.ndarray, np.ndarray]:
        """Return the joined ids of one or more UTF-8 texts with BOS and EOS, int32 [T], and their lengths, int64."""


class UnsupportedTokenizerError(ValueError):
    """An error for a tokenizer that gigatoken does not take; its message is a phrase with the reason."""


class RustPanicError(ValueError):
    """A library written in Rust has ended what it was asked for."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise RustPanicError in place of pyo3's PanicException, which is no Exception and cannot be imported."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise RustPanicError(f"tokenizers fails: {first_line(error)}") from None
        raise


def refuse_text(panic: RustPanicError, text: str) -> InputError:
    """Return the error of a tokenizer that cannot encode a text, such as by a pattern that takes too many steps."""
    start = f"{text[:_SHOWN_CHARACTERS]!r}"
    return InputError(f"{panic}, in the text that begins with {start}; leave it out, or use another tokenizer")


def load_fast(tokenizer_file: Path, special_text_is_plain: bool) -> "Tokenizer":
    """Load the tokenizer without truncation and padding; InputError if the file is damaged."""
    from tokenizers import Tokenizer

    try:
        with panics_as_errors():
            tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # noqa: BLE001 - tokenizers raises no narrower type
        reason = str(error).splitlines()[0]
        raise InputError(f"{tokenizer_file} is not a tokenizer: {reason}; fetch the file again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = special_text_is_plain
    return tokenizer


class FastEncoder:
    """The ``tokenizers`` library on one core."""

    def __init__(self, tokenizer_file: Path, special_text_is_plain: bool) -> None:
        # each core has its own encoding process, and a fork would hang: the library's threads do not survive it
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._tokenizer = load_fast(tokenizer_file, special_text_is_plain)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        try:
            with panics_as_errors():
                encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except RustPanicError as panic:
            if len(texts) > 1:
                return [self.encode_batch([text])[0] for text in texts]  # one of them is at fault
            raise refuse_text(panic, texts[0]) from None
        return [np.array(encoding.ids, np.int32) for encoding in encoded]

    def encode_documents(self, texts: Sequence[bytes], borders: Borders) -> tuple[np.ndarray, np.ndarray]:
        return join_documents(self.encode_batch([text.decode() for text in texts]), borders)


class CharacterFinder:
    """A search for ``characters``, code points from 128 on, in UTF-8, first by the first two bytes, which is fast."""

    def __init__(self, characters: Iterable[int]) -> None:
        codes = sorted(set(characters))
        runs = (list(run) for _, run in groupby(enumerate(codes), key=lambda numbered: numbered[1] - numbered[0]))
        ranges = (f"{re.escape(chr(run[0][1]))}-{re.escape(chr(run[-1][1]))}" for run in runs)
        self._expression = re.compile(f"[{''.join(ranges)}]")
        # by the first byte: whether the second one may belong to a character
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
    """Return the content of a ``tokenizer.json`` for gigatoken; ValueError if gigatoken would give other ids."""
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
        if not (token.single_word or token.lstrip or token.rstrip or (token.normalized and known.normalizer))
        and token.content[:1] not in after_start
        and token.content not in beginnings
    }


@cache
def _numbers() -> tuple[int, ...]:
    # every number has a numeric value, and asking for it takes less time than asking for the category
    numeric = filter(str.isnumeric, map(chr, range(128, sys.maxunicode + 1)))
    return (*(ord(letter) for letter in numeric if unicodedata.category(letter)[0] == "N"), *_NEWER_NUMBERS)


def _byte_letters() -> list[str]:
    """Return the letter that stands for each byte of UTF-8 in byte-level vocabularies, as GPT-2 introduced them."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in shown}
    hidden = (byte for byte in range(256) if byte not in letters)
    letters |= {byte: chr(256 + number) for number, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256) if byte < 0xF5 and byte not in (0xC0, 0xC1)]


class GigatokenEncoder:
    """An encoder on one core with the ids of the ``tokenizers`` library.

    After each ``text_between_looks`` bytes it looks at the memory of the process: if that has grown by ``most_growth``
    bytes, it loads the tokenizer again, without its cache. UnsupportedTokenizerError if gigatoken cannot load it.
    """

    def __init__(
        self,
        tokenizer_file: Path,
        special_text_is_plain: bool,
        most_growth: int = 256 << 20,
        text_between_looks: int = 8 << 20,
    ) -> None:
        self._arguments = tokenizer_file, special_text_is_plain
        self._most_growth = most_growth
        self._text_between_looks = text_between_looks
        try:
            self._json = read_for_gigatoken(tokenizer_file, special_text_is_plain)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnsupportedTokenizerError(f"it is of another kind: {first_line(error)}") from None
        self._load()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self._arguments, self._most_growth, self._text_between_looks)

    def _load(self) -> None:
        try:
            from gigatoken.gigatoken_rs import load_hf_json

            with panics_as_errors():
                self._backend = load_hf_json(self._json.content)
        except (ImportError, RuntimeError, ValueError) as error:
            raise UnsupportedTokenizerError(first_line(error)) from None
        self._memory_before = process_memory()
        self._num_bytes = 0

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        encoded = [text.encode() for text in texts]
        self._limit_memory(sum(map(len, encoded)))
        return [self._encode(text) for text in encoded]

    def encode_documents(self, texts: Sequence[bytes], borders: Borders) -> tuple[np.ndarray, np.ndarray]:
        """Encode all texts at once, with EOS and BOS between them: the tokenizer splits at added tokens first."""
        self._limit_memory(sum(map(len, texts)))
        return self._encode_joined(texts, borders) or join_documents([self._encode(text) for text in texts], borders)

    def _encode_joined(self, texts: Sequence[bytes], borders: Borders) -> tuple[np.ndarray, np.ndarray] | None:
        """Return what ``encode_documents`` does; None if the texts have to be encoded one by one."""
        begin = b"" if borders.bos_token_id is None else self._json.separators.get(borders.bos_token_id)
        end = self._json.separators.get(borders.eos_token_id)
        if begin is None or end is None:
            return None
        ids = self._encode_known(b"".join((begin, (end + begin).join(texts), end)))
        if ids is None:
            return None
        is_one_token = borders.bos_token_id == borders.eos_token_id
        ends = np.flatnonzero(ids == borders.eos_token_id)
        num_begins = np.count_nonzero(ids == borders.bos_token_id) if begin and not is_one_token else len(texts)
        if len(ends) != len(texts) * (1 + is_one_token) or num_begins != len(texts):
            return None  # a text has the text of EOS or BOS in it
        return ids, np.diff(ends[1::2] if is_one_token else ends, prepend=-1)

    def _encode(self, text: bytes) -> np.ndarray:
        ids = self._encode_known(text)
        return self._fast_encoder.encode_batch([text.decode()])[0] if ids is None else ids

    def _encode_known(self, text: bytes) -> np.ndarray | None:
        """Return the ids, int32 [T]; None if a character, a byte or a panic leaves the text to ``tokenizers``."""
        if self._json.unknown.is_in(text):
            return None
        try:
            with panics_as_errors():
                ids: np.ndarray = self._backend.encode(text).view(np.int32)
        except RustPanicError:
            return None
        return ids if self._json.has_all_bytes or not len(ids) or ids.max() < self._json.first_unknown_id else None

    @cached_property
    def _fast_encoder(self) -> FastEncoder:
        return FastEncoder(*self._arguments)

    def _limit_memory(self, num_bytes: int) -> None:
        """Load the tokenizer again, which takes half a second, if its cache has grown too large."""
        self._num_bytes += num_bytes
        if self._num_bytes > self._text_between_looks:
            self._num_bytes = 0
            if process_memory() - self._memory_before > self._most_growth:
                del self._backend
                self._load()


def open_encoder(
    tokenizer_file: Path, special_text_is_plain: bool, why_not_gigatoken: str = ""
) -> tuple[TextEncoder, str]:
    """Return the fastest encoder, and "gigatoken" or "tokenizers: REASON"; a reason may be given."""
    try:
        if why_not_gigatoken:
            raise UnsupportedTokenizerError(why_not_gigatoken)
        return GigatokenEncoder(tokenizer_file, special_text_is_plain), "gigatoken"
    except UnsupportedTokenizerError as reason:
        return FastEncoder(tokenizer_file, special_text_is_plain), f"tokenizers: {reason}"
