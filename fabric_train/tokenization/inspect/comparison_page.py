"""Write a comparison of two token datasets as one HTML page without other files, in the style of the inspector's."""

from collections.abc import Iterator, Sequence
from html import escape

from fabric_train.tokenization.inspect.comparison import Comparison
from fabric_train.tokenization.inspect.comparison_tables import (
    NAMES,
    PairTable,
    language_pairs,
    length_pairs,
    notes,
    sample_note,
    source_pairs,
    summary_table,
)
from fabric_train.tokenization.inspect.page import html_page
from fabric_train.tokenization.inspect.row_view import visible
from fabric_train.tokenization.inspect.terminal import Bar, histograms
from fabric_train.tokenization.inspect.word_ngrams import CLEAR_Z, NgramScore

_LONGEST_NGRAM = 60  # characters


def comparison_to_html(comparison: Comparison) -> str:
    """Return the page, with every text of the datasets escaped."""
    folders = (corpus.folder.name or str(corpus.folder) for corpus in comparison.corpora)
    return html_page(f"{' and '.join(escape(visible(name)) for name in folders)} compared", _body(comparison), _STYLE)


def _body(comparison: Comparison) -> Iterator[str]:
    yield '<dl class="facts corpora">'
    for name, corpus in zip(NAMES, comparison.corpora, strict=True):
        yield f"<dt>{_mark(name)}</dt><dd>{escape(visible(str(corpus.folder)))}</dd>"
    yield "</dl>"
    yield from _pairs(summary_table(comparison))
    yield f'<p class="note">{escape(" ".join(notes(comparison)))}</p>'
    yield "<h2>Sources</h2>"
    yield from _pairs(source_pairs(comparison))
    yield "<h2>Languages</h2>"
    if comparison.no_languages is None:
        yield from _pairs(language_pairs(comparison))
    else:
        yield f"<p>{escape(comparison.no_languages)}</p>"
    yield f'<p class="note">{escape(sample_note(comparison))}</p>'
    yield "<h2>Lengths of documents</h2>"
    yield from _lengths(comparison)
    yield from _pairs(length_pairs(comparison))
    for number, name in enumerate(NAMES):
        yield f"<h2>Words that {_mark(name)} has more often</h2>"
        yield '<div class="ngrams">'
        for size, both in comparison.ngrams.items():
            yield from _ngrams(size, both[number])
        yield "</div>"
    yield _NGRAM_NOTE


def _mark(name: str) -> str:
    return f'<span class="{name.lower()}">{name}</span>'


def _pairs(table: PairTable) -> Iterator[str]:
    groups = "".join(f"<th colspan=2 class=group>{escape(column)}</th>" for column in table.columns)
    names = "".join(f"<th class=number>{_mark(name)}</th>" for name in NAMES) * len(table.columns)
    is_titled = any(table.columns)
    head = f"<tr><th class=group></th>{groups}</tr>" if is_titled else ""
    kind = "pairs" if is_titled else "pairs plain"
    yield f'<div class="wide"><table class="{kind}"><thead>{head}<tr><th>{escape(table.name)}</th>{names}</tr></thead>'
    yield "<tbody>"
    for label, pairs in table.lines:
        cells = "".join(f"<td class=number>{escape(visible(value))}</td>" for pair in pairs for value in pair)
        yield f"<tr><td>{escape(visible(label))}</td>{cells}</tr>"
    yield "</tbody></table></div>"


def _lengths(comparison: Comparison) -> Iterator[str]:
    bars = histograms(*(corpus.totals.byte_lengths for corpus in comparison.corpora))
    shares = [_shares(of_corpus) for of_corpus in bars]
    most = max((share for of_corpus in shares for share in of_corpus), default=0) or 1
    yield '<div class="bars both">'
    for number, bar in enumerate(bars[0]):
        label = f"{bar.low:,}–{bar.high:,}" if bar.high > bar.low else f"{bar.low:,}"
        yield f"<span>{label}</span><section>"
        for name, of_corpus in zip(NAMES, shares, strict=True):
            share = of_corpus[number]
            block = f'<b class="{name.lower()}" style="width:{100 * share / most:.2f}%"></b>' if share else ""
            percent = f"{share:.1%}" if share >= 0.0005 else "&lt; 0.1%" if share else ""
            yield f"<div>{block}<em>{percent}</em></div>"
        yield "</section>"
    yield "</div>"
    yield f"<p class=note>Shares of the documents of {_mark('A')} and {_mark('B')} by length in bytes.</p>"


def _shares(bars: Sequence[Bar]) -> list[float]:
    total = sum(bar.count for bar in bars) or 1
    return [bar.count / total for bar in bars]


def _ngrams(size: int, scores: Sequence[NgramScore]) -> Iterator[str]:
    title = f"{size} word{'s' if size > 1 else ''}"
    if not scores:
        yield f"<table><thead><tr><th>{title}</th></tr></thead><tbody><tr><td>none</td></tr></tbody></table>"
        return
    names = "".join(f"<th class=number>{_mark(name)}</th>" for name in NAMES)
    yield f"<table><thead><tr><th>{title}</th>{names}<th class=number>z</th></tr></thead><tbody>"
    for score in scores:
        text = visible(score.text)
        shown = text if len(text) <= _LONGEST_NGRAM else f"{text[: _LONGEST_NGRAM - 1]}…"
        in_documents = ", ".join(
            f"{name}: {count:,} times in {documents:,} documents"
            for name, count, documents in zip(NAMES, score.counts, score.documents, strict=True)
        )
        rates = "".join(f"<td class=number>{_rate(rate)}</td>" for rate in score.per_million)
        cell = f'<td dir="auto" title="{escape(in_documents)}">{escape(shown)}</td>'
        yield f"<tr>{cell}{rates}<td class=number>{score.z:.1f}</td></tr>"
    yield "</tbody></table>"


def _rate(per_million: float) -> str:
    return f"{per_million:,.0f}" if per_million >= 10 or not per_million else f"{per_million:.1f}"


_NGRAM_NOTE = f"""<p class="note">Columns A and B: times per million n-grams of the sample. z: the log-odds ratio with
an informative Dirichlet prior, the frequencies in both samples together, divided by its standard deviation (Monroe,
Colaresi, Quinn, “Fightin’ Words”, 2008). Shown are the largest, from {CLEAR_Z} on. Words are in lower case. Hover over
an n-gram for the number of documents that have it: z takes every word as independent, so one document that repeats
itself can be enough.</p>"""

_STYLE = """
:root { --first: #2f6fae; --second: #c1671b; }
@media (prefers-color-scheme: dark) { :root { --first: #6aa8e6; --second: #f0a35c; } }
span.a { color: var(--first); font-weight: 600; } span.b { color: var(--second); font-weight: 600; }
.corpora { margin-bottom: 1rem; }
.pairs th.group { text-align: center; border-bottom: none; padding-bottom: 0; white-space: nowrap; }
.pairs tbody tr:hover { background: var(--hatch); }
.pairs tbody td { border-bottom: 1px solid var(--line); }
.pairs:not(.plain) th.number:nth-child(odd), .pairs:not(.plain) td.number:nth-child(odd) { padding-left: .7rem; }
.plain td.number { white-space: normal; overflow-wrap: anywhere; }
.bars.both { gap: .15rem .8rem; } .bars.both span { white-space: nowrap; }
.bars.both div { line-height: 1; font-size: .78rem; min-height: .78rem; } .bars.both section { padding: .2rem 0; }
.bars.both b { height: .55rem; } .bars b.a { background: var(--first); } .bars b.b { background: var(--second); }
.ngrams { display: grid; grid-template-columns: repeat(auto-fit, minmax(19rem, 1fr)); gap: 1.2rem 2rem;
  align-items: start; }
.ngrams table { width: 100%; font-size: .92rem; } .ngrams td:first-child { min-width: 0; }
.ngrams th, .ngrams td { padding: .12rem .3rem; } .ngrams th.number, .ngrams td.number { padding-left: .5rem; }
"""
