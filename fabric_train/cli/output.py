"""Make output safe: a closed stream does not end a program, no text controls a terminal, no secret is printed.

Control characters in names and texts are made visible, always on standard error and in logs, and on standard output if
it is a terminal. Only the console of :func:`open_console` may write control codes, which are rich's.
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
_GONE = (errno.EPIPE, errno.EBADF, errno.EIO, errno.ECONNRESET)  # the reader has ended, or the terminal is closed
_HIDDEN = "***"
# It begins after the scheme: to look for a scheme at each letter takes minutes in a word of 100,000 letters
_URL = re.compile(
    r"(?<=[a-zA-Z0-9+.-])://"
    r"(?:[^/\s'\"]*@)?"  # user and password
    r"(?P<place>[^\s?'\"]*)"
    r"(?P<query>\?[^\s'\"=]*=[^\s'\"]*)?"  # may hold a signature
)
_PUNCTUATION = ".,:;)"  # at the end of a URL it belongs to the sentence
_SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIALS?)(_|$|ID$)", re.IGNORECASE
)
_SHORTEST_SECRET = 8  # shorter values may be ordinary words


class _LastingFile(io.FileIO):
    """A file descriptor whose errors do not end the program: text that cannot be written is dropped."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        remaining = memoryview(data)
        while remaining:
            try:
                num_written = super().write(remaining)
            except OSError as error:
                if error.errno in _GONE:  # the descriptor is redirected, so native libraries can write to it as well
                    _redirect_to_null(self.fileno())
                break
            if num_written is None:  # the terminal is full, and another program has made it non-blocking
                select.select([], [self], [])
            else:
                remaining = remaining[num_written:]
        return len(data)


def ago(seconds: float) -> str:
    """Return how long ago something was, such as ``3 h 5 min ago``."""
    minutes = int(seconds // 60)
    if minutes <= 0:
        return f"{max(seconds, 0):.0f} s ago"
    hours = minutes // 60
    if hours == 0:
        return f"{minutes} min ago"
    days = hours // 24
    if days == 0:
        return f"{hours} h {minutes % 60} min ago"
    return f"{days} d ago"


def escape_controls(text: str) -> str:
    """Return a text with its control characters made visible, such as ``\\x1b``, except tabs and line breaks."""
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def escape_texts(content: Any) -> Any:
    """Return a JSON value with :func:`escape_controls` applied to all texts in it, including keys."""
    if isinstance(content, str):
        return escape_controls(content)
    if isinstance(content, dict):
        return {escape_controls(name): escape_texts(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [escape_texts(value) for value in content]
    return content


def visible(text: str) -> str:
    """Replace line breaks, tabs and invisible characters by visible ones; the result cannot control a terminal."""
    return "".join(map(_visible_char, text))


def _visible_char(char: str) -> str:
    if char in _SIGNS:
        return _SIGNS[char]
    if unicodedata.category(char) in _INVISIBLE:
        return f"⟨U+{ord(char):04X}⟩"
    return char


class _SafeText(io.TextIOWrapper):
    """Standard output or standard error.

    With ``filters``, it makes control characters visible and removes colours. ``has_bars`` lets the progress bars of
    libraries through: a carriage return at the beginning of a text, and cursor moves between bars.
    """

    def __init__(self, descriptor: int, encoding: str, filters: bool, has_bars: bool) -> None:
        file = _LastingFile(descriptor, "w", closefd=False)
        super().__init__(file, encoding=encoding, errors="backslashreplace", line_buffering=True)
        self._filters = filters
        self._has_bars = has_bars
        self.unfiltered = _Unfiltered(self)

    def write(self, text: str) -> int:
        is_bar_move = self._has_bars and _MOVES.fullmatch(text) is not None
        if self._filters and not is_bar_move:
            carriage_return = "\r" if self._has_bars and text.startswith("\r") else ""
            line = text.removeprefix(carriage_return)
            text = carriage_return + escape_controls(_COLOUR.sub("", line))
        return super().write(text)


class _Unfiltered:
    """A :class:`_SafeText` without its filter, for text that is already safe."""

    def __init__(self, stream: _SafeText) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_console(**options: Any) -> "Console":
    """Return a ``rich.console.Console`` whose own codes reach the terminal, but not codes in the texts that it prints.

    In a notebook, it prints text instead of HTML. ``options`` are the arguments of the class.
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
            safe_segments = []
            for segment in buffer:
                if not segment.control:  # a text, and not a code of rich
                    segment = Segment(escape_controls(segment.text), segment.style)
                safe_segments.append(segment)
            return super()._render_buffer(safe_segments)

    return SafeConsole


def keep_streams_writable() -> None:
    """Keep errors of standard output and standard error from the program, from now on.

    A reader such as ``tee`` may end, a terminal may disappear, a disk may fill up, and a stream may be closed from the
    start (``>&-``). The program then continues without printing and keeps its exit code. Characters that the encoding
    lacks are escaped. Every line is written immediately, so nothing has to be flushed when the program ends.

    Call it before anything else opens a file: a file could get the number of a closed stream.
    """
    # Open streams that are closed, so that no file gets their numbers.
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            _redirect_to_null(descriptor)
    # Standard output is filtered only on a terminal: a file or another program gets what was printed.
    stdout_encoding = sys.stdout.encoding if sys.stdout else "utf-8"
    sys.stdout = _SafeText(1, stdout_encoding, filters=os.isatty(1), has_bars=False)
    stderr_encoding = sys.stderr.encoding if sys.stderr else "utf-8"
    sys.stderr = _SafeText(2, stderr_encoding, filters=True, has_bars=True)


def _redirect_to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)


def is_secret_variable(name: str) -> bool:
    """Return whether the name of an environment variable says that its value is secret, such as HF_TOKEN."""
    return _SECRET_NAME.search(name) is not None


def redact(text: str) -> str:
    """Remove secrets from a text: user, password and query of URLs, and the values of secret environment variables.

    A variable is secret if its name says so; paths, such as the path of a file with a password, are not removed.
    """
    text = _URL.sub(_redact_url, text)
    for name, value in os.environ.items():
        is_secret = len(value) >= _SHORTEST_SECRET and is_secret_variable(name)
        if is_secret and not os.path.exists(value):
            text = text.replace(value, _HIDDEN)
    return text


def _redact_url(url: re.Match[str]) -> str:
    query = url["query"]
    if query is None:
        return f"://{url['place']}"
    after_url = query[len(query.rstrip(_PUNCTUATION)) :]
    return f"://{url['place']}?{_HIDDEN}{after_url}"


def open_templates(folder: Path | Sequence[Path], **options: Any) -> "Environment":
    """Return the jinja2 templates of one folder or of several; values are escaped, and missing ones are errors.

    ``options`` are arguments of ``jinja2.Environment``, which override the ones set here.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # imported late: most programs need no templates

    options = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True, **options}
    return Environment(loader=FileSystemLoader(folder), **options)


def number_ranges(numbers: Iterable[int]) -> str:
    """Return numbers with consecutive ones as ranges: 0–3, 7."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    texts = []
    for run in ranges:
        texts.append(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]))
    return ", ".join(texts)
