"""What the programs print and write: a reader that has gone ends nothing, no text controls a terminal or a page, no
secret is printed.

Control characters in names and texts are made visible: on standard error and in logs always, on standard output if it
is a terminal. ``open_console`` writes the codes of rich.
"""

import errno
import io
import os
import re
import select
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment
    from rich.console import Console
    from rich.segment import Segment

_CONTROLS = re.compile(
    r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"  # without tab and line break
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"  # these change the direction of text
)
_INVISIBLE = ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs")
_SIGNS = {"\n": "↵", "\r": "␍", "\t": "⇥", " ": " "}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MOVES = re.compile(r"(\n|\x1b\[A)+")  # of tqdm, between the bars of several downloads
_GONE = (errno.EPIPE, errno.EBADF, errno.EIO, errno.ECONNRESET)  # reader has ended, closed, terminal has gone
_HIDDEN = "***"
# It begins after the scheme: to look for a scheme at each letter takes minutes in a word of 100,000 letters
_URL = re.compile(
    r"(?<=[a-zA-Z0-9+.-])://"
    r"(?:[^/\s'\"]*@)?"  # user and password
    r"(?P<place>[^\s?'\"]*)"
    r"(?P<query>\?[^\s'\"=]*=[^\s'\"]*)?"  # may hold a signature
)
_PUNCTUATION = ".,:;)"  # after a URL, not of it
_SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIALS?)(_|$|ID$)", re.IGNORECASE
)
_SHORTEST_SECRET = 8  # shorter values may be ordinary words


class _LastingFile(io.FileIO):
    """A file descriptor whose errors end no program: what cannot be written is dropped."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        left = memoryview(data)
        while left:
            try:
                written = super().write(left)
            except OSError as error:
                if error.errno in _GONE:  # later writes go nowhere, also from native libraries
                    _redirect_to_null(self.fileno())
                break
            if written is None:  # another program has made the terminal non-blocking
                select.select([], [self], [])
            left = left[written or 0 :]
        return len(data)


def ago(seconds: float) -> str:
    """Return how long ago something was, such as ``3 h 5 min ago``."""
    minutes, hours, days = (int(seconds // length) for length in (60, 3600, 86400))
    if days > 0:
        return f"{days} d ago"
    if hours > 0:
        return f"{hours} h {minutes % 60} min ago"
    return f"{minutes} min ago" if minutes > 0 else f"{max(seconds, 0):.0f} s ago"


def escape_controls(text: str) -> str:
    """Return a text with its control characters made visible, such as ``\\x1b``, except tabs and line breaks."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def escape_texts(content: Any) -> Any:
    """Return what JSON can hold with :func:`escape_controls` of all texts in it, the names of an object included."""
    if isinstance(content, str):
        return escape_controls(content)
    if isinstance(content, dict):
        return {escape_controls(name): escape_texts(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [escape_texts(value) for value in content]
    return content


def visible(text: str) -> str:
    """Replace line breaks, tabs and invisible characters by visible ones; the result cannot control a terminal."""
    escaped = (f"⟨U+{ord(one):04X}⟩" if unicodedata.category(one) in _INVISIBLE else one for one in text)
    return "".join(_SIGNS.get(one) or shown for one, shown in zip(text, escaped, strict=True))


class _SafeText(io.TextIOWrapper):
    """Standard output or standard error; if it ``filters``, it writes control characters visibly, without colours.

    ``has_bars`` lets progress bars of libraries through: a carriage return at the beginning, and moves between bars.
    """

    def __init__(self, descriptor: int, encoding: str, filters: bool, has_bars: bool) -> None:
        file = _LastingFile(descriptor, "w", closefd=False)
        super().__init__(file, encoding=encoding, errors="backslashreplace", line_buffering=True)
        self._filters = filters
        self._has_bars = has_bars
        self.unfiltered = _Unfiltered(self)

    def write(self, text: str) -> int:
        if self._filters and not (self._has_bars and _MOVES.fullmatch(text)):
            begin = "\r" if self._has_bars and text.startswith("\r") else ""
            text = begin + escape_controls(_COLOUR.sub("", text[len(begin) :]))
        return super().write(text)


class _Unfiltered:
    """The same stream for text that has been made safe already."""

    def __init__(self, stream: _SafeText) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_console(**options: Any) -> "Console":
    """Return a ``rich.console.Console``: its own codes reach the terminal, those in the texts that it prints do not.

    In a notebook it prints text, as everywhere, and no HTML.
    """
    return _safe_console()(**{"force_jupyter": False, **options})


@cache
def _safe_console() -> "type[Console]":
    from rich.console import Console
    from rich.segment import Segment

    class SafeConsole(Console):
        """Makes the control characters of texts visible."""

        @property
        def file(self) -> IO[str]:
            stream = super().file
            return getattr(stream, "unfiltered", stream)

        @file.setter
        def file(self, new_file: IO[str]) -> None:
            self._file = new_file

        def _render_buffer(self, buffer: "Iterable[Segment]") -> str:
            parts = list(buffer)
            safe = (part if part.control else Segment(escape_controls(part.text), part.style) for part in parts)
            return super()._render_buffer(safe)

    return SafeConsole


def keep_streams_writable() -> None:
    """Let no error of standard output or standard error reach the program, from now on.

    A reader such as ``tee`` may end, a terminal go away, a disk fill up, and a stream may be closed from the start
    (``>&-``). Then the program goes on, prints to nowhere and keeps its exit code. Characters that the encoding lacks
    are escaped. Every line is written at once, so nothing has to be flushed when the program ends.

    Call it before anything else opens a file: a file could get the number of a closed stream.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            _redirect_to_null(descriptor)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        replaced = getattr(sys, name)
        encoding = replaced.encoding if replaced else "utf-8"
        is_log = name == "stderr"
        setattr(sys, name, _SafeText(descriptor, encoding, is_log or os.isatty(descriptor), has_bars=is_log))


def _redirect_to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)


def redact(text: str) -> str:
    """Remove user, password and query from the URLs in ``text``, and the values of environment variables whose names
    mark them as secret.
    """
    text = _URL.sub(_without_secrets, text)
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST_SECRET and _SECRET_NAME.search(name) and not os.path.exists(value):
            text = text.replace(value, _HIDDEN)
    return text


def _without_secrets(url: re.Match[str]) -> str:
    query = url["query"]
    if query is None:
        return f"://{url['place']}"
    after_url = query[len(query.rstrip(_PUNCTUATION)) :]
    return f"://{url['place']}?{_HIDDEN}{after_url}"


def open_templates(folder: Path | Sequence[Path], **options: Any) -> "Environment":
    """Return the templates of one folder or of several: values are escaped, missing ones are errors.

    ``options`` are further ones of jinja2.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # most programs need none

    options = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True, **options}
    return Environment(loader=FileSystemLoader(folder), **options)


def number_ranges(numbers: Iterable[int]) -> str:
    """Return numbers with runs of consecutive ones as ranges: 0–3, 7."""
    texts = []
    for _, pairs in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        texts.append(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}")
    return ", ".join(texts)
