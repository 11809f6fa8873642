"""python -m fabric_train.vocabulary report counts what the tokenizer gives, and its advice follows from thresholds."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    """Twelve pages of a guide in Catalan and in English, the first 1,500 characters of each; a file by language."""
    folder = tmp_path_factory.mktemp("texts")
    files = {}
    for language in ("ca", "en"):
        lines = real_data.guide(language).read_text(encoding="utf-8").splitlines()[:12]
        pages = [json.dumps({"text": json.loads(line)["text"][:1500]}) for line in lines]
        files[language] = folder / f"{language}.jsonl"
        files[language].write_text("\n".join(pages), encoding="utf-8")
    return files


def count_ids(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def count_ids_of_word(tokenizer: Tokenizer, word: str) -> int:
    """Return the number of ids of a word after a space."""
    return count_ids(tokenizer, f"a {word}") - count_ids(tokenizer, "a")


def test_the_figures_are_counts_of_the_tokenizers_ids(
    tmp_path: Path,
    chatml_dir: Path,
    small_spm_dir: Path,
    texts: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    # the report on two tokenizers: as JSON, as a picture and on the screen
    sources = [f"{language}={file}" for language, file in texts.items()]
    json_file = tmp_path / "figures.json"
    picture = tmp_path / "tokens.png"
    outputs = ["--json", str(json_file), "--picture", str(picture)]
    main(["report", "--tokenizer", str(chatml_dir), str(small_spm_dir), "--texts", *sources, *outputs])
    printed = capsys.readouterr().out
    content = json.loads(json_file.read_text())
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert content["recommendation"][0] in printed

    # the figures by language, and within a language in the order of the tokenizers
    figures_by_language: dict[str, list[dict[str, Any]]] = {}
    for figures in content["measured"]:
        figures_by_language.setdefault(figures["language"], []).append(figures)
    assert list(figures_by_language) == list(texts)

    tokenizers = [Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (chatml_dir, small_spm_dir)]
    for language, file in texts.items():
        documents = [json.loads(line)["text"] for line in file.read_text().splitlines()]
        words = [word for document in documents for word in document.split()]

        # what is counted for each tokenizer
        for tokenizer, figures in zip(tokenizers, figures_by_language[language], strict=True):
            num_tokens = sum(count_ids(tokenizer, document) for document in documents)
            assert figures["num_tokens"] == num_tokens
            assert figures["num_words"] == len(words)
            tokens_per_word = num_tokens / len(words)
            assert figures["tokens_per_word"]["value"] == tokens_per_word
            low, high = figures["tokens_per_word"]["interval"]
            assert low < tokens_per_word < high
            assert f"{tokens_per_word:.2f} ±" in printed
            assert figures["words_in_context"]["value"] == pytest.approx(8192 / tokens_per_word)

        # words that the first tokenizer cuts into four pieces or more
        first_figures, second_figures = figures_by_language[language]
        num_cut_words = sum(count_ids_of_word(tokenizers[0], word) >= 4 for word in words)
        assert first_figures["share_cut_in_many"]["value"] == pytest.approx(num_cut_words / len(words))

        # the second tokenizer is compared with the first
        saving = 1 - second_figures["num_tokens"] / first_figures["num_tokens"]
        assert first_figures["saving"] is None
        assert second_figures["saving"]["value"] == pytest.approx(saving)


def figures_of(tokenizer: str, num_tokens: int, saving: Estimate | None) -> TokenizerFigures:
    """Return the figures of a tokenizer that needs ``num_tokens`` for 100 words of Catalan."""
    estimate = Estimate(num_tokens / 100, None)
    return TokenizerFigures(
        language="ca",
        tokenizer=tokenizer,
        num_documents=20,
        num_words=100,
        num_tokens=num_tokens,
        spaces=True,
        tokens_per_word=estimate,
        bytes_per_token=estimate,
        share_cut_in_many=estimate,
        words_in_context=estimate,
        saving=saving,
    )


@pytest.mark.parametrize(
    "num_tokens, interval, advice",
    [
        (127, (0.02, 0.04), "keep A: 1.31 → 1.27 with B saves 3.1% (2.0% to 4.0%)"),
        (140, None, "keep A: no other tokenizer needs fewer tokens"),
        (110, (0.13, 0.18), "it depends: 1.31 → 1.10 with B saves 16.0%"),
        (95, (0.24, 0.31), "it depends: 1.31 → 0.95 with B saves 27.5%"),
        (90, (0.26, 0.36), "change it: 1.31 → 0.90 with B saves 31.3%"),
    ],
)
def test_the_advice_follows_from_the_saving_and_its_interval(
    num_tokens: int, interval: tuple[float, float] | None, advice: str
) -> None:
    first_figures = figures_of("A", num_tokens=131, saving=None)
    saving = Estimate(1 - num_tokens / 131, interval)
    second_figures = figures_of("B", num_tokens, saving)
    (line,) = report.recommend([first_figures, second_figures])
    assert line.startswith(f"ca: {advice}")


def test_the_advice_on_one_tokenizer_follows_from_its_tokens_per_word() -> None:
    verdicts = {150: "ca: keep A", 190: "neither few nor many", 250: "which is many"}  # by tokens for 100 words
    for num_tokens, verdict in verdicts.items():
        (line,) = report.recommend([figures_of("A", num_tokens, saving=None)])
        assert verdict in line

    # the thresholds are for languages whose words are between spaces
    figures = replace(figures_of("A", num_tokens=150, saving=None), spaces=False)
    (line,) = report.recommend([figures])
    assert "no threshold" in line


def test_words_stand_between_spaces_and_characters_without_spaces_count_alone() -> None:
    assert words_of("L'àvia  va, 3.5 cops\n") == ["L'àvia", "va,", "3.5", "cops"]
    assert words_of("Debian 安装を") == ["Debian", "安", "装", "を"]


def test_a_tenth_is_held_out_and_nothing_is_lost() -> None:
    # of many documents, whole ones
    documents = tuple(f"document {number}" for number in range(500))
    kept, held_out = hold_out(LanguageTexts("ca", documents))
    assert sorted([*kept, *held_out]) == sorted(documents)
    assert 30 < len(held_out) < 70

    # of a single document, lines
    document = "".join(f"line {number}\n" for number in range(500))
    kept, held_out = hold_out(LanguageTexts("ca", (document,)))
    assert len("".join(kept)) + len("".join(held_out)) == len(document)
    assert 30 < len(held_out) < 70


def test_a_large_text_is_sampled_from_all_over_it(tmp_path: Path) -> None:
    # 4,000 documents, each of which begins with its number
    file = tmp_path / "large.jsonl"
    lines = [json.dumps({"text": f"{number:06d} " * 100}) for number in range(4000)]
    file.write_text("\n".join(lines), encoding="utf-8")

    def sample(seed: int) -> LanguageTexts:
        (language_texts,) = read_texts([f"ca={file}"], "text", "1MB", seed)
        return language_texts

    sampled = sample(seed=3)
    assert 900_000 < sampled.num_bytes <= 1_000_000
    assert "of 2.9 MB were read" in sampled.note
    tenths = {int(document[:6]) // 400 for document in sampled.documents}
    assert len(tenths) == 10
    assert sample(seed=3) == sampled
    assert sample(seed=4) != sampled


def test_columns_beside_the_text_are_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"text": "one two", "title": "A"}, {"text": "three", "id": 1}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (language_texts,) = read_texts([f"ca={file}"], "text", "1MB", 0)
    assert language_texts.note == f"ca: columns of {file} not used: id, title"


@pytest.mark.parametrize(
    "words, faults",
    [
        ("--tokenizer nowhere/at/all --texts ca=CA", ["--tokenizer nowhere/at/all: no such file or folder"]),
        ("--tokenizer TOKENIZER --texts ca=nothing.txt", ["--texts nothing.txt: no such file or folder"]),
        ("--tokenizer TOKENIZER TOKENIZER --texts ca=CA", ["--tokenizer: .* is given twice"]),
        ("--tokenizer TOKENIZER --texts ca=CA --max_bytes many", ["--max_bytes: expected a size such as 100MB"]),
        (
            "--tokenizer TOKENIZER --texts ca=CA --picture a.jpg",
            ["--picture a.jpg: expected a file name that ends in .png"],
        ),
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
