"""Compare an encoder's ids with the tokenizer's in a process of its own, in parallel with other work."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric_train.tokenization.tokenizers.borders import Borders
from fabric_train.tokenization.tokenizers.reference import Reference, find_difference, find_different_document
from fabric_train.tokenization.tokenizers.tokenizer import find_tokenizer_json
from fabric_train.tokenization.workers import Worker

if TYPE_CHECKING:
    from tokenizers import Encoding

    from fabric_train.tokenization.tokenizers.text_encoder import TextEncoder


class ParityCheck:
    """A process that compares an encoder's ids with the tokenizer's; a context manager that ends the process.

    Loading the tokenizer and encoding with it takes longer than everything else before gigatoken encodes the first
    document. So the process starts as soon as the tokenizer's name is known. Call, in this order: ``start_early`` (if
    the name is known early), ``start``, ``prepare``, ``begin``, ``result``.

    Raises:
        InputError: from ``begin`` and ``result``, if the tokenizer cannot be loaded.
    """

    def __init__(self) -> None:
        self._worker: Worker[list[Any] | None, list[str] | str | None] | None = None
        self._sample: list[str] = []

    def __enter__(self) -> "ParityCheck":
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker:
            self._worker.kill()

    def start_early(self, name: str) -> None:
        """Start to load the tokenizer called ``name``, if its ``tokenizer.json`` is used unchanged.

        Raises:
            InputError: there is no such tokenizer.
        """
        file = find_tokenizer_json(name)
        if file:
            self.start(file, special_text_is_plain=False)

    def start(self, tokenizer_file: Path, special_text_is_plain: bool) -> None:
        """Start to load the tokenizer, unless it has started already."""
        if self._worker is None:
            self._worker = Worker(_Comparison(tokenizer_file, special_text_is_plain))
            self._worker.send(None)

    def prepare(self, sample: list[str]) -> None:
        """Start to encode the hard strings and ``sample`` with the tokenizer."""
        assert self._worker is not None, "start comes first"
        self._sample = sample
        self._worker.send(sample)

    def begin(self, encoder: "TextEncoder", borders: Borders) -> None:
        """Start to compare the encoder's ids of the same texts, each on its own and all as documents."""
        assert self._worker is not None, "start comes first"
        hard_strings = self._worker.receive()
        assert isinstance(hard_strings, list)
        # in a process of its own: what the encoder loads for rare characters is freed with it
        encoding: Worker[list[str], list[Any]] = Worker(partial(_encode, encoder, borders))
        encoding.send([*hard_strings, *self._sample])
        self._worker.send(encoding.receive())
        encoding.kill()
        encoding.process.join()

    def result(self) -> str | None:
        """Wait for the comparison; return where the first difference is, or None."""
        assert self._worker is not None, "start comes first"
        self._worker.receive()  # the empty answer to ``prepare``
        found = self._worker.receive()
        assert not isinstance(found, list)
        return found


class _Comparison:
    """The process's work, in three calls.

    1. Given None, load the tokenizer and return its hard strings.
    2. Given a sample, encode the hard strings and the sample; return None.
    3. Given an encoder's ids of all these texts, the same as documents, and BOS and EOS, return the first difference
       or None.
    """

    def __init__(self, tokenizer_file: Path, special_text_is_plain: bool) -> None:
        self._tokenizer = tokenizer_file, special_text_is_plain
        self._reference: Reference | None = None
        self._texts: list[str] = []
        self._expected: list[Encoding] = []

    def __call__(self, given: list[Any] | None) -> list[str] | str | None:
        if self._reference is None:
            self._reference = Reference(*self._tokenizer)
            self._texts = self._reference.hard_strings()
            return self._texts
        assert given is not None, "the tokenizer is loaded once"
        if not self._expected:
            self._texts += given
            self._expected = self._reference.encode(self._texts)
            return None
        ids, documents, borders = given
        difference = find_difference(self._texts, self._expected, ids)
        difference = difference or find_different_document(self._texts, self._expected, documents, borders)
        self._reference, self._texts, self._expected = None, [], []  # the process waits until the run has encoded all
        return difference


def _encode(encoder: "TextEncoder", borders: Borders, texts: list[str]) -> list[Any]:
    """Return the ids of each text, the same as documents, and BOS and EOS."""
    documents, lengths = encoder.encode_documents([text.encode() for text in texts], borders)
    return [encoder.encode_batch(texts), np.split(documents, np.cumsum(lengths)[:-1]), borders]
