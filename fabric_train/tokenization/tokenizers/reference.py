"""Compare an encoder's ids with the tokenizer's. Imports little, because a process is started to load it."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fabric_train.files.rust_panic import RustPanicError, panics_as_errors, refuse_text
from fabric_train.tokenization.tokenizers.borders import Borders, add_borders
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast
from fabric_train.tokenization.tokenizers.hard_strings import HARD_STRINGS, special_token_strings

if TYPE_CHECKING:
    from tokenizers import Encoding

_EXCERPT = 30  # characters before and after the place where ids differ


class Reference:
    """The tokenizer in the ``tokenizers`` library, whose ids are the correct ones.

    Texts are encoded one at a time: the library starts no threads for that, so the process can still be forked.

    Raises:
        InputError: the file is damaged.
    """

    def __init__(self, tokenizer_file: Path, special_text_is_plain: bool) -> None:
        self._tokenizer = load_fast(tokenizer_file, special_text_is_plain)

    def hard_strings(self) -> list[str]:
        """Return texts on which encoders are likely to fail, some with this tokenizer's added tokens."""
        own = (token.content for token in self._tokenizer.get_added_tokens_decoder().values())
        return [*HARD_STRINGS, *special_token_strings(own)]

    def encode(self, texts: Iterable[str]) -> "list[Encoding]":
        """Return the texts' encodings, without added BOS or EOS.

        Raises:
            InputError: the tokenizer cannot encode one.
        """
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> "Encoding":
        try:
            with panics_as_errors():
                return self._tokenizer.encode(text, add_special_tokens=False)
        except RustPanicError as panic:
            raise refuse_text(panic, text) from None


def find_difference(texts: Iterable[str], expected: "Iterable[Encoding]", ids: "Iterable[np.ndarray]") -> str | None:
    """Return where an encoder's ids first differ from the tokenizer's, or None.

    Args:
        texts: the texts.
        expected: the tokenizer's encoding of each text.
        ids: the encoder's ids of each text, int32 [number of tokens].
    """
    for text, encoding, found in zip(texts, expected, ids, strict=True):
        if found.tolist() != encoding.ids:
            return f"ids differ from the tokenizer's at {_excerpt(text, found.tolist(), encoding)!r}"
    return None


def find_different_document(
    texts: Iterable[str], expected: "Iterable[Encoding]", documents: "Iterable[np.ndarray]", borders: Borders
) -> str | None:
    """Return where documents first differ from the tokenizer's ids with BOS and EOS, or None.

    Args:
        texts: the texts.
        expected: the tokenizer's encoding of each text.
        documents: the encoder's ids of each text with BOS and EOS, int32 [number of tokens].
        borders: the ids of BOS and EOS.
    """
    for text, encoding, found in zip(texts, expected, documents, strict=True):
        if not np.array_equal(found, add_borders(np.array(encoding.ids, dtype=np.int32), borders)):
            return f"ids differ from the tokenizer's in the document that begins with {text[:_EXCERPT]!r}"
    return None


def _excerpt(text: str, ids: list[int], expected: "Encoding") -> str:
    """Return the text around the first id that differs."""
    same = 0
    while same < min(len(ids), len(expected.ids)) and ids[same] == expected.ids[same]:
        same += 1
    place = expected.offsets[same][0] if same < len(expected.offsets) else len(text)
    return text[max(0, place - _EXCERPT) : place + _EXCERPT]
