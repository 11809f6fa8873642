"""Run a program in a terminal of a given size, and read what its screen shows."""

import fcntl
import os
import pty
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pyte

from tests.support.forked_runs import ForkedRun
from tests.support.rank_environment import CONSOLE_VARIABLES

_KIND = "xterm-256color"


def run_in_terminal(
    command: Sequence[str], folder: Path, columns: int = 80, timeout: float = 120, env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Return a program's exit code, and all that it wrote to its terminal.

    Raises:
        TimeoutError: it did not end in time; it was killed.
    """
    terminal, program = _open_terminal(columns)
    inherited = {name: value for name, value in os.environ.items() if name not in CONSOLE_VARIABLES}
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


def shown(written: str, columns: int, rows: int = 200) -> list[str]:
    """Return the lines of the screen of a terminal after a program has written to it."""
    screen = pyte.Screen(columns, rows)
    pyte.Stream(screen).feed(written)
    return [line.rstrip() for line in screen.display]


class Terminal:
    """A terminal for forked runs, and its screen; give ``device`` and ``env`` to ``ForkedRuns.start``."""

    def __init__(self, columns: int = 80, rows: int = 24, kind: str = _KIND) -> None:
        self._ours, self._theirs = _open_terminal(columns, rows)
        self.device = os.ttyname(self._theirs)
        self.env = {"TERM": kind, "PYTHONWARNINGS": "ignore"}
        self.written = ""
        self._screen = pyte.HistoryScreen(columns, rows, history=10_000)
        self._stream = pyte.ByteStream(self._screen)

    def resize(self, columns: int, rows: int) -> None:
        _set_size(self._theirs, columns, rows)
        self._screen.resize(rows, columns)

    def lines(self) -> list[str]:
        """Return the lines that the screen shows now, and before them those that have scrolled away."""
        with suppress(BlockingIOError):
            while part := os.read(self._ours, 1 << 16):
                self.written += part.decode(errors="replace")
                self._stream.feed(part)
        columns = range(self._screen.columns)
        gone = ["".join(line[column].data for column in columns).rstrip() for line in self._screen.history.top]
        return [*gone, *(line.rstrip() for line in self._screen.display)]

    def text(self) -> str:
        return "\n".join(self.lines())

    def wait_for(self, holds: Callable[[str], object], timeout: float = 60) -> str:
        """Return the text of the screen as soon as a condition holds for it.

        Raises:
            TimeoutError: it did not hold in time.
        """
        deadline = time.monotonic() + timeout
        while not holds(text := self.text()):
            if time.monotonic() > deadline:
                raise TimeoutError(text)
            time.sleep(0.02)
        return text

    def wait_for_end(self, run: ForkedRun, timeout: float = 120) -> list[int]:
        """Return the exit codes of a run's ranks; it is killed if it does not end in time."""
        try:
            self.wait_for(lambda _: run.has_ended(), timeout)
        finally:
            run.kill()
        return run.wait()

    def close(self) -> None:
        os.close(self._ours)
        os.close(self._theirs)


def _open_terminal(columns: int, rows: int = 24) -> tuple[int, int]:
    """Return both ends of a new terminal: one to read what its screen gets, one for the program."""
    terminal, program = pty.openpty()
    _set_size(program, columns, rows)
    os.set_blocking(terminal, False)
    return terminal, program


def _set_size(terminal: int, columns: int, rows: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _read(terminal: int, has_ended: Callable[[], bool], timeout: float) -> str:
    """Return what a program has written when it has ended or the time is over, and close the terminal."""
    written = b""
    deadline = time.monotonic() + timeout
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
