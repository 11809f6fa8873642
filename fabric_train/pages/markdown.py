"""Write the Markdown of cards and reports, and turn it into HTML pages that need no other files.

A Markdown template (``*.md.j2``) escapes each value that it inserts, unless it is :class:`Markdown` already. So a name
from the data cannot become Markdown or HTML. All pages have one template, one style and one escaping; their curves are
Vega charts.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from markupsafe import Markup, escape

from fabric_train.cli.output import escape_controls, escape_texts, open_templates, redact, visible
from fabric_train.pages.charts import Chart, configuration, curve_columns, javascript, specification

if TYPE_CHECKING:
    from jinja2 import Environment

SHOWN_DIGITS = 12
"""The number of hexadecimal digits of a hash or revision that a card shows."""
_SPACE = re.compile(r"[\t\r\n\f\v ]+")
_SPECIAL = re.compile(r"[\\`*~\[\]<>&]|(?<![^\W_])_|_(?![^\W_])")  # an underscore in a word is no emphasis
_UNESCAPED_PIPE = re.compile(r"(?<!\\)((?:\\\\)*)\|")
_BLANK_LINES = re.compile(r"\n{3,}")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FOLDER = Path(__file__).with_name("templates")


class Markdown(str):
    """Text that is Markdown already."""

    __slots__ = ()

    def __html__(self) -> str:  # jinja2 and markupsafe do not escape a value with this method
        return self


def escaped(value: Any) -> Any:
    """Return one line without Markdown or HTML; Markdown stays as it is."""
    if hasattr(value, "__html__"):
        return value
    text = escape_controls(redact(str(value)))  # redact first: it finds a secret only unescaped
    line = _SPACE.sub(" ", text).strip()
    return Markdown(_SPECIAL.sub(r"\\\g<0>", line))


def number(value: float) -> str:
    """Return a number with commas between its thousands."""
    return f"{value:,}"


def table(head: str | Sequence[str], rows: Sequence[Sequence[Any]], num_numbers: int = 0) -> Markdown:
    """Return a table.

    Args:
        head: The names of the columns: Markdown that ``|`` separates, or texts.
        rows: The cells; None is an empty one.
        num_numbers: The number of columns of numbers; they are the last ones, and right-aligned.
    """
    names = head.split("|") if isinstance(head, str) else [_cell(name) for name in head]
    num_texts = len(names) - num_numbers
    alignments = ["---"] * num_texts + ["---:"] * num_numbers
    lines = [_row(name.strip() for name in names), f"|{'|'.join(alignments)}|"]
    for row in rows:
        lines.append(_row(_cell(_format_value(value)) for value in row))
    return Markdown("\n".join(lines))


def _format_value(value: Any) -> Any:
    if value is None:
        return ""
    return number(value) if isinstance(value, int) else value


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> Markdown:
    """Escape a value for a table: a pipe gets an odd number of backslashes before it, or it would end its cell."""
    return Markdown(_UNESCAPED_PIPE.sub(r"\1\\|", escaped(value)))


def code(text: str) -> Markdown:
    """Return a name in the font of code; nothing in it is Markdown."""
    line = _SPACE.sub(" ", escape_controls(redact(text)).replace("`", "'"))
    return Markdown(f"`{line}`")


def code_block(text: str) -> str:
    """Return a text as an indented block of code, which no line of the text can end."""
    return "\n".join(f"    {line}" for line in redact(text).splitlines() or [""])


def link(text: str, target: str) -> Markdown:
    """Return a link to a file next to the card, or to a URL."""
    return Markdown(f"[{escaped(text)}]({quote(target, safe=':/@.')})")


def dataset_link(repository: str) -> Markdown:
    """Return a link to a dataset on the hub."""
    return link(repository, f"https://huggingface.co/datasets/{repository}")


def listed(names: Sequence[str], most: int = 6) -> Markdown:
    """Return names as ``a, b and c``; if there are more than ``most``, the first ones and the number of the others."""
    items = [escaped(name) for name in names]
    if len(items) > most:
        items = [*items[:most], f"{len(items) - most:,} others"]
    if len(items) < 2:
        return Markdown("".join(items))
    return Markdown(f"{', '.join(items[:-1])} and {items[-1]}")


def _rounded(value: int) -> str:
    """Return a large number such as ``1.23 billion``."""
    for size, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if value >= size:
            return f"{value / size:.3g} {word}"
    return number(value)


def last_part(place: str) -> str:
    """Return the last part of a path or URL, in printable characters."""
    _, is_url, address = redact(place).partition("://")
    path = place
    if is_url:
        path = address.partition("?")[0].partition("/")[2]  # without query and host
    name = "".join(character if character.isprintable() else "?" for character in Path(path).name)
    return name or "unnamed"


def public_value(value: Any) -> str:
    """Return an argument's value as a card shows it: only the last part of a path, but a full name on the hub."""
    if isinstance(value, list | tuple):
        return ", ".join(public_value(item) for item in value)
    if not isinstance(value, str):
        return f"{value}"
    is_hub_name = _HUB_NAME.fullmatch(value) and not Path(value).exists()
    return value if is_hub_name else last_part(value)


@cache
def _templates(folder: Path) -> "Environment":
    templates = open_templates(folder, finalize=escaped)
    templates.filters |= {"cell": _cell, "code": code, "listed": listed, "number": number, "public": public_value}
    templates.filters["rounded"] = _rounded
    templates.globals |= {"table": table, "link": link}
    return templates


def render(template: Path, **values: Any) -> str:
    """Return the text of a template; several blank lines, where parts are left out, become one."""
    text = _templates(template.parent).get_template(template.name).render(values)
    return escape_controls(_BLANK_LINES.sub("\n\n", text).strip())


@dataclass(frozen=True)
class WrittenPage:
    """A page that was written, its content as Markdown, and the lines to print about it."""

    page: Path
    markdown: Path
    lines: list[str]


@dataclass(frozen=True)
class Section:
    """A part of a page."""

    key: str
    title: str
    body: str = ""
    """Markdown; HTML in it is shown as text."""
    charts: tuple[Chart, ...] = ()
    html: str = ""
    """More HTML, only for the page; its values are escaped."""
    is_folded: bool = False
    """Whether the page hides it until the reader opens it."""
    fault: str = ""
    """Why the section is empty otherwise."""
    terminal_lines: tuple[str, ...] = ()
    """Lines that are also printed."""


def page_templates(folder: Path = _FOLDER, **options: Any) -> "Environment":
    """Return the templates of a folder, which may extend or include the templates of all pages."""
    templates = open_templates([folder, _FOLDER], **options)
    templates.filters |= {"visible": visible, "marked": marked, "number": "{:,}".format}
    return templates


def marked(text: str) -> Markup:
    """Escape a token's text as HTML; show line breaks and tabs by signs, and mark spaces at its ends."""
    html = Markup()
    for piece in re.split(r"(\r?\n|\r|\t|^ +| +$)", text):
        is_only_spaces = piece != "" and not piece.strip(" ")
        if piece in ("\n", "\r\n", "\r"):
            html += Markup(f"<i>{visible(piece)}</i>\n")
        elif piece == "\t":
            html += Markup("<i>⇥</i>\t")
        elif is_only_spaces:
            html += Markup("<i class=b> </i>") * len(piece)
        else:
            html += escape(visible(piece))
    return html


def to_html(title: str, sections: Sequence[Section], axes: Sequence[dict[str, Any]] = ()) -> str:
    """Return a page with a contents list, text and charts.

    Args:
        title: The headline.
        sections: The sections, in their order.
        axes: For each run that the charts show, ``step``, ``tokens`` and ``hours`` at some steps, between which the
            page interpolates.
    """
    # the script that draws the charts; without it, the page has no charts
    charts = list(chain.from_iterable(section.charts for section in sections))
    script = library() if charts else ""
    if not script:
        sections = [replace(section, charts=()) for section in sections]

    # the data of the charts
    chart_contents = [_chart_content(chart) for chart in charts]
    content = escape_texts({"charts": chart_contents, "axes": list(axes), "config": configuration()})
    data = json.dumps(content, separators=(",", ":"))

    template = page_templates().get_template("sections.html.j2")
    return template.render(
        title=escape_controls(title),
        sections=[_without_controls(section) for section in sections],
        to_html=markdown_to_html,
        # "</script" in a string would end the element
        data=Markup(data.replace("<", "\\u003c")),
        library=Markup(script.replace("</script", "<\\/script")),
    )


def _without_controls(section: Section) -> Section:
    return replace(
        section,
        title=escape_controls(section.title),
        body=escape_controls(section.body),
        html=escape_controls(section.html),
        fault=escape_controls(section.fault),
    )


def _chart_content(chart: Chart) -> dict[str, Any]:
    """Return a chart as the script of the page reads it."""
    curves = []
    for series in chart.series:
        curves.append({"name": series.name, "kind": series.kind, "axis": series.axis, **curve_columns(series)})
    marks = [asdict(mark) for mark in chart.marks]
    return {"key": chart.key, "spec": specification(chart), "series": curves, "marks": marks}


@cache
def library() -> str:
    """Return the script that draws the charts, which takes seconds; empty, with a note, if it cannot be made."""
    return javascript()


def markdown_to_html(text: str) -> Markup:
    """Return Markdown with tables as HTML; HTML in it is shown as text, and links lead only to safe places."""
    from markdown_it import MarkdownIt  # rich also needs it

    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    html = html.replace("<table>", '<div class="wide" tabindex="0"><table>').replace("</table>", "</table></div>")
    return Markup(html)


def to_markdown(title: str, sections: Iterable[Section], picture: str = "") -> str:
    """Return a page as Markdown; ``picture`` is the name of a file next to it that has the most important curves."""
    paragraphs = [f"# {title}"]
    for index, section in enumerate(sections):
        body = section.fault or section.body
        if body:
            paragraphs.append(f"## {section.title}")
            paragraphs.append(body.strip("\n"))
        if index == 0 and picture:  # after the summary
            paragraphs.append(f"![{title}]({picture})")
    return escape_controls("\n\n".join(paragraphs) + "\n")
