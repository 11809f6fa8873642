"""Run the demo's programs through their command lines, showing what is run and that something moves."""

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
    """A stage of the demo failed; ``exit_code`` is what the demo leaves with."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_stage(name: str, *command: object) -> None:
    """Print the command, run it in the project's root and pass its output on as it comes.

    ``python`` and ``fabric`` are those of this environment. In silence, a line now and then tells how long it ran.

    Raises:
        StageError: with the program's exit code, where that is not 0.
    """
    words = [str(word) for word in command]
    print(f"\n$ {shlex.join(words)}", flush=True)
    words[0] = str(Path(sys.executable).parent / words[0])
    # a terminal gets the programs' own progress bars, which they draw on nothing else
    reader, writer = pty.openpty() if sys.stdout.isatty() else os.pipe()
    width = str(shutil.get_terminal_size((120, 24)).columns)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": width, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(words, cwd=ROOT, env=environment, stdout=writer, stderr=writer) as process:
        os.close(writer)
        try:
            _pass_on(reader, name)
        finally:
            os.close(reader)
    if process.returncode:
        code = process.returncode if process.returncode > 0 else 128 - process.returncode
        raise StageError(f"{name} failed with exit code {code}; its own message stands above", code)


def _pass_on(reader: int, name: str) -> None:
    """Copy what the program writes to our standard output until it has closed its end."""
    started = time.monotonic()
    while True:
        if not select.select([reader], [], [], _SILENCE_SECONDS)[0]:
            print(f"  … {name}, {time.monotonic() - started:.0f} s", flush=True)
            continue
        try:
            output = os.read(reader, 65536)
        except OSError:  # Linux's way of ending a pseudo-terminal
            return
        if not output:
            return
        sys.stdout.buffer.write(output)
        sys.stdout.flush()
