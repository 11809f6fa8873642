"""python -m fabric_train.inspection --compare A B shows two corpora side by side."""

import json
import random
import re
import shutil
import sys
from collections import Counter
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
    choose = random.Random(name)
    words = ["sea", "wind", "stone", "é", "moon", "river", "of", "and"]
    return [" ".join([*choose.choices(words, k=choose.choice([3, 20, 300])), planted]) for _ in range(count)]


TEXTS = {
    "shared": texts_of("shared", 20, HARD),
    "lantern": texts_of("lantern", 40, PLANTED),
    "moon": texts_of("moon", 30, "no Lantern at all"),
}


def sampled(corpus: OpenCorpus) -> list[SampledDocument]:
    return list(sample_documents(corpus, lambda done: None))


def compared(*folders: Path) -> Comparison:
    """Compare two folders, and check the progress."""
    done: list[int] = []
    corpora = open_corpora(folders, "train")
    found = compare(corpora, "none", done.append)
    assert sum(done) == amount_of_work(corpora)
    return found


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
    found = compared(first, second)
    assert not found.same_tokenizer
    for corpus, names in zip(found.corpora, (["shared", "lantern"], ["shared", "moon"]), strict=True):
        sizes = {name: [len(text.encode()) for text in TEXTS[name]] for name in names}
        assert {name: (one.documents, one.bytes) for name, one in corpus.totals.sources.items()} == {
            name: (len(own), sum(own)) for name, own in sizes.items()
        }
        assert corpus.totals.byte_lengths == Counter(size for own in sizes.values() for size in own)
        ledger = corpus.manifest.ledger.splits["train"]
        assert corpus.totals.all.tokens == ledger.tokens_in
        assert sum(length * count for length, count in corpus.totals.token_lengths.items()) == ledger.tokens_in
        # all are sampled, and the words of the texts do not depend on the tokenizer
        assert corpus.sample.documents == corpus.totals.all.documents
        assert corpus.sample.words == sum(len(re.findall(r"\w+", text)) for name in names for text in TEXTS[name])


@pytest.mark.parametrize("packing, overlap", [("concat", 5), ("best_fit", 5), ("none", 0)])
def test_sampled_texts_are_those_of_the_documents(
    packing: str, overlap: int, tmp_path: Path, first: Path, tiny_model_dir: Path, sources: dict[str, str]
) -> None:
    options = {"packing": packing, "overlap": overlap, "max_length": 32, "validation_split": 0}
    tokenize(tmp_path / "tokens", tiny_model_dir, sources["shared"], sources["lantern"], **options)
    corpus, _ = open_corpora([tmp_path / "tokens", first], "train")
    found = sampled(corpus)
    expected = Counter([*TEXTS["shared"], *TEXTS["lantern"]])
    for document in found[:-1] if packing == "concat" else found:  # there the last row, if not full, is dropped
        expected[document.text] -= 1
        assert (document.bytes, document.tokens) == (len(document.text.encode()), document.tokens_read)
    left = list(expected.elements())
    assert min(expected.values()) == 0
    assert len(left) <= (1 if packing == "concat" else 0)
    assert not left or left[0].startswith(found[-1].text)


def test_sample_is_bounded_and_spread_over_the_corpus(
    first: Path, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, _ = open_corpora([first, second], "train")
    texts = [one.text for one in sampled(corpus)]
    assert corpus.sample_size == 60
    monkeypatch.setattr(comparison, "FEWEST_DOCUMENTS", 12)
    monkeypatch.setattr(comparison, "NUM_TOKENS", 500)
    found = sampled(corpus)
    assert found == sampled(corpus)
    assert len(found) == 12
    for number, one in enumerate(found):  # one of each of 12 equal parts
        beginning = one.text.rstrip("\ufffd")  # of a character that is cut
        assert any(text.startswith(beginning) for text in texts[5 * number : 5 * number + 5])
    num_tokens = sum(one.tokens_read for one in found)
    longest = max(one.tokens_read for one in found)
    cut = [one for one in found if one.tokens_read < one.tokens]
    assert {one.tokens_read for one in cut} == {longest}
    assert num_tokens <= 500 < num_tokens + len(cut)  # no greater length is possible


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
    assert words_more_often((first, second), 1) == []  # ling and eel: 1.9 and 1.4 times
    first.add("shark shark shark")
    assert [one.word for one in words_more_often((first, second), 1)] == ["ling"]  # 16 / 7 times


def test_largest_difference_comes_first_and_the_table_is_bounded() -> None:
    first = WordCounts()
    second = WordCounts()
    for _ in range(3):
        first.add(" ".join(f"word{number} " * number for number in range(1, 31)))
    assert [one.word for one in words_more_often((first, second), 0)] == [
        f"word{number}" for number in range(30, 15, -1)
    ]
    found = words_more_often((second, first), 1)
    assert [one.per_million[::-1] for one in found] == [one.per_million for one in words_more_often((first, second), 0)]


def test_words_are_those_of_any_script() -> None:
    counts = WordCounts()
    counts.add("L'Home d’aigua_x हिन्दी भाषा 你好 E\u0301t 3,5")
    assert [*counts.times] == ["l'home", "d’aigua", "x", "हिन्दी", "भाषा", "你", "好", "e\u0301t", "3", "5"]


def test_planted_words_lead_on_their_side(first: Path, second: Path) -> None:
    found = compared(first, second)
    assert {one.word: one.documents for one in found.words[0][:2]} == {"green": 40, "the": 40}
    assert {one.word for one in found.words[1][:3]} == {"all", "at", "no"}
    other_way = compared(second, first)
    sides = [[[(one.word, one.documents) for one in side] for side in one.words] for one in (found, other_way)]
    assert sides[0] == sides[1][::-1]
    assert "script" not in {word for side in sides[0] for word, _ in side}  # what both have as often


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
        assert "Words that A has more often" in shown
        assert "green" in shown
        assert "The tokenizers differ: numbers of tokens cannot be compared." in shown
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
    spanish, english = (
        [json.loads(line)["text"][1000:1400] for line in file.read_text(encoding="utf-8").splitlines()[:20]]
        for file in (bible_es_jsonl, shakespeare_jsonl)
    )
    one = tmp_path / "one"
    other = tmp_path / "other"
    for folder, texts in ((one, spanish), (other, [*english, *spanish[:5]])):
        file = write_jsonl(tmp_path / f"{folder.name}.jsonl", texts)
        tokenize(folder, tiny_model_dir, file, max_length=200, packing="best_fit", validation_split=0)
    found = compare(open_corpora([one, other], "train"), None, lambda done: None).corpora
    documents = [{name: language.documents for name, language in corpus.languages.items()} for corpus in found]
    assert documents == [{"es": 20}, {"en": 20, "es": 5}]
    assert found[1].languages["es"].bytes == sum(len(text.encode()) for text in spanish[:5])
    monkeypatch.setenv("COLUMNS", "100")
    inspect.main(["--compare", str(one), str(other)])
    assert re.search(r"^ *es +A +20 +100.0% .*\n +B +5 +20.0% ", capsys.readouterr().out, re.MULTILINE)
    language._identifier.cache_clear()
    monkeypatch.setitem(sys.modules, "py3langid", None)
    inspect.main(["--compare", str(one), str(other), "--html", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text(encoding="utf-8").replace("&#39;", "'")
    for text in (" ".join(capsys.readouterr().out.split()), page):
        assert "this table needs py3langid: pip install 'fabric-train[cleaning]'" in text
        assert "25 of 25 documents of B" in text


def test_merged_dataset_is_compared_as_one(first: Path, tiny_model_dir: Path, sources: dict[str, str]) -> None:
    moon = first.parent / "moon"
    merged = first.parent / "merged"
    tokenize(moon, tiny_model_dir, sources["moon"], packing="best_fit", max_length=64, validation_split=0)
    merge.main([str(first), str(moon), "--output_dir", str(merged)])
    one = compared(first, merged)
    both = compared(first, moon)
    assert one.same_tokenizer
    assert one.corpora[1].totals.sources.keys() == TEXTS.keys()
    assert one.corpora[1].sample.words == sum(corpus.sample.words for corpus in both.corpora)


def damage_index(folder: Path) -> str:
    (folder / "train" / "index" / "rows.npy").write_bytes(b"no array")
    return "train/index/rows.npy: damaged"


def remove_index(folder: Path) -> str:
    file = folder / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"has_index": False}), encoding="utf-8")
    return "no document index, an older version wrote it; tokenize again to compare it"


def remove_tokenizer(folder: Path) -> str:
    (folder / "tokenizer" / "tokenizer.json").unlink()
    return "no tokenizer/tokenizer.json, so its texts are unknown; tokenize again"


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
    return "rows have tokens that its tokenizer does not have; tokenize again"


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
    fault = damage(damaged)
    with pytest.raises(InputError) as error:
        inspect.main(["--compare", str(first), str(damaged)])
    assert len(error.value.faults) == 1
    assert fault in error.value.faults[0]
    assert str(damaged) in error.value.faults[0]


def test_one_folder_under_two_names_is_refused(first: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(first)
    with pytest.raises(InputError, match="are the same folder; give two token datasets"):
        inspect.main(["--compare", str(first), str(tmp_path / "link")])


@pytest.mark.parametrize(
    "line, fault",
    [
        ("--compare A", "--compare: expected two token datasets, got 1"),
        ("A --compare B", "--compare takes both token datasets: write --compare A OTHER"),
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
