"""A process that compares an encoder's ids with the tokenizer's, which it loads while others do other things."""

from functools import cache, partial
from pathlib import Path

import numpy as np

from fabric_train.corpus.tokenizers.byte_bpe import ByteBPE
from fabric_train.corpus.tokenizers.text_encoder import Reference
from fabric_train.corpus.workers import Worker

_Compared = tuple[list[str], list[np.ndarray]]


class IdentityCheck:
    """Begins with ``start``; leaving the block ends it, whatever it has found.

    Raises:
        InputError: where an answer is waited for, the tokenizer cannot be loaded.
    """

    def __init__(self) -> None:
        self._worker: Worker[_Compared | None, list[str] | str | None] | None = None

    def __enter__(self) -> "IdentityCheck":
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker:
            self._worker.kill()

    def start(self, tokenizer_file: Path, special_text_is_plain: bool) -> None:
        """Load the tokenizer, unless that has begun already."""
        if self._worker is None:
            self._worker = Worker(partial(_answer, tokenizer_file, special_text_is_plain))
            self._worker.send(None)

    def begin(self, encoder: ByteBPE, sample: list[str], is_long: bool) -> None:
        """Compare the encoder's ids of hard strings and of ``sample``, in a long run also as it goes on in one."""
        assert self._worker is not None, "start comes first"
        texts = [*(self._worker.receive() or ()), *sample]
        ids = encoder.encode_batch(texts)
        if is_long:
            encoder.pieces.quicken()
            ids += encoder.encode_batch(texts)
        self._worker.send((texts * (2 if is_long else 1), ids))

    def result(self) -> str | None:
        """Wait for the end and return where the first difference is, None if there is none."""
        assert self._worker is not None, "start comes first"
        found = self._worker.receive()
        assert not isinstance(found, list)
        return found


def _answer(tokenizer_file: Path, special_text_is_plain: bool, given: _Compared | None) -> list[str] | str | None:
    """Return hard strings where nothing is given yet, then what comes of the comparison."""
    reference = _reference(tokenizer_file, special_text_is_plain)
    return reference.hard_strings() if given is None else reference.find_difference(*given)


@cache
def _reference(tokenizer_file: Path, special_text_is_plain: bool) -> Reference:
    return Reference(tokenizer_file, special_text_is_plain)
