"""Start runs of two ranks by a real launcher."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.support.programs import ROOT


class Launched:
    """A launcher in a session of its own; the end of the ``with`` block kills it and the processes it started."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._file = folder / "output"
        with self._file.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._tree: set[psutil.Process] = set()

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *_: object) -> None:
        self._update_tree()
        for process in self._tree:
            if process.is_running():
                process.kill()
        self.process.kill()
        self.process.wait()

    def wait_until(self, condition: Callable[[], bool], timeout: float = 150) -> None:
        """Wait until the condition holds; fail if the launcher ends first or the time is over."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)
        self._update_tree()

    def ranks(self) -> list[psutil.Process]:
        """Return the launcher's living children in the order of their start."""
        return living_children(self.process.pid)

    def all_gone(self, timeout: float) -> bool:
        """Return whether all processes known from the last ``wait_until`` end within ``timeout`` seconds."""
        return not psutil.wait_procs(self._tree, timeout=timeout)[1]

    def output(self) -> str:
        """Return what all processes have printed so far."""
        return self._file.read_text(encoding="utf-8")

    def _update_tree(self) -> None:
        if self.process.poll() is None:
            self._tree |= set(psutil.Process(self.process.pid).children(recursive=True))


def living_children(pid: int) -> list[psutil.Process]:
    """Return a process's living children in the order of their start."""
    children = [child for child in psutil.Process(pid).children() if child.status() != "zombie"]
    return sorted(children, key=lambda child: (child.create_time(), child.pid))


def launcher(name: str, port: int) -> list[str]:
    """Return the start of a command line for two ranks with ``python -m``, ``fabric run`` or ``torchrun``."""
    if name == "python -m":
        return [sys.executable, "-m", "fabric_train", "--devices", "2"]
    program = str(Path(sys.executable).with_name(name.split()[0]))
    if name == "torchrun":
        options = f"--nproc-per-node 2 --master-port {port} --max-restarts 2"
        return [program, *options.split(), "-m", "fabric_train"]
    return [program, "run", "--main-port", str(port), "--devices", "2", str(ROOT / "fabric_train")]
