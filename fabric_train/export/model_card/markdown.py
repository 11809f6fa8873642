"""Parts of a model card in Markdown."""

import re
from collections.abc import Sequence
from urllib.parse import quote

from fabric_train.cli.redaction import redact

_SPACE = re.compile(r"[\t\r\n\f\v ]+")
_SPECIAL = re.compile(r"[\\`*_~\[\]<>&]")
_UNESCAPED_PIPE = re.compile(r"(?<!\\)((?:\\\\)*)\|")


class Markdown(str):
    """Text that is Markdown already; any other is escaped where it becomes a part of a card."""

    __slots__ = ()


def escaped(text: str) -> Markdown:
    """Return one line of which nothing is Markdown or HTML, unless it is :class:`Markdown` already."""
    if isinstance(text, Markdown):
        return text
    return Markdown(_SPECIAL.sub(r"\\\g<0>", _SPACE.sub(" ", redact(text)).strip()))  # a secret is found unescaped


def table(head: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a table; ``head`` has the names of its columns, separated by ``|``.

    Cells are escaped, see :func:`escaped`. A pipe has an odd number of backslashes before it, or it would end its cell.
    """
    line = "|".join("---" for _ in head.split("|"))
    cells = [[_UNESCAPED_PIPE.sub(r"\1\\|", escaped(cell)) for cell in row] for row in rows]
    return "\n".join([f"| {head} |", f"|{line}|", *(f"| {' | '.join(row)} |" for row in cells)])


def folded(title: str, text: str) -> str:
    """Return a text of which only the title is shown until a reader opens it."""
    return f"<details>\n<summary>{title}</summary>\n\n{text}\n\n</details>"


def code(text: str) -> Markdown:
    """Return a name in the font of code; nothing in it is Markdown."""
    return Markdown(f"`{_SPACE.sub(' ', text.replace('`', chr(39)))}`")


def link(text: str, target: str) -> Markdown:
    """Return a link to a file beside the card, or to the path of a URL."""
    return Markdown(f"[{escaped(text)}]({quote(target, safe=':/@.')})")


def listed(names: Sequence[str], most: int = 6) -> str:
    """Return names as ``a, b and c``; after the first ones only the number of the others."""
    names = [*names[:most], f"{len(names) - most:,} others"] if len(names) > most else names
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def steps(number: int) -> str:
    """Return a number of optimizer steps in words."""
    return f"{number:,} optimizer step{'s' * (number != 1)}"


def rounded(number: int) -> str:
    """Return a large number as it is read, such as ``1.23 billion``."""
    for size, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,}"
