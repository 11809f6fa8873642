"""Encode with gigatoken, a library in Rust that is far faster than ``tokenizers`` (``benchmarks/growth.py``).

It reads the same ``tokenizer.json`` as the ``tokenizers`` library, and refuses the kinds that it does not know. Where
the two libraries differ, ``tokenizers`` encodes the text (``gigatoken_json.py``). Its cache of pieces has no limit, so
the tokenizer is loaded again when it has grown. Bytes that are not UTF-8 can end its process: all texts here are UTF-8.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fabric_train.cli.errors import first_line
from fabric_train.distributed.process_memory import process_memory
from fabric_train.files.rust_panic import RustPanicError, panics_as_errors
from fabric_train.tokenization.tokenizers.borders import Borders, join_documents
from fabric_train.tokenization.tokenizers.fast_encoder import FastEncoder
from fabric_train.tokenization.tokenizers.gigatoken_json import read_for_gigatoken
from fabric_train.tokenization.tokenizers.unsupported import UnsupportedTokenizerError

_MOST_GROWTH = 256 << 20  # bytes of cached pieces in one process
_TEXT_BETWEEN_LOOKS = 8 << 20  # bytes of text; pieces that never repeat take several times as much memory


class GigatokenEncoder:
    """An encoder on one core, whose ids are those of the ``tokenizers`` library.

    Args:
        tokenizer_file: the ``tokenizer.json``.
        special_text_is_plain: whether the text of a special token in a document is encoded as text, not as the token.

    Raises:
        UnsupportedTokenizerError: gigatoken does not know this kind of tokenizer, or is not installed.
    """

    def __init__(self, tokenizer_file: Path, special_text_is_plain: bool) -> None:
        self._arguments = tokenizer_file, special_text_is_plain
        try:
            self._json = read_for_gigatoken(tokenizer_file, special_text_is_plain)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnsupportedTokenizerError(f"it is of another kind: {first_line(error)}") from None
        self._load()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

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
        """Return each text's ids, int32 [T], without BOS and EOS. Texts must not contain lone surrogates."""
        encoded = [text.encode() for text in texts]
        self._limit_memory(sum(map(len, encoded)))
        return [self._encode(text) for text in encoded]

    def encode_documents(self, texts: Sequence[bytes], borders: Borders) -> tuple[np.ndarray, np.ndarray]:
        """Return the joined ids of all texts with BOS and EOS, int32 [T], and their lengths, int64 [texts].

        All texts are encoded at once, with the text of EOS and BOS between them: these are added tokens, at which the
        tokenizer splits before it does anything else.
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
        """Load the tokenizer again, which takes half a second, if its cache has grown to 256 MiB."""
        self._num_bytes += num_bytes
        if self._num_bytes > _TEXT_BETWEEN_LOOKS:
            self._num_bytes = 0
            if process_memory() - self._memory_before > _MOST_GROWTH:
                del self._backend
                self._load()
