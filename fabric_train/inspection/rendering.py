"""Show the report or a comparison: on a terminal, or as one HTML page without other files.

On the terminal every colour has a sign next to it, for readers without colours. The page's text is in ``templates/``.
Both show the same tables of a comparison, in which the two corpora are named A and B.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fabric_train.cleaning.language import DEFAULT_THRESHOLD
from fabric_train.cli.output import escape_controls, visible
from fabric_train.inspection import report as reports
from fabric_train.inspection.comparison import (
    IN_DOCUMENTS,
    TIMES_MORE,
    UNCERTAIN_LANGUAGE,
    Comparison,
    CorpusSummary,
    TextTotals,
)
from fabric_train.inspection.row_view import PairView, RowView, Token
from fabric_train.pages.markdown import page_templates

NAMES = ("A", "B")
_NONE = "–"
_LANGUAGES_SHOWN = 15
_UNITS = ("k", "M", "G", "T", "P")
Cells: TypeAlias = tuple[str, ...]
_BAR_WIDTH = 40
_LONGEST_STRETCH = 400  # tokens with the same supervision; in a longer stretch, the middle is left out
_SHOWN_BEFORE = 250
_SHOWN_AFTER = 50
_SHOWN_ORIGINS = 12  # documents of a row
# of a reason, and of each document
_SHOWN_DROPPED = 3
_DROPPED_CHARACTERS = 160
_STYLES = {"bos": "bold magenta", "eos": "bold magenta", "special": "bold yellow", "gap": "italic"}
_BORDER = "bold cyan"
_SUPERVISED = "green"
_UNSUPERVISED = "bright_black"
_PADDING = "dim red"
_DIFFERENT = "bold reverse"


def print_report(report: reports.DatasetReport, console: Console) -> None:
    """Print the report. Problems come last, so that they are in view at the end."""
    console.rule(Text(f"token dataset {report.folder}"), align="left", style="dim")
    _print_facts(reports.facts(report), console)
    console.print(_rich_table(reports.ledger_table(report)))
    if report.manifest and report.manifest.sources:
        console.print(_rich_table(reports.source_table(report.manifest)))
    _print_dropped(report, console)
    _print_lengths(report, console)
    if report.rows:
        _print_legend(report, console)
    for row in report.rows:
        _print_row(row, report.split, console)
    console.rule(Text("problems"), align="left", style="dim")
    for problem in report.problems:
        console.print(Text(f"✗ {problem}", style="bold red"), soft_wrap=True)
    if not report.problems:
        console.print(Text(f"✓ {reports.success_line(report)}", style="bold green"), soft_wrap=True)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print two token datasets side by side: their folders and the tables that compare them."""
    console.rule(Text("token datasets compared"), align="left", style="dim")
    _print_facts([(name, str(one.folder)) for name, one in zip(NAMES, comparison.corpora, strict=True)], console)
    for section in sections(comparison):
        console.rule(Text(section.title), align="left", style="dim")
        if section.table:
            console.print(_rich_table(section.table))
        if section.note:
            console.print(Text(section.note))


def _print_facts(lines: Iterable[tuple[str, str]], console: Console) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, value in lines:
        grid.add_row(Text(name), Text(visible(value)))
    console.print(grid)


def _rich_table(table: reports.TextTable) -> Table:
    shown = Table(box=box.SIMPLE)
    for index, name in enumerate(table.columns):
        is_words = index < table.num_words
        justify: Literal["left", "right"] = "left" if is_words else "right"
        shown.add_column(Text(name), justify=justify, overflow="fold", no_wrap=not is_words, header_style="dim")
    for depth, line in zip(table.depth, table.lines, strict=True):
        first, *others = (Text(visible(text)) for text in line)
        shown.add_row(Text("  " * depth) + first, *others)
    return shown


def _print_dropped(report: reports.DatasetReport, console: Console) -> None:
    if report.dropped:
        console.rule(Text("some of the documents left out; --html shows more"), align="left", style="dim")
    for reason, documents in report.dropped.items():
        console.print(Text(visible(reports.dropped_title(report, reason)), style="bold"), soft_wrap=True)
        for document in documents[:_SHOWN_DROPPED]:
            head = f"  {document.place}: {document.detail}" if document.detail else f"  {document.place}"
            console.print(Text(visible(head), style=_UNSUPERVISED), soft_wrap=True)
            console.print(Padding(Text(visible(document.text[:_DROPPED_CHARACTERS])), (0, 0, 0, 4)))


def _print_lengths(report: reports.DatasetReport, console: Console) -> None:
    counts = report.counts[report.split]
    console.rule(Text(f"document lengths in {report.split}, in tokens"), align="left", style="dim")
    if counts.lengths is None:
        console.print("unknown: this dataset does not store where documents begin")
        return
    bars = reports.histogram(counts.lengths)
    most = max((bar.count for bar in bars), default=1) or 1
    width = max((len(bar.name) for bar in bars), default=0)
    for bar in bars:
        block = "█" * max(round(_BAR_WIDTH * bar.count / most), 1 if bar.count else 0)
        console.print(Text(f"{bar.name:>{width}} ").append(block, "cyan").append(f" {bar.count:,}"), soft_wrap=True)
    percentiles = "   ".join(f"{name} {value:,}" for name, value in reports.length_facts(counts.lengths))
    for line in (percentiles, *reports.length_notes(report)):
        console.print(Text(line))


def _print_legend(report: reports.DatasetReport, console: Console) -> None:
    console.rule(Text("rows as the model sees them"), align="left", style="dim")
    signs = [
        Text("supervised", _SUPERVISED),
        Text("‹not supervised›", _UNSUPERVISED),
        Text.assemble(("┃", _BORDER), " document border"),
        Text.assemble(("┆", _BORDER), " continued from or in another row"),
        Text("<bos or eos>", _STYLES["bos"]),
        Text("<other special>", _STYLES["special"]),
        Text("░ padding", _PADDING),
        *([Text("▸ first token that differs", _DIFFERENT)] if report.manifest and report.manifest.has_pairs else []),
        Text("↵ line break  ⇥ tab  ⋯ left out here"),
    ]
    console.print(Text("  ").join(signs))


def _print_row(row: RowView, split: str, console: Console) -> None:
    console.print()
    head = f"{split}, row {row.index:,}: {row.num_tokens:,} tokens, {row.num_supervised:,} supervised"
    console.print(Text(head + (f", {row.num_padding:,} of padding" if row.num_padding else ""), style="bold"))
    for pair in row.pairs:
        _print_pair(pair, console)
    shown = Text()
    for piece in () if row.pairs else row.pieces:
        if piece.begins is not None:
            shown.append("┃" if piece.begins else "┆", _BORDER)
        _append_tokens(shown, piece.tokens)
    if row.continues:
        shown.append("┆", _BORDER)
    if row.num_padding:
        shown.append(f"░ {row.num_padding:,} × {visible(row.padding)}", _PADDING)
    console.print(shown)
    for line in row.origins[:_SHOWN_ORIGINS]:
        console.print(Text(f"  {visible(line)}", style=_UNSUPERVISED), soft_wrap=True)
    if len(row.origins) > _SHOWN_ORIGINS:
        more = len(row.origins) - _SHOWN_ORIGINS
        console.print(Text(f"  and {more:,} more documents; --html lists all", style=_UNSUPERVISED))


def _print_pair(pair: PairView, console: Console) -> None:
    """Print the prompt of a pair, and its two answers side by side."""
    begins = Text("┃", _BORDER)
    _append_tokens(begins, pair.prompt.tokens)
    console.print(begins)
    table = Table(box=box.MINIMAL, padding=(0, 1))
    for name, position in zip(("chosen", "rejected"), pair.differs_at, strict=True):
        table.add_column(Text(f"{name}, differs from position {position:,} on"), overflow="fold", header_style="dim")
    answers = [Text(), Text()]
    for shown, tokens in zip(answers, (pair.chosen, pair.rejected), strict=True):
        _append_tokens(shown, tokens, pair)
    table.add_row(*answers)
    console.print(table)


def _append_tokens(shown: Text, all_tokens: Sequence[Token], pair: PairView | None = None) -> None:
    for is_supervised, tokens in groupby(all_tokens, lambda token: token.is_supervised):
        stretch = list(tokens)
        shown.append("" if is_supervised else "‹", _UNSUPERVISED)
        for token in stretch if len(stretch) <= _LONGEST_STRETCH else stretch[:_SHOWN_BEFORE]:
            _append_token(shown, token, pair)
        if len(stretch) > _LONGEST_STRETCH:
            left_out = sum(len(token.ids) for token in stretch[_SHOWN_BEFORE:-_SHOWN_AFTER])
            shown.append(f" ⋯ {left_out:,} tokens ⋯ ", "italic")
            for token in stretch[-_SHOWN_AFTER:]:
                _append_token(shown, token)
        shown.append("" if is_supervised else "›", _UNSUPERVISED)


def _append_token(shown: Text, token: Token, pair: PairView | None = None) -> None:
    if pair is not None and pair.begins_to_differ(token):
        shown.append("▸", _DIFFERENT)
    shown.append(visible(token.text), _STYLES.get(token.role, _SUPERVISED if token.is_supervised else _UNSUPERVISED))


def report_to_html(report: reports.DatasetReport) -> str:
    """Return the page, with every text of the dataset escaped."""
    manifest = report.manifest
    lengths = report.counts[report.split].lengths
    bars = None if lengths is None else reports.histogram(lengths)
    return _render(
        "report.html.j2",
        title=f"token dataset {report.folder.name or report.folder}",
        report=report,
        success=reports.success_line(report),
        names=reports.facts(report),
        ledger=reports.ledger_table(report),
        sources=reports.source_table(manifest) if manifest and manifest.sources else None,
        dropped_title=reports.dropped_title,
        bars=bars,
        most=max((bar.count for bar in bars or ()), default=1) or 1,
        lengths=reports.length_facts(lengths or {}),
        notes=reports.length_notes(report),
    )


def comparison_to_html(comparison: Comparison) -> str:
    """Return the page, with every text of the datasets escaped."""
    names = (visible(corpus.folder.name or str(corpus.folder)) for corpus in comparison.corpora)
    return _render(
        "comparison.html.j2",
        title=f"{' and '.join(names)} compared",
        folders=[(name, str(one.folder)) for name, one in zip(NAMES, comparison.corpora, strict=True)],
        sections=sections(comparison),
    )


def _title(token: Token) -> str:
    first = token.position
    last = token.position + len(token.ids) - 1
    position = f"position {first:,}" if first == last else f"positions {first:,} to {last:,}"
    label = "supervised, label as the id" if token.is_supervised else "not supervised, label -100"
    name = {"text": "", "bos": ", BOS", "eos": ", EOS", "special": ", special"}[token.role]
    return f"{position}, id {' '.join(map(str, token.ids))}{name}: {visible(token.text)!r}\n{label}"


_TEMPLATES = page_templates(Path(__file__).with_name("templates"), keep_trailing_newline=True)
_TEMPLATES.filters["title"] = _title


def _render(template: str, **values: Any) -> str:
    return escape_controls(_TEMPLATES.get_template(template).render(values).lstrip())


@dataclass(frozen=True)
class Section:
    """A part of a comparison: its title, a table, and sentences about it; either may be missing."""

    title: str
    table: reports.TextTable | None
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


def _totals(comparison: Comparison) -> reports.TextTable:
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


def _sources(comparison: Comparison) -> reports.TextTable:
    def values(corpus: CorpusSummary, name: str) -> tuple[float, tuple[str, ...]]:
        one = corpus.totals.sources[name]
        total = corpus.totals.all.bytes
        shown = (amount(one.documents), amount(one.tokens), amount(one.bytes), _share(one.bytes, total))
        return one.bytes / max(total, 1), (*shown, _tokens_per_byte(one))

    columns = ("documents", "tokens", "bytes", "share of bytes", "tokens per byte")
    names = [list(corpus.totals.sources) for corpus in comparison.corpora]
    return _table(("source", "", *columns), _pairs(comparison, names, values))


def _languages(comparison: Comparison) -> reports.TextTable:
    def values(corpus: CorpusSummary, name: str) -> tuple[float, tuple[str, ...]]:
        one = corpus.languages[name]
        all_of = corpus.sample
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


def _lengths(comparison: Comparison) -> reports.TextTable:
    columns: list[str] = []
    lines: list[tuple[str, ...]] = []
    for unit in ("bytes", "tokens"):
        for label, letter, corpus in zip((unit, ""), NAMES, comparison.corpora, strict=True):
            facts = reports.length_facts(corpus.totals.byte_lengths if unit == "bytes" else corpus.totals.token_lengths)
            columns = [name for name, _ in facts]
            lines.append((label, letter, *(amount(value) for _, value in facts)))
    return _table(("length", "", *columns), lines)


def _words(comparison: Comparison, which: int) -> reports.TextTable:
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


def _table(columns: tuple[str, ...], lines: Iterable[tuple[str, ...]], num_words: int = 2) -> reports.TextTable:
    lines = tuple(lines)
    return reports.TextTable(columns, lines, (0,) * len(lines), num_words)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else _NONE


def _rate(per_million: float) -> str:
    return f"{per_million:,.0f}" if per_million >= 10 or not per_million else f"{per_million:.1f}"


def _tokens_per_byte(totals: TextTotals) -> str:
    return f"{totals.tokens / totals.bytes:.3f}" if totals.bytes else _NONE


def _tokens_per_word(sample: TextTotals) -> str:
    return f"{sample.tokens_read / sample.words:.2f}" if sample.words else _NONE
