"""Texts to token ids: by tiktoken where it gives the tokenizer's own ids, otherwise by the ``tokenizers`` library."""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np

from fabric_train.tokenization.tokenizers.byte_bpe import NotExpressibleError, express
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast
from fabric_train.tokenization.tokenizers.long_texts import Cutter, Part, WholeTexts, find_cutter
from fabric_train.tokenization.tokenizers.tokenizer_json import read_tokenizer_json

_PARTS_AT_ONCE = 256


class TextEncoder(Protocol):
    """Encodes whole documents."""

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return each text's ids, int32 [number of tokens], without BOS and EOS. Texts hold no lone surrogates."""


class FastEncoder:
    """The ``tokenizers`` library's own encoder, on one core; long texts are cut where that changes no id."""

    def __init__(self, tokenizer_file: Path, special_text_is_plain: bool, cutter: Cutter) -> None:
        # a process for each core encodes; and threads of the library do not survive a fork, which then waits for them
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._tokenizer = load_fast(tokenizer_file, special_text_is_plain)
        self._cutter = cutter

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return each text's ids, int32 [number of tokens], without BOS and EOS."""
        cut = [self._cutter.cut(text) for text in texts]
        ids = self._encode_parts(part for parts in cut for part in parts)
        return [_joined(list(islice(ids, len(parts)))) for parts in cut]

    def _encode_parts(self, parts: Iterator[Part]) -> Iterator[np.ndarray]:
        while some := list(islice(parts, _PARTS_AT_ONCE)):
            encoded = self._tokenizer.encode_batch_fast([part.text for part in some], add_special_tokens=False)
            for part, encoding in zip(some, encoded, strict=True):
                yield np.array(encoding.ids[part.num_dropped :], np.int32)


def open_encoder(
    tokenizer_file: Path, special_text_is_plain: bool, why_not_tiktoken: str = ""
) -> tuple[TextEncoder, str]:
    """Return the fastest encoder that has the ids of the ``tokenizer.json`` at ``tokenizer_file``, and what it is.

    That is "tiktoken", or "encode_batch_fast: WHY" where it cannot be or ``why_not_tiktoken`` is known.
    ``special_text_is_plain``: the text of a special token inside a document is text, and not that token.
    """
    try:
        content = read_tokenizer_json(tokenizer_file)
    except ValueError as reason:  # perhaps tokenizers knows better
        encoder = FastEncoder(tokenizer_file, special_text_is_plain, WholeTexts())
        return encoder, f"encode_batch_fast: {reason}"
    try:
        if why_not_tiktoken:
            raise NotExpressibleError(why_not_tiktoken)
        return express(content, tokenizer_file, special_text_is_plain), "tiktoken"
    except NotExpressibleError as reason:
        cutter = find_cutter(content, special_text_is_plain)
        return FastEncoder(tokenizer_file, special_text_is_plain, cutter), f"encode_batch_fast: {reason}"


def with_borders(ids: np.ndarray, bos_token_id: int | None, eos_token_id: int) -> np.ndarray:
    """Return ``ids`` between BOS (where there is one) and EOS, each exactly once, even where the text has its own."""
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


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
