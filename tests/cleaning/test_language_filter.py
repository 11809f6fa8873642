"""Test --language: what the identifier tells apart, what it cannot, and what the ledger says of dropped documents."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Literal

import pytest

from fabric_train.cleaning.language import (
    LanguageFilter,
    identify,
    language_probabilities,
    open_language_filter,
)
from fabric_train.cleaning.results import Dropped
from fabric_train.cli.errors import InputError
from fabric_train.tokenization.arguments import TokenizeArguments
from tests.support.token_datasets import manifest_of, tokenize, write_jsonl

# Universal Declaration of Human Rights, article 1
ARTICLE = {
    "es": "Todos los seres humanos nacen libres e iguales en dignidad y derechos y, dotados como están de razón y "
    "conciencia, deben comportarse fraternalmente los unos con los otros.",
    "ca": "Tots els éssers humans neixen lliures i iguals en dignitat i en drets. Són dotats de raó i de consciència, "
    "i han de comportar-se fraternalment els uns amb els altres.",
    "gl": "Tódolos seres humanos nacen libres e iguais en dignidade e dereitos e, dotados como están de razón e "
    "conciencia, díbense comportar fraternalmente uns cos outros.",
    "pt": "Todos os seres humanos nascem livres e iguais em dignidade e em direitos. Dotados de razão e de "
    "consciência, devem agir uns para com os outros em espírito de fraternidade.",
    "oc": "Totes los èssers umans naisson liures e egals en dignitat e en dreches. Son dotats de rason e de "
    "consciéncia e se devon comportar los unes amb los autres dins un esperit de fraternitat.",
    "it": "Tutti gli esseri umani nascono liberi ed eguali in dignità e diritti. Essi sono dotati di ragione e di "
    "coscienza e devono agire gli uni verso gli altri in spirito di fratellanza.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison et de "
    "conscience et doivent agir les uns envers les autres dans un esprit de fraternité.",
    "en": "All human beings are born free and equal in dignity and rights. They are endowed with reason and conscience "
    "and should act towards one another in a spirit of brotherhood.",
}
VALENCIAN = (
    "Eixe xiquet ha vingut hui a casa amb la seua germana, perquè vol que puga vore les estreles abans de les huit."
)
GENERAL = (
    "Aquell nen ha vingut avui a casa amb la seva germana, perquè vol que pugui veure les estrelles abans de les vuit."
)


def _filter(*languages: str, by: Literal["document", "paragraph"] = "document") -> LanguageFilter:
    return LanguageFilter(languages, 0.65, by)


def _clean(language_filter: LanguageFilter, text: str) -> str | Dropped:
    return language_filter.clean(text, Counter())


@pytest.mark.parametrize("language", ARTICLE)
def test_short_paragraph_is_identified_among_its_neighbours(language: str) -> None:
    identified_language, probability = identify(ARTICLE[language])
    assert identified_language == language
    assert probability > 0.65


def test_identifier_takes_valencian_for_catalan() -> None:
    assert identify(VALENCIAN)[0] == identify(GENERAL)[0] == "ca"


def test_identifier_is_uncertain_of_a_few_words_and_of_numbers() -> None:
    assert all(identify(text)[1] < 0.65 for text in ("Avui fa bon dia", "1 2 3 4", "", "...", "https://example.com/a"))


def test_documents_in_other_languages_are_dropped() -> None:
    kept = [code for code, text in ARTICLE.items() if _clean(_filter("es", "ca"), text) == text]
    assert kept == ["es", "ca"]
    dropped = _clean(_filter("es", "ca"), ARTICLE["gl"])
    assert isinstance(dropped, Dropped)
    assert (dropped.reason, dropped.detail[:3]) == ("other_language", "gl ")


def test_document_of_which_the_identifier_is_uncertain_is_dropped_as_such() -> None:
    dropped = _clean(_filter("ca"), "Avui fa bon dia")
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "uncertain_language"


def test_wide_margins_do_not_make_a_page_uncertain() -> None:
    """A manual page: indented and filled with spaces, with names of options in English."""
    options = ("--recursive", "--preserve-root", "--no-dereference")
    meaning = "cambia también los ficheros que haya en los directorios que se dan"
    lines = [f"{' ' * 14}{option:<60}{meaning:>90}" for option in options]
    page = "\n".join(["CHOWN(1)" + " " * 90 + "Órdenes de usuario", "", *lines * 4, " " * 100 + "Linux 5.10", ""])
    assert _clean(_filter("es"), page) == page
    assert _clean(_filter("es"), page * 40) == page * 40
    assert isinstance(_clean(_filter("ca"), page), Dropped)


def test_what_is_dropped_for_uncertainty_has_its_margin() -> None:
    dropped = _clean(_filter("ca"), "Avui fa bon dia")
    assert isinstance(dropped, Dropped)
    assert dropped.detail == "ca 0.44, 0.21 below 0.65"
    exact = language_probabilities("Avui fa bon dia")["ca"]
    below = _clean(LanguageFilter(("ca",), exact + 1e-4, "document"), "Avui fa bon dia")
    assert isinstance(below, Dropped)
    shown, margin = re.fullmatch(r"ca (\S+), (\S+) below \S+", below.detail).groups()  # type: ignore[union-attr]
    assert float(shown) < exact + 1e-4
    assert float(margin) > 0
    for_two_languages = _clean(LanguageFilter(("es", "gl"), 0.999, "document"), "Avui fa bon dia")
    assert isinstance(for_two_languages, Dropped)
    assert re.fullmatch(r"ca 0\.44\d; es,gl 0\.\d{3}, 0\.\d{3} below 0\.999", for_two_languages.detail)


def test_va_keeps_valencian_and_drops_general_catalan() -> None:
    assert _clean(_filter("es", "va"), VALENCIAN) == VALENCIAN
    dropped = _clean(_filter("es", "va"), GENERAL)
    assert isinstance(dropped, Dropped)
    assert dropped.detail.endswith("forms: 0 Valencian, 4 general Catalan")


def test_catalan_without_a_form_of_either_norm_is_kept_by_ca_alone() -> None:
    assert isinstance(_clean(_filter("va"), ARTICLE["ca"]), Dropped)
    assert _clean(_filter("ca", "va"), ARTICLE["ca"]) == ARTICLE["ca"]


def test_ca_keeps_valencian_too() -> None:
    assert _clean(_filter("ca"), VALENCIAN) == VALENCIAN


def test_document_in_two_of_the_languages_is_kept() -> None:
    mixed = f"{ARTICLE['ca']}\n\n{ARTICLE['es']}"
    assert identify(mixed)[1] < 0.65
    assert _clean(_filter("es", "ca"), mixed) == mixed


def test_mixed_document_counts_as_the_language_of_most_of_its_pieces() -> None:
    mixed = "\n\n".join([ARTICLE["ca"]] * 6 + [ARTICLE["en"]])
    assert _clean(_filter("ca"), mixed) == mixed


def test_paragraphs_in_other_languages_are_removed_and_counted() -> None:
    edits: Counter[str] = Counter()
    text = "\n\n".join(["1. Drets", ARTICLE["ca"], ARTICLE["en"], ARTICLE["es"], ARTICLE["fr"], ARTICLE["fr"]])
    cleaned = _filter("es", "ca", by="paragraph").clean(text, edits)
    assert cleaned == "\n\n".join(["1. Drets", ARTICLE["ca"], ARTICLE["es"]])
    assert edits == {"removed paragraph in en": 1, "removed paragraph in fr": 2}


def test_lines_are_paragraphs_in_a_text_without_blank_lines() -> None:
    text = f"{ARTICLE['en']}\n{ARTICLE['ca']}\n{ARTICLE['ca']}"
    assert _clean(_filter("ca", by="paragraph"), text) == f"{ARTICLE['ca']}\n{ARTICLE['ca']}"


def test_document_without_a_paragraph_left_is_dropped() -> None:
    text = f"{ARTICLE['en']}\n\n{ARTICLE['fr']}"
    assert _clean(_filter("ca", by="paragraph"), text) == Dropped("other_language", "every paragraph")


def test_value_has_languages_and_a_threshold() -> None:
    assert open_language_filter("es,ca,va:0.8", "document") == LanguageFilter(("es", "ca", "va"), 0.8, "document")
    assert open_language_filter("es", "document").threshold == 0.65


def test_language_that_the_identifier_does_not_know_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"^--language: py3langid does not support xx; it supports ace af .* zu.*, and va$"
    ):
        open_language_filter("es,xx", "document")


def test_dropped_documents_are_in_the_ledger_and_in_the_sample(tmp_path: Path, tiny_model_dir: Path) -> None:
    source = write_jsonl(tmp_path / "texts.jsonl", [*ARTICLE.values(), VALENCIAN])
    tokenize(tmp_path / "out", tiny_model_dir, source, language="es,va", validation_split=0)
    manifest = manifest_of(tmp_path / "out")
    assert manifest.ledger.documents_skipped == {"other_language": 7}
    assert manifest.cleaning["language"]["threshold"] == 0.65
    dropped = [json.loads(line) for line in (tmp_path / "out" / "dropped.jsonl").read_text().splitlines()]
    assert ARTICLE["ca"] in [document["text"] for document in dropped]


def test_languages_in_another_form_are_refused() -> None:
    for language in ("es;ca", "ES", "es,", "es:2", "es:", "spanish"):
        faults = TokenizeArguments(dataset=["a"], tokenizer_name="t", output_dir="o", language=language).faults()
        assert faults == [f"--language: expected codes such as es,ca or es,ca:0.8, got {language!r}"]
