"""Encode texts: by gigatoken if it gives the tokenizer's ids, otherwise by the ``tokenizers`` library."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from fabric_train.tokenization.tokenizers.borders import Borders
from fabric_train.tokenization.tokenizers.fast_encoder import FastEncoder
from fabric_train.tokenization.tokenizers.gigatoken_encoder import GigatokenEncoder
from fabric_train.tokenization.tokenizers.unsupported import UnsupportedTokenizerError


class TextEncoder(Protocol):
    """An encoder of texts on one core."""

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return each text's ids, int32 [T], without BOS and EOS. Texts must not contain lone surrogates."""

    def encode_documents(self, texts: Sequence[bytes], borders: Borders) -> tuple[np.ndarray, np.ndarray]:
        """Return the joined ids of all texts with BOS and EOS, int32 [T], and their lengths, int64 [texts].

        Args:
            texts: at least one, in UTF-8.
            borders: the ids of BOS and EOS.
        """


def open_encoder(
    tokenizer_file: Path, special_text_is_plain: bool, why_not_gigatoken: str = ""
) -> tuple[TextEncoder, str]:
    """Return the fastest encoder for the tokenizer, and a description of it.

    Args:
        tokenizer_file: the ``tokenizer.json``.
        special_text_is_plain: whether the text of a special token in a document is encoded as text, not as the token.
        why_not_gigatoken: a reason not to use gigatoken; "" if there is none.

    Returns:
        The encoder, and "gigatoken" or "tokenizers: REASON".

    Raises:
        InputError: the file is damaged.
    """
    try:
        if why_not_gigatoken:
            raise UnsupportedTokenizerError(why_not_gigatoken)
        return GigatokenEncoder(tokenizer_file, special_text_is_plain), "gigatoken"
    except UnsupportedTokenizerError as reason:
        return FastEncoder(tokenizer_file, special_text_is_plain), f"tokenizers: {reason}"
