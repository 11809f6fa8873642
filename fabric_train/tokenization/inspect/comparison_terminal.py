"""Print a comparison of two token datasets on a terminal."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fabric_train.tokenization.inspect.comparison import Comparison
from fabric_train.tokenization.inspect.comparison_tables import (
    NAMES,
    NONE,
    PairTable,
    language_pairs,
    length_pairs,
    notes,
    sample_note,
    source_pairs,
    summary_table,
)
from fabric_train.tokenization.inspect.row_view import visible
from fabric_train.tokenization.inspect.word_ngrams import NgramScore

_STYLES = {"A": "cyan", "B": "yellow"}
_MOST_BESIDE = 2  # columns of which A and B are shown beside each other
_NGRAMS_SHOWN = 8
_LONGEST_NGRAM = 24  # characters


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
