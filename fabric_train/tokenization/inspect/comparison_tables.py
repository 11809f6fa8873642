"""The tables of a comparison, which terminal and page show. The two corpora are named A and B."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fabric_train.tokenization.cleaning.language import DEFAULT_THRESHOLD
from fabric_train.tokenization.inspect.comparison import (
    UNCERTAIN_LANGUAGE,
    Comparison,
    CorpusSummary,
    SampleTotals,
    TextTotals,
)
from fabric_train.tokenization.inspect.row_view import visible
from fabric_train.tokenization.inspect.terminal import length_facts
from fabric_train.tokenization.inspect.word_ngrams import NgramScore

NAMES = ("A", "B")
NONE = "–"
_LANGUAGES_SHOWN = 15
_UNITS = ("k", "M", "G", "T", "P")
Pair = tuple[str, str]
_STYLES = {"A": "cyan", "B": "yellow"}
_MOST_BESIDE = 2  # columns of which A and B are shown beside each other
_NGRAMS_SHOWN = 8
_LONGEST_NGRAM = 24  # characters


@dataclass(frozen=True)
class PairTable:
    """A table with a column for A and one for B under each name of ``columns``; ``lines`` have a name and the pairs."""

    name: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, tuple[Pair, ...]], ...]


def amount(value: float) -> str:
    """Return a number exactly, or from 100,000 on with three digits: 1,234, 123 k, 1.23 M."""
    if value < 100_000:
        return f"{value:,.0f}"
    power = min(int(math.log10(value * 1000 / 999.5) // 3), len(_UNITS))
    scaled = value / 1000**power
    return f"{scaled:.{0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2}f} {_UNITS[power - 1]}"


def summary_table(comparison: Comparison) -> PairTable:
    """Return the tokenizers, settings and totals of both."""

    def line(name: str, value: Callable[[CorpusSummary], str]) -> tuple[str, tuple[Pair, ...]]:
        first, second = map(value, comparison.corpora)
        return name, ((first, second),)

    lines = (
        line("split", lambda corpus: corpus.split),
        line("tokenizer", lambda corpus: corpus.manifest.tokenizer.name),
        line("vocabulary", lambda corpus: f"{corpus.manifest.tokenizer.vocab_size:,} tokens"),
        line("documents", lambda corpus: f"{corpus.totals.all.documents:,}"),
        line("tokens", lambda corpus: f"{corpus.totals.all.tokens:,}"),
        line("bytes", lambda corpus: f"{corpus.totals.all.bytes:,}"),
        line("tokens per byte", lambda corpus: _tokens_per_byte(corpus.totals.all)),
        line("tokens per word", lambda corpus: _tokens_per_word(corpus.sample)),
    )
    return PairTable("", ("",), lines)


def source_pairs(comparison: Comparison) -> PairTable:
    """Return the sources of both, the largest share first."""

    def values(corpus: CorpusSummary, name: str) -> tuple[str, ...] | None:
        source = corpus.totals.sources.get(name)
        if source is None:
            return None
        share = _share(source.bytes, corpus.totals.all.bytes)
        return amount(source.documents), amount(source.tokens), amount(source.bytes), share, _tokens_per_byte(source)

    def size(name: str) -> float:
        found = [(corpus.totals.sources.get(name), corpus.totals.all.bytes) for corpus in comparison.corpora]
        return max(source.bytes / max(total, 1) for source, total in found if source is not None)

    names = {name for corpus in comparison.corpora for name in corpus.totals.sources}
    columns = ("documents", "tokens", "bytes", "share of bytes", "tokens per byte")
    return _pair_table(comparison, "source", columns, sorted(names, key=lambda name: (-size(name), name)), values)


def language_pairs(comparison: Comparison) -> PairTable:
    """Return the languages of the sampled documents, the largest share first."""

    def values(corpus: CorpusSummary, name: str) -> tuple[str, ...] | None:
        found = corpus.languages.get(name)
        if found is None:
            return None
        return (
            f"{found.documents:,}",
            _share(found.documents, corpus.sample.documents),
            _share(found.bytes, corpus.sample.bytes),
            _tokens_per_byte(found),
            _tokens_per_word(found),
        )

    def size(name: str) -> float:
        found = [(corpus.languages.get(name), corpus.sample.documents) for corpus in comparison.corpora]
        return max(language.documents / total for language, total in found if language is not None)

    names = {name for corpus in comparison.corpora for name in corpus.languages}
    columns = ("documents", "share of documents", "share of bytes", "tokens per byte", "tokens per word")
    largest = sorted(names, key=lambda name: (-size(name), name))[:_LANGUAGES_SHOWN]
    return _pair_table(comparison, "language", columns, largest, values)


def length_pairs(comparison: Comparison) -> PairTable:
    """Return percentiles of the documents' lengths."""
    facts = [
        [dict(length_facts(lengths)) for lengths in (corpus.totals.byte_lengths, corpus.totals.token_lengths)]
        for corpus in comparison.corpora
    ]
    lines = tuple(
        (name, tuple((amount(facts[0][unit][name]), amount(facts[1][unit][name])) for unit in (0, 1)))
        for name in facts[0][0]
    )
    return PairTable("length", ("bytes", "tokens"), lines)


def notes(comparison: Comparison) -> list[str]:
    """Return sentences about what is counted, and what of it can be compared."""
    lines = []
    if not comparison.same_tokenizer:
        lines.append(
            "The tokenizers differ: numbers of tokens cannot be compared. Compare bytes, and tokens per byte or word."
        )
    lines.append("Tokens include BOS and EOS. Bytes are those of the text in UTF-8, of a chat those of its messages.")
    if any(source.epochs != 1 for corpus in comparison.corpora for source in corpus.manifest.sources):
        lines.append("A document that --weights repeats counts as often as it is packed.")
    return lines


def sample_note(comparison: Comparison) -> str:
    """Return how large the samples are."""
    sizes = [
        f"{corpus.sample.documents:,} of {corpus.totals.all.documents:,} documents of {name} "
        f"({amount(corpus.sample.tokens_read)} tokens, {amount(corpus.sample.words)} words)"
        for name, corpus in zip(NAMES, comparison.corpora, strict=True)
    ]
    note = (
        f"Languages, words and n-grams are those of a sample that is spread evenly: {sizes[0]} and {sizes[1]}. Long "
        "documents are cut, so that a sample has at most 2^20 tokens."
    )
    if comparison.no_languages is None:
        note += (
            f" A language is {UNCERTAIN_LANGUAGE} below a probability of {DEFAULT_THRESHOLD}; ca includes Valencian."
        )
    return note


def _pair_table(
    comparison: Comparison,
    name: str,
    columns: tuple[str, ...],
    labels: Iterable[str],
    values: Callable[[CorpusSummary, str], tuple[str, ...] | None],
) -> PairTable:
    absent = (NONE,) * len(columns)
    lines = []
    for label in labels:
        first, second = (values(corpus, label) or absent for corpus in comparison.corpora)
        lines.append((label, tuple(zip(first, second, strict=True))))
    return PairTable(name, columns, tuple(lines))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else NONE


def _tokens_per_byte(totals: TextTotals) -> str:
    return f"{totals.tokens / totals.bytes:.3f}" if totals.bytes else NONE


def _tokens_per_word(sample: SampleTotals) -> str:
    return f"{sample.tokens_read / sample.words:.2f}" if sample.words else NONE


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the tables of a comparison."""
    console.rule(Text("token datasets compared"), align="left", style="dim")
    for name, corpus in zip(NAMES, comparison.corpora, strict=True):
        console.print(Text.assemble((f"{name} ", _STYLES[name]), visible(str(corpus.folder))), soft_wrap=True)
    for table in (summary_table(comparison), source_pairs(comparison), length_pairs(comparison)):
        console.print(_rich_pairs(table))
    if comparison.no_languages is None:
        console.print(_rich_pairs(language_pairs(comparison)))
    else:
        console.print(Text(f"languages: {comparison.no_languages}"), soft_wrap=True)
    for number, name in enumerate(NAMES):
        console.rule(Text(f"n-grams that {name} has more often, with z"), align="left", style="dim")
        console.print(_rich_ngrams({size: both[number] for size, both in comparison.ngrams.items()}))
    for note in (*notes(comparison), sample_note(comparison)):
        console.print(Text(note))


def _rich_pairs(table: PairTable) -> Table:
    """Return a table with A and B beside each other, or below each other if there are many columns."""
    shown = Table(box=box.SIMPLE)
    shown.add_column(Text(table.name), overflow="fold", header_style="dim")
    if len(table.columns) <= _MOST_BESIDE:
        for column in table.columns:
            for name in NAMES:
                header = Text(f"{column}\n{name}" if column else name, style=_STYLES[name])
                shown.add_column(header, justify="right", no_wrap=bool(column), overflow="fold")
        for label, pairs in table.lines:
            shown.add_row(Text(visible(label)), *(Text(visible(value)) for pair in pairs for value in pair))
        return shown
    shown.add_column()
    for column in table.columns:
        shown.add_column(Text(column), justify="right", header_style="dim")
    marks = Text("\n").join(Text(name, _STYLES[name]) for name in NAMES)
    for label, pairs in table.lines:
        shown.add_row(Text(visible(label)), marks, *(Text("\n".join(map(visible, pair))) for pair in pairs))
    return shown


def _rich_ngrams(by_size: dict[int, Sequence[NgramScore]]) -> Table:
    shown = Table(box=box.SIMPLE)
    for size in by_size:
        shown.add_column(Text(f"{size} word{'s' if size > 1 else ''}"), no_wrap=True, header_style="dim")
        shown.add_column(Text("z"), justify="right", no_wrap=True, header_style="dim")
    most = min(max(map(len, by_size.values())), _NGRAMS_SHOWN)
    for place in range(max(most, 1)):
        cells = []
        for scores in by_size.values():
            score = scores[place] if place < len(scores) else None
            cells += [Text(_shortened(score.text)), Text(f"{score.z:.1f}")] if score else [Text(NONE), Text("")]
        shown.add_row(*cells)
    return shown


def _shortened(text: str) -> str:
    text = visible(text)
    return text if len(text) <= _LONGEST_NGRAM else f"{text[: _LONGEST_NGRAM - 1]}…"
