"""Write the report of one run, or a comparison of several: the page, the Markdown, and the picture in the Markdown."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from fabric_train.cli.errors import InputError
from fabric_train.cli.output import escape_controls
from fabric_train.files.regular_file import check_no_link, write_atomically
from fabric_train.pages.charts import Chart, draw
from fabric_train.pages.markdown import WrittenPage, to_html, to_markdown
from fabric_train.report.comparison import comparison_sections
from fabric_train.report.reported_run import ReportedRun
from fabric_train.report.sections import run_sections

PAGE = "report.html"
_PICTURE_HEIGHTS = {"loss": 260, "sources": 220, "rewards": 220}
"""The height in pixels of each chart in the picture, by the chart's key."""


def write_report(runs: Sequence[ReportedRun], page: Path, price_per_hour: float | None = None) -> WrittenPage:
    """Write the report of one run, or the comparison of several.

    Args:
        runs: The opened runs.
        page: The HTML file; Markdown and picture are written next to it with other endings.
        price_per_hour: What an hour of one device costs; None leaves the cost out.

    Raises:
        InputError: a file cannot be written.
    """
    # build
    if len(runs) == 1:
        title = f"Report of {runs[0].name}"
        sections = run_sections(runs[0], price_per_hour)
    else:
        title = f"{' and '.join(run.name for run in runs)} compared"
        sections = comparison_sections(runs, price_per_hour)

    # draw
    markdown = page.with_suffix(".md")
    picture = page.with_suffix(".png")
    for file in (page, markdown, picture):
        check_no_link(file)
    charts: list[Chart] = []
    for section in sections:
        charts += [chart for chart in section.charts if chart.key in _PICTURE_HEIGHTS]
    has_picture = False
    if charts:
        heights = [_PICTURE_HEIGHTS[chart.key] for chart in charts]
        has_picture = draw(charts, picture, title=title, heights=heights)

    # write
    # For each run with metrics, the tokens and hours at its steps: the page can show any of the three on the x-axis. A
    # curve names its run by the index among these runs (Series.axis), so they must be in the order of the charts.
    axes = [run.metrics.page_axis() for run in runs if _has_metrics(run)]
    write_atomically(page, to_html(title, sections, axes))
    write_atomically(markdown, to_markdown(title, sections, picture.name if has_picture else ""))

    # what the user is told
    lines = list(chain.from_iterable(section.terminal_lines for section in sections))
    faults = [section.fault for section in sections if section.fault]
    for fault in dict.fromkeys(faults):  # a damaged file is missing in several sections
        lines.append(f"not in the report: {fault}")
    lines.append(f"written {page} and {markdown.name}")
    return WrittenPage(page, markdown, [escape_controls(line) for line in lines])


def _has_metrics(run: ReportedRun) -> bool:
    try:
        return len(run.metrics.steps) > 0
    except (InputError, OSError):
        return False
