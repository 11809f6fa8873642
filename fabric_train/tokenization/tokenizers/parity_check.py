"""Compare an encoder's ids with the tokenizer's in a separate process, in parallel with other work."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fabric_train.tokenization.tokenizers.fast_tokenizer import RustPanicError, load_fast, panics_as_errors, refuse_text
from fabric_train.tokenization.tokenizers.text_encoder import Borders, TextEncoder, add_borders
from fabric_train.tokenization.tokenizers.tokenizer import find_tokenizer_json
from fabric_train.workers import Worker

if TYPE_CHECKING:
    from tokenizers import Encoding

_WHITESPACE = (*" \t\n\r", "\r\n", *"\v\f\x1c\x85\xa0\u2003\u2028\u200b\u3000\ufeff")
_CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
_EXCERPT = 30  # characters before and after the position at which ids differ


def special_token_strings(tokens: Iterable[str]) -> Iterator[str]:
    """Yield texts with a tokenizer's special or added ``tokens``, and with text that only looks like them."""
    tokens = list(tokens)
    for separator in ("", " ", "a", "\n "):
        yield separator.join(tokens)
    for token in tokens[:20]:
        similar = f"{token[:-1]} {token[1:]} {token.upper()}"
        yield f"a{token}b {token} c\n{token}\n{token}{token}, {similar} {token}'s  {token}"


def _every_plane() -> Iterator[str]:
    """Yield short samples of code points of all Unicode planes: joined, with spaces, between letters and digits."""
    # start, end and step; surrogates are no characters
    strides = ((0, 0xD800, 61), (0xE000, 0x10000, 61), (0x10000, 0x40000, 257), (0x40000, 0x110000, 0x7FF))
    letters: list[str] = []
    for start, end, step in strides:
        letters += map(chr, range(start, end, step))
    # letters, digits and marks of recent Unicode versions, which libraries adopt at different times
    letters += map(chr, (0x1C89, 0x0897, 0x105C0, 0x10D40, 0x11DE0, 0x11DE9, 0x16D63, 0x16D68, 0x16FF4))
    letters += ["\ud7ff", "\ue000", "\ufffd", "\uffff", "\U00010000", "\U0010ffff"]
    for start in range(0, len(letters), 32):
        sample = letters[start : start + 32]
        yield "".join(sample)
        yield " ".join(sample)
        yield "".join(f"a{letter}1{letter}" for letter in sample)


def _whitespace_runs() -> Iterator[str]:
    """Yield texts with runs of each white space, and with two kinds next to one another."""
    for space in _WHITESPACE:
        yield space
        runs = [space * length for length in (1, 2, 3, 4, 7, 8, 40)]
        yield "".join(f"{run}x{run}7{run}." for run in runs) + space
        yield "".join(f"a{space}{second_space}{space}b " for second_space in _WHITESPACE)
    yield " " * 5000
    yield "\n" * 3000 + "x" + " \n" * 2000 + "\t" * 3000


def _joined_at_random() -> Iterator[str]:
    """Yield random sequences of fragments that overlap, repeat or end pieces, from a fixed seed."""
    fragments = ["er", "e", "re", "an", "a", "na", "t", "ing", "ab", "ь", "р", "=", "😀", "é", "▁", "\x00", "1", "22"]
    fragments += ["333", *_WHITESPACE, *_CONTRACTIONS, "'S", "'LL", "_", ".", "<|", "|>"]
    fragments += ["日本", "한국", "e\u0301", "\u0338"]
    draw = random.Random(0)
    for _ in range(300):
        yield "".join(draw.choices(fragments, k=draw.randint(1, 30)))


HARD_STRINGS: tuple[str, ...] = (
    "",
    "a",
    *_every_plane(),
    *_whitespace_runs(),
    *_joined_at_random(),
    "".join(f" it{end} I{end.upper()} {end}{end.title()}x ’{end[1:]} 1{end}" for end in _CONTRACTIONS)
    + "'ſ 'K ' ''s 's't",
    "0 1 12 123 1234 12345 1234567 0.5 1,000.00 ½ ² Ⅷ ٣٤٥ ४५६ 一二三 ①② 1a2b3c -1 1e-5 0x1F 2026-11-21 12:30",
    "<s></s> <unk><pad><mask> <0x0A><0x41> <|endoftext|><|begin_of_text|> <|im_start|>user<|im_end|> [INST] <bos>",
    "▁ ▁▁a▁ b Ġ ĠĠthe Ċ ĉ Ã© â€™",
    "é e\u0301 \u0301 a\u0323\u0307 a\u0307\u0323 Å \u212b Ω \u2126 ﬁ ﬀ ① ½ ｆｕｌｌ 한글",
    "\u1112\u1161\u11ab >\u0338 \u0344 \u0958",
    "日本語のテキスト、中文文本。العربية עברית ไทย हिन्दी ქართული ᏣᎳᎩ ǅ ß ẞ İ ı ſ K",
    "😀😃 👩\u200d👩\u200d👧 🇫🇷🇩🇪 👍🏽 ❤\ufe0f 1\ufe0f\u20e3 \U0001f9ff\U000e0041 🏴\U000e0067\U000e007f",
    "\x00\x01\x02\x04\x06\x13\x1d \x7f\x1b[0m \u200b\u200d\ufeff\u202e\u2066x\u2069",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}  # note\n\n\n\tif a<b&&c>=d{e=~f;}//g\r\n",
    "aaaaaaaaaaaaaaaa ----------- ====== ...... !!!???!! ,,;: ((([[[{{{ \\\\\\ //// http://a.b/c?d=e&f=%20#g",
    "a" * 20_000,
    "abcdefghijklmnopqrstuvwxyz" * 400,
    "LoremIpsumDolorSitAmet" * 300,
    "中文文本没有空格" * 600,
    "1234567890" * 800,
    "-=" * 3000,
    "👩\u200d👧" * 500,
)


class Reference:
    """The tokenizer in the ``tokenizers`` library, whose ids are correct by definition.

    Texts are encoded one at a time, so that the library starts no threads, which would prevent a fork.
    """

    def __init__(self, tokenizer_file: Path, special_text_is_plain: bool) -> None:
        self._tokenizer = load_fast(tokenizer_file, special_text_is_plain)

    def hard_strings(self) -> list[str]:
        """Return texts on which encoders are likely to fail, some with this tokenizer's added tokens."""
        added_tokens = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        return [*HARD_STRINGS, *special_token_strings(added_tokens)]

    def encode(self, texts: Iterable[str]) -> "list[Encoding]":
        """Return the texts' encodings, without added BOS or EOS; InputError if the tokenizer cannot encode a text."""
        encodings = []
        for text in texts:
            try:
                with panics_as_errors():
                    encodings.append(self._tokenizer.encode(text, add_special_tokens=False))
            except RustPanicError as panic:
                raise refuse_text(panic, text) from None
        return encodings


def find_difference(texts: Iterable[str], expected: "Iterable[Encoding]", ids: Iterable[np.ndarray]) -> str | None:
    """Return where an encoder's ids first differ from the tokenizer's, or None.

    Args:
        texts: the texts that were encoded.
        expected: the tokenizer's encoding of each text.
        ids: the encoder's ids of each text, int32 [number of tokens].
    """
    for text, encoding, token_ids in zip(texts, expected, ids, strict=True):
        if token_ids.tolist() != encoding.ids:
            return f"ids differ from the tokenizer's at {_excerpt(text, token_ids.tolist(), encoding)!r}"
    return None


def find_different_document(
    texts: Iterable[str], expected: "Iterable[Encoding]", documents: Iterable[np.ndarray], borders: Borders
) -> str | None:
    """Return where an encoder's ids with BOS and EOS first differ from the tokenizer's, or None.

    Arguments are as for :func:`find_difference`; ``documents`` are ids with BOS and EOS.
    """
    for text, encoding, token_ids in zip(texts, expected, documents, strict=True):
        expected_ids = add_borders(np.array(encoding.ids, dtype=np.int32), borders)
        if not np.array_equal(token_ids, expected_ids):
            return f"ids differ from the tokenizer's in the document that begins with {text[:_EXCERPT]!r}"
    return None


def _excerpt(text: str, token_ids: list[int], expected: "Encoding") -> str:
    """Return the text around the first id that differs."""
    num_equal = 0
    while num_equal < min(len(token_ids), len(expected.ids)) and token_ids[num_equal] == expected.ids[num_equal]:
        num_equal += 1
    position = len(text)  # after the tokenizer's last token
    if num_equal < len(expected.offsets):
        position, _ = expected.offsets[num_equal]
    return text[max(0, position - _EXCERPT) : position + _EXCERPT]


class ParityCheck:
    """A process that compares an encoder's ids with the tokenizer's; a context manager that ends the process.

    Loading the tokenizer and encoding with it takes longer than everything else before gigatoken encodes the first
    document. So the process starts as soon as the tokenizer's name is known. Call, in this order: ``start_early`` (if
    the name is known early), ``start``, ``prepare``, ``begin``, ``result``. ``begin`` and ``result`` raise InputError
    if the tokenizer cannot be loaded.
    """

    def __init__(self) -> None:
        self._worker: Worker[_Request, list[str] | str | None] | None = None
        self._sample: list[str] = []

    def __enter__(self) -> "ParityCheck":
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker:
            self._worker.kill()

    def start_early(self, name: str) -> None:
        """Start to load the tokenizer called ``name``, if there is a ``tokenizer.json`` that is used unchanged."""
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

    def begin(self, encoder: TextEncoder, borders: Borders) -> None:
        """Start to compare the encoder's ids for the same texts, each alone and all joined as documents."""
        assert self._worker is not None, "start comes first"
        hard_strings = self._worker.receive()  # the answer to ``start``
        assert isinstance(hard_strings, list)
        # in a process of its own: what the encoder loads for rare characters is freed with it
        encoding_worker: Worker[list[str], _EncodedTexts] = Worker(partial(_encode, encoder, borders))
        encoding_worker.send([*hard_strings, *self._sample])
        self._worker.send(encoding_worker.receive())
        encoding_worker.kill()
        encoding_worker.process.join()

    def result(self) -> str | None:
        """Wait for the comparison; return the place of the first difference, or None."""
        assert self._worker is not None, "start comes first"
        self._worker.receive()  # the empty answer to ``prepare``
        difference = self._worker.receive()  # the answer to ``begin``
        assert not isinstance(difference, list)
        return difference


@dataclass(frozen=True)
class _EncodedTexts:
    """The ids that an encoder gives to the compared texts."""

    ids: list[np.ndarray]  # int32 [number of tokens] of each text
    documents: list[np.ndarray]  # the same with BOS and EOS, encoded together
    borders: Borders


_Request = list[str] | _EncodedTexts | None


class _Comparison:
    """The work of the process, which answers three requests, in this order.

    1. None: load the tokenizer and return its hard strings.
    2. A sample of texts: encode the hard strings and the sample; return None.
    3. An encoder's ids for all these texts: return the first difference or None.
    """

    def __init__(self, tokenizer_file: Path, special_text_is_plain: bool) -> None:
        self._tokenizer_file = tokenizer_file
        self._special_text_is_plain = special_text_is_plain
        self._reference: Reference | None = None
        self._texts: list[str] = []
        self._expected: list[Encoding] = []

    def __call__(self, request: _Request) -> list[str] | str | None:
        if request is None:
            self._reference = Reference(self._tokenizer_file, self._special_text_is_plain)
            self._texts = self._reference.hard_strings()
            return self._texts
        if isinstance(request, list):
            assert self._reference is not None, "the tokenizer is loaded first"
            self._texts += request
            self._expected = self._reference.encode(self._texts)
            return None
        difference = find_difference(self._texts, self._expected, request.ids)
        if difference is None:
            difference = find_different_document(self._texts, self._expected, request.documents, request.borders)
        # the process waits until the run has encoded all: free its memory
        self._reference = None
        self._texts = []
        self._expected = []
        return difference


def _encode(encoder: TextEncoder, borders: Borders, texts: list[str]) -> _EncodedTexts:
    token_ids, lengths = encoder.encode_documents([text.encode() for text in texts], borders)
    documents = np.split(token_ids, np.cumsum(lengths)[:-1])
    return _EncodedTexts(encoder.encode_batch(texts), documents, borders)
