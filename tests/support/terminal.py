"""Run a program in a terminal of a given width, and read what its screen shows."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.forked_runs import OF_CONSOLES, ForkedRun

_KIND = "xterm-256color"
_SEQUENCE = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])")


def run_in_terminal(
    command: Sequence[str], folder: Path, columns: int = 80, timeout: float = 120, env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Return a program's exit code, and all that it wrote to its terminal.

    Raises:
        TimeoutError: it did not end in time; it was killed.
    """
    terminal, program = _open_terminal(columns)
    inherited = {name: value for name, value in os.environ.items() if name not in OF_CONSOLES}
    process = subprocess.Popen(
        command,
        stdin=program,
        stdout=program,
        stderr=program,
        cwd=folder,
        env=inherited | {"TERM": _KIND, "OMP_NUM_THREADS": "1"} | dict(env or {}),
        start_new_session=True,
    )
    os.close(program)
    written = _read(terminal, lambda: process.poll() is not None, timeout)
    if process.poll() is None:
        process.kill()
        process.wait()
        raise TimeoutError(written)
    return process.returncode, written


def run_forked_in_terminal(
    start: Callable[..., ForkedRun], columns: int = 80, timeout: float = 120, kind: str = _KIND
) -> tuple[int, str]:
    """Return the exit code of a run of one rank, and all that it wrote to its terminal.

    Args:
        start: starts the run with the given ``terminal`` and ``env``.
        columns: the width of the terminal.
        timeout: seconds in which the run has to end.
        kind: the terminal's name in ``TERM``.

    Raises:
        TimeoutError: it did not end in time; it was killed.
    """
    terminal, program = _open_terminal(columns)
    run = start(terminal=os.ttyname(program), env={"TERM": kind, "PYTHONWARNINGS": "ignore"})
    os.close(program)
    written = _read(terminal, run.has_ended, timeout)
    if not run.has_ended():
        run.kill()
        run.wait()
        raise TimeoutError(written)
    (code,) = run.wait()
    return code, written


def _open_terminal(columns: int) -> tuple[int, int]:
    """Return both ends of a new terminal: one to read what its screen gets, one for the program."""
    terminal, program = pty.openpty()
    fcntl.ioctl(program, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    os.set_blocking(terminal, False)
    return terminal, program


def _read(terminal: int, has_ended: Callable[[], bool], timeout: float) -> str:
    """Return what a program has written when it has ended or the time is over, and close the terminal."""
    written, deadline = b"", time.monotonic() + timeout
    is_over = False
    while not is_over:
        is_over = has_ended() or time.monotonic() > deadline
        with suppress(BlockingIOError, OSError):  # EIO: nobody has the other end open any more
            while part := os.read(terminal, 1 << 16):
                written += part
        if not is_over:
            time.sleep(0.02)
    os.close(terminal)
    return written.decode(errors="replace")


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
