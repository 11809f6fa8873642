"""Write the report, or a comparison, as one HTML page without other files; the text is in ``templates/``."""

from pathlib import Path
from typing import Any

from fabric_train.cli.output import visible
from fabric_train.pages.page import page_templates
from fabric_train.tokenization.inspect import report as reports
from fabric_train.tokenization.inspect.comparison import Comparison
from fabric_train.tokenization.inspect.comparison_tables import NAMES, sections
from fabric_train.tokenization.inspect.row_view import Token


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


def _title(token: Token) -> str:
    first, last = token.position, token.position + len(token.ids) - 1
    position = f"position {first:,}" if first == last else f"positions {first:,} to {last:,}"
    label = "supervised, label as the id" if token.is_supervised else "not supervised, label -100"
    name = {"text": "", "bos": ", BOS", "eos": ", EOS", "special": ", special"}[token.role]
    return f"{position}, id {' '.join(map(str, token.ids))}{name}: {visible(token.text)!r}\n{label}"


_TEMPLATES = page_templates(Path(__file__).with_name("templates"), keep_trailing_newline=True)
_TEMPLATES.filters["title"] = _title


def _render(template: str, **values: Any) -> str:
    return _TEMPLATES.get_template(template).render(values).lstrip()
