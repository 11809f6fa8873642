"""The tables of a comparison, which terminal and page show. The two corpora are named A and B."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fabric_train.tokenization.cleaning.language_filter import DEFAULT_THRESHOLD
from fabric_train.tokenization.inspect.comparison import UNCERTAIN_LANGUAGE, Comparison, CorpusSummary, SampleTotals
from fabric_train.tokenization.inspect.corpus_totals import TextTotals
from fabric_train.tokenization.inspect.length_distribution import length_facts

NAMES = ("A", "B")
NONE = "–"
_LANGUAGES_SHOWN = 15
_UNITS = ("k", "M", "G", "T", "P")

Pair = tuple[str, str]


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
