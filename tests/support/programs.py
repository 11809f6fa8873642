"""Write command lines of the project's programs, and run them as a user does: in processes and folders of their own."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RunProgram = Callable[..., "subprocess.CompletedProcess[str]"]


def option_words(options: Mapping[str, object]) -> list[str]:
    """Return options as the words of a command line: ``{"lr": 0.1, "betas": [1, 2]}`` as ``--lr 0.1 --betas 1 2``."""
    words: list[str] = []
    for name, value in options.items():
        words.append(f"--{name}")
        if isinstance(value, list):
            words.extend(str(item) for item in value)
        else:
            words.append(str(value))
    return words


def run_python(folder: Path, timeout: float, *argv: object) -> "subprocess.CompletedProcess[str]":
    """Run Python on ``argv`` in a folder, and return the ended process with its output.

    Args:
        folder: the current folder of the process.
        timeout: in seconds.
        argv: a path that ends with ``.py`` is relative to the project, or absolute.
    """
    words = [str(argument) for argument in argv]
    if words[0].endswith(".py"):
        words[0] = str(ROOT / words[0])
    return subprocess.run(
        [sys.executable, *words], cwd=folder, timeout=timeout, text=True, capture_output=True, check=False
    )
