"""Run the project's programs as a user does: in a process of their own, in a folder of their own."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RunProgram = Callable[..., "subprocess.CompletedProcess[str]"]


def run_python(folder: Path, timeout: float, *argv: object) -> "subprocess.CompletedProcess[str]":
    """Run Python on argv in a folder; a relative path of a program is one of the project's."""
    command = [sys.executable, *map(str, argv)]
    if command[1].endswith(".py"):
        command[1] = str(ROOT / command[1])
    return subprocess.run(command, cwd=folder, timeout=timeout, text=True, capture_output=True, check=False)
