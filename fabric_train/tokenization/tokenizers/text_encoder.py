"""Encode texts: by gigatoken if it gives the tokenizer's ids, otherwise by the ``tokenizers`` library."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fabric_train.cli.errors import InputError, first_line
from fabric_train.distributed.memory import process_memory
from fabric_train.tokenization.tokenizers.gigatoken_json import read_for_gigatoken

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class Borders:
    """The ids of BOS and EOS; a tokenizer without BOS has None, and none is added."""

    bos_token_id: int | None
    eos_token_id: int


def add_borders(ids: np.ndarray, borders: Borders) -> np.ndarray:
    """Return ``ids``, int32 [T], with exactly one BOS at the start and one EOS at the end, also if they are there."""
    begin, end = 0, len(ids)
    while begin < end and ids[begin] == borders.bos_token_id:
        begin += 1
    while end > begin and ids[end - 1] == borders.eos_token_id:
        end -= 1
    num_bos = 0 if borders.bos_token_id is None else 1
    bordered = np.empty(num_bos + end - begin + 1, np.int32)
    if borders.bos_token_id is not None:
        bordered[0] = borders.bos_token_id
    bordered[num_bos:-1] = ids[begin:end]
    bordered[-1] = borders.eos_token_id
    return bordered


def join_documents(documents: list[np.ndarray], borders: Borders) -> tuple[np.ndarray, np.ndarray]:
    """Return the joined ids with BOS and EOS, int32 [T], and the documents' lengths, int64 [documents]."""
    bordered = [add_borders(ids, borders) for ids in documents]
    return np.concatenate(bordered), np.fromiter(map(len, bordered), np.int64, len(bordered))


class TextEncoder(Protocol):
    """An encoder of texts on one core, with the tokenizer in the file ``tokenizer.json``.

    ``special_text_is_plain`` says whether the text of a special token is encoded as text, not as the token.
    """

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return each text's ids, int32 [T], without BOS and EOS. Texts must not contain lone surrogates.

        Raises:
            InputError: the tokenizer cannot encode one, such as by a pattern that takes too many steps.
        """

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
    """Load the tokenizer without truncation and padding; ``special_text_is_plain`` as for ``TextEncoder``.

    Raises:
        InputError: the file is damaged.
    """
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
    """The ``tokenizers`` library on one core.

    Raises:
        InputError: the file is damaged.
    """

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


class GigatokenEncoder:
    """An encoder on one core, whose ids are those of the ``tokenizers`` library.

    It looks at the memory of the process after each ``text_between_looks`` bytes of text; pieces that never repeat take
    several times as much. If its cache has grown by ``most_growth`` bytes, it loads the tokenizer again.

    Raises:
        UnsupportedTokenizerError: gigatoken does not know this kind of tokenizer, or is not installed.
    """

    def __init__(
        self,
        tokenizer_file: Path,
        special_text_is_plain: bool,
        most_growth: int = 256 << 20,
        text_between_looks: int = 8 << 20,
    ) -> None:
        self._arguments = tokenizer_file, special_text_is_plain
        self._most_growth, self._text_between_looks = most_growth, text_between_looks
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
        """Encode all texts at once, with the text of EOS and BOS between them.

        These are added tokens, at which the tokenizer splits before it does anything else.
        """
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
    """Return the fastest encoder for the tokenizer, and "gigatoken" or "tokenizers: REASON".

    ``why_not_gigatoken`` is a reason not to use gigatoken; "" if there is none.

    Raises:
        InputError: the file is damaged.
    """
    try:
        if why_not_gigatoken:
            raise UnsupportedTokenizerError(why_not_gigatoken)
        return GigatokenEncoder(tokenizer_file, special_text_is_plain), "gigatoken"
    except UnsupportedTokenizerError as reason:
        return FastEncoder(tokenizer_file, special_text_is_plain), f"tokenizers: {reason}"
