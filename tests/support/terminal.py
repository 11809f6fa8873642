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
_READ_BYTES = 1 << 16
_POLL_SECONDS = 0.02


def run_in_terminal(
    command: Sequence[str], folder: Path, columns: int = 80, timeout: float = 120, env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Return a program's exit code, and all that it wrote to its terminal.

    Raises:
        TimeoutError: it did not end in time; it was killed.
    """
    screen_end, program_end = _open_terminal(columns)
    inherited = {name: value for name, value in os.environ.items() if name not in CONSOLE_VARIABLES}
    process = subprocess.Popen(
        command,
        stdin=program_end,
        stdout=program_end,
        stderr=program_end,
        cwd=folder,
        env=inherited | {"TERM": _KIND, "OMP_NUM_THREADS": "1"} | dict(env or {}),
        start_new_session=True,
    )
    os.close(program_end)  # the program has its own copy, and reading ends when that is closed
    written = _read_to_end(screen_end, lambda: process.poll() is not None, timeout)
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
        self._screen_end, self._program_end = _open_terminal(columns, rows)
        self.device = os.ttyname(self._program_end)
        self.env = {"TERM": kind, "PYTHONWARNINGS": "ignore"}
        self.written = ""
        self._screen = pyte.HistoryScreen(columns, rows, history=10_000)
        self._stream = pyte.ByteStream(self._screen)

    def resize(self, columns: int, rows: int) -> None:
        _set_size(self._program_end, columns, rows)
        self._screen.resize(rows, columns)

    def lines(self) -> list[str]:
        """Return the lines that the screen shows now, and before them those that have scrolled away."""
        with suppress(BlockingIOError):  # nothing more to read for now
            while received := os.read(self._screen_end, _READ_BYTES):
                self.written += received.decode(errors="replace")
                self._stream.feed(received)
        columns = range(self._screen.columns)
        lines = []
        for scrolled_line in self._screen.history.top:
            lines.append("".join(scrolled_line[column].data for column in columns))
        lines += self._screen.display
        return [line.rstrip() for line in lines]

    def text(self) -> str:
        return "\n".join(self.lines())

    def wait_for(self, holds: Callable[[str], object], timeout: float = 60) -> str:
        """Return the text of the screen as soon as a condition holds for it.

        Raises:
            TimeoutError: it did not hold in time.
        """
        deadline = time.monotonic() + timeout
        text = self.text()
        while not holds(text):
            if time.monotonic() > deadline:
                raise TimeoutError(text)
            time.sleep(_POLL_SECONDS)
            text = self.text()
        return text

    def wait_for_end(self, run: ForkedRun, timeout: float = 120) -> list[int]:
        """Return the exit codes of a run's ranks; it is killed if it does not end in time."""
        try:
            self.wait_for(lambda _: run.has_ended(), timeout)
        finally:
            run.kill()
        return run.wait()

    def close(self) -> None:
        os.close(self._screen_end)
        os.close(self._program_end)


def _open_terminal(columns: int, rows: int = 24) -> tuple[int, int]:
    """Return both ends of a new terminal: one to read what its screen gets, which never waits, and the program's."""
    screen_end, program_end = pty.openpty()
    _set_size(program_end, columns, rows)
    os.set_blocking(screen_end, False)
    return screen_end, program_end


def _set_size(program_end: int, columns: int, rows: int) -> None:
    """Set the size of a terminal; its program gets a SIGWINCH."""
    fcntl.ioctl(program_end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _read_to_end(screen_end: int, has_ended: Callable[[], bool], timeout: float) -> str:
    """Return what a program has written when it has ended or the time is over, and close the terminal."""
    written = b""
    deadline = time.monotonic() + timeout
    is_over = False
    while not is_over:
        # asked before the last read: the program may write between a read and its end
        is_over = has_ended() or time.monotonic() > deadline
        with suppress(OSError):  # nothing more to read for now, or (EIO) nobody has the other end open any more
            while received := os.read(screen_end, _READ_BYTES):
                written += received
        if not is_over:
            time.sleep(_POLL_SECONDS)
    os.close(screen_end)
    return written.decode(errors="replace")
