"""Write a report: the page, the Markdown beside it, and the picture that the Markdown shows."""

from collections.abc import Sequence
from pathlib import Path

from fabric_train.cli.errors import InputError
from fabric_train.cli.output import escape_controls
from fabric_train.files.regular_file import check_no_link, write_atomically
from fabric_train.pages.charts import draw
from fabric_train.pages.page import WrittenPage, to_html, to_markdown
from fabric_train.report.comparison import comparison_sections
from fabric_train.report.run_files import RunFiles
from fabric_train.report.sections import run_sections
from fabric_train.training.curves import page_axis

PAGE = "report.html"
_HEIGHTS = {"loss": 260, "sources": 220}


def write_report(runs: Sequence[RunFiles], page: Path, price_per_hour: float | None = None) -> WrittenPage:
    """Write the report of one run, or of several beside one another.

    Raises:
        InputError: a file cannot be written.
        DrawError: the charts cannot be made.
    """
    if len(runs) == 1:
        title, sections = f"Report of {runs[0].name}", run_sections(runs[0], price_per_hour)
    else:
        title = f"{' and '.join(run.name for run in runs)} compared"
        sections = comparison_sections(runs, price_per_hour)
    markdown, picture = page.with_suffix(".md"), page.with_suffix(".png")
    for file in (page, markdown, picture):
        check_no_link(file)
    charts = [chart for section in sections for chart in section.charts if chart.key in _HEIGHTS]
    if charts:
        draw(charts, picture, title=title, heights=[_HEIGHTS[chart.key] for chart in charts])
    axes = [page_axis(run.metrics) for run in runs if _has_metrics(run)]  # as the charts number them
    write_atomically(page, to_html(title, sections, axes))
    write_atomically(markdown, to_markdown(title, sections, picture.name if charts else ""))
    lines = [line for section in sections for line in section.told]
    lines += [f"left out of the report: {section.fault}" for section in sections if section.fault]
    lines.append(f"written {page} and {markdown.name}")
    return WrittenPage(page, markdown, list(map(escape_controls, lines)))


def _has_metrics(run: RunFiles) -> bool:
    try:
        return len(run.metrics.steps) > 0
    except (InputError, OSError):
        return False
