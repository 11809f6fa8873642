"""The tables of a comparison, which terminal and page show. The two corpora are named A and B."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from fabric_train.tokenization.cleaning.language import DEFAULT_THRESHOLD
from fabric_train.tokenization.inspect.comparison import (
    IN_DOCUMENTS,
    TIMES_MORE,
    UNCERTAIN_LANGUAGE,
    Comparison,
    CorpusSummary,
    TextTotals,
)
from fabric_train.tokenization.inspect.report import TextTable, length_facts

NAMES = ("A", "B")
_NONE = "–"
_LANGUAGES_SHOWN = 15
_UNITS = ("k", "M", "G", "T", "P")
Cells: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """A part of a comparison: its title, a table, and sentences about it; either may be missing."""

    title: str
    table: TextTable | None
    note: str = ""


def sections(comparison: Comparison) -> list[Section]:
    """Return the tables that compare two token datasets, for the terminal and the page."""
    languages = _languages(comparison) if comparison.no_languages is None else None
    words = (
        f"Times per million words of the sample, in lower case. Listed are words in {IN_DOCUMENTS} documents or more "
        f"that are at least {TIMES_MORE} times as frequent as in the other, the largest difference first."
    )
    return [
        Section("Totals", _totals(comparison), _about_totals(comparison)),
        Section("Sources", _sources(comparison)),
        Section("Lengths of documents", _lengths(comparison)),
        Section("Languages", languages, " ".join(filter(None, (comparison.no_languages, _about_sample(comparison))))),
        Section("Words that A has more often", _words(comparison, 0)),
        Section("Words that B has more often", _words(comparison, 1), words),
    ]


def amount(value: float) -> str:
    """Return a number exactly, or from 100,000 on with three digits: 1,234, 123 k, 1.23 M."""
    if value < 100_000:
        return f"{value:,.0f}"
    power = min(int(math.log10(value * 1000 / 999.5) // 3), len(_UNITS))
    scaled = value / 1000**power
    return f"{scaled:.{0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2}f} {_UNITS[power - 1]}"


def _totals(comparison: Comparison) -> TextTable:
    shown: dict[str, Callable[[CorpusSummary], str]] = {
        "split": lambda corpus: corpus.split,
        "tokenizer": lambda corpus: corpus.manifest.tokenizer.name,
        "vocabulary": lambda corpus: f"{corpus.manifest.tokenizer.vocab_size:,} tokens",
        "documents": lambda corpus: f"{corpus.totals.all.documents:,}",
        "tokens": lambda corpus: f"{corpus.totals.all.tokens:,}",
        "bytes": lambda corpus: f"{corpus.totals.all.bytes:,}",
        "tokens per byte": lambda corpus: _tokens_per_byte(corpus.totals.all),
        "tokens per word": lambda corpus: _tokens_per_word(corpus.sample),
    }
    return _table(("", *NAMES), ((name, *map(value, comparison.corpora)) for name, value in shown.items()), 3)


def _about_totals(comparison: Comparison) -> str:
    lines = []
    if not comparison.same_tokenizer:
        lines.append(
            "The tokenizers differ: numbers of tokens cannot be compared. Compare bytes, and tokens per byte or word."
        )
    lines.append("Tokens include BOS and EOS. Bytes are of the text in UTF-8, or of a chat's messages.")
    if any(source.epochs != 1 for corpus in comparison.corpora for source in corpus.manifest.sources):
        lines.append("A document that --weights repeats counts as often as it is packed.")
    return " ".join(lines)


def _sources(comparison: Comparison) -> TextTable:
    def values(corpus: CorpusSummary, name: str) -> tuple[float, tuple[str, ...]]:
        one, total = corpus.totals.sources[name], corpus.totals.all.bytes
        shown = (amount(one.documents), amount(one.tokens), amount(one.bytes), _share(one.bytes, total))
        return one.bytes / max(total, 1), (*shown, _tokens_per_byte(one))

    columns = ("documents", "tokens", "bytes", "share of bytes", "tokens per byte")
    names = [list(corpus.totals.sources) for corpus in comparison.corpora]
    return _table(("source", "", *columns), _pairs(comparison, names, values))


def _languages(comparison: Comparison) -> TextTable:
    def values(corpus: CorpusSummary, name: str) -> tuple[float, tuple[str, ...]]:
        one, all_of = corpus.languages[name], corpus.sample
        shares = (_share(one.documents, all_of.documents), _share(one.bytes, all_of.bytes))
        shown = (f"{one.documents:,}", *shares, _tokens_per_byte(one), _tokens_per_word(one))
        return one.documents / all_of.documents, shown

    columns = ("documents", "share of documents", "share of bytes", "tokens per byte", "tokens per word")
    names = [list(corpus.languages) for corpus in comparison.corpora]
    return _table(("language", "", *columns), _pairs(comparison, names, values)[: 2 * _LANGUAGES_SHOWN])


def _pairs(
    comparison: Comparison, names: list[list[str]], values: Callable[[CorpusSummary, str], tuple[float, Cells]]
) -> list[Cells]:
    """Return lines for A and B under each name that one has; ``values`` gives a name's share in a corpus, and cells."""
    found = [{name: values(one, name) for name in own} for one, own in zip(comparison.corpora, names, strict=True)]
    shares = {name: max(own[name][0] for own in found if name in own) for own in found for name in own}
    absent = (_NONE,) * max(len(cells) for own in found for _, cells in own.values())
    return [
        (name if letter == "A" else "", letter, *(own[name][1] if name in own else absent))
        for name in sorted(shares, key=lambda name: (-shares[name], name))
        for letter, own in zip(NAMES, found, strict=True)
    ]


def _lengths(comparison: Comparison) -> TextTable:
    columns, lines = list[str](), list[tuple[str, ...]]()
    for unit in ("bytes", "tokens"):
        for label, letter, corpus in zip((unit, ""), NAMES, comparison.corpora, strict=True):
            facts = length_facts(corpus.totals.byte_lengths if unit == "bytes" else corpus.totals.token_lengths)
            columns = [name for name, _ in facts]
            lines.append((label, letter, *(amount(value) for _, value in facts)))
    return _table(("length", "", *columns), lines)


def _words(comparison: Comparison, which: int) -> TextTable:
    lines = [(one.word, *map(_rate, one.per_million), f"{one.documents:,}") for one in comparison.words[which]]
    return _table(("word", *NAMES, f"documents of {NAMES[which]}"), lines or [(_NONE,) * 4], 1)


def _about_sample(comparison: Comparison) -> str:
    sizes = [
        f"{corpus.sample.documents:,} of {corpus.totals.all.documents:,} documents of {name} "
        f"({amount(corpus.sample.tokens_read)} tokens, {amount(corpus.sample.words)} words)"
        for name, corpus in zip(NAMES, comparison.corpora, strict=True)
    ]
    note = (
        f"Languages and words are counted in a sample that is spread evenly: {sizes[0]} and {sizes[1]}. Long documents "
        "are cut, so that a sample has at most 2^20 tokens."
    )
    if comparison.no_languages is None:
        note += (
            f" A language is {UNCERTAIN_LANGUAGE} below a probability of {DEFAULT_THRESHOLD}; ca includes Valencian."
        )
    return note


def _table(columns: tuple[str, ...], lines: Iterable[tuple[str, ...]], num_words: int = 2) -> TextTable:
    lines = tuple(lines)
    return TextTable(columns, lines, (0,) * len(lines), num_words)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else _NONE


def _rate(per_million: float) -> str:
    return f"{per_million:,.0f}" if per_million >= 10 or not per_million else f"{per_million:.1f}"


def _tokens_per_byte(totals: TextTotals) -> str:
    return f"{totals.tokens / totals.bytes:.3f}" if totals.bytes else _NONE


def _tokens_per_word(sample: TextTotals) -> str:
    return f"{sample.tokens_read / sample.words:.2f}" if sample.words else _NONE
