"""Run a program in a terminal of a given width, and read what its screen shows."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_OF_CONSOLES = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
_SEQUENCE = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])")


def run_in_terminal(
    command: Sequence[str], folder: Path, columns: int = 80, timeout: float = 120, env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Return a program's exit code, and all that it wrote to its terminal.

    Raises:
        TimeoutError: it did not end in time; it was killed.
    """
    terminal, program = pty.openpty()
    fcntl.ioctl(program, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_CONSOLES}
    process = subprocess.Popen(
        command,
        stdin=program,
        stdout=program,
        stderr=program,
        cwd=folder,
        env=inherited | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"} | dict(env or {}),
        start_new_session=True,
    )
    os.close(program)
    os.set_blocking(terminal, False)
    written, deadline = b"", time.monotonic() + timeout
    while True:
        has_ended = process.poll() is not None
        with suppress(BlockingIOError, OSError):  # EIO: nobody has the other end open any more
            while part := os.read(terminal, 1 << 16):
                written += part
        if has_ended:
            break
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise TimeoutError(written.decode(errors="replace"))
        time.sleep(0.02)
    os.close(terminal)
    return process.returncode, written.decode()


@dataclass
class Screen:
    """The lines of a terminal, those that have scrolled away included.

    ``drawn`` are the states of every line at the moment at which it was erased or left.
    """

    columns: int
    lines: list[str] = field(default_factory=lambda: [""])
    drawn: list[str] = field(default_factory=list)
    shows_cursor: bool = True
    _row: int = 0
    _column: int = 0

    def write(self, text: str) -> None:
        """Show what a program has written.

        Raises:
            ValueError: the text has a control code that this class does not know.
        """
        place = 0
        while place < len(text):
            sequence = _SEQUENCE.match(text, place)
            if sequence:
                self._control(sequence[1], sequence[2])
                place = sequence.end()
                continue
            self._put(text[place])
            place += 1

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._leave()
        elif character.isprintable():
            if self._column == self.columns:
                self._leave()
                self._column = 0
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
            self._column += 1
        else:
            raise ValueError(f"{character!r} after {self.lines[-3:]}")

    def _leave(self) -> None:
        self.drawn.append(self.lines[self._row])
        self._row += 1
        if self._row == len(self.lines):
            self.lines.append("")

    def _control(self, numbers: str, letter: str) -> None:
        if (numbers, letter) == ("2", "K"):
            self.drawn.append(self.lines[self._row])
            self.lines[self._row] = ""
        elif letter == "A":
            self._row -= int(numbers or "1")
        elif numbers == "?25":
            self.shows_cursor = letter == "h"
        elif letter != "m":  # colours
            raise ValueError(f"escape code {numbers}{letter}")
