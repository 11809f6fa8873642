"""Every encoder gives the tokenizer's ids, alone and joined as documents; a difference is found and shown."""

import json
import random
import unicodedata
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from gigatoken.gigatoken_rs import pretokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from fabric_train.cli.errors import InputError
from fabric_train.tokenization.tokenizers import gigatoken_json
from fabric_train.tokenization.tokenizers.gigatoken_json import CharacterFinder
from fabric_train.tokenization.tokenizers.parity_check import HARD_STRINGS, Reference, find_different_document
from fabric_train.tokenization.tokenizers.parity_check import find_difference as find_difference_from
from fabric_train.tokenization.tokenizers.text_encoder import (
    Borders,
    FastEncoder,
    GigatokenEncoder,
    TextEncoder,
    add_borders,
    open_encoder,
)


def find_difference(encoder: TextEncoder, tokenizer_file: Path, plain: bool, *texts: str) -> str | None:
    """Compare the encoder's ids of ``texts``, or of the hard strings if there are none, with the tokenizer's."""
    reference = Reference(tokenizer_file, plain)
    chosen = list(texts) or reference.hard_strings()
    return find_difference_from(chosen, reference.encode(chosen), encoder.encode_batch(chosen))


@pytest.fixture(scope="module")
def spm_file(small_spm_dir: Path) -> Path:
    return small_spm_dir / "tokenizer.json"


@pytest.fixture(scope="module")
def works(shakespeare_jsonl: Path) -> list[str]:
    with shakespeare_jsonl.open(encoding="utf-8") as lines:
        return [json.loads(next(lines))["text"] for _ in range(8)]


def edited(file: Path, target: Path, **parts: object) -> Path:
    target.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | parts), encoding="utf-8")
    return target


LOWERCASE = {"type": "Lowercase"}


@pytest.mark.parametrize("name", ["small_llama3_dir", "chatml_dir", "small_spm_dir"])
@pytest.mark.parametrize("plain", [False, True])
def test_hard_strings_get_the_tokenizers_ids_from_gigatoken(
    request: pytest.FixtureRequest, works: list[str], name: str, plain: bool
) -> None:
    file = request.getfixturevalue(name) / "tokenizer.json"
    encoder, used = open_encoder(file, plain)
    assert used == "gigatoken"
    assert find_difference(encoder, file, plain) is None
    assert find_difference(encoder, file, plain, works[0][:20_000]) is None


def test_unsupported_tokenizer_uses_tokenizers_and_gives_the_reason(chatml_dir: Path, tmp_path: Path) -> None:
    lowercase = edited(chatml_dir / "tokenizer.json", tmp_path / "tokenizer.json", normalizer=LOWERCASE)
    encoder, name = open_encoder(lowercase, False)
    assert name == "tokenizers: Unsupported normalizer type: Lowercase"
    assert find_difference(encoder, lowercase, False) is None


def test_first_difference_is_shown_with_the_text_around_it(chatml_dir: Path, tmp_path: Path) -> None:
    encoder, _ = open_encoder(chatml_dir / "tokenizer.json", False)
    lowercase = edited(chatml_dir / "tokenizer.json", tmp_path / "tokenizer.json", normalizer=LOWERCASE)
    difference = find_difference(encoder, lowercase, False, *HARD_STRINGS[::10], "I knew him, Horatio")
    assert difference is not None
    assert "ids differ" in difference
    assert difference.lower() != difference  # it shows a text with capitals
    assert len(difference) < 300


class Shifting:
    """An encoder with one wrong id."""

    def __init__(self, file: Path) -> None:
        self._encoder, _ = open_encoder(file, False)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        ids_of_texts = self._encoder.encode_batch(texts)
        for text, ids in zip(texts, ids_of_texts, strict=True):
            if "Yorick" in text:
                ids[len(ids) // 2] += 1
        return ids_of_texts

    def encode_documents(self, texts: Sequence[bytes], borders: Borders) -> tuple[np.ndarray, np.ndarray]:
        return self._encoder.encode_documents(texts, borders)


def test_one_wrong_id_in_a_sample_of_the_corpus_is_found(chatml_dir: Path) -> None:
    file = chatml_dir / "tokenizer.json"
    text = "Alas, poor Yorick! I knew him, Horatio"
    assert find_difference(Shifting(file), file, False, text[:8]) is None
    difference = find_difference(Shifting(file), file, False, text)
    assert difference is not None
    assert "Yorick" in difference


PIECES = [
    "\n",
    "\n\n",
    " ",
    "  ",
    "\r\n",
    "\t",
    "a",
    "the",
    "The",
    ".",
    "!!",
    "1",
    "é",
    "\u0301",
    "日本",
    "▁",
    "😀",
    "\x1c",
    "<s>",
]
# where two libraries may differ: digits, bytes without a token, letters and marks of the newest Unicode versions
RARE = ["\x04", "²", "٣", "\u0897", "\U00011de3", "\U00016ff4", "\U00032d2b", "\u1acf", "\U0001ccf1"]
TEXTS = st.lists(st.sampled_from([*PIECES, *RARE]) | st.text(max_size=3), max_size=40).map("".join)


@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_documents_have_the_tokenizers_ids_alone_and_joined(
    chatml_dir: Path, small_llama3_dir: Path, spm_file: Path, texts: list[str]
) -> None:
    for file, plain, bos, eos in (
        (chatml_dir / "tokenizer.json", False, 0, 0),
        (chatml_dir / "tokenizer.json", True, 1, 2),
        (small_llama3_dir / "tokenizer.json", False, 0, 1),
        (spm_file, True, 1, 2),
    ):
        encoder, reference = loaded(file, plain)
        expected = reference.encode(texts)
        assert find_difference_from(texts, expected, encoder.encode_batch(texts)) is None
        borders = Borders(bos, eos)
        ids, lengths = encoder.encode_documents([text.encode() for text in texts], borders)
        documents = np.split(ids, np.cumsum(lengths)[:-1])
        assert find_different_document(texts, expected, documents, borders) is None


@cache
def loaded(file: Path, plain: bool) -> tuple[TextEncoder, Reference]:
    encoder, name = open_encoder(file, plain)
    assert name == "gigatoken"
    return encoder, Reference(file, plain)


def test_the_text_of_bos_and_eos_in_a_document_does_not_end_it(small_llama3_dir: Path) -> None:
    encoder, _ = loaded(small_llama3_dir / "tokenizer.json", False)
    texts = [b"<|begin_of_text|>one", b"in<|end_of_text|><|end_of_text|>", b"a<|end_of_text|><|begin_of_text|>b", b"c"]
    ids, lengths = encoder.encode_documents(texts, Borders(0, 1))
    assert lengths.tolist() == [3, 3, 6, 3]
    assert ids[[0, 2, 3, 5, 6, 11, 12, 14]].tolist() == [0, 1] * 4


def byte_tokenizer(target: Path, eos: str, *added: dict[str, object], **parts: object) -> Path:
    """Write a byte-level tokenizer with a token for each byte, one for "'S", EOS (256) and more added tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, eos, "'S"])}
    defaults = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokens = [{"content": eos, "special": True}, *added]
    content = {
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [["'", "S"]]},
        "added_tokens": [defaults | token | {"id": 256 + 2 * number} for number, token in enumerate(tokens)],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    }
    target.write_text(json.dumps(content | parts), encoding="utf-8")
    return target


def check_documents(file: Path, borders: Borders, *texts: str) -> None:
    """Check that documents encoded by gigatoken have the tokenizer's ids, each on its own and all joined."""
    encoder, name = open_encoder(file, False)
    assert name == "gigatoken"
    expected = Reference(file, False).encode(texts)
    assert find_difference_from(texts, expected, encoder.encode_batch(list(texts))) is None
    ids, lengths = encoder.encode_documents([text.encode() for text in texts], borders)
    documents = np.split(ids, np.cumsum(lengths)[:-1])
    assert find_different_document(texts, expected, documents, borders) is None


NFC = {"type": "NFC"}


def test_nfc_gives_the_tokenizers_ids_also_for_new_marks(tmp_path: Path) -> None:
    file = byte_tokenizer(tmp_path / "tokenizer.json", "<eos>", normalizer=NFC)
    marks = {chr(code) for code in range(0x300, 0x1F000) if unicodedata.combining(chr(code))}
    marks |= {chr(code) for code in gigatoken_json._NEW_IN_NFC}
    composed = ["\U00011935\U00011930", "\U000105d2\u0307", "\U00016d69\U00016d67", "\u1100\u1161\u11a8"]
    texts = [f"a{mark}\u0338b\u0301{mark}" for mark in sorted(marks)]
    check_documents(file, Borders(None, 256), *texts, *composed, "e\u0301", "\u0338")


def test_added_tokens_that_are_matched_after_nfc_are_left_to_tokenizers(tmp_path: Path) -> None:
    token = {"content": "<tool>", "normalized": True}
    file = byte_tokenizer(tmp_path / "tokenizer.json", "<eos>", token, normalizer=NFC)
    encoder, name = open_encoder(file, False)
    assert name == "tokenizers: it is of another kind: it has added tokens that are matched after NFC"
    assert find_difference(encoder, file, False, "a<tool>b <tool>\u0338") is None


def test_symbols_of_the_newest_unicode_are_split_as_by_the_tokenizer(tmp_path: Path) -> None:
    isolated = {"type": "Split", "behavior": "Isolated", "invert": False}
    words = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    others = "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    patterns = ("\\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", words + others)  # DeepSeek's
    splits: list[dict[str, object]] = [isolated | {"pattern": {"Regex": pattern}} for pattern in patterns]
    splits += [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]
    pre_tokenizer = {"type": "Sequence", "pretokenizers": splits}
    file = byte_tokenizer(tmp_path / "tokenizer.json", "<eos>", pre_tokenizer=pre_tokenizer)
    codes = [*gigatoken_json._NEW_SYMBOLS, *range(0x2000, 0x2C00), *range(0x1F000, 0x1FC00), *range(0xFB50, 0xFE00)]
    check_documents(file, Borders(None, 256), *(f"{chr(code)}'S {chr(code)} 'S" for code in codes))


@pytest.mark.parametrize(
    ("eos", "other", "texts"),
    [
        ("\n</s>\n", "<tool>", ["\n</s>", "a", "b"]),  # EOS overlaps itself
        ("</s>", ".<", ["a.", "b</s>c", "d"]),  # and another token
        ("<s", "<sep>", ["a", "ep>b", "c<sd"]),  # and begins one
    ],
)
def test_documents_are_joined_only_by_tokens_that_overlap_no_other(
    tmp_path: Path, eos: str, other: str, texts: list[str]
) -> None:
    file = byte_tokenizer(tmp_path / "tokenizer.json", eos, {"content": other})
    check_documents(file, Borders(None, 256), *texts)


def test_documents_are_not_joined_by_a_token_matched_after_a_prefix_is_added(spm_file: Path, tmp_path: Path) -> None:
    tokens = [token | {"normalized": True} for token in json.loads(spm_file.read_text())["added_tokens"]]
    file = edited(spm_file, tmp_path / "tokenizer.json", added_tokens=tokens)
    for borders in (Borders(1, 2), Borders(None, 2)):
        check_documents(file, borders, "give ")
        check_documents(file, borders, "give ", "a", " b")


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_documents_are_joined_only_if_their_starts_stay_starts(spm_file: Path, tmp_path: Path, scheme: str) -> None:
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    file = edited(spm_file, tmp_path / "tokenizer.json", normalizer=None, pre_tokenizer=space)
    encoder = open_encoder(file, False)[0]
    reference = Reference(file, False)
    texts = ["hello world", "another text"]
    ids, lengths = encoder.encode_documents([text.encode() for text in texts], Borders(1, 2))
    documents = np.split(ids, np.cumsum(lengths)[:-1])
    assert find_different_document(texts, reference.encode(texts), documents, Borders(1, 2)) is None


def test_a_grown_cache_is_emptied_and_ids_stay_the_same(small_llama3_dir: Path) -> None:
    file = small_llama3_dir / "tokenizer.json"
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=20_000)).encode() for _ in range(3)]
    expected = GigatokenEncoder(file, False).encode_documents(texts, Borders(0, 1))[0]
    encoder = GigatokenEncoder(file, False, most_growth=-1 << 40, text_between_looks=1)
    before = encoder._backend
    assert np.array_equal(encoder.encode_documents(texts, Borders(0, 1))[0], expected)
    assert encoder._backend is not before


def test_memory_is_looked_at_after_ten_megabytes(tmp_path: Path) -> None:
    encoder = GigatokenEncoder(byte_tokenizer(tmp_path / "tokenizer.json", "<eos>"), False, most_growth=-1 << 40)
    before = encoder._backend
    encoder.encode_documents([b"a few words " * 850_000], Borders(None, 256))
    assert encoder._backend is not before


def test_the_libraries_differ_only_in_the_characters_that_are_set_apart() -> None:
    """Compare what both libraries take for letters and numbers, by the pieces into which they split a text."""
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    codes = [*range(0x80, 0x3000), *range(0xA000, 0xD800, 7), *range(0xE000, 0x20000, 3), *range(0x2A6D0, 0x34000, 41)]
    known = CharacterFinder(gigatoken_json._NEW_CHARACTERS)
    for code in {*codes, *gigatoken_json._NEW_CHARACTERS}:
        letter = chr(code)
        text = f"a{letter}a1{letter}1.{letter}."
        if not known.is_in(text.encode()):
            assert [piece.encode() for piece, _ in split.pre_tokenize_str(text)] == list(pretokenizer(text.encode())), (
                code
            )


@given(
    text=st.text(max_size=60), characters=st.sets(st.integers(128, 0xD7FF) | st.integers(0xE000, 0x10FFFF), min_size=1)
)
def test_a_character_is_found_wherever_it_is(text: str, characters: set[int]) -> None:
    finder = CharacterFinder(characters)
    assert finder.is_in(text.encode()) == any(ord(letter) in characters for letter in text)
    assert finder.is_in(f"{text}{chr(min(characters))}{text}".encode())


@pytest.mark.parametrize(
    ("ids", "bos", "expected"),
    [
        ([7, 8], 1, [1, 7, 8, 2]),
        ([1, 1, 7, 8, 2, 2], 1, [1, 7, 8, 2]),
        ([7, 2, 1, 8], 1, [1, 7, 2, 1, 8, 2]),
        ([7, 8, 2], None, [7, 8, 2]),
        ([], 1, [1, 2]),
        ([2, 2], 2, [2, 2]),
        ([], None, [2]),
    ],
)
def test_a_document_begins_with_one_bos_and_ends_with_one_eos(
    ids: list[int], bos: int | None, expected: list[int]
) -> None:
    bordered = add_borders(np.array(ids, np.int32), Borders(bos, 2))
    assert bordered.tolist() == expected
    assert bordered.dtype == np.int32


def test_a_text_that_the_tokenizer_cannot_take_is_named(tmp_path: Path, tiny_model_dir: Path) -> None:
    content = json.loads((tiny_model_dir / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, whole]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    encode = FastEncoder(tmp_path / "tokenizer.json", special_text_is_plain=True).encode_batch
    check = Reference(tmp_path / "tokenizer.json", special_text_is_plain=True).encode
    for encoding in (encode, check):
        with pytest.raises(
            InputError,
            match=r"^the tokenizers library failed: .*retry-limit.*, in the text that begins with 'x{60}'; leave",
        ):
            encoding(["one", "x" * 99, "two"])
