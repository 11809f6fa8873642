"""Encode with the ``tokenizers`` library, which reads every ``tokenizer.json`` and is slower than gigatoken."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fabric_train.files.rust_panic import RustPanicError, panics_as_errors, refuse_text
from fabric_train.tokenization.tokenizers.borders import Borders, join_documents
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast


class FastEncoder:
    """The ``tokenizers`` library on one core.

    Args:
        tokenizer_file: the ``tokenizer.json``.
        special_text_is_plain: whether the text of a special token in a document is encoded as text, not as the token.

    Raises:
        InputError: the file is damaged.
    """

    def __init__(self, tokenizer_file: Path, special_text_is_plain: bool) -> None:
        # each core has its own encoding process, and a fork would hang: the library's threads do not survive it
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._tokenizer = load_fast(tokenizer_file, special_text_is_plain)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return each text's ids, int32 [T], without BOS and EOS.

        Raises:
            InputError: the tokenizer cannot encode one, such as by a pattern that takes too many steps.
        """
        try:
            with panics_as_errors():
                encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except RustPanicError as panic:
            if len(texts) > 1:
                return [self.encode_batch([text])[0] for text in texts]  # one of them is at fault
            raise refuse_text(panic, texts[0]) from None
        return [np.array(encoding.ids, np.int32) for encoding in encoded]

    def encode_documents(self, texts: Sequence[bytes], borders: Borders) -> tuple[np.ndarray, np.ndarray]:
        """Return the joined ids of all texts with BOS and EOS, int32 [T], and their lengths, int64 [texts]."""
        return join_documents(self.encode_batch([text.decode() for text in texts]), borders)
