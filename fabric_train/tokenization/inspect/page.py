"""Write the report, or a comparison, as one HTML page without other files."""

import re
from collections.abc import Iterable, Iterator
from html import escape

from fabric_train.tokenization.inspect.comparison import Comparison
from fabric_train.tokenization.inspect.comparison_tables import NAMES, sections
from fabric_train.tokenization.inspect.report import (
    DatasetReport,
    TextTable,
    dropped_title,
    facts,
    histogram,
    ledger_table,
    length_facts,
    length_notes,
    source_table,
    success_line,
)
from fabric_train.tokenization.inspect.row_view import RowPiece, RowView, Token, visible


def report_to_html(report: DatasetReport) -> str:
    """Return the page, with every text of the dataset escaped."""
    title, manifest = f"token dataset {escape(report.folder.name or str(report.folder))}", report.manifest
    return html_page(
        title,
        [
            *_problems(report),
            *html_facts(facts(report)),
            "<h2>Ledger</h2>",
            *html_table(ledger_table(report)),
            *(["<h2>Sources</h2>", *html_table(source_table(manifest))] if manifest and manifest.sources else []),
            *_dropped(report),
            f"<h2>Document lengths in {escape(report.split)}</h2>",
            *_lengths(report),
            *_rows(report),
        ],
    )


def comparison_to_html(comparison: Comparison) -> str:
    """Return the page, with every text of the datasets escaped."""
    folders = (corpus.folder.name or str(corpus.folder) for corpus in comparison.corpora)
    body = [*html_facts((name, str(one.folder)) for name, one in zip(NAMES, comparison.corpora, strict=True))]
    for section in sections(comparison):
        body += [f"<h2>{section.title}</h2>"]
        body += html_table(section.table) if section.table else []
        body += [f'<p class="note">{escape(section.note)}</p>'] if section.note else []
    return html_page(f"{' and '.join(escape(visible(name)) for name in folders)} compared", body)


def html_page(title: str, body: Iterable[str], further_style: str = "") -> str:
    """Return a page without other files, scripts or links; title and body are HTML."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{_STYLE}{further_style}</style></head>",
            f"<body><main><h1>{title}</h1>",
            *body,
            "</main></body></html>",
            "",
        ]
    )


def _problems(report: DatasetReport) -> Iterator[str]:
    if report.problems:
        yield '<ul class="verdict bad">'
        yield from (f"<li>{escape(visible(str(problem)))}</li>" for problem in report.problems)
        yield "</ul>"
    else:
        yield f'<p class="verdict good">{escape(success_line(report))}</p>'


def html_facts(lines: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a list of names and values, which are any text."""
    yield '<dl class="facts">'
    yield from (f"<dt>{escape(name)}</dt><dd>{escape(visible(value))}</dd>" for name, value in lines)
    yield "</dl>"


def html_table(table: TextTable) -> Iterator[str]:
    """Yield a table of any texts."""

    def cells(tag: str, texts: tuple[str, ...], depth: int) -> str:
        indent = f' style="padding-left:{0.6 + 1.2 * depth:.1f}em"' if depth else ""
        first = f"<{tag}{indent}>{escape(visible(texts[0]))}</{tag}>"
        others = (
            f"<{tag}{'' if index < table.num_words else ' class=number'}>{escape(visible(text))}</{tag}>"
            for index, text in enumerate(texts[1:], start=1)
        )
        return f"<tr{' class=part' if depth else ''}>{first}{''.join(others)}</tr>"

    yield f'<div class="wide"><table><thead>{cells("th", table.columns, 0)}</thead><tbody>'
    yield from (cells("td", line, depth) for depth, line in zip(table.depth, table.lines, strict=True))
    yield "</tbody></table></div>"


def _dropped(report: DatasetReport) -> Iterator[str]:
    if report.dropped:
        yield "<h2>Some of the documents left out</h2>"
    for reason, documents in report.dropped.items():
        yield f"<details class=dropped><summary>{escape(visible(dropped_title(report, reason)))}</summary>"
        for document in documents:
            yield f"<h3>{escape(visible(document.detail))} <small>{escape(visible(document.place))}</small></h3>"
            yield f'<p class="tokens" dir="auto">{marked(document.text)}</p>'
        yield "</details>"


def _lengths(report: DatasetReport) -> Iterator[str]:
    counts = report.counts[report.split]
    if counts.lengths is None:
        yield "<p>Unknown: this dataset does not store where documents begin.</p>"
        return
    bars = histogram(counts.lengths)
    most = max((bar.count for bar in bars), default=1) or 1
    yield '<div class="bars">'
    for bar in bars:
        name = f"{bar.low:,}–{bar.high:,}" if bar.high > bar.low else f"{bar.low:,}"
        width = f'<b style="width:{100 * bar.count / most:.2f}%"></b>' if bar.count else ""
        yield f"<span>{name}</span><div>{width}<em>{bar.count:,}</em></div>"
    yield "</div>"
    values = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{value:,}</dd></div>" for name, value in length_facts(counts.lengths)
    )
    yield f'<dl class="percentiles">{values}</dl>'
    yield f"<p class=note>{escape(' '.join(('Lengths are in tokens.', *length_notes(report))))}</p>"


def _rows(report: DatasetReport) -> Iterator[str]:
    if not report.rows:
        return
    yield f"<h2>Rows of {escape(report.split)} as the model sees them</h2>"
    yield _LEGEND
    for row in report.rows:
        yield from _row(row)


def _row(row: RowView) -> Iterator[str]:
    parts = [f"{row.num_tokens:,} tokens", f"{row.num_supervised:,} supervised"]
    parts += [f"{row.num_padding:,} of padding"] if row.num_padding else []
    yield f'<section class="row"><h3>row {row.index:,} <small>{" · ".join(parts)}</small></h3>'
    for number, piece in enumerate(row.pieces):
        is_last = number == len(row.pieces) - 1
        yield from _piece(piece, continues=row.continues and is_last)
    if row.num_padding:
        title = f"positions {row.num_tokens - row.num_padding:,} to {row.num_tokens - 1:,}, not supervised"
        text = f"{row.num_padding:,} × {escape(visible(row.padding))}"
        yield f'<div class="padding" title="{title}">padding: {text}</div>'
    if row.origins:
        yield "<details><summary>documents</summary><ul>"
        yield from (f"<li>{escape(visible(line))}</li>" for line in row.origins)
        yield "</ul></details>"
    yield "</section>"


def _piece(piece: RowPiece, *, continues: bool) -> Iterator[str]:
    kind = {True: "begins", False: "continued", None: "unknown"}[piece.begins]
    notes = {True: f"document border at position {piece.position:,}", False: "continued from another row", None: ""}
    yield f'<div class="piece {kind}">'
    if notes[piece.begins]:
        yield f'<div class="border">{notes[piece.begins]}</div>'
    yield f'<p class="tokens" dir="auto">{"".join(map(_token, piece.tokens))}</p>'
    if continues:
        yield '<div class="border">continued in the next row</div>'
    yield "</div>"


def _token(token: Token) -> str:
    kinds = {"text": "", "bos": " edge", "eos": " edge", "special": " special"}
    first, last = token.position, token.position + len(token.ids) - 1
    position = f"position {first:,}" if first == last else f"positions {first:,} to {last:,}"
    label = "supervised, label as the id" if token.is_supervised else "not supervised, label -100"
    name = {"text": "", "bos": ", BOS", "eos": ", EOS", "special": ", special"}[token.role]
    title = f"{position}, id {' '.join(map(str, token.ids))}{name}: {visible(token.text)!r}\n{label}"
    kind = ("s" if token.is_supervised else "u") + kinds[token.role]
    return f'<span class="{kind}" title="{escape(title)}">{marked(token.text)}</span>'


def marked(text: str) -> str:
    """Escape a token's text; show line breaks and keep them, and mark spaces at its edges."""
    parts = []
    for part in re.split(r"(\r?\n|\r|\t|^ +| +$)", text):
        if part in ("\n", "\r\n", "\r"):
            parts.append(f"<i>{visible(part)}</i>\n")
        elif part == "\t":
            parts.append("<i>⇥</i>\t")
        elif part and not part.strip(" "):
            parts.append("<i class=b> </i>" * len(part))
        else:
            parts.append(escape(visible(part)))
    return "".join(parts)


_LEGEND = """<p class="legend tokens">
<span class="s">supervised</span> <span class="u">not supervised</span> <span class="s edge">BOS or EOS</span>
<span class="s special">other special token</span> <span class="padding">padding</span>
<span class="plain"><i>↵</i> line break, <i class=b>  </i> space at a token's edge</span>
</p><p class="note">A bar on the left is a document; it is dashed if the document continues from another row. Shades
alternate from token to token. Hover over a token for its position, id and label. With isolated documents, nothing
predicts a document's first token, whatever its label is.</p>"""

_STYLE = """
:root { color-scheme: light dark; --ground: #fcfcfa; --card: #fff; --ink: #1c1e21; --soft: #5f6670; --line: #dfe2e6;
  --bar: #4a7fb5; --sup1: #dff1e1; --sup2: #cbe7d0; --supline: #3f9a58; --un: #727983; --edge: #6d3fc0;
  --edgeback: #ece4fb; --special: #8a5a00; --specialback: #fdeecb; --good: #1f7a3d; --goodback: #e6f4ea; --bad: #a3231d;
  --badback: #fdebea; --hatch: #e9ebee; }
@media (prefers-color-scheme: dark) { :root { --ground: #15171a; --card: #1c1f23; --ink: #e4e6e9; --soft: #9aa2ad;
  --line: #31363d; --bar: #6aa0d8; --sup1: #1d3a27; --sup2: #264a32; --supline: #5fbf7c; --un: #8d949e; --edge: #c9aefb;
  --edgeback: #382a57; --special: #f0c565; --specialback: #463613; --good: #7fd69a; --goodback: #1b3324; --bad: #ff9d96;
  --badback: #43201e; --hatch: #272b31; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 1.5rem clamp(.8rem, 3vw, 2rem) 4rem; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.12rem; margin: 2.2rem 0 .7rem; }
h3 { font-size: 1rem; margin: 0 0 .6rem; }
h3 small { font-weight: 400; color: var(--soft); margin-left: .5em; }
.verdict { margin: 0 0 1.2rem; padding: .6rem .9rem; border-radius: .4rem; border-left: 4px solid; }
.verdict.good { color: var(--good); background: var(--goodback); }
.verdict.good::before { content: "✓ "; }
.verdict.bad { color: var(--bad); background: var(--badback); list-style: "✗ "; padding-left: 2rem; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; margin: 0; }
.facts dt { color: var(--soft); } .facts dd { margin: 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 400; text-align: left; border-bottom: 1px solid var(--line); }
th, td { padding: .18rem .6rem; } td:first-child { overflow-wrap: anywhere; min-width: 9rem; }
th.number, td.number { text-align: right; white-space: nowrap; padding-left: 1.6rem; } .part td { color: var(--soft); }
.bars { display: grid; grid-template-columns: max-content 1fr; gap: .2rem .8rem; font-variant-numeric: tabular-nums; }
.bars span { text-align: right; color: var(--soft); }
.bars div { display: flex; align-items: center; gap: .5rem; padding-right: 4.5rem; }
.bars b { background: var(--bar); height: .9rem; min-width: 2px; border-radius: 0 2px 2px 0; flex: none; }
.bars em { font-style: normal; }
.percentiles { display: flex; flex-wrap: wrap; gap: .3rem 1.6rem; margin: 1rem 0 0; }
.percentiles dt { color: var(--soft); font-size: .85rem; }
.percentiles dd { margin: 0; font-variant-numeric: tabular-nums; }
.note { color: var(--soft); font-size: .9rem; max-width: 46rem; margin: .6rem 0; }
.dropped summary { cursor: pointer; padding: .2rem 0; }
.dropped h3 { margin: .9rem 0 0; } .dropped .tokens { border-left: 4px solid var(--line); padding-left: .8rem; }
.row { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .9rem 1rem;
  margin: 1rem 0; }
.piece { border-left: 4px solid var(--bar); padding-left: .8rem; margin: .6rem 0; }
.piece.continued { border-left-style: dashed; } .piece.unknown { border-left-color: var(--line); }
.border { color: var(--bar); font-size: .8rem; }
.tokens { margin: .2rem 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: .875rem/1.75 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.tokens span { padding: .12em 0; border-bottom: 1.5px solid transparent; }
.tokens .s { background: var(--sup1); border-bottom-color: var(--supline); }
.tokens .s:nth-child(even) { background: var(--sup2); }
.tokens .u { color: var(--un); } .tokens .u:nth-child(even) { background: var(--hatch); }
.tokens .edge, .tokens .special { border-radius: .3em; padding: .12em .3em; margin: 0 .1em; font-size: .82em; }
.tokens .edge, .tokens .edge:nth-child(even) { color: var(--edge); background: var(--edgeback); }
.tokens .special, .tokens .special:nth-child(even) { color: var(--special); background: var(--specialback); }
.tokens span:hover { outline: 2px solid var(--bar); }
.tokens i { font-style: normal; opacity: .5; } .tokens .b { white-space: pre;
  border-bottom: 1px solid; opacity: .28; }
.padding, .tokens .padding { color: var(--soft); font-size: .82rem; padding: .15rem .5rem; border-radius: .25rem;
  background: repeating-linear-gradient(135deg, var(--hatch) 0 6px, transparent 6px 12px); }
.legend { white-space: normal; display: flex; flex-wrap: wrap; gap: .3rem .8rem; align-items: baseline; }
.legend .s, .legend .u { padding: .12em .35em; } .legend .plain { color: var(--soft); }
.legend .u { background: var(--hatch); }
"""
