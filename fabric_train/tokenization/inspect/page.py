"""Write the report, or a comparison, as one HTML page without other files; the text is in ``templates/``."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from fabric_train.cli.output import open_templates
from fabric_train.tokenization.inspect import report as reports
from fabric_train.tokenization.inspect.comparison import Comparison
from fabric_train.tokenization.inspect.comparison_tables import NAMES, sections
from fabric_train.tokenization.inspect.row_view import Token, visible


def report_to_html(report: reports.DatasetReport) -> str:
    """Return the page, with every text of the dataset escaped."""
    manifest, lengths = report.manifest, report.counts[report.split].lengths
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


def html_page(title: str, body: Iterable[str], further_style: str = "") -> str:
    """Return a page without other files, scripts or links; title and body are HTML."""
    return _render("page.html.j2", title=Markup(title), body=Markup("\n".join(body)), further_style=further_style)


def marked(text: str) -> Markup:
    """Escape a token's text; show line breaks and keep them, and mark spaces at its edges."""
    parts = Markup()
    for part in re.split(r"(\r?\n|\r|\t|^ +| +$)", text):
        if part in ("\n", "\r\n", "\r"):
            parts += Markup(f"<i>{visible(part)}</i>\n")
        elif part == "\t":
            parts += Markup("<i>⇥</i>\t")
        elif part and not part.strip(" "):
            parts += Markup("<i class=b> </i>") * len(part)
        else:
            parts += escape(visible(part))
    return parts


def _title(token: Token) -> str:
    first, last = token.position, token.position + len(token.ids) - 1
    position = f"position {first:,}" if first == last else f"positions {first:,} to {last:,}"
    label = "supervised, label as the id" if token.is_supervised else "not supervised, label -100"
    name = {"text": "", "bos": ", BOS", "eos": ", EOS", "special": ", special"}[token.role]
    return f"{position}, id {' '.join(map(str, token.ids))}{name}: {visible(token.text)!r}\n{label}"


_TEMPLATES = open_templates(Path(__file__).with_name("templates"), keep_trailing_newline=True)
_TEMPLATES.filters |= {"visible": visible, "marked": marked, "title": _title}
_TEMPLATES.filters["number"] = "{:,}".format


def _render(template: str, **values: Any) -> str:
    return _TEMPLATES.get_template(template).render({"further_style": "", **values}).lstrip()
