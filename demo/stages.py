"""Run a program of the demo by its command line."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from fabric_train.sample_data import real_data

ROOT = Path(__file__).resolve().parent.parent


class StageError(RuntimeError):
    """A stage of the demo failed; the demo exits with ``exit_code``."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def print_heading(text: str) -> None:
    """Print the heading of a part of the demo, such as ``2/6  tokenize``."""
    Console(highlight=False).print(f"\n[bold]{text}")


def run_stage(name: str, *command: object) -> None:
    """Print the command and run it in the project's root; the program writes where this one does.

    Args:
        name: the stage, for errors.
        command: a program of this virtual environment (``python``, ``fabric``) and its arguments.

    Raises:
        StageError: the program's exit code is not 0.
        KeyboardInterrupt: the user pressed Ctrl-C, and the program has ended.
    """
    words = [str(word) for word in command]
    print(f"\n$ {shlex.join(words)}", flush=True)
    words[0] = str(Path(sys.executable).parent / words[0])
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(words, cwd=ROOT, env=environment) as program:
        try:
            code = program.wait()
        except KeyboardInterrupt:
            # Ctrl-C reaches the program too, and a run saves a checkpoint before it ends
            program.wait()
            raise
    if code:
        code = code if code > 0 else 128 - code
        raise StageError(f"{name} failed with exit code {code}; see its message above", code)


@contextmanager
def exit_on_failure() -> Iterator[None]:
    """Print why a stage or a download failed, and exit with the stage's exit code; exit with 130 after Ctrl-C."""
    try:
        yield
    except (StageError, real_data.FetchError) as error:
        print(f"\nerror: demo: {error}", file=sys.stderr, flush=True)
        sys.exit(getattr(error, "exit_code", 1))
    except KeyboardInterrupt:
        print("\nerror: demo: interrupted", file=sys.stderr, flush=True)
        sys.exit(130)
