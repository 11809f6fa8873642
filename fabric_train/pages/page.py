"""HTML pages without other files: one template, one style, one escaping; text is Markdown, curves are Vega charts."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from fabric_train.cli.output import open_templates, visible
from fabric_train.pages.charts import Chart, columns, configuration, javascript, specification

if TYPE_CHECKING:
    from jinja2 import Environment

_FOLDER = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class WrittenPage:
    """A page on the disk, the same as Markdown, and the lines to print about it."""

    page: Path
    markdown: Path
    lines: list[str]


@dataclass(frozen=True)
class Section:
    """A part of a page. ``body`` is Markdown, in which nothing is HTML; ``html`` is more, for the page alone, in which
    all texts are escaped.

    ``fault`` says why there is nothing else. ``is_folded``: the page shows it on demand. ``told`` are lines for the
    terminal.
    """

    key: str
    title: str
    body: str = ""
    charts: tuple[Chart, ...] = ()
    html: str = ""
    is_folded: bool = False
    fault: str = ""
    told: tuple[str, ...] = ()


def page_templates(folder: Path = _FOLDER, **options: Any) -> "Environment":
    """Return the templates of a folder, which may extend or include the templates of all pages."""
    templates = open_templates([folder, _FOLDER], **options)
    templates.filters |= {"visible": visible, "marked": marked, "number": "{:,}".format}
    return templates


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


def to_html(title: str, sections: Sequence[Section], axes: Sequence[dict[str, Any]] = ()) -> str:
    """Return a page with a contents list, text and charts.

    Args:
        title: its headline.
        sections: in their order.
        axes: of each run that the charts show, ``step``, ``tokens`` and ``hours`` of some steps, between which the
            page interpolates.
    """
    charts = [chart for section in sections for chart in section.charts]
    content = {"charts": [_content(chart) for chart in charts], "axes": list(axes), "config": configuration()}
    template = page_templates().get_template("sections.html.j2")
    return template.render(
        title=title,
        sections=sections,
        to_html=markdown_to_html,
        data=Markup(json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")),
        # "</script" in a string of the library would end the element
        library=Markup(library().replace("</script", "<\\/script")) if charts else "",
    )


def _content(chart: Chart) -> dict[str, Any]:
    series = [{"name": one.name, "kind": one.kind, "axis": one.axis, **columns(one)} for one in chart.series]
    marks = [asdict(mark) for mark in chart.marks]
    return {"key": chart.key, "spec": specification(chart), "series": series, "marks": marks}


@cache
def library() -> str:
    """Return the script that draws the charts; it takes seconds, and a DrawError if it cannot be made."""
    with TemporaryDirectory() as folder:
        return javascript(Path(folder))


def markdown_to_html(text: str) -> Markup:
    """Return Markdown with tables as HTML; HTML in it is shown as text, and links lead only to safe places."""
    from markdown_it import MarkdownIt  # rich needs it too

    found = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    found = found.replace("<table>", '<div class="wide" tabindex="0"><table>').replace("</table>", "</table></div>")
    return Markup(found)


def to_markdown(title: str, sections: Iterable[Section], picture: str = "") -> str:
    """Return the same as Markdown; ``picture`` is the name of a file beside it that has the most important curves."""
    parts = [f"# {title}"]
    for number, section in enumerate(sections):
        body = section.fault or section.body
        if body:
            parts += [f"## {section.title}", body.strip("\n")]
        if number == 0 and picture:
            parts.append(f"![{title}]({picture})")
    return "\n\n".join(parts) + "\n"
