"""Test --quality: planted documents for each rule, and the same decisions as datatrove on real ones."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.corpora import cut_documents, whole_documents
from benchmarks.packages import install_packages
from fabric_train.cleaning import quality
from fabric_train.cleaning.language import identify
from fabric_train.cleaning.quality import STOP_WORDS, Fault, MeasuredText, open_quality_filter
from fabric_train.cleaning.results import Dropped
from fabric_train.tokenization.arguments import TokenizeArguments
from tests.support.token_datasets import manifest_of, tokenize, write_jsonl

SENTENCES = [
    "El port de la ciutat va créixer amb el comerç de taronges i de seda durant aquell segle.",
    "Les barques sortien abans de l'alba, i tornaven carregades quan el sol ja era alt.",
    "A la plaça, els pagesos venien oli, ametlles i formatge als mercaders que venien del nord.",
    "Un escrivent apuntava cada preu en un llibre gruixut que encara es conserva.",
    "Ningú no recorda qui va fer construir la torre, però tothom sap per què hi és.",
    "Quan plovia molt, el riu pujava fins a les primeres cases i calia pujar el blat al pis de dalt.",
]
GOOD = "\n".join(SENTENCES)


def _words(*groups: str) -> str:
    """Return 20 different words, with the words of ``groups`` among them, in a text long enough for the rules."""
    return " ".join(f"{group} paraula{number} de llengua" for number in range(20) for group in groups)


def _clean(rules: str, text: str) -> str | Dropped:
    return open_quality_filter(rules).clean(text, Counter())


@pytest.mark.parametrize(
    ("rule", "text"),
    {
        "gopher_few_words": "El port de la ciutat va créixer.",
        "gopher_many_words": " ".join(f"paraula{number} de" for number in range(50_001)),
        "gopher_short_words": _words("a b c d e f g", "h i j k l m"),
        "gopher_long_words": " ".join(f"internacionalització{number} de" for number in range(60)),
        "gopher_few_alphabetic_words": _words("1,5 2017 3.000"),
        "gopher_hashes": re.sub(r"(?<= )(el|de|la|i|va)\b", r"#\1", GOOD + SENTENCES[0].upper()),
        "gopher_ellipses": GOOD.replace(",", "...").replace(" de ", "… de "),
        "gopher_bullet_lines": "\n".join(f"- {sentence}" for sentence in SENTENCES),
        "gopher_ellipsis_lines": GOOD.replace(".\n", "...\n"),
        "gopher_few_stop_words": " ".join(f"verd groc{number} blau" for number in range(20)),
        "gopher_duplicate_paragraphs": "\n\n".join([*SENTENCES, *(["Llegiu-ne més"] * 5)]),
        "gopher_duplicate_paragraph_characters": "\n\n".join([*SENTENCES, SENTENCES[5], SENTENCES[2]]),
        "gopher_duplicate_lines": "\n".join([*SENTENCES, *(["Llegiu-ne més"] * 5)]),
        "gopher_duplicate_line_characters": "\n".join([*SENTENCES, SENTENCES[5], SENTENCES[2]]),
        "gopher_top_2_gram": GOOD + " per tant" * 20,
        "gopher_duplicate_5_grams": f"{GOOD} A més, {' Després, '.join(SENTENCES[:2])}",
        "c4_lorem_ipsum": f"{GOOD}\nLorem ipsum dolor sit amet.",
        "c4_curly_bracket": f"{GOOD}\nLa funció f() {{ torna el valor. }}.",
        "c4_few_sentences": "\n".join(SENTENCES[:4]),
        "fineweb_few_punctuated_lines": GOOD.replace(".", ""),
        "fineweb_short_lines": "\n".join([*SENTENCES[:1], "Inici.", "Qui som.", "Contacte."]),
        "fineweb_duplicate_line_characters": "\n".join([*SENTENCES, SENTENCES[0]]),
    }.items(),
)
def test_document_that_breaks_a_rule_is_dropped_for_it(rule: str, text: str) -> None:
    dropped = _clean(rule.split("_")[0], text)
    assert isinstance(dropped, Dropped)
    assert dropped.reason == f"low_quality: {rule}"


def test_document_that_breaks_no_rule_is_kept_as_it_is() -> None:
    assert _clean("gopher,c4,fineweb", GOOD) == GOOD


def test_first_rule_of_the_fixed_order_decides() -> None:
    text = "\n".join(SENTENCES[:4]).replace(".", "")
    for rules in ("fineweb,c4", "c4,fineweb"):
        dropped = _clean(rules, text)
        assert isinstance(dropped, Dropped)
        assert dropped.reason == "low_quality: c4_few_sentences"


def test_c4_removes_lines_and_counts_them_by_rule() -> None:
    edits: Counter[str] = Counter()
    menu = ["Inici | Contacte", "Molt bé.", "Cal activar javascript per a veure-ho.", "This page uses cookies here."]
    cleaned = open_quality_filter("c4").clean("\n".join([menu[0], GOOD.replace("seda", "seda[2]"), *menu[1:]]), edits)
    assert cleaned == GOOD
    reasons = ("no_end_mark", "few_words", "javascript", "policy")
    assert edits == {f"c4 removed line: {reason}": 1 for reason in reasons}


def test_closing_quotes_of_spanish_and_catalan_end_a_line() -> None:
    text = GOOD.replace("segle.", "segle.»")
    assert _clean("c4", text) == text


def test_stop_words_are_those_of_the_documents_language() -> None:
    english = " ".join(
        f"Harbour {number} town trade oranges silk century boats dawn sun high noon" for number in range(9)
    )
    dropped = _clean("gopher", english)
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "low_quality: gopher_few_stop_words"
    assert dropped.detail.startswith("0 stop words")


def test_language_without_stop_words_leaves_their_rule_out_visibly() -> None:
    edits: Counter[str] = Counter()
    german = (
        "Der Hafen der Stadt wuchs in jenem Jahrhundert durch den Handel mit Orangen und Seide. Die Boote fuhren vor "
        "dem Morgengrauen hinaus und kehrten beladen zurück, wenn die Sonne schon hoch stand. Auf dem Platz verkauften "
        "die Bauern Öl, Mandeln und Käse an Händler aus dem Norden, und ein Schreiber hielt jeden Preis in einem "
        "dicken Buch fest, das bis heute erhalten ist."
    )
    assert open_quality_filter("gopher").clean(german, edits) == german
    assert edits == {"no list of stop words: de": 1}


def test_unknown_rules_are_refused() -> None:
    for rules in ("gopher;c4", "", "Gopher", "gopher,refinedweb"):
        faults = TokenizeArguments(dataset=["a"], tokenizer_name="t", output_dir="o", quality=rules).faults()
        assert faults == [f"--quality: expected gopher, c4, fineweb or several separated by commas, got {rules!r}"]


def test_ledger_counts_each_rule(tmp_path: Path, tiny_model_dir: Path) -> None:
    source = write_jsonl(tmp_path / "texts.jsonl", [GOOD, SENTENCES[0], SENTENCES[1], GOOD.replace(".", "")])
    tokenize(tmp_path / "out", tiny_model_dir, source, quality="fineweb,gopher", validation_split=0)
    manifest = manifest_of(tmp_path / "out")
    skipped = {"low_quality: gopher_few_words": 2, "low_quality: fineweb_few_punctuated_lines": 1}
    assert manifest.ledger.documents_skipped == skipped
    assert manifest.cleaning["quality"]["limits"]["gopher"]["few_words"] == 50
    sample = [json.loads(line) for line in (tmp_path / "out" / "dropped.jsonl").read_text().splitlines()]
    assert [document["detail"] for document in sample] == ["0%", "18 words", "15 words"]


@pytest.fixture
def datatrove_filters(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Any]]:
    """Return datatrove's filters for a language, with our words and sentences instead of spaCy's."""
    monkeypatch.syspath_prepend(install_packages("datatrove"))
    from datatrove.pipeline.filters import (
        c4_filters,
        fineweb_quality_filter,
        gopher_quality_filter,
        gopher_repetition_filter,
    )

    for module in (fineweb_quality_filter, gopher_quality_filter, gopher_repetition_filter):
        monkeypatch.setattr(module, "split_into_words", lambda text, language: MeasuredText(text).words)
    monkeypatch.setattr(
        c4_filters, "split_into_sentences", lambda text, language: [None] * quality.count_sentences(text)
    )
    return lambda language: [
        gopher_quality_filter.GopherQualityFilter(stop_words=list(STOP_WORDS[language])),
        gopher_repetition_filter.GopherRepetitionFilter(),
        fineweb_quality_filter.FineWebQualityFilter(char_duplicates_ratio=0.1, new_line_ratio=1e9),
        c4_filters.C4QualityFilter(),
    ]


def _dirty_documents() -> list[str]:
    """Return pieces of Shakespeare and of the Spanish Bible, many with repetitions, symbols or short lines."""
    chance = random.Random(0)

    def number_or_tag(word: re.Match[str]) -> str:
        return chance.choice([word[0], "17", f"#{word[0]}"])

    documents = []
    for document in chance.sample(list(cut_documents(whole_documents(), 1)), 200):
        lines = [line.strip() for line in re.split(r"\n|(?<=[.:;]) ", document) if line.strip()]
        lines = lines[: chance.choice([1, 5, 20, 60])]
        if chance.random() < 0.4:
            lines += chance.choices(lines, k=chance.choice([1, 3, len(lines)]))
        if chance.random() < 0.2:
            lines = [re.sub(r"\W$", chance.choice(["...", ""]), line) for line in lines]
        if chance.random() < 0.1:
            lines = [f"- {line}" for line in lines]
        if chance.random() < 0.1:
            lines = [re.sub(r"\w+", number_or_tag, line) for line in lines]
        documents.append("\n".join(lines))
    return documents


@pytest.mark.slow
def test_decisions_are_those_of_datatrove(datatrove_filters: Callable[[str], list[Any]]) -> None:
    from datatrove.data import Document

    names = ("gopher", "repetition", "fineweb", "c4")
    decisions: Counter[tuple[str, bool]] = Counter()
    for text in _dirty_documents():
        document = Document(text=text, id="0")
        language, _ = identify(text)
        filters = datatrove_filters(language if language in STOP_WORDS else "en")
        kept_by_datatrove = [datatrove_filter.filter(document) is True for datatrove_filter in filters]
        lines = quality.clean_lines(text, Counter())
        faults: Sequence[Fault | None] = [
            quality.find_gopher_fault(MeasuredText(text)),
            quality.find_repetition(MeasuredText(text)),
            quality.find_fineweb_fault(MeasuredText(text)),
            lines if isinstance(lines, Fault) else None,
        ]
        assert [fault is None for fault in faults] == kept_by_datatrove, (text, faults)
        assert document.text == lines or isinstance(lines, Fault)
        decisions.update(zip(names, kept_by_datatrove, strict=True))
    for name in names:  # both decisions come often
        assert decisions[name, True] > 20
        assert decisions[name, False] > 20
