"""Markdown of cards and reports: templates, tables, escaped values, and names without private places.

Each value that a template (``*.md.j2``) inserts is escaped, so that a name from the data is no Markdown and
no HTML, unless it is :class:`Markdown` already.
"""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fabric_train.cli.output import open_templates, redact

if TYPE_CHECKING:
    from jinja2 import Environment

SHOWN_DIGITS = 12
"""Hexadecimal digits of a hash or revision in a card."""
_SPACE = re.compile(r"[\t\r\n\f\v ]+")
_SPECIAL = re.compile(r"[\\`*~\[\]<>&]|(?<![^\W_])_|_(?![^\W_])")  # an underscore in a word is no emphasis
_UNESCAPED_PIPE = re.compile(r"(?<!\\)((?:\\\\)*)\|")
_BLANK_LINES = re.compile(r"\n{3,}")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class Markdown(str):
    """Text that is Markdown already."""

    __slots__ = ()

    def __html__(self) -> str:  # jinja2 and markupsafe leave what has this method as it is
        return self


def escaped(value: Any) -> Any:
    """Return one line without Markdown or HTML; Markdown stays as it is."""
    if hasattr(value, "__html__"):
        return value
    text = redact(str(value))  # a secret is found unescaped
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
    return Markdown(f"`{_SPACE.sub(' ', text.replace('`', chr(39)))}`")


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
    return _BLANK_LINES.sub("\n\n", _templates(template.parent).get_template(template.name).render(values)).strip()
