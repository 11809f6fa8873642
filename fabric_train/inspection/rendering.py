"""Show a report or a comparison on a terminal, or as an HTML page that needs no other files.

On the terminal every colour has a sign next to it, for readers without colours. The page's text is in ``templates/``.
Terminal and page show the same tables of a comparison, which call the two corpora A and B.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fabric_train.cleaning.language import DEFAULT_THRESHOLD
from fabric_train.cli.output import escape_controls, visible
from fabric_train.inspection import tables
from fabric_train.inspection.comparison import (
    IN_DOCUMENTS,
    TIMES_MORE,
    UNCERTAIN_LANGUAGE,
    Comparison,
    CorpusSummary,
    TextTotals,
)
from fabric_train.inspection.report import DatasetReport
from fabric_train.inspection.row_view import PairView, RowView, Token
from fabric_train.pages.markdown import page_templates

NAMES = ("A", "B")
_NONE = "–"
_LANGUAGES_SHOWN = 15
_UNITS = ("k", "M", "G", "T", "P")

_BAR_WIDTH = 40
_LONGEST_RUN = 400  # tokens with the same supervision; in a longer run, the middle is left out
_SHOWN_BEFORE = 250
_SHOWN_AFTER = 50
_SHOWN_ORIGINS = 12  # documents of a row
_SHOWN_DROPPED = 3  # documents of a reason
_DROPPED_CHARACTERS = 160  # of a document
_STYLES = {"bos": "bold magenta", "eos": "bold magenta", "special": "bold yellow", "gap": "italic"}
_BORDER = "bold cyan"
_SUPERVISED = "green"
_UNSUPERVISED = "bright_black"
_PADDING = "dim red"
_DIFFERENT = "bold reverse"


def print_report(report: DatasetReport, console: Console) -> None:
    """Print the report. Problems come last, so that they are in view at the end."""
    print_heading(f"token dataset {report.folder}", console)
    print_facts(tables.facts(report), console)
    console.print(rich_table(tables.ledger_table(report)))
    if report.manifest and report.manifest.sources:
        console.print(rich_table(tables.source_table(report.manifest)))
    _print_dropped(report, console)
    _print_lengths(report, console)
    if report.rows:
        _print_legend(report, console)
    for row in report.rows:
        _print_row(row, report.split, console)
    print_heading("problems", console)
    for problem in report.problems:
        console.print(Text(f"✗ {problem}", style="bold red"), soft_wrap=True)
    if not report.problems:
        console.print(Text(f"✓ {tables.success_line(report)}", style="bold green"), soft_wrap=True)


def print_heading(title: str, console: Console) -> None:
    """Print a line across the terminal with a title in it."""
    console.rule(Text(title), align="left", style="dim")


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print two token datasets side by side: their folders and the tables that compare them."""
    print_heading("token datasets compared", console)
    print_facts(_named_folders(comparison), console)
    for section in sections(comparison):
        print_heading(section.title, console)
        if section.table:
            console.print(rich_table(section.table))
        if section.note:
            console.print(Text(section.note))


def _named_folders(comparison: Comparison) -> list[tuple[str, str]]:
    return [(name, str(corpus.folder)) for name, corpus in zip(NAMES, comparison.corpora, strict=True)]


def print_facts(lines: Iterable[tuple[str, str]], console: Console) -> None:
    """Print names with their values, a line for each."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, value in lines:
        grid.add_row(Text(name), Text(visible(value)))
    console.print(grid)


def rich_table(table: tables.TextTable) -> Table:
    """Return a table for the terminal; columns of words are left-aligned and wrapped, columns of numbers are not."""
    rich_table = Table(box=box.SIMPLE)
    for index, column in enumerate(table.columns):
        is_words = index < table.num_words
        justify: Literal["left", "right"] = "left" if is_words else "right"
        rich_table.add_column(Text(column), justify=justify, overflow="fold", no_wrap=not is_words, header_style="dim")
    for depth, line in zip(table.depth, table.lines, strict=True):
        name, *values = (Text(visible(text)) for text in line)
        indented_name = Text("  " * depth) + name
        rich_table.add_row(indented_name, *values)
    return rich_table


def _print_dropped(report: DatasetReport, console: Console) -> None:
    if report.dropped:
        print_heading("some of the documents that were left out; --html shows more", console)
    for reason, documents in report.dropped.items():
        console.print(Text(visible(tables.dropped_title(report, reason)), style="bold"), soft_wrap=True)
        for document in documents[:_SHOWN_DROPPED]:
            title = f"  {document.place}"
            if document.detail:
                title += f": {document.detail}"
            console.print(Text(visible(title), style=_UNSUPERVISED), soft_wrap=True)
            excerpt = Text(visible(document.text[:_DROPPED_CHARACTERS]))
            console.print(Padding(excerpt, (0, 0, 0, 4)))


def _print_lengths(report: DatasetReport, console: Console) -> None:
    """Print the histogram of the documents' lengths, percentiles and notes."""
    lengths = report.counts[report.split].lengths
    print_heading(f"document lengths in {report.split}, in tokens", console)
    if lengths is None:
        console.print("unknown: this dataset does not store where documents begin")
        return
    bars = tables.histogram(lengths)
    largest_count = _largest_count(bars)
    name_width = max((len(bar.name) for bar in bars), default=0)
    for bar in bars:
        width = round(_BAR_WIDTH * bar.count / largest_count)
        if bar.count:
            width = max(width, 1)  # few documents are still visible
        line = Text(f"{bar.name:>{name_width}} ")
        line.append("█" * width, "cyan")
        line.append(f" {bar.count:,}")
        console.print(line, soft_wrap=True)
    percentiles = "   ".join(f"{name} {value:,}" for name, value in tables.length_facts(lengths))
    for note in (percentiles, *tables.length_notes(report)):
        console.print(Text(note))


def _largest_count(bars: Sequence[tables.Bar]) -> int:
    """Return the count of the largest bar, by which the others are divided; at least 1."""
    return max([1, *(bar.count for bar in bars)])


def _print_legend(report: DatasetReport, console: Console) -> None:
    print_heading("rows as the model sees them", console)
    signs = [
        Text("supervised", _SUPERVISED),
        Text("‹not supervised›", _UNSUPERVISED),
        Text.assemble(("┃", _BORDER), " document border"),
        Text.assemble(("┆", _BORDER), " continued from or in another row"),
        Text("<bos or eos>", _STYLES["bos"]),
        Text("<other special>", _STYLES["special"]),
        Text("░ padding", _PADDING),
    ]
    # The sequences of a document, such as both answers of a pair, begin with the same prompt.
    if report.manifest and report.manifest.sequences_per_document > 1:
        signs.append(Text("▸ first token that differs", _DIFFERENT))
    signs.append(Text("↵ line break  ⇥ tab  ⋯ left out here"))
    console.print(Text("  ").join(signs))


def _print_row(row: RowView, split: str, console: Console) -> None:
    """Print a row: its counts, pieces or pairs, padding, and the origins of its documents."""
    console.print()
    title = f"{split}, row {row.index:,}: {row.num_tokens:,} tokens, {row.num_supervised:,} supervised"
    if row.num_padding:
        title += f", {row.num_padding:,} of padding"
    console.print(Text(title, style="bold"))

    content = Text()
    if row.pairs:
        for pair in row.pairs:
            _print_pair(pair, console)
    else:
        for piece in row.pieces:
            if piece.begins is True:  # the piece begins its document
                content.append("┃", _BORDER)
            elif piece.begins is False:  # the piece continues the document of the row before
                content.append("┆", _BORDER)
            # without a border: it is unknown whether the document begins with the piece
            _append_tokens(content, piece.tokens)
    if row.continues:  # the last document goes on in the next row
        content.append("┆", _BORDER)
    if row.num_padding:
        content.append(f"░ {row.num_padding:,} × {visible(row.padding)}", _PADDING)
    console.print(content)

    for origin in row.origins[:_SHOWN_ORIGINS]:
        console.print(Text(f"  {visible(origin)}", style=_UNSUPERVISED), soft_wrap=True)
    num_hidden = len(row.origins) - _SHOWN_ORIGINS
    if num_hidden > 0:
        console.print(Text(f"  and {num_hidden:,} more documents; --html lists all", style=_UNSUPERVISED))


def _print_pair(pair: PairView, console: Console) -> None:
    """Print a prompt, and its two answers side by side."""
    prompt = Text("┃", _BORDER)
    _append_tokens(prompt, pair.prompt.tokens)
    console.print(prompt)
    table = Table(box=box.MINIMAL, padding=(0, 1))
    for name, position in zip(pair.names, pair.differs_at, strict=True):
        table.add_column(Text(f"{name}, differs from position {position:,} on"), overflow="fold", header_style="dim")
    texts = []
    for tokens in pair.answers:
        text = Text()
        _append_tokens(text, tokens, pair)
        texts.append(text)
    table.add_row(*texts)
    console.print(table)


def _append_tokens(text: Text, tokens: Sequence[Token], pair: PairView | None = None) -> None:
    """Append tokens to ``text``, without the middle of a long run of the same supervision.

    If the tokens belong to ``pair``, the first token in which its answers differ is marked.
    """
    for is_supervised, group in groupby(tokens, lambda token: token.is_supervised):
        run = list(group)
        if not is_supervised:
            text.append("‹", _UNSUPERVISED)
        if len(run) <= _LONGEST_RUN:
            for token in run:
                _append_token(text, token, pair)
        else:
            for token in run[:_SHOWN_BEFORE]:
                _append_token(text, token, pair)
            num_left_out = sum(len(token.ids) for token in run[_SHOWN_BEFORE:-_SHOWN_AFTER])
            text.append(f" ⋯ {num_left_out:,} tokens ⋯ ", "italic")
            for token in run[-_SHOWN_AFTER:]:
                _append_token(text, token)
        if not is_supervised:
            text.append("›", _UNSUPERVISED)


def _append_token(text: Text, token: Token, pair: PairView | None = None) -> None:
    if pair is not None and pair.begins_to_differ(token):
        text.append("▸", _DIFFERENT)
    style = _SUPERVISED if token.is_supervised else _UNSUPERVISED
    text.append(visible(token.text), _STYLES.get(token.role, style))


def report_to_html(report: DatasetReport) -> str:
    """Return the page of a report, with every text of the dataset escaped."""
    lengths = report.counts[report.split].lengths
    bars = None if lengths is None else tables.histogram(lengths)
    sources = None
    if report.manifest and report.manifest.sources:
        sources = tables.source_table(report.manifest)
    return _render(
        "report.html.j2",
        title=f"token dataset {report.folder.name or report.folder}",
        report=report,
        success=tables.success_line(report),
        names=tables.facts(report),
        ledger=tables.ledger_table(report),
        sources=sources,
        dropped_title=tables.dropped_title,
        bars=bars,
        most=_largest_count(bars or []),
        lengths=tables.length_facts(lengths or {}),
        notes=tables.length_notes(report),
    )


def comparison_to_html(comparison: Comparison) -> str:
    """Return the page of a comparison, with every text of the datasets escaped."""
    names = [visible(corpus.folder.name or str(corpus.folder)) for corpus in comparison.corpora]
    return _render(
        "comparison.html.j2",
        title=f"{' and '.join(names)} compared",
        folders=_named_folders(comparison),
        sections=sections(comparison),
    )


def _title(token: Token) -> str:
    """Return what the page shows when the mouse is over a token: position, ids, role, text and label."""
    last_position = token.position + len(token.ids) - 1
    if last_position == token.position:
        position = f"position {token.position:,}"
    else:
        position = f"positions {token.position:,} to {last_position:,}"
    label = "supervised, label as the id" if token.is_supervised else "not supervised, label -100"
    role = {"text": "", "bos": ", BOS", "eos": ", EOS", "special": ", special"}[token.role]
    ids = " ".join(map(str, token.ids))
    return f"{position}, id {ids}{role}: {visible(token.text)!r}\n{label}"


_TEMPLATES = page_templates(Path(__file__).with_name("templates"), keep_trailing_newline=True)
_TEMPLATES.filters["title"] = _title


def _render(template: str, **values: Any) -> str:
    return escape_controls(_TEMPLATES.get_template(template).render(values).lstrip())


@dataclass(frozen=True)
class Section:
    """A section of a comparison: a table, and sentences about it; either may be missing."""

    title: str
    table: tables.TextTable | None
    note: str = ""


def sections(comparison: Comparison) -> list[Section]:
    """Return the tables that compare two token datasets, for the terminal and the page."""
    languages = None
    note_on_languages = _about_sample(comparison)
    if comparison.no_languages is None:
        languages = _language_table(comparison)
    else:
        note_on_languages = f"{comparison.no_languages} {note_on_languages}"
    note_on_words = (
        "Occurrences per million words of the sample, in lower case. Lists words that are in at least "
        f"{IN_DOCUMENTS} documents and at least {TIMES_MORE} times as frequent as in the other dataset, largest "
        "difference first."
    )
    return [
        Section("Totals", _totals_table(comparison), _about_totals(comparison)),
        Section("Sources", _source_table(comparison)),
        Section("Document lengths", _length_table(comparison)),
        Section("Languages", languages, note_on_languages),
        Section("Words more frequent in A", _word_table(comparison, 0)),
        Section("Words more frequent in B", _word_table(comparison, 1), note_on_words),
    ]


def amount(value: float) -> str:
    """Return a number exactly, or from 100,000 on with three digits: 1,234, 123 k, 1.23 M."""
    if value < 100_000:
        return f"{value:,.0f}"
    # 999.5 is rounded to 1000, which needs the next unit
    power = min(int(math.log10(value * 1000 / 999.5) // 3), len(_UNITS))
    scaled = value / 1000**power
    unit = _UNITS[power - 1]
    if scaled >= 99.95:
        return f"{scaled:.0f} {unit}"
    if scaled >= 9.995:
        return f"{scaled:.1f} {unit}"
    return f"{scaled:.2f} {unit}"


def _totals_table(comparison: Comparison) -> tables.TextTable:
    values: dict[str, Callable[[CorpusSummary], str]] = {
        "split": lambda corpus: corpus.split,
        "tokenizer": lambda corpus: corpus.manifest.tokenizer.name,
        "vocabulary": lambda corpus: f"{corpus.manifest.tokenizer.vocab_size:,} tokens",
        "documents": lambda corpus: f"{corpus.totals.all.documents:,}",
        "tokens": lambda corpus: f"{corpus.totals.all.tokens:,}",
        "bytes": lambda corpus: f"{corpus.totals.all.bytes:,}",
        "tokens per byte": lambda corpus: _tokens_per_byte(corpus.totals.all),
        "tokens per word": lambda corpus: _tokens_per_word(corpus.sample),
    }
    lines = [(name, *map(value, comparison.corpora)) for name, value in values.items()]
    return tables.flat_table(("", *NAMES), lines, num_words=3)


def _about_totals(comparison: Comparison) -> str:
    """Return sentences that say what can be compared, and what is counted."""
    sentences = []
    if not comparison.same_tokenizer:
        sentences.append(
            "The tokenizers differ, so token counts are not comparable. Compare bytes, and tokens per byte or word."
        )
    sentences.append("Tokens include BOS and EOS. Bytes count the UTF-8 text, or the messages of a chat.")
    for corpus in comparison.corpora:
        if any(source.epochs != 1 for source in corpus.manifest.sources):
            sentences.append("A document repeated by --weights counts each time it is packed.")
            break
    return " ".join(sentences)


def _source_table(comparison: Comparison) -> tables.TextTable:
    cells = []
    for corpus in comparison.corpora:
        total_bytes = corpus.totals.all.bytes
        cells_by_source = {}
        for name, source in corpus.totals.sources.items():
            texts = (
                amount(source.documents),
                amount(source.tokens),
                amount(source.bytes),
                _share(source.bytes, total_bytes),
                _tokens_per_byte(source),
            )
            cells_by_source[name] = _SharedCells(source.bytes / max(total_bytes, 1), texts)
        cells.append(cells_by_source)
    columns = ("source", "", "documents", "tokens", "bytes", "share of bytes", "tokens per byte")
    return tables.flat_table(columns, _side_by_side(cells), num_words=2)


def _language_table(comparison: Comparison) -> tables.TextTable:
    cells = []
    for corpus in comparison.corpora:
        sample = corpus.sample
        cells_by_language = {}
        for name, language in corpus.languages.items():
            texts = (
                f"{language.documents:,}",
                _share(language.documents, sample.documents),
                _share(language.bytes, sample.bytes),
                _tokens_per_byte(language),
                _tokens_per_word(language),
            )
            cells_by_language[name] = _SharedCells(language.documents / sample.documents, texts)
        cells.append(cells_by_language)
    columns = (
        "language",
        "",
        "documents",
        "share of documents",
        "share of bytes",
        "tokens per byte",
        "tokens per word",
    )
    return tables.flat_table(columns, _side_by_side(cells)[: 2 * _LANGUAGES_SHOWN], num_words=2)


@dataclass(frozen=True)
class _SharedCells:
    """The cells of a source or language in one corpus."""

    share: float  # of the corpus, by which sources and languages are sorted
    texts: tuple[str, ...]


def _side_by_side(cells: Sequence[Mapping[str, _SharedCells]]) -> list[tuple[str, ...]]:
    """Return a line for A and one for B under each name; the names with the largest share in a corpus come first.

    ``cells`` has the cells by name of each of the two corpora; a name may be in one of them only.
    """
    largest_shares: dict[str, float] = {}
    num_cells = 0
    for cells_of_corpus in cells:
        for name, shared_cells in cells_of_corpus.items():
            largest_shares[name] = max(shared_cells.share, largest_shares.get(name, 0.0))
            num_cells = len(shared_cells.texts)
    absent = _SharedCells(0.0, (_NONE,) * num_cells)
    lines = []
    for name in sorted(largest_shares, key=lambda name: (-largest_shares[name], name)):
        for letter, cells_of_corpus in zip(NAMES, cells, strict=True):
            label = name if letter == "A" else ""
            lines.append((label, letter, *cells_of_corpus.get(name, absent).texts))
    return lines


def _length_table(comparison: Comparison) -> tables.TextTable:
    columns: list[str] = []
    lines: list[tuple[str, ...]] = []
    for unit in ("bytes", "tokens"):
        for letter, corpus in zip(NAMES, comparison.corpora, strict=True):
            lengths = corpus.totals.byte_lengths if unit == "bytes" else corpus.totals.token_lengths
            facts = tables.length_facts(lengths)
            columns = [name for name, _ in facts]
            label = unit if letter == "A" else ""
            lines.append((label, letter, *(amount(value) for _, value in facts)))
    return tables.flat_table(("length", "", *columns), lines, num_words=2)


def _word_table(comparison: Comparison, corpus: int) -> tables.TextTable:
    """Return the words that are more frequent in a corpus, 0 or 1."""
    lines = [(word.word, *map(_rate, word.per_million), f"{word.documents:,}") for word in comparison.words[corpus]]
    columns = ("word", *NAMES, f"documents of {NAMES[corpus]}")
    return tables.flat_table(columns, lines or [(_NONE,) * 4], num_words=1)


def _about_sample(comparison: Comparison) -> str:
    """Return sentences that say how the sample was taken."""
    sizes = []
    for name, corpus in zip(NAMES, comparison.corpora, strict=True):
        sample = corpus.sample
        num_documents = f"{sample.documents:,} of {corpus.totals.all.documents:,} documents of {name}"
        sizes.append(f"{num_documents} ({amount(sample.tokens_read)} tokens, {amount(sample.words)} words)")
    note = (
        f"Languages and words are counted in an evenly spread sample: {sizes[0]} and {sizes[1]}. Long documents are "
        "cut so that a sample has at most 2^20 tokens."
    )
    if comparison.no_languages is None:
        note += (
            f" Below a probability of {DEFAULT_THRESHOLD}, a language is {UNCERTAIN_LANGUAGE}; ca includes Valencian."
        )
    return note


def _share(count: int, total: int) -> str:
    return f"{count / total:.1%}" if total else _NONE


def _rate(per_million: float) -> str:
    if per_million == 0 or per_million >= 10:
        return f"{per_million:,.0f}"
    return f"{per_million:.1f}"


def _tokens_per_byte(totals: TextTotals) -> str:
    return f"{totals.tokens / totals.bytes:.3f}" if totals.bytes else _NONE


def _tokens_per_word(sample: TextTotals) -> str:
    return f"{sample.tokens_read / sample.words:.2f}" if sample.words else _NONE
