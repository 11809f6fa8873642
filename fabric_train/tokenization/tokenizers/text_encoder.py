"""Encode texts with gigatoken if it gives the tokenizer's ids, and otherwise with the ``tokenizers`` library."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fabric_train.cli.errors import first_line
from fabric_train.distributed.memory import process_memory
from fabric_train.tokenization.tokenizers.fast_tokenizer import (
    RustPanicError,
    load_fast,
    panics_as_errors,
    refuse_text,
)
from fabric_train.tokenization.tokenizers.gigatoken_json import read_for_gigatoken


@dataclass(frozen=True)
class Borders:
    """The ids of BOS and EOS; a tokenizer without BOS has None, and none is added."""

    bos_token_id: int | None
    eos_token_id: int


def add_borders(token_ids: np.ndarray, borders: Borders) -> np.ndarray:
    """Return ``token_ids``, int32 [T], with exactly one BOS at the start and one EOS at the end.

    BOS and EOS that are already at the ends are removed first.
    """
    start = 0
    end = len(token_ids)
    while start < end and token_ids[start] == borders.bos_token_id:
        start += 1
    while end > start and token_ids[end - 1] == borders.eos_token_id:
        end -= 1
    bos = [] if borders.bos_token_id is None else [borders.bos_token_id]
    eos = [borders.eos_token_id]
    return np.concatenate((bos, token_ids[start:end], eos), dtype=np.int32, casting="unsafe")


def join_documents(documents: list[np.ndarray], borders: Borders) -> tuple[np.ndarray, np.ndarray]:
    """Add BOS and EOS to each document's ids; return the joined ids, int32 [T], and the lengths, int64 [documents]."""
    bordered_documents = [add_borders(token_ids, borders) for token_ids in documents]
    lengths = np.array([len(token_ids) for token_ids in bordered_documents], dtype=np.int64)
    return np.concatenate(bordered_documents), lengths


class TextEncoder(Protocol):
    """An encoder of texts on one core."""

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return each text's ids, int32 [T], without BOS and EOS; InputError if the tokenizer cannot encode one."""

    def encode_documents(self, texts: Sequence[bytes], borders: Borders) -> tuple[np.ndarray, np.ndarray]:
        """Encode one or more UTF-8 texts, each with BOS and EOS.

        Returns:
            The joined ids, int32 [T], and the length of each document, int64 [documents].
        """


class UnsupportedTokenizerError(ValueError):
    """Raised for a tokenizer that gigatoken does not support; the message is a phrase with the reason."""


class FastEncoder:
    """The ``tokenizers`` library on one core.

    With ``special_text_is_plain``, the text of a special token is encoded as text, not as the token.
    """

    def __init__(self, tokenizer_file: Path, special_text_is_plain: bool) -> None:
        # each core has its own encoding process, and a fork would hang: the library's threads do not survive it
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._tokenizer = load_fast(tokenizer_file, special_text_is_plain)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        try:
            with panics_as_errors():
                encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except RustPanicError as panic:
            if len(texts) == 1:
                raise refuse_text(panic, texts[0]) from None
            # find the text at fault
            return [self.encode_batch([text])[0] for text in texts]
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_documents(self, texts: Sequence[bytes], borders: Borders) -> tuple[np.ndarray, np.ndarray]:
        return join_documents(self.encode_batch([text.decode() for text in texts]), borders)


class GigatokenEncoder:
    """An encoder on one core with the ids of the ``tokenizers`` library.

    gigatoken's cache grows without limit. So after every ``text_between_looks`` bytes of text, the encoder checks the
    memory of the process. If it has grown by ``most_growth`` bytes, the tokenizer is loaded again, without its cache.

    Raises:
        UnsupportedTokenizerError: gigatoken cannot load the tokenizer.
    """

    def __init__(
        self,
        tokenizer_file: Path,
        special_text_is_plain: bool,
        most_growth: int = 256 << 20,
        text_between_looks: int = 8 << 20,
    ) -> None:
        self._tokenizer_file = tokenizer_file
        self._special_text_is_plain = special_text_is_plain
        self._most_growth = most_growth
        self._text_between_looks = text_between_looks
        try:
            self._json = read_for_gigatoken(tokenizer_file, special_text_is_plain)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnsupportedTokenizerError(f"it is of another kind: {first_line(error)}") from None
        self._load()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments, with which another process loads the tokenizer."""
        arguments = (
            self._tokenizer_file,
            self._special_text_is_plain,
            self._most_growth,
            self._text_between_looks,
        )
        return type(self), arguments

    def _load(self) -> None:
        try:
            from gigatoken.gigatoken_rs import load_hf_json

            with panics_as_errors():
                self._backend = load_hf_json(self._json.content)
        except (ImportError, RuntimeError, ValueError) as error:
            raise UnsupportedTokenizerError(first_line(error)) from None
        self._memory_after_loading = process_memory()
        self._num_bytes = 0  # of text since the last look at the memory

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        encoded_texts = [text.encode() for text in texts]
        self._limit_memory(sum(map(len, encoded_texts)))
        return [self._encode(text) for text in encoded_texts]

    def encode_documents(self, texts: Sequence[bytes], borders: Borders) -> tuple[np.ndarray, np.ndarray]:
        """Encode all texts at once if possible, otherwise one by one."""
        self._limit_memory(sum(map(len, texts)))
        joined = self._encode_joined(texts, borders)
        if joined is not None:
            return joined
        return join_documents([self._encode(text) for text in texts], borders)

    def _encode_joined(self, texts: Sequence[bytes], borders: Borders) -> tuple[np.ndarray, np.ndarray] | None:
        """Encode all texts at once, with the text of EOS and BOS between them, at which the tokenizer splits first.

        Returns:
            The same as :meth:`encode_documents`; None if the texts must be encoded one by one.
        """
        # join the texts
        bos: bytes | None = b""
        if borders.bos_token_id is not None:
            bos = self._json.separators.get(borders.bos_token_id)
        eos = self._json.separators.get(borders.eos_token_id)
        if bos is None or eos is None:
            return None
        token_ids = self._encode_by_gigatoken(bos + (eos + bos).join(texts) + eos)
        if token_ids is None:
            return None

        # find the documents; more borders than documents mean that a text contains the text of EOS or BOS
        eos_positions = np.flatnonzero(token_ids == borders.eos_token_id)
        if borders.bos_token_id == borders.eos_token_id:  # each document begins and ends with the same token
            if len(eos_positions) != 2 * len(texts):
                return None
            ends = eos_positions[1::2]
        else:
            if len(eos_positions) != len(texts):
                return None
            if bos and np.count_nonzero(token_ids == borders.bos_token_id) != len(texts):
                return None
            ends = eos_positions
        return token_ids, np.diff(ends, prepend=-1)

    def _encode(self, text: bytes) -> np.ndarray:
        """Return the ids of a UTF-8 text, int32 [T]."""
        token_ids = self._encode_by_gigatoken(text)
        if token_ids is not None:
            return token_ids
        return self._fast_encoder.encode_batch([text.decode()])[0]

    def _encode_by_gigatoken(self, text: bytes) -> np.ndarray | None:
        """Return the ids, int32 [T]; None if a character, a byte or a panic leaves the text to ``tokenizers``."""
        if self._json.unknown.is_in(text):
            return None
        try:
            with panics_as_errors():
                token_ids: np.ndarray = self._backend.encode(text).view(np.int32)
        except RustPanicError:
            return None
        if self._json.has_all_bytes or not len(token_ids):
            return token_ids
        has_unknown_byte = token_ids.max() >= self._json.first_unknown_id
        return None if has_unknown_byte else token_ids

    @cached_property
    def _fast_encoder(self) -> FastEncoder:
        return FastEncoder(self._tokenizer_file, self._special_text_is_plain)

    def _limit_memory(self, num_bytes: int) -> None:
        """Load the tokenizer again, which takes half a second, if its cache has grown too large.

        ``num_bytes`` is the length of the text that is encoded next.
        """
        self._num_bytes += num_bytes
        if self._num_bytes <= self._text_between_looks:
            return
        self._num_bytes = 0
        if process_memory() - self._memory_after_loading > self._most_growth:
            del self._backend
            self._load()


def open_encoder(
    tokenizer_file: Path, special_text_is_plain: bool, why_not_gigatoken: str = ""
) -> tuple[TextEncoder, str]:
    """Return the fastest encoder, and its name: "gigatoken" or "tokenizers: REASON".

    ``why_not_gigatoken`` is a reason for not trying gigatoken.
    """
    if why_not_gigatoken:
        return FastEncoder(tokenizer_file, special_text_is_plain), f"tokenizers: {why_not_gigatoken}"
    try:
        return GigatokenEncoder(tokenizer_file, special_text_is_plain), "gigatoken"
    except UnsupportedTokenizerError as reason:
        return FastEncoder(tokenizer_file, special_text_is_plain), f"tokenizers: {reason}"
