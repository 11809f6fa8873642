"""A process that compares an encoder's ids with the tokenizer's, which it loads while others do other things."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric_train.tokenization.tokenizers.reference import Reference, find_difference
from fabric_train.tokenization.tokenizers.tokenizer import find_tokenizer_json
from fabric_train.tokenization.workers import Worker

if TYPE_CHECKING:
    from tokenizers import Encoding

    from fabric_train.tokenization.tokenizers.byte_bpe import ByteBPE


class IdentityCheck:
    """Begins with ``start`` or ``start_early``; leaving the block ends it, whatever it has found.

    Loading the tokenizer and encoding with it take longer than all that comes before the first document is encoded by
    tiktoken. So the process starts as soon as the tokenizer's name is known, and has its ids when they are asked for.

    Raises:
        InputError: where an answer is waited for, the tokenizer cannot be loaded.
    """

    def __init__(self) -> None:
        self._worker: Worker[list[Any] | None, list[str] | str | None] | None = None
        self._sample: list[str] = []

    def __enter__(self) -> "IdentityCheck":
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker:
            self._worker.kill()

    def start_early(self, name: str) -> None:
        """Load the tokenizer called ``name`` if it is taken as it stands.

        Raises:
            InputError: nothing of that name.
        """
        file = find_tokenizer_json(name)
        if file:
            self.start(file, special_text_is_plain=False)

    def start(self, tokenizer_file: Path, special_text_is_plain: bool) -> None:
        """Load the tokenizer, unless that has begun already."""
        if self._worker is None:
            self._worker = Worker(_Comparison(tokenizer_file, special_text_is_plain))
            self._worker.send(None)

    def prepare(self, sample: list[str]) -> None:
        """Encode hard strings and ``sample`` with the tokenizer."""
        assert self._worker is not None, "start comes first"
        self._sample = sample
        self._worker.send(sample)

    def begin(self, encoder: "ByteBPE", is_long: bool) -> None:
        """Compare the ids that the encoder gives the same texts, in a long run also as it goes on in one."""
        assert self._worker is not None, "start comes first"
        hard_strings = self._worker.receive()
        assert isinstance(hard_strings, list)
        texts = [*hard_strings, *self._sample]
        ids = encoder.encode_batch(texts)
        if is_long:
            encoder.pieces.quicken()
            ids += encoder.encode_batch(texts)
        self._worker.send(ids)

    def result(self) -> str | None:
        """Wait for the end and return where the first difference is, None if there is none."""
        assert self._worker is not None, "start comes first"
        self._worker.receive()  # of ``prepare``, which says nothing
        found = self._worker.receive()
        assert not isinstance(found, list)
        return found


class _Comparison:
    """What the process does: asked for None it answers with hard strings; given a sample, it encodes both, and answers
    nothing; given an encoder's ids of both, once or several times, it answers with what is wrong with them.
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
        times = len(given) // len(self._texts)
        return find_difference(self._texts * times, self._expected * times, given)
