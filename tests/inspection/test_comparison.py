"""python -m fabric_train.inspection --compare A B shows two corpora side by side."""

import json
import random
import re
import shutil
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_train.cleaning import language
from fabric_train.cli.errors import InputError
from fabric_train.cli.parser import parse_arguments
from fabric_train.inspection import __main__ as inspect
from fabric_train.inspection import comparison
from fabric_train.inspection.__main__ import InspectArguments
from fabric_train.inspection.comparison import (
    Comparison,
    OpenCorpus,
    SampledDocument,
    WordCounts,
    amount_of_work,
    compare,
    open_corpora,
    sample_documents,
    words_more_often,
)
from fabric_train.inspection.rendering import amount
from fabric_train.token_dataset.token_folder import open_splits
from fabric_train.tokenization import merge
from tests.support.token_datasets import tokenize, write_jsonl

HARD = "<script>alert('x')</script> \x1b[31m \u202edrawkcab end"
PLANTED = "the Green\nLantern"


def texts_of(name: str, count: int, planted: str) -> list[str]:
    """Return texts of 3 to 300 words that end with ``planted``."""
    draw = random.Random(name)
    vocabulary = ["sea", "wind", "stone", "é", "moon", "river", "of", "and"]
    texts = []
    for _ in range(count):
        num_words = draw.choice([3, 20, 300])
        words = draw.choices(vocabulary, k=num_words)
        texts.append(" ".join([*words, planted]))
    return texts


TEXTS = {
    "shared": texts_of("shared", 20, HARD),
    "lantern": texts_of("lantern", 40, PLANTED),
    "moon": texts_of("moon", 30, "no Lantern at all"),
}


def sampled(corpus: OpenCorpus) -> list[SampledDocument]:
    return list(sample_documents(corpus, lambda done: None))


def compared(*folders: Path) -> Comparison:
    """Compare two folders, and check the progress."""
    advances: list[int] = []
    corpora = open_corpora(folders, "train")
    comparison_of_folders = compare(corpora, "none", advances.append)
    assert sum(advances) == amount_of_work(corpora)
    return comparison_of_folders


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """NAME=FILE of each source."""
    folder = tmp_path_factory.mktemp("texts")
    return {name: f"{name}={write_jsonl(folder / f'{name}.jsonl', texts)}" for name, texts in TEXTS.items()}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, sources: dict[str, str]) -> Path:
    folder = tmp_path_factory.mktemp("first") / "tokens"
    options = {"packing": "best_fit", "max_length": 64, "validation_split": 0}
    tokenize(folder, tiny_model_dir, sources["shared"], sources["lantern"], **options)
    return folder


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory, small_spm_dir: Path, sources: dict[str, str]) -> Path:
    """With another tokenizer, packing and row length than the first."""
    folder = tmp_path_factory.mktemp("second") / "tokens"
    options = {"packing": "none", "max_length": 50, "overlap": 7, "validation_split": 0}
    tokenize(folder, small_spm_dir, sources["shared"], sources["moon"], **options)
    return folder


def test_totals_are_those_of_all_documents(first: Path, second: Path) -> None:
    both = compared(first, second)
    assert not both.same_tokenizer
    for corpus, names in zip(both.corpora, (["shared", "lantern"], ["shared", "moon"]), strict=True):
        # documents and bytes of each source
        totals = corpus.totals
        assert list(totals.sources) == names
        byte_lengths: list[int] = []
        for name in names:
            lengths_of_source = [len(text.encode()) for text in TEXTS[name]]
            assert totals.sources[name].documents == len(lengths_of_source)
            assert totals.sources[name].bytes == sum(lengths_of_source)
            byte_lengths += lengths_of_source
        assert totals.byte_lengths == Counter(byte_lengths)

        # tokens of all documents
        num_tokens = corpus.manifest.ledger.splits["train"].tokens_in
        assert totals.all.tokens == num_tokens
        assert sum(length * count for length, count in totals.token_lengths.items()) == num_tokens

        # all documents are sampled, and the words of the texts do not depend on the tokenizer
        assert corpus.sample.documents == totals.all.documents
        texts = chain.from_iterable(TEXTS[name] for name in names)
        assert corpus.sample.words == sum(len(re.findall(r"\w+", text)) for text in texts)


@pytest.mark.parametrize("packing, overlap", [("concat", 5), ("best_fit", 5), ("none", 0)])
def test_sampled_texts_are_those_of_the_documents(
    packing: str, overlap: int, tmp_path: Path, first: Path, tiny_model_dir: Path, sources: dict[str, str]
) -> None:
    options = {"packing": packing, "overlap": overlap, "max_length": 32, "validation_split": 0}
    tokenize(tmp_path / "tokens", tiny_model_dir, sources["shared"], sources["lantern"], **options)
    corpus, _ = open_corpora([tmp_path / "tokens", first], "train")
    documents = sampled(corpus)

    # concat drops the last row if it is not full, and with it the end of the last document
    cut_documents = documents[-1:] if packing == "concat" else []
    whole_documents = documents[:-1] if packing == "concat" else documents
    for document in whole_documents:
        assert document.bytes == len(document.text.encode())
        assert document.tokens == document.tokens_read
    texts_left = Counter([*TEXTS["shared"], *TEXTS["lantern"]])
    texts_left.subtract(document.text for document in whole_documents)
    assert min(texts_left.values()) == 0
    for text, document in zip(texts_left.elements(), cut_documents, strict=True):
        assert text.startswith(document.text)


def test_sample_is_bounded_and_spread_over_the_corpus(
    first: Path, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, _ = open_corpora([first, second], "train")
    all_texts = [document.text for document in sampled(corpus)]
    assert corpus.sample_size == len(all_texts) == 60

    # 12 documents of at most 500 tokens together, the same at each call
    monkeypatch.setattr(comparison, "FEWEST_DOCUMENTS", 12)
    monkeypatch.setattr(comparison, "NUM_TOKENS", 500)
    sample = sampled(corpus)
    assert sample == sampled(corpus)
    assert len(sample) == 12

    # one of each of 12 equal parts
    for index, document in enumerate(sample):
        beginning = document.text.rstrip("\ufffd")  # without the bytes of a character that is cut
        part = all_texts[5 * index : 5 * index + 5]
        assert any(text.startswith(beginning) for text in part)

    # long documents are cut at one length, and a greater one is not possible
    num_tokens = sum(document.tokens_read for document in sample)
    longest = max(document.tokens_read for document in sample)
    cut_documents = [document for document in sample if document.tokens_read < document.tokens]
    assert {document.tokens_read for document in cut_documents} == {longest}
    assert num_tokens <= 500 < num_tokens + len(cut_documents)


def test_listed_words_are_clearly_more_frequent_on_their_side() -> None:
    first = WordCounts()
    second = WordCounts()
    for text in ("Cod cod ling", "cod ling eel hake", "COD ling hake", "eel eel eel"):
        first.add(text)
    for text in ("ling cod eel", "ling eel", "ling eel"):
        assert second.add(text) == len(text.split())
    # of 13 words and of 7: cod 4 and 1, ling 3 and 3, eel 4 and 3; hake is in two documents only
    (cod,) = words_more_often((first, second), 0)
    assert (cod.word, cod.documents) == ("cod", 3)
    assert cod.per_million == pytest.approx((4e6 / 13, 1e6 / 7))

    # on the other side, ling is (3 / 7) / (3 / 13) = 1.9 times as frequent; with three more words, 2.3 times
    assert words_more_often((first, second), 1) == []
    first.add("shark shark shark")
    (ling,) = words_more_often((first, second), 1)
    assert ling.word == "ling"


def test_largest_difference_comes_first_and_the_table_is_bounded() -> None:
    first = WordCounts()
    second = WordCounts()
    for _ in range(3):  # word n comes n times in each document
        first.add(" ".join(f"word{number} " * number for number in range(1, 31)))
    words = words_more_often((first, second), 0)
    assert [word.word for word in words] == [f"word{number}" for number in range(30, 15, -1)]

    # the same from the other side
    mirrored_words = words_more_often((second, first), 1)
    assert [word.per_million[::-1] for word in mirrored_words] == [word.per_million for word in words]


def test_words_are_those_of_any_script() -> None:
    counts = WordCounts()
    counts.add("L'Home d’aigua_x हिन्दी भाषा 你好 E\u0301t 3,5")
    assert [*counts.times] == ["l'home", "d’aigua", "x", "हिन्दी", "भाषा", "你", "好", "e\u0301t", "3", "5"]


def test_planted_words_lead_on_their_side(first: Path, second: Path) -> None:
    first_words, second_words = compared(first, second).words
    assert {word.word: word.documents for word in first_words[:2]} == {"green": 40, "the": 40}
    assert {word.word for word in second_words[:3]} == {"all", "at", "no"}
    assert "script" not in {word.word for word in (*first_words, *second_words)}  # which both have as often

    # the same in the other order
    swapped_second_words, swapped_first_words = compared(second, first).words
    for words, swapped_words in ((first_words, swapped_first_words), (second_words, swapped_second_words)):
        assert [(word.word, word.documents) for word in words] == [
            (word.word, word.documents) for word in swapped_words
        ]


def test_program_prints_the_tables_and_writes_the_page(
    first: Path, second: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    file = tmp_path / "page.html"
    inspect.main(["--compare", str(first), str(second), "--html", str(file)])
    output = capsys.readouterr().out
    page = file.read_text(encoding="utf-8")
    num_bytes = sum(len(text.encode()) for name in ("shared", "lantern") for text in TEXTS[name])
    assert re.search(rf"^ *bytes +{num_bytes:,} ", output, re.MULTILINE)
    assert re.search(r"^ *lantern +A +40 ", output, re.MULTILINE)
    for shown in (" ".join(output.split()), page):
        assert "Words more frequent in A" in shown
        assert "green" in shown
        assert "The tokenizers differ, so token counts are not comparable." in shown
        assert "60 of 60 documents of A" in shown
    assert not re.search(r"<script|https?://|<link|\x1b", page)
    inspect.main(["--compare", str(first), str(second), "--html", str(tmp_path / "again.html")])
    assert (tmp_path / "again.html").read_bytes() == file.read_bytes()


def test_languages_are_those_of_the_documents(
    tmp_path: Path,
    tiny_model_dir: Path,
    bible_es_jsonl: Path,
    shakespeare_jsonl: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spanish = excerpts(bible_es_jsonl)
    english = excerpts(shakespeare_jsonl)
    spanish_dir = tmp_path / "spanish"
    mixed_dir = tmp_path / "mixed"
    for folder, texts in ((spanish_dir, spanish), (mixed_dir, [*english, *spanish[:5]])):
        file = write_jsonl(tmp_path / f"{folder.name}.jsonl", texts)
        tokenize(folder, tiny_model_dir, file, max_length=200, packing="best_fit", validation_split=0)

    # counted, and printed
    spanish_corpus, mixed_corpus = compare(
        open_corpora([spanish_dir, mixed_dir], "train"), None, lambda done: None
    ).corpora
    assert {name: counts.documents for name, counts in spanish_corpus.languages.items()} == {"es": 20}
    assert {name: counts.documents for name, counts in mixed_corpus.languages.items()} == {"en": 20, "es": 5}
    assert mixed_corpus.languages["es"].bytes == sum(len(text.encode()) for text in spanish[:5])
    monkeypatch.setenv("COLUMNS", "100")
    inspect.main(["--compare", str(spanish_dir), str(mixed_dir)])
    assert re.search(r"^ *es +A +20 +100.0% .*\n +B +5 +20.0% ", capsys.readouterr().out, re.MULTILINE)

    # without the package that recognises languages
    language._identifier.cache_clear()
    monkeypatch.setitem(sys.modules, "py3langid", None)
    inspect.main(["--compare", str(spanish_dir), str(mixed_dir), "--html", str(tmp_path / "page.html")])
    output = " ".join(capsys.readouterr().out.split())
    page = (tmp_path / "page.html").read_text(encoding="utf-8").replace("&#39;", "'")
    for text in (output, page):
        assert "this table needs py3langid; run pip install 'fabric-train[cleaning]'" in text
        assert "25 of 25 documents of B" in text


def excerpts(file: Path) -> list[str]:
    """Return 400 characters of each of the first 20 texts in a file."""
    lines = file.read_text(encoding="utf-8").splitlines()[:20]
    return [json.loads(line)["text"][1000:1400] for line in lines]


def test_merged_dataset_is_compared_as_one(first: Path, tiny_model_dir: Path, sources: dict[str, str]) -> None:
    moon = first.parent / "moon"
    merged = first.parent / "merged"
    tokenize(moon, tiny_model_dir, sources["moon"], packing="best_fit", max_length=64, validation_split=0)
    merge.main([str(first), str(moon), "--output_dir", str(merged)])
    with_merged = compared(first, merged)
    with_moon = compared(first, moon)
    assert with_merged.same_tokenizer
    merged_corpus = with_merged.corpora[1]
    assert merged_corpus.totals.sources.keys() == TEXTS.keys()
    assert merged_corpus.sample.words == sum(corpus.sample.words for corpus in with_moon.corpora)


def damage_index(folder: Path) -> str:
    (folder / "train" / "index" / "rows.npy").write_bytes(b"no array")
    return "train/index/rows.npy: damaged"


def remove_index(folder: Path) -> str:
    file = folder / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"has_index": False}), encoding="utf-8")
    return "it has no document index because an older version wrote it; tokenize again to compare it"


def remove_tokenizer(folder: Path) -> str:
    (folder / "tokenizer" / "tokenizer.json").unlink()
    return "it has no tokenizer/tokenizer.json, so its texts are unknown; tokenize again"


def alter_pieces(folder: Path) -> str:
    file = folder / "train" / "index" / "continuations.npy"
    records = np.load(file)
    records["start"] += 1 << 20
    np.save(file, records)
    return "the document index is damaged; tokenize again"


def name_another_file(folder: Path) -> str:
    file = folder / "train" / "index" / "documents.npy"
    records = np.load(file)
    records["file"][3] = 77
    np.save(file, records)
    return "the document index has a file that manifest.json does not list; tokenize again"


def add_unknown_tokens(folder: Path) -> str:
    ids = next(open_splits(folder)["train"].batches()).input_ids[:64].astype(np.int32)
    (file,) = (folder / "train").glob("*.arrow")
    file.write_bytes(file.read_bytes().replace(ids.tobytes(), (ids - 5000).tobytes(), 1))
    return "its rows have tokens that its tokenizer does not have; tokenize again"


def remove_folder(folder: Path) -> str:
    shutil.rmtree(folder)
    return "no such folder; give the --output_dir of fabric-train tokenize"


@pytest.mark.parametrize(
    "damage",
    [
        damage_index,
        remove_index,
        remove_tokenizer,
        alter_pieces,
        name_another_file,
        add_unknown_tokens,
        remove_folder,
    ],
)
def test_dataset_that_cannot_be_compared_ends_in_one_line(damage: Any, first: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(first, tmp_path / "damaged")
    expected = damage(damaged)
    with pytest.raises(InputError) as error:
        inspect.main(["--compare", str(first), str(damaged)])
    (fault,) = error.value.faults
    assert expected in fault
    assert str(damaged) in fault


def test_one_folder_under_two_names_is_refused(first: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(first)
    with pytest.raises(InputError, match="are the same folder; give two token datasets"):
        inspect.main(["--compare", str(first), str(tmp_path / "link")])


@pytest.mark.parametrize(
    "line, fault",
    [
        ("--compare A", "--compare: expected two token datasets, got 1"),
        ("A --compare B", "--compare takes both token datasets; write --compare A OTHER"),
        ("--compare A B --start 3", "--compare shows no rows; leave out --start"),
    ],
)
def test_wrong_command_line_of_a_comparison_is_reported(line: str, fault: str) -> None:
    with pytest.raises(InputError) as error:
        parse_arguments(InspectArguments, line.split())
    assert error.value.faults == (fault,)


def test_large_numbers_are_shown_with_three_digits() -> None:
    numbers = [0, 99_999, 100_000, 999_499, 999_500, 9_994_999, 1.2345e9, 1e21]
    assert [amount(number) for number in numbers] == [
        *("0", "99,999", "100 k", "999 k", "1.00 M", "9.99 M", "1.23 G", "1000000 P")
    ]
