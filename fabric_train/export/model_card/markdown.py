"""Parts of a model card in Markdown."""

import re
from collections.abc import Sequence


def table(head: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a table; ``head`` has the names of its columns, separated by ``|``."""
    line = "|".join("---" for _ in head.split("|"))
    cells = [[re.sub(r"[\t\r\n ]+", " ", cell).strip().replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join([f"| {head} |", f"|{line}|", *(f"| {' | '.join(row)} |" for row in cells)])


def folded(title: str, text: str) -> str:
    """Return a text of which only the title is shown until a reader opens it."""
    return f"<details>\n<summary>{title}</summary>\n\n{text}\n\n</details>"


def code(text: str) -> str:
    """Return a name in the font of code; nothing in it is Markdown."""
    return f"`{text.replace('`', chr(39))}`"


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
