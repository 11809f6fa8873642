"""MinHash signatures, and the documents that --near_duplicates leaves out."""

import json
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_train.cleaning import near_duplicates
from fabric_train.cleaning.near_duplicates import NUM_HASHES, choose_bands, signature, similarities
from fabric_train.cli.errors import InputError
from fabric_train.tokenization import build, encoding
from fabric_train.tokenization.shards import ShardSizes
from tests.support.token_datasets import documents_in, manifest_of, tokenize, write_jsonl

_WORDS = ["".join(letters) for letters in combinations("abcdefghijk", 5)]


def text_of(seed: int, num_words: int = 400) -> list[str]:
    return [str(word) for word in np.random.default_rng(seed).choice(_WORDS, num_words)]


def edit(words: Sequence[str], places: Sequence[int]) -> list[str]:
    """Return the words with a typo in those at ``places``."""
    return [word + "x" if place in places else word for place, word in enumerate(words)]


def shingles_of(words: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(words[start : start + 5]) for start in range(len(words) - 4)}


def jaccard(first_words: Sequence[str], second_words: Sequence[str]) -> float:
    first = shingles_of(first_words)
    second = shingles_of(second_words)
    return len(first & second) / len(first | second)


def compare(first_text: str, second_text: str) -> float:
    (similarity,) = similarities(signature(first_text)[None], signature(second_text)[None])
    return float(similarity)


@pytest.mark.parametrize("num_edits", [0, 4, 8, 20, 60])
def test_signatures_estimate_the_jaccard_similarity(num_edits: int) -> None:
    errors = []
    for seed in range(20):
        words = text_of(seed)
        edited_words = edit(words, np.random.default_rng(seed).choice(400, num_edits, replace=False).tolist())
        errors.append(compare(" ".join(words), " ".join(edited_words)) - jaccard(words, edited_words))
    assert np.abs(errors).max() < 4 * 0.5 / NUM_HASHES**0.5
    assert abs(np.mean(errors)) < 3 * 0.5 / (20 * NUM_HASHES) ** 0.5


def test_a_signature_has_the_smallest_value_of_each_function() -> None:
    shingles = near_duplicates._hash_shingles(near_duplicates._hash_words("one two three four five six seven"))
    assert len(set(shingles.tolist())) == 3
    functions = zip(
        near_duplicates._MULTIPLIERS.ravel().tolist(), near_duplicates._ADDENDS.ravel().tolist(), strict=True
    )
    expected = [min((a * x + b) % 2**64 for x in shingles.tolist()) >> 32 for a, b in functions]
    assert signature("one two three four five six seven").tolist() == expected


def test_case_punctuation_and_lines_do_not_count_and_words_do() -> None:
    text = "The dog, which was old, sleeps on the warm stones of the yard."
    assert compare(text, "the dog which was\nOLD sleeps on the warm (stones) of the yard") == 1
    assert compare(text, text.replace("dog", "cat")) < 1
    assert compare("we are here", "we are there") == 0  # fewer than five words are compared whole
    assert compare("我们在学校学习中文和历史", "我们在学校，学习中文和历史。") == 1
    assert 0.1 < compare("我们在学校学习中文和历史", "我们在学校学习中文和数学") < 1


def test_a_text_longer_than_a_piece_has_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(text_of(0))
    whole = signature(text)
    monkeypatch.setattr(near_duplicates, "_CHARACTERS_AT_ONCE", 600)
    monkeypatch.setattr(near_duplicates, "_SHINGLES_AT_ONCE", 7)
    assert similarities(signature(text)[None], whole[None])[0] > 0.9


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9, 1.0])
def test_bands_find_pairs_at_the_threshold(threshold: float) -> None:
    bands, rows = choose_bands(threshold)
    assert bands * rows <= NUM_HASHES
    assert 1 - (1 - threshold**rows) ** bands >= 0.9
    assert choose_bands(0.8) == (14, 8)  # FineWeb's


def test_pieces_and_ranges_find_what_one_piece_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    signatures = random.integers(0, 1 << 32, (300, NUM_HASHES), dtype=np.uint32)
    originals = random.integers(0, 150, 125)
    for document, original in enumerate(originals, start=175):
        kept = random.random(NUM_HASHES) < random.choice([0.7, 0.9, 1])
        signatures[document] = np.where(kept, signatures[original], signatures[document])
    signatures[:30] = signatures[0]  # a large group
    signatures[100:110] = near_duplicates.NO_WORDS
    files = [tmp_path / f"{number}.signatures" for number in range(4)]
    for file, part in zip(files, np.split(signatures, [0, 7, 150]), strict=True):
        part.tofile(file)
    whole = near_duplicates.find_near_duplicates(files, 0.8, tmp_path / "bands").cluster_roots
    monkeypatch.setattr(near_duplicates, "_RECORDS_AT_ONCE", 50)
    monkeypatch.setattr(near_duplicates, "_SIGNATURES_AT_ONCE", 20)
    in_pieces = near_duplicates.find_near_duplicates(files, 0.8, tmp_path / "bands").cluster_roots
    assert not (tmp_path / "bands").exists()
    assert in_pieces.tolist() == whole.tolist() == clusters_by_all_pairs(signatures, 0.8)


def clusters_by_all_pairs(signatures: np.ndarray, threshold: float) -> list[int]:
    firsts = list(range(len(signatures)))
    similar = (signatures[:, None] == signatures).mean(axis=2) >= threshold
    for left, right in combinations(range(len(signatures)), 2):
        if similar[left, right] and (signatures[left] != near_duplicates.NO_WORDS).any():
            # join both clusters under the earlier first document
            earlier, later = sorted((firsts[left], firsts[right]))
            firsts = [earlier if first == later else first for first in firsts]
    return firsts


@pytest.fixture(scope="module")
def sources() -> dict[str, list[str]]:
    """Two sources and one for validation, by name, with planted near duplicates."""
    page = text_of(1)
    letter = text_of(2)
    chain = text_of(3)
    # similarities: 0.86 of chain and middle, 0.86 of middle and last, but 0.74 of chain and last
    middle = edit(chain, range(20, 260, 40))
    last = edit(middle, range(40, 260, 40))
    assert jaccard(chain, last) < 0.78 < 0.84 < jaccard(chain, middle)
    first = [page, ["12", "May", "2021", *letter], chain, edit(text_of(4), range(0, 400, 40))]
    second = [
        edit(page, [100, 200]),  # typos
        ["3", "June", "2022", *letter],  # another date
        ["Another", "site", "Home", "Contact", *page],  # another header
        middle,
        last,
        edit(text_of(4), range(20, 400, 40)),  # 0.64
        ["--", "..."],
        ["...", "--"],
        text_of(5),
    ]
    held_out = [edit(text_of(5), [3]), text_of(6)]
    named = {"a": first, "b": second, "v": held_out}
    return {name: [" ".join(words) for words in texts] for name, texts in named.items()}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, sources: dict[str, list[str]]) -> list[Path]:
    folder = tmp_path_factory.mktemp("sources")
    return [write_jsonl(folder / f"{name}.jsonl", texts) for name, texts in sources.items()]


def run(out: Path, tokenizer: Path, files: Sequence[Path], **options: Any) -> Path:
    tokenize(out, tokenizer, *files[:2], validation_dataset=files[2], near_duplicates=0.8, **options)
    return out


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, files: list[Path]) -> tuple[Path, str]:
    """The token dataset of one process in one go, and the output."""
    with redirect_stdout(StringIO()) as printed:
        out = run(tmp_path_factory.mktemp("whole") / "out", tiny_model_dir, files)
    return out, printed.getvalue()


def test_near_duplicates_of_all_sources_are_left_out_and_counted(
    whole: tuple[Path, str], sources: dict[str, list[str]]
) -> None:
    out, printed = whole
    manifest = manifest_of(out)
    assert manifest.ledger.documents_skipped == {"near_duplicate": 6}
    assert [source.documents for source in manifest.sources] == [4, 4, 1]
    assert manifest.cleaning["near_duplicates"]["threshold"] == manifest.settings.near_duplicates == 0.8
    assert "left out: 6 near duplicate" in printed
    sample = {line["place"].rpartition("/")[2]: line for line in map(json.loads, (out / "dropped.jsonl").open())}
    repeated = {"b.jsonl:1": 1, "b.jsonl:2": 2, "b.jsonl:3": 1, "b.jsonl:4": 3, "b.jsonl:5": 3, "v.jsonl:1": None}
    assert sample.keys() == repeated.keys()
    for place, row in repeated.items():
        similarity, _, original = sample[place]["detail"].partition(" like ")
        assert (float(similarity) >= 0.8) == (place != "b.jsonl:5")  # the end of the chain
        assert original.endswith(f"a.jsonl:{row}" if row else "b.jsonl:9")
        assert sources[place[0]][int(place[-1]) - 1].startswith(sample[place]["text"][:400])


def test_processes_shards_and_a_restart_leave_out_the_same(
    tmp_path: Path,
    tiny_model_dir: Path,
    files: list[Path],
    whole: tuple[Path, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, _ = whole
    sizes = ShardSizes(smallest=3_000, worth_keeping=0)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(build, "find_near_duplicates", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "out", tiny_model_dir, files, num_proc=2, sizes=sizes)
    assert len(list((tmp_path / ".out.unfinished").glob("*.signatures"))) > 3
    monkeypatch.setattr(encoding, "encode_shard", interrupt)  # no shard is encoded again
    out = run(tmp_path / "out", tiny_model_dir, files, num_proc=2, sizes=sizes)
    for file in ("dropped.jsonl", "train/index/documents.npy"):
        assert (out / file).read_bytes() == (expected / file).read_bytes()
    assert manifest_of(out).ledger == manifest_of(expected).ledger


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_exact_duplicates_and_caps_are_counted_apart(
    tmp_path: Path, tiny_model_dir: Path, sources: dict[str, list[str]]
) -> None:
    texts = [*sources["a"][:2], sources["a"][0], *sources["b"]]
    file = write_jsonl(tmp_path / "c.jsonl", texts)
    options = {"near_duplicates": 0.8, "deduplicate": "true"}
    rows = tokenize(tmp_path / "out", tiny_model_dir, file, validation_split=0, max_documents=3, **options)
    # a page, a letter, the page again exactly, and nearly, the letter, the page; then a chain without its first text
    assert documents_in(rows["train"], tmp_path / "out") == texts[:2]  # rows end before the third does
    ledger = manifest_of(tmp_path / "out").ledger
    assert (ledger.documents_read, ledger.documents_kept) == (7, 3)
    assert ledger.documents_skipped == {"duplicate": 1, "near_duplicate": 3}
    sample = [json.loads(line) for line in (tmp_path / "out" / "dropped.jsonl").open()]
    assert [line["reason"] for line in sample] == ["duplicate", *["near_duplicate"] * 3]
    assert sample[0]["place"].endswith("c.jsonl:3")
    assert texts[0].startswith(sample[0]["text"][:400])


def test_validation_that_only_repeats_training_is_named(
    tmp_path: Path, tiny_model_dir: Path, files: list[Path]
) -> None:
    message = (
        r"^validation: every document is left out \(4 near duplicate\); leave out the source, or the options that "
        r"drop its documents$"
    )
    with pytest.raises(InputError, match=message):
        tokenize(tmp_path / "out", tiny_model_dir, files[0], validation_dataset=files[0], near_duplicates=0.8)
    assert not (tmp_path / "out").exists()
