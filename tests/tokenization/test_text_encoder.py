"""Every encoder gives the tokenizer's ids, also for texts that it splits; a difference is found and shown."""

import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from fabric_train.tokenization.tokenizers import long_texts
from fabric_train.tokenization.tokenizers.hard_strings import HARD_STRINGS
from fabric_train.tokenization.tokenizers.long_texts import (
    LineSplitter,
    NoSplitter,
    SpaceSplitter,
    TextPart,
    find_splitter,
)
from fabric_train.tokenization.tokenizers.reference import Reference
from fabric_train.tokenization.tokenizers.reference import find_difference as find_difference_from
from fabric_train.tokenization.tokenizers.text_encoder import FastEncoder, TextEncoder, add_bos_eos, open_encoder
from fabric_train.tokenization.tokenizers.tokenizer_json import read_tokenizer_json


def find_difference(encoder: TextEncoder, tokenizer_file: Path, plain: bool, *texts: str) -> str | None:
    """Compare the encoder's ids of ``texts``, or of the hard strings if there are none, with the tokenizer's."""
    reference = Reference(tokenizer_file, plain)
    chosen = list(texts) or reference.hard_strings()
    return find_difference_from(chosen, reference.encode(chosen), encoder.encode_batch(chosen))


@pytest.fixture(scope="module")
def spm_file(spm_dir: Path) -> Path:
    return spm_dir / "tokenizer.json"


@pytest.fixture(scope="module")
def works(shakespeare_jsonl: Path) -> list[str]:
    with shakespeare_jsonl.open(encoding="utf-8") as lines:
        return [json.loads(next(lines))["text"] for _ in range(8)]


def edited(file: Path, target: Path, **parts: object) -> Path:
    target.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | parts), encoding="utf-8")
    return target


LOWERCASE = {"type": "Lowercase"}


def test_hard_strings_get_the_tokenizers_ids_from_tiktoken(smollm2_dir: Path, works: list[str]) -> None:
    encoder, name = open_encoder(smollm2_dir / "tokenizer.json", False)
    assert name == "tiktoken"
    assert find_difference(encoder, smollm2_dir / "tokenizer.json", False) is None
    assert find_difference(encoder, smollm2_dir / "tokenizer.json", False, works[0][:20_000]) is None


def test_unsupported_tokenizer_uses_tokenizers_and_gives_the_reason(
    smollm2_dir: Path, spm_file: Path, tmp_path: Path
) -> None:
    lowercase = edited(smollm2_dir / "tokenizer.json", tmp_path / "tokenizer.json", normalizer=LOWERCASE)
    for file, plain, reason in ((lowercase, False, "normalizer is Lowercase"), (spm_file, True, "byte_fallback")):
        encoder, name = open_encoder(file, plain)
        assert name.startswith("encode_batch_fast: ")
        assert reason in name
        assert find_difference(encoder, file, plain) is None


def test_first_difference_is_shown_with_the_text_around_it(smollm2_dir: Path, tmp_path: Path) -> None:
    encoder, _ = open_encoder(smollm2_dir / "tokenizer.json", False)
    lowercase = edited(smollm2_dir / "tokenizer.json", tmp_path / "tokenizer.json", normalizer=LOWERCASE)
    found = find_difference(encoder, lowercase, False, *HARD_STRINGS[::10], "I knew him, Horatio")
    assert found is not None
    assert "ids differ" in found
    assert found.lower() != found
    assert len(found) < 300


class Shifting:
    """An encoder with one wrong id."""

    def __init__(self, file: Path) -> None:
        self._encoder, _ = open_encoder(file, False)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        found = self._encoder.encode_batch(texts)
        for text, ids in zip(texts, found, strict=True):
            if "Yorick" in text:
                ids[len(ids) // 2] += 1
        return found


def test_one_wrong_id_in_a_sample_of_the_corpus_is_found(smollm2_dir: Path) -> None:
    file = smollm2_dir / "tokenizer.json"
    text = "Alas, poor Yorick! I knew him, Horatio"
    assert find_difference(Shifting(file), file, False, text[:8]) is None
    found = find_difference(Shifting(file), file, False, text)
    assert found is not None
    assert "Yorick" in found


def test_splitter_is_found_only_if_it_keeps_the_ids(smollm2_dir: Path, spm_file: Path, tmp_path: Path) -> None:
    byte_level = smollm2_dir / "tokenizer.json"
    strips = {"type": "Sequence", "normalizers": [{"type": "Strip", "strip_left": True, "strip_right": True}]}
    cases: list[tuple[Path, dict[str, object], bool, type]] = [
        (byte_level, {}, False, LineSplitter),
        (byte_level, {"normalizer": LOWERCASE}, False, NoSplitter),
        (byte_level, {"pre_tokenizer": {"type": "Whitespace"}}, False, NoSplitter),
        (spm_file, {}, True, SpaceSplitter),
        (spm_file, {}, False, NoSplitter),
        (spm_file, {"normalizer": strips}, True, NoSplitter),
    ]
    for file, parts, plain, expected in cases:
        content = read_tokenizer_json(edited(file, tmp_path / "tokenizer.json", **parts))
        assert isinstance(find_splitter(content, plain), expected), (file, parts, plain)


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
LINES = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=60).map("".join)


@given(text=LINES)
@settings(max_examples=200, deadline=None)
def test_parts_of_a_text_have_its_ids_wherever_it_is_split(smollm2_dir: Path, spm_file: Path, text: str) -> None:
    for file, plain in ((smollm2_dir / "tokenizer.json", False), (spm_file, True)):
        splitter, whole = loaded(file, plain)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(long_texts, "MIN_PART_CHARACTERS", 1)  # split wherever it is allowed
            parts = splitter.split(text)
        ids = [index for part in parts for index in ids_of(whole, part)]
        assert ids == ids_of(whole, TextPart(text))


_LOADED: dict[Path, tuple[long_texts.TextSplitter, Tokenizer]] = {}


def loaded(file: Path, plain: bool) -> tuple[long_texts.TextSplitter, Tokenizer]:
    if file not in _LOADED:
        whole = Tokenizer.from_file(str(file))
        whole.encode_special_tokens = plain
        _LOADED[file] = (find_splitter(read_tokenizer_json(file), plain), whole)
    return _LOADED[file]


def ids_of(whole: Tokenizer, part: TextPart) -> list[int]:
    return list(whole.encode(part.text, add_special_tokens=False).ids[part.num_dropped :])


def test_long_sentencepiece_text_is_split_and_keeps_its_ids(
    spm_file: Path, spm_tokenizer_model: Path, works: list[str]
) -> None:
    text = "\n".join(works)[:300_000]
    encoder, _ = open_encoder(spm_file, True)
    assert len(find_splitter(read_tokenizer_json(spm_file), True).split(text)) > 25
    (ids,) = encoder.encode_batch([text])
    library = sentencepiece.SentencePieceProcessor(model_file=str(spm_tokenizer_model))
    assert ids.tolist() == library.encode(text)


def test_long_byte_level_text_is_split_and_keeps_its_ids(smollm2_dir: Path, works: list[str]) -> None:
    file = smollm2_dir / "tokenizer.json"
    texts = ["\n".join(works)[:300_000], "", works[0][:100]]
    by_tokenizers = FastEncoder(file, False, LineSplitter()).encode_batch(texts)
    by_tiktoken = open_encoder(file, False)[0].encode_batch(texts)
    assert [ids.tolist() for ids in by_tokenizers] == [ids.tolist() for ids in by_tiktoken]


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
    bordered = add_bos_eos(np.array(ids, np.int32), bos, 2)
    assert bordered.tolist() == expected
    assert bordered.dtype == np.int32
