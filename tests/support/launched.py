"""Runs over two ranks by their real command lines."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.support.programs import ROOT


class Launched:
    """A launcher in a session of its own, and the processes below it, which go at the end of the block."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._file = folder / "said"
        with self._file.open("w") as said:
            self.process = subprocess.Popen(
                command,
                stdout=said,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._tree: set[psutil.Process] = set()

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *_: object) -> None:
        self._look()
        for process in self._tree:
            if process.is_running():
                process.kill()
        self.process.kill()
        self.process.wait()

    def wait_until(self, condition: Callable[[], bool], timeout: float = 150) -> None:
        """Wait until the condition holds; an error where the launcher ends before, or it never does."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)
        self._look()

    def ranks(self) -> list[psutil.Process]:
        """The launcher's own living children, in the order of their start."""
        children = [child for child in psutil.Process(self.process.pid).children() if child.status() != "zombie"]
        return sorted(children, key=lambda child: (child.create_time(), child.pid))

    def all_gone(self, timeout: float) -> bool:
        """Whether every process that was there when a condition last came to hold ends in time."""
        return not psutil.wait_procs(self._tree, timeout=timeout)[1]

    def said(self) -> str:
        """What all of them have said so far."""
        return self._file.read_text(encoding="utf-8")

    def _look(self) -> None:
        if self.process.poll() is None:
            self._tree |= set(psutil.Process(self.process.pid).children(recursive=True))


def launcher(name: str, port: int) -> list[str]:
    """Return the beginning of a command line over two ranks, by ``python -m``, ``fabric run`` or ``torchrun``."""
    if name == "python -m":
        return [sys.executable, "-m", "fabric_train", "--devices", "2"]
    program = str(Path(sys.executable).with_name(name.split()[0]))
    if name == "torchrun":
        return [
            program,
            "--nproc-per-node",
            "2",
            "--master-port",
            str(port),
            "--max-restarts",
            "2",
            "-m",
            "fabric_train",
        ]
    return [program, "run", "--main-port", str(port), "--devices", "2", str(ROOT / "fabric_train")]
