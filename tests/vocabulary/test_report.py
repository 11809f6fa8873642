"""python -m fabric_train.vocabulary report counts what the tokenizer gives, and its advice follows from thresholds."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from fabric_train.cli.errors import InputError
from fabric_train.sample_data import real_data
from fabric_train.vocabulary import report
from fabric_train.vocabulary.__main__ import main
from fabric_train.vocabulary.report import Estimate, TokenizerFigures
from fabric_train.vocabulary.words import LanguageTexts, hold_out, read_texts, words_of


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Twelve pages of a guide in Catalan and in English, their first 1,500 characters."""
    folder = tmp_path_factory.mktemp("texts")
    for language in ("ca", "en"):
        lines = real_data.guide(language).read_text(encoding="utf-8").splitlines()[:12]
        pages = [json.dumps({"text": json.loads(line)["text"][:1500]}) for line in lines]
        (folder / f"{language}.jsonl").write_text("\n".join(pages), encoding="utf-8")
    return {language: folder / f"{language}.jsonl" for language in ("ca", "en")}


def num_ids(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_the_figures_are_counts_of_the_tokenizers_ids(
    tmp_path: Path,
    chatml_dir: Path,
    small_spm_dir: Path,
    texts: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    sources = [f"{language}={file}" for language, file in texts.items()]
    words = ["--texts", *sources, "--json", str(tmp_path / "figures.json"), "--picture", str(tmp_path / "tokens.png")]
    main(["report", "--tokenizer", str(chatml_dir), str(small_spm_dir), *words])
    printed = capsys.readouterr().out
    content = json.loads((tmp_path / "figures.json").read_text())
    tokenizers = [Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (chatml_dir, small_spm_dir)]
    for language_index, (language, file) in enumerate(texts.items()):
        documents = [json.loads(line)["text"] for line in file.read_text().splitlines()]
        num_words = sum(len(document.split()) for document in documents)
        first_figures, second_figures = content["measured"][2 * language_index : 2 * language_index + 2]
        for tokenizer, figures in zip(tokenizers, (first_figures, second_figures), strict=True):
            num_tokens = sum(num_ids(tokenizer, document) for document in documents)
            assert (figures["language"], figures["num_tokens"], figures["num_words"]) == (
                language,
                num_tokens,
                num_words,
            )
            low, high = figures["tokens_per_word"]["interval"]
            assert low < figures["tokens_per_word"]["value"] == num_tokens / num_words < high
            assert figures["words_in_context"]["value"] == pytest.approx(8192 * num_words / num_tokens)
            assert f"{num_tokens / num_words:.2f} ±" in printed
        words_of_documents = " ".join(documents).split()
        tokens_of_words = [
            num_ids(tokenizers[0], f"a {word}") - num_ids(tokenizers[0], "a") for word in words_of_documents
        ]
        share = np.mean(np.array(tokens_of_words) >= 4)
        assert first_figures["share_cut_in_many"]["value"] == pytest.approx(share)
        assert first_figures["saving"] is None
        saving = 1 - second_figures["num_tokens"] / first_figures["num_tokens"]
        assert second_figures["saving"]["value"] == pytest.approx(saving)
    assert content["recommendation"][0] in printed
    assert (tmp_path / "tokens.png").read_bytes().startswith(b"\x89PNG")


def measured(tokenizer: str, tokens: int, saving: Estimate | None) -> TokenizerFigures:
    """Return the figures of a tokenizer that needs ``tokens`` for 100 words."""
    figure = Estimate(tokens / 100, None)
    return TokenizerFigures("ca", tokenizer, 20, 100, tokens, True, figure, figure, figure, figure, saving)


@pytest.mark.parametrize(
    "tokens, interval, advice",
    [
        (127, (0.02, 0.04), "keep A: 1.31 → 1.27 with B saves 3.1% (2.0% to 4.0%)"),
        (140, None, "keep A: no other needs fewer tokens"),
        (110, (0.13, 0.18), "it depends: 1.31 → 1.10 with B saves 16.0%"),
        (95, (0.24, 0.31), "it depends: 1.31 → 0.95 with B saves 27.5%"),
        (90, (0.26, 0.36), "change it: 1.31 → 0.90 with B saves 31.3%"),
    ],
)
def test_the_advice_follows_from_the_saving_and_its_interval(
    tokens: int, interval: tuple[float, float] | None, advice: str
) -> None:
    first = measured("A", 131, None)
    other = measured("B", tokens, Estimate(1 - tokens / 131, interval))
    (line,) = report.recommend([first, other])
    assert line.startswith(f"ca: {advice}")


def test_the_advice_on_one_tokenizer_follows_from_its_tokens_per_word() -> None:
    lines = [report.recommend([measured("A", tokens, None)])[0] for tokens in (150, 190, 250)]
    assert [re.search("few$|neither few|many", line) is not None for line in lines] == [True] * 3
    assert lines[0].startswith("ca: keep A")
    assert "no threshold" in report.recommend([replace(measured("A", 150, None), spaces=False)])[0]


def test_words_stand_between_spaces_and_characters_without_spaces_count_alone() -> None:
    assert words_of("L'àvia  va, 3.5 cops\n") == ["L'àvia", "va,", "3.5", "cops"]
    assert words_of("Debian 安装を") == ["Debian", "安", "装", "を"]


def test_a_tenth_is_held_out_and_nothing_is_lost() -> None:
    documents = tuple(f"document {number}" for number in range(500))
    kept, held_out = hold_out(LanguageTexts("ca", documents))
    assert sorted([*kept, *held_out]) == sorted(documents)
    assert 30 < len(held_out) < 70
    single_document = "".join(f"line {number}\n" for number in range(500))
    kept, held_out = hold_out(LanguageTexts("ca", (single_document,)))  # by lines
    assert len("".join(kept)) + len("".join(held_out)) == len(single_document)
    assert 30 < len(held_out) < 70


def test_a_large_text_is_sampled_from_all_over_it(tmp_path: Path) -> None:
    lines = (json.dumps({"text": f"{number:06d} " * 100}) for number in range(4000))
    (tmp_path / "large.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (read,) = read_texts([f"ca={tmp_path / 'large.jsonl'}"], "text", "1MB", 3)
    assert 900_000 < read.num_bytes <= 1_000_000
    assert "of 2.9 MB were read" in read.note
    numbers = np.array([int(document[:6]) for document in read.documents])
    assert len(np.unique(numbers // 400)) == 10
    (again,) = read_texts([f"ca={tmp_path / 'large.jsonl'}"], "text", "1MB", 3)
    (of_another_seed,) = read_texts([f"ca={tmp_path / 'large.jsonl'}"], "text", "1MB", 4)
    assert again == read
    assert of_another_seed != read


def test_columns_beside_the_text_are_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"text": "one two", "title": "A"}, {"text": "three", "id": 1}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (read,) = read_texts([f"ca={file}"], "text", "1MB", 0)
    assert read.note == f"ca: columns of {file} not used: id, title"


@pytest.mark.parametrize(
    "words, faults",
    [
        ("--tokenizer nowhere/at/all --texts ca=CA", ["--tokenizer nowhere/at/all: no such file or folder"]),
        ("--tokenizer TOKENIZER --texts ca=nothing.txt", ["--texts nothing.txt: no such file or folder"]),
        ("--tokenizer TOKENIZER TOKENIZER --texts ca=CA", ["--tokenizer: .* is given twice"]),
        ("--tokenizer TOKENIZER --texts ca=CA --max_bytes many", ["--max_bytes: expected a size such as 100MB"]),
        ("--tokenizer TOKENIZER --texts ca=CA --picture a.jpg", ["--picture a.jpg: give a name that ends in .png"]),
        ("--tokenizer TOKENIZER --texts ca=CA --json no/such/x", ["--json no/such/x: expected a file in an existing"]),
        ("--tokenizer TOKENIZER --texts ca=CA --text_column body", ["column 'body'"]),
    ],
)
def test_bad_input_is_one_clear_line(words: str, faults: list[str], chatml_dir: Path, texts: dict[str, Path]) -> None:
    arguments = words.replace("TOKENIZER", str(chatml_dir)).replace("CA", str(texts["ca"])).split()
    with pytest.raises(InputError) as error:
        main(["report", *arguments])
    for pattern, fault in zip(faults, error.value.faults, strict=True):
        assert re.search(pattern, fault)
        assert "\n" not in fault


def test_an_unknown_command_names_the_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="measure: no such command; write report or extend"):
        main(["measure"])
    main([])
    assert "report|extend" in capsys.readouterr().out
