"""The commands in the shell blocks of the documents, and what a page shows of their output."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

# a block of bash, and a block of its output after it, if there is one, with the same indentation
_BLOCK = re.compile(
    r"^( *)```bash\n(?P<commands>.*?)^\1```$(?:\s*^\1```(?:text)?\n(?P<shown>.*?)^\1```$)?", re.MULTILINE | re.DOTALL
)
# a script that the reader is to save
_SAVED = re.compile(r"(Save this as `(?P<name>[\w.]+)`.*\n\n)```python\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
# a line with <<'END' and all lines up to END, or another line
_COMMAND = re.compile(r"^.*<<'(\w+)'\n(?:.*\n)*?\1$|^.+$", re.MULTILINE)
_NUMBER = r"\d[\d.,]*(?:e[+-]\d+)?"
_BORDERS = re.compile("[\u2500-\u257f]+")
"""Characters that draw the borders of tables."""


@dataclass(frozen=True)
class Command:
    """A command line of a page, and the lines that the page shows of its output; none if it shows nothing."""

    line: str
    shown: tuple[str, ...] = ()


def commands_in(text: str) -> Iterator[Command]:
    """Yield the whole command lines of a document's shell blocks; the output of a block belongs to its last one.

    A script that the reader is to save is a command that writes it.
    """
    text = _SAVED.sub(_as_command, text)
    for block in _BLOCK.finditer(text):
        lines = []
        for match in _COMMAND.finditer(block["commands"].replace("\\\n", " ")):
            line = match[0].strip()
            if line and not line.startswith("#"):
                lines.append(line)
        *earlier_lines, last_line = lines
        for line in earlier_lines:
            yield Command(line)
        shown = (block["shown"] or "").splitlines()
        yield Command(last_line, tuple(line for line in shown if line.strip()))


def words_of(line: str) -> list[str]:
    """Return the words of a command line, without comments."""
    return shlex.split(line, comments=True)


def plain(output: str) -> str:
    """Return an output in one line without the borders of its tables, which differ in a file and in a terminal."""
    return " ".join(_BORDERS.sub(" ", output).split())


def pattern_of(shown: str) -> str:
    """Return a pattern of a line of output: any number for a number, any text for …, any blanks for blanks."""
    patterns = []
    for text in plain(shown).split("…"):
        # blanks at either end of the text stay, next to the …
        patterns_between_numbers = []
        for words in re.split(_NUMBER, re.sub(r"\s+", " ", text)):
            patterns_between_numbers.append(r"\s+".join(re.escape(word) for word in words.split(" ")))
        patterns.append(_NUMBER.join(patterns_between_numbers))
    return ".*".join(patterns)


def _as_command(script: "re.Match[str]") -> str:
    """Return a shell block that writes a script."""
    return f"```bash\ncat > {script['name']} <<'END'\n{script['text']}END\n```"
