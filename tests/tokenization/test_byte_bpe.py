"""tiktoken gives a byte-level tokenizer's ids for every text, or the tokenizer is refused with a reason."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from fabric_train.tokenization.tokenizers import long_texts, piece_encoder
from fabric_train.tokenization.tokenizers.byte_bpe import ByteBPE, UnsupportedTokenizerError, load_byte_bpe
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast
from fabric_train.tokenization.tokenizers.hard_strings import HARD_STRINGS
from fabric_train.tokenization.tokenizers.split_pattern import _NUMERIC, QWEN2_PATTERN

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def works(shakespeare_jsonl: Path) -> list[str]:
    with shakespeare_jsonl.open(encoding="utf-8") as lines:
        return [json.loads(next(lines))["text"] for _ in range(8)]


def train(file: Path, texts: list[str], parts: dict[str, Any], tokens: Sequence[str | AddedToken]) -> Path:
    """Train 2,000 tokens on ``texts`` and save them to ``file``."""
    tokenizer = Tokenizer(BPE())
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=2000, special_tokens=list(tokens), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(file))
    return file


def byte_level(**options: Any) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, **options)


def split(pattern: str, behavior: str = "isolated", **options: Any) -> pre_tokenizers.PreTokenizer:
    first = pre_tokenizers.Split(Regex(pattern), behavior, **options)
    return pre_tokenizers.Sequence([first, byte_level(use_regex=False)])


@pytest.fixture(scope="module")
def tokenizer_files(
    tmp_path_factory: pytest.TempPathFactory, llama3_dir: Path, smollm2_dir: Path, works: list[str]
) -> dict[str, Path]:
    """A ``tokenizer.json`` of each style."""
    folder = tmp_path_factory.mktemp("tokenizers")
    texts = [
        *(work[:50_000] for work in works[:2]),
        "Ça déjà été où? 日本語のテキスト、中文文本。 한국어 Việt Ångström",
    ]
    # GPT-2's added tokens are matched after normalization, Qwen's before it
    gpt2 = [AddedToken(token, normalized=True, special=True) for token in SPECIAL[:1]]
    qwen = {"normalizer": normalizers.NFC(), "pre_tokenizer": split(QWEN2_PATTERN)}
    return {
        "llama-3": llama3_dir / "tokenizer.json",
        "smollm2": smollm2_dir / "tokenizer.json",
        "gpt2": train(folder / "gpt2.json", texts, {"pre_tokenizer": byte_level()}, gpt2),
        "small llama-3": edited(folder / "gpt2.json", folder / "small.json", list_all_ways),
        "qwen": train(folder / "qwen.json", texts, qwen, SPECIAL),
    }


@pytest.fixture(scope="module", params=["llama-3", "smollm2", "gpt2", "qwen"])
def pair(request: pytest.FixtureRequest, tokenizer_files: dict[str, Path]) -> tuple[ByteBPE, Tokenizer]:
    file = tokenizer_files[request.param]
    return load_byte_bpe(file, False), reference(file)


@cache
def reference(file: Path) -> Tokenizer:
    return load_fast(file, False)


def ids_of(fast: Tokenizer, text: str) -> list[int]:
    return list(fast.encode(text, add_special_tokens=False).ids)


def assert_same_ids(pair: tuple[ByteBPE, Tokenizer], texts: list[str]) -> None:
    for text, ids in zip(texts, pair[0].encode_batch(texts), strict=True):
        assert ids.dtype == np.int32
        assert ids.tolist() == ids_of(pair[1], text), text[:200]


# characters and tokens that determine where pieces end; strategies mix them with any code points
PARTS = ["'s", "'S", "'ſ", "'LL", "re", "the", " ", "  ", "\n", "\r\n", "\t", "\u3000", "\x85", "1", "22", "½", "٣"]
PARTS += [
    "\U00011de3",
    "e",
    "\u0301",
    ">",
    "\u0338",
    "ǅ",
    "日本",
    "한",
    "가",
    "😀",
    "\u200d",
    "=",
    "_",
    "\x00",
    "\U0010ffff",
    "\U00016d68",
]
PARTS += [*SPECIAL, "<|begin_of_text|>", "<|eot_id|>", "<|", "|>", "<|im_", "<repo_name>"]
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=5), max_size=30).map("".join)


@given(texts=st.lists(TEXTS, min_size=10, max_size=30))
@settings(max_examples=30, deadline=None)
def test_any_text_gets_the_tokenizers_ids(pair: tuple[ByteBPE, Tokenizer], texts: list[str]) -> None:
    assert_same_ids(pair, texts)


@pytest.fixture(scope="module", params=["llama-3", "qwen"])
def quick_pair(request: pytest.FixtureRequest, tokenizer_files: dict[str, Path]) -> tuple[ByteBPE, Tokenizer]:
    """An encoder that uses the pattern without lookahead where it is safe, as after millions of characters."""
    file = tokenizer_files[request.param]
    encoder = load_byte_bpe(file, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(piece_encoder, "_WORTH_A_SECOND", 0)
        encoder.encode_batch(["one text"])
    assert encoder.pieces._quick_encoding is not encoder.pieces._encoding
    return encoder, reference(file)


@given(texts=st.lists(TEXTS, min_size=10, max_size=30))
@settings(max_examples=30, deadline=None)
def test_ids_do_not_depend_on_lookahead_or_where_a_text_is_split(
    quick_pair: tuple[ByteBPE, Tokenizer], texts: list[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_texts, "MIN_PART_CHARACTERS", 1)
        assert_same_ids(quick_pair, texts)


def test_real_text_gets_the_same_ids_without_lookahead(quick_pair: tuple[ByteBPE, Tokenizer], works: list[str]) -> None:
    single_spaced = [work[50_000:90_000].replace("  ", " ") for work in works[:3]]
    assert_same_ids(quick_pair, [*single_spaced, *HARD_STRINGS])


def test_real_text_gets_the_tokenizers_ids(pair: tuple[ByteBPE, Tokenizer], works: list[str]) -> None:
    assert_same_ids(pair, [work[50_000:90_000] for work in works[:5]])


@pytest.mark.parametrize(
    "text",
    [
        "a" * 500_000,
        " " * 600_000 + "x",
        "x" + "\u3000" * 150_000,
        "中文文本" * 30_000,
        "=" * 200_000,
        " \n" * 100_000,
    ],
    ids=["letters", "spaces", "wide spaces", "no spaces", "punctuation", "lines"],
)
def test_one_very_long_piece_is_encoded_correctly_within_seconds(
    tokenizer_files: dict[str, Path], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    encoder = load_byte_bpe(tokenizer_files["qwen"], False)
    started = time.perf_counter()
    (ids,) = encoder.encode_batch([text])
    assert time.perf_counter() - started < 20
    assert ids.tolist() == ids_of(reference(tokenizer_files["qwen"]), text)
    assert "panicked" not in capfd.readouterr().err


def test_plain_special_tokens_stay_text_and_other_added_tokens_do_not(tmp_path: Path, works: list[str]) -> None:
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    others = [AddedToken("<|im_start", special=False), AddedToken("start|>", special=False)]
    file = train(tmp_path / "t.json", [works[0][:50_000]], {"pre_tokenizer": byte_level()}, special + others)
    text = "a<|im_start|>b<|im_start>c start|><|endoftext|>"
    for plain in (False, True):
        assert_same_ids((load_byte_bpe(file, plain), load_fast(file, plain)), [text])
    plainly, specially = (load_byte_bpe(file, plain).encode_batch([text])[0].tolist() for plain in (True, False))
    assert 0 in specially
    assert 0 not in plainly


def edited(file: Path, target: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    content = json.loads(file.read_text(encoding="utf-8"))
    edit(content)
    target.write_text(json.dumps(content), encoding="utf-8")
    return target


def swap_merges(content: dict[str, Any]) -> None:
    """Swap the merge that makes "the" and one of its parts."""
    merges = content["model"]["merges"]
    merges[3], merges[400] = merges[400], merges[3]


def drop_merge(content: dict[str, Any]) -> None:
    del content["model"]["merges"][50]


def keep_some_ways(content: dict[str, Any]) -> None:
    merges = content["model"]["merges"]
    first = dict.fromkeys(map("".join, merges), True)
    content["model"]["merges"] = [
        merge for number, merge in enumerate(merges) if first.pop("".join(merge), False) or number % 2
    ]


def list_all_ways(content: dict[str, Any]) -> None:
    """Let the merges be as in Llama-3's: all ways to make each token, and pieces that are tokens are kept whole."""
    vocabulary = content["model"]["vocab"]
    ways = [
        (token[:cut], token[cut:]) for token in sorted(vocabulary, key=vocabulary.get) for cut in range(1, len(token))
    ]
    merges = [list(way) for way in ways if vocabulary.keys() >= set(way)]
    content["model"].update(merges=merges, ignore_merges=True)


def set_model(**options: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["model"].update(options)


def set_pre_tokenizer(step: pre_tokenizers.PreTokenizer) -> Callable[[dict[str, Any]], None]:
    holder = Tokenizer(BPE())
    holder.pre_tokenizer = step
    parsed = json.loads(holder.to_str())["pre_tokenizer"]
    return lambda content: content.update(pre_tokenizer=parsed)


def set_token(**options: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["added_tokens"][0].update(options)


REFUSED: dict[str, tuple[str, Callable[[dict[str, Any]], None], str]] = {
    "merges in another order": ("gpt2", swap_merges, "do not make|before they make"),
    "a merge left out": ("gpt2", drop_merge, "which they do not make|do not make every token"),
    "merges in another order than ids": ("small llama-3", swap_merges, "order"),
    "some ways to make a token left out": (
        "small llama-3",
        keep_some_ways,
        "lacks some",
    ),
    "several ways to make a token": ("small llama-3", set_model(ignore_merges=False), "several ways"),
    "a token that no merge makes": (
        "gpt2",
        lambda content: content["model"].update(ignore_merges=True, vocab=content["model"]["vocab"] | {"zzz": 2000}),
        "no merge makes its token 'zzz'",
    ),
    "dropout": ("gpt2", set_model(dropout=0.1), "dropout"),
    "another model": ("gpt2", lambda content: content.update(model={"type": "Unigram", "vocab": []}), "Unigram"),
    "a space before the text": ("gpt2", set_pre_tokenizer(pre_tokenizers.ByteLevel()), "space before"),
    "two splits": (
        "gpt2",
        set_pre_tokenizer(pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), byte_level()])),
        r"\(Punctuation, ByteLevel\) is not known",
    ),
    "no bytes": ("gpt2", set_pre_tokenizer(pre_tokenizers.Whitespace()), "not byte-level"),
    "words as Oniguruma defines them": ("gpt2", set_pre_tokenizer(split(r"\w+|\W")), "another meaning"),
    "an interval that only tiktoken reads as possessive": (
        "gpt2",
        set_pre_tokenizer(split(r"a{1,3}+|.")),
        "another meaning",
    ),
    "pieces joined with what follows": ("gpt2", set_pre_tokenizer(split(" ", "merged_with_next")), "MergedWithNext"),
    "a lower-casing normalizer": (
        "gpt2",
        lambda content: content.update(normalizer={"type": "Lowercase"}),
        "normalizer is Lowercase",
    ),
    "a token that includes whitespace": ("gpt2", set_token(lstrip=True), "depends on the whitespace"),
    "a token with the id of another": ("gpt2", set_token(id=7), "another id than 7"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_tokenizer_raises_an_error_with_the_reason(
    tokenizer_files: dict[str, Path], tmp_path: Path, case: str
) -> None:
    style, edit, reason = REFUSED[case]
    load_byte_bpe(tokenizer_files[style], False)
    with pytest.raises(UnsupportedTokenizerError, match=reason):
        load_byte_bpe(edited(tokenizer_files[style], tmp_path / "tokenizer.json", edit), False)


@pytest.mark.parametrize(("behavior", "invert"), [("isolated", False), ("removed", True)])
def test_text_between_pattern_matches_is_kept_or_dropped_as_set(
    tokenizer_files: dict[str, Path], tmp_path: Path, behavior: str, invert: bool
) -> None:
    step = split(r"\p{L}+| ?\p{N}", behavior, invert=invert)
    file = edited(tokenizer_files["gpt2"], tmp_path / "tokenizer.json", set_pre_tokenizer(step))
    assert_same_ids((load_byte_bpe(file, False), load_fast(file, False)), ["the king, 1605 ... (and) so--on !!"])


@pytest.fixture(scope="module")
def all_characters() -> str:
    return "".join(chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000)


def code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


@pytest.mark.parametrize("expression", [r"\p{L}", r"\p{N}", r"\s", "(?i:s|t|re|ve|m|ll|d)"])
def test_both_libraries_agree_on_unicode_classes(all_characters: str, expression: str) -> None:
    split_off = pre_tokenizers.Split(Regex(expression), "removed")
    parts = (all_characters[start : start + 5000] for start in range(0, len(all_characters), 5000))
    others = "".join(piece for part in parts for piece, _ in split_off.pre_tokenize_str(part))
    in_tokenizers = np.setdiff1d(code_points(all_characters), code_points(others), assume_unique=True)
    single_bytes = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding("class", pat_str=expression, mergeable_ranks=single_bytes, special_tokens={})
    in_tiktoken = code_points(bytes(encoding.encode_ordinary(all_characters)).decode())
    assert len(in_tiktoken) > 0
    assert in_tokenizers.tolist() == in_tiktoken.tolist()


def test_digits_pattern_matches_what_the_digits_step_splits(all_characters: str) -> None:
    parts = (all_characters[start : start + 5000] for start in range(0, len(all_characters), 5000))
    digits, by_class = pre_tokenizers.Digits(individual_digits=False), Regex(f"[{_NUMERIC}]+")
    by_pattern = pre_tokenizers.Split(by_class, "isolated")
    for part in parts:
        assert digits.pre_tokenize_str(part) == by_pattern.pre_tokenize_str(part)
