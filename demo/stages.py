"""Run a program of the demo by its command line and show its output and its progress."""

import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_SILENCE_SECONDS = 5.0


class StageError(RuntimeError):
    """A stage of the demo failed; the demo exits with ``exit_code``."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_stage(name: str, *command: object) -> None:
    """Print the command, run it in the project's root and print its output as it comes.

    While the program prints nothing, print every few seconds how long it has run.

    Args:
        name: the stage, for progress lines and errors.
        command: a program of this virtual environment (``python``, ``fabric``) and its arguments.

    Raises:
        StageError: the program's exit code is not 0.
    """
    words = [str(word) for word in command]
    print(f"\n$ {shlex.join(words)}", flush=True)
    words[0] = str(Path(sys.executable).parent / words[0])
    # programs draw their progress bars only on a terminal
    reader, writer = pty.openpty() if sys.stdout.isatty() else os.pipe()
    width = str(shutil.get_terminal_size((120, 24)).columns)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": width, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(words, cwd=ROOT, env=environment, stdout=writer, stderr=writer) as process:
        os.close(writer)
        try:
            _copy_output(reader, name)
        finally:
            os.close(reader)
    if process.returncode:
        code = process.returncode if process.returncode > 0 else 128 - process.returncode
        raise StageError(f"{name} failed with exit code {code}; see its message above", code)


def _copy_output(reader: int, name: str) -> None:
    """Copy the program's output to our standard output until the program closes it."""
    started = time.monotonic()
    while True:
        if not select.select([reader], [], [], _SILENCE_SECONDS)[0]:
            print(f"  … {name}, {time.monotonic() - started:.0f} s", flush=True)
            continue
        try:
            output = os.read(reader, 65536)
        except OSError:  # how Linux reports that a pseudo-terminal is closed
            return
        if not output:
            return
        sys.stdout.buffer.write(output)
        sys.stdout.flush()
