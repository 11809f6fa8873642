"""Commands of the project's own processes, ``python -m MODULE``, as forks that need not import torch."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from tests.support.forked_runs import ForkedRuns


def run_in_fork(runs: ForkedRuns, before: str = "") -> "Callable[..., subprocess.CompletedProcess[str]]":
    """Return a function that runs a command as ``subprocess.run`` does with ``capture_output=True, text=True``.

    Args:
        runs: their server starts the process.
        before: see ``ForkedRuns.start``.
    """

    def run(
        command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None, **_: object
    ) -> "subprocess.CompletedProcess[str]":
        python, option, module, *words = command
        assert (python, option) == (sys.executable, "-m")
        spec = find_spec(module)
        assert spec is not None, module
        is_package = spec.submodule_search_locations is not None
        program = f"{module}.__main__" if is_package else module
        process = runs.start(words, 1, cwd=cwd, env=env, program=program, before=before)
        (code,) = process.wait()
        return subprocess.CompletedProcess(command, code, process.stdout(), process.stderr())

    return run
