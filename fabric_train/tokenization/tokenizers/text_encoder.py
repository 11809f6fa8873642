"""Encode texts: by tiktoken if it gives the tokenizer's ids, otherwise by the ``tokenizers`` library."""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np

from fabric_train.tokenization.tokenizers.byte_bpe import build_byte_bpe
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast
from fabric_train.tokenization.tokenizers.long_texts import NoSplitter, TextPart, TextSplitter, find_splitter
from fabric_train.tokenization.tokenizers.tokenizer_json import read_tokenizer_json
from fabric_train.tokenization.tokenizers.unsupported import UnsupportedTokenizerError

_PARTS_AT_ONCE = 256


class TextEncoder(Protocol):
    """An encoder of whole documents."""

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return each text's ids, int32 [T], without BOS and EOS. Texts must not contain lone surrogates."""


class FastEncoder:
    """The ``tokenizers`` library on one core. Long texts are split where that does not change ids."""

    def __init__(self, tokenizer_file: Path, special_text_is_plain: bool, splitter: TextSplitter) -> None:
        # each core has its own encoding process, and a fork would hang: the library's threads do not survive it
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._tokenizer = load_fast(tokenizer_file, special_text_is_plain)
        self._splitter = splitter

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return each text's ids, int32 [T], without BOS and EOS."""
        parts_of_texts = [self._splitter.split(text) for text in texts]
        ids = self._encode_parts(part for parts in parts_of_texts for part in parts)
        return [_concatenated(list(islice(ids, len(parts)))) for parts in parts_of_texts]

    def _encode_parts(self, parts: Iterator[TextPart]) -> Iterator[np.ndarray]:
        while some := list(islice(parts, _PARTS_AT_ONCE)):
            encoded = self._tokenizer.encode_batch_fast([part.text for part in some], add_special_tokens=False)
            for part, encoding in zip(some, encoded, strict=True):
                yield np.array(encoding.ids[part.num_dropped :], np.int32)


def open_encoder(
    tokenizer_file: Path, special_text_is_plain: bool, why_not_tiktoken: str = ""
) -> tuple[TextEncoder, str]:
    """Return the fastest encoder that gives the tokenizer's ids, and a description of it.

    Args:
        tokenizer_file: the ``tokenizer.json``.
        special_text_is_plain: whether the text of a special token in a document is encoded as text, not as the token.
        why_not_tiktoken: a reason not to use tiktoken; "" if there is none.

    Returns:
        The encoder, and "tiktoken" or "encode_batch_fast: REASON".

    Raises:
        InputError: the file is damaged.
    """
    try:
        content = read_tokenizer_json(tokenizer_file)
    except ValueError as reason:  # the tokenizers library may still read it
        encoder = FastEncoder(tokenizer_file, special_text_is_plain, NoSplitter())
        return encoder, f"encode_batch_fast: {reason}"
    try:
        if why_not_tiktoken:
            raise UnsupportedTokenizerError(why_not_tiktoken)
        return build_byte_bpe(content, tokenizer_file, special_text_is_plain), "tiktoken"
    except UnsupportedTokenizerError as reason:
        splitter = find_splitter(content, special_text_is_plain)
        return FastEncoder(tokenizer_file, special_text_is_plain, splitter), f"encode_batch_fast: {reason}"


def add_bos_eos(ids: np.ndarray, bos_token_id: int | None, eos_token_id: int) -> np.ndarray:
    """Return ``ids`` with exactly one BOS at the start and one EOS at the end, also if they are there already.

    Args:
        ids: int32 [T].
        bos_token_id: None for a tokenizer without BOS; none is added.
        eos_token_id: the id of EOS.
    """
    begin, end = 0, len(ids)
    while begin < end and ids[begin] == bos_token_id:
        begin += 1
    while end > begin and ids[end - 1] == eos_token_id:
        end -= 1
    num_bos = 0 if bos_token_id is None else 1
    bordered = np.empty(num_bos + end - begin + 1, np.int32)
    if bos_token_id is not None:
        bordered[0] = bos_token_id
    bordered[num_bos:-1] = ids[begin:end]
    bordered[-1] = eos_token_id
    return bordered


def _concatenated(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
