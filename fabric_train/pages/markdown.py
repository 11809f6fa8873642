"""Markdown of cards and reports, and HTML pages that are made of it and need no other files.

Each value that a Markdown template (``*.md.j2``) inserts is escaped, so that a name from the data is no Markdown and
no HTML, unless it is :class:`Markdown` already. All pages have one template, one style and one escaping; their curves
are Vega charts.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from markupsafe import Markup, escape

from fabric_train.cli.output import escape_controls, escape_texts, open_templates, redact, visible
from fabric_train.pages.charts import Chart, columns, configuration, javascript, specification

if TYPE_CHECKING:
    from jinja2 import Environment

SHOWN_DIGITS = 12
"""Hexadecimal digits of a hash or revision in a card."""
_SPACE = re.compile(r"[\t\r\n\f\v ]+")
_SPECIAL = re.compile(r"[\\`*~\[\]<>&]|(?<![^\W_])_|_(?![^\W_])")  # an underscore in a word is no emphasis
_UNESCAPED_PIPE = re.compile(r"(?<!\\)((?:\\\\)*)\|")
_BLANK_LINES = re.compile(r"\n{3,}")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FOLDER = Path(__file__).with_name("templates")


class Markdown(str):
    """Text that is Markdown already."""

    __slots__ = ()

    def __html__(self) -> str:  # jinja2 and markupsafe leave what has this method as it is
        return self


def escaped(value: Any) -> Any:
    """Return one line without Markdown or HTML; Markdown stays as it is."""
    if hasattr(value, "__html__"):
        return value
    text = escape_controls(redact(str(value)))  # a secret is found unescaped
    return Markdown(_SPECIAL.sub(r"\\\g<0>", _SPACE.sub(" ", text).strip()))


def number(value: float) -> str:
    """Return a number with commas between its thousands."""
    return f"{value:,}"


def table(head: str | Sequence[str], rows: Sequence[Sequence[Any]], num_numbers: int = 0) -> Markdown:
    """Return a table; ``head`` has the names of its columns, as Markdown that ``|`` separates or as texts.

    None is an empty cell. The last ``num_numbers`` columns are aligned at the right.
    """
    names = head.split("|") if isinstance(head, str) else [*map(_cell, head)]
    rule = "|".join(["---"] * (len(names) - num_numbers) + ["---:"] * num_numbers)
    lines = [f"| {' | '.join(name.strip() for name in names)} |", f"|{rule}|"]
    for row in rows:
        cells = (number(one) if isinstance(one, int) else "" if one is None else one for one in row)
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return Markdown("\n".join(lines))


def _cell(value: Any) -> Markdown:
    """Escape a value for a table: a pipe has an odd number of backslashes before it, or it would end its cell."""
    return Markdown(_UNESCAPED_PIPE.sub(r"\1\\|", escaped(value)))


def code(text: str) -> Markdown:
    """Return a name in the font of code; nothing in it is Markdown."""
    shown = _SPACE.sub(" ", escape_controls(redact(text)).replace("`", "'"))
    return Markdown(f"`{shown}`")


def link(text: str, target: str) -> Markdown:
    """Return a link to a file beside the card, or to the path of a URL."""
    return Markdown(f"[{escaped(text)}]({quote(target, safe=':/@.')})")


def dataset_link(repository: str) -> Markdown:
    """Return a link to a dataset on the hub."""
    return link(repository, f"https://huggingface.co/datasets/{repository}")


def listed(names: Sequence[str], most: int = 6) -> Markdown:
    """Return names as ``a, b and c``; after the first ones only the number of the others."""
    names = [*map(escaped, names)]
    names = [*names[:most], f"{len(names) - most:,} others"] if len(names) > most else names
    return Markdown(" and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names))


def _rounded(value: int) -> str:
    """Return a large number as it is read, such as ``1.23 billion``."""
    for size, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if value >= size:
            return f"{value / size:.3g} {word}"
    return number(value)


def last_part(place: str) -> str:
    """Return the last part of a path or URL, in printable characters."""
    _, is_url, after = redact(place).partition("://")
    path = after.partition("?")[0].partition("/")[2] if is_url else place
    return "".join(part if part.isprintable() else "?" for part in Path(path).name) or "unnamed"


def public_value(value: Any) -> str:
    """Return the value of an argument. A text that looks like a name on the hub stays, of another one the last part."""
    if isinstance(value, list | tuple):
        return ", ".join(map(public_value, value))
    if not isinstance(value, str):
        return f"{value}"
    return value if _HUB_NAME.fullmatch(value) and not Path(value).exists() else last_part(value)


@cache
def _templates(folder: Path) -> "Environment":
    templates = open_templates(folder, finalize=escaped)
    templates.filters |= {"cell": _cell, "code": code, "listed": listed, "number": number, "public": public_value}
    templates.filters["rounded"] = _rounded
    templates.globals |= {"table": table, "link": link}
    return templates


def render(template: Path, **values: Any) -> str:
    """Return the text of a template; the blank lines around parts that are left out become one."""
    text = _templates(template.parent).get_template(template.name).render(values)
    return escape_controls(_BLANK_LINES.sub("\n\n", text).strip())


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

    ``fault`` says why there is nothing else. ``is_folded``: the page shows it on demand. ``terminal_lines`` are printed
    too.
    """

    key: str
    title: str
    body: str = ""
    charts: tuple[Chart, ...] = ()
    html: str = ""
    is_folded: bool = False
    fault: str = ""
    terminal_lines: tuple[str, ...] = ()


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
    script = library() if charts else ""
    if not script:
        sections = [replace(section, charts=()) for section in sections]
    of_charts = [_content(chart) for chart in charts]
    content = escape_texts({"charts": of_charts, "axes": list(axes), "config": configuration()})
    template = page_templates().get_template("sections.html.j2")
    return template.render(
        title=escape_controls(title),
        sections=[_without_controls(section) for section in sections],
        to_html=markdown_to_html,
        data=Markup(json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")),
        # "</script" in a string of the library would end the element
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


def _content(chart: Chart) -> dict[str, Any]:
    series = [{"name": one.name, "kind": one.kind, "axis": one.axis, **columns(one)} for one in chart.series]
    marks = [asdict(mark) for mark in chart.marks]
    return {"key": chart.key, "spec": specification(chart), "series": series, "marks": marks}


@cache
def library() -> str:
    """Return the script that draws the charts, which takes seconds; empty, with a note, if it cannot be made."""
    return javascript()


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
    return escape_controls("\n\n".join(parts) + "\n")
