"""Make exports, and verify them without a fresh process, whose start takes seconds, where it is not the claim."""

import importlib
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from fabric_train.export import verification
from tests.support.forked_runs import ForkedRuns

VERIFY_IN_PROCESS = "from tests.support import exports; exports.verify_in_this_process().__enter__()"
"""Source for ``ForkedRuns.start(before=)``: a forked run verifies its export in its own process."""


def verify_in_this_process() -> AbstractContextManager[object]:
    """Return a context in which exports are verified by calling ``main`` of the module that verifies them."""
    return patch.object(verification, "subprocess", SimpleNamespace(run=_run_module))


def convert_run(runs: ForkedRuns, folder: Path, *words: object) -> Path:
    """Run ``convert_to_hf.py --output_dir FOLDER WORDS``; return the folder."""
    argv = ["--output_dir", folder, *words]
    runs.start(argv, 1, program="fabric_train.programs.convert_to_hf", before=VERIFY_IN_PROCESS).finish(900)
    return folder


def _run_module(command: list[str], env: dict[str, str], check: bool) -> "subprocess.CompletedProcess[str]":
    """Do in this process what ``subprocess.run`` does with ``python -m MODULE WORDS``."""
    _python, _dash_m, module, *_words = command
    with patch.object(sys, "argv", command[2:]):
        try:
            importlib.import_module(module).main()
        except SystemExit as system_exit:
            return subprocess.CompletedProcess(command, int(system_exit.code or 0))
    raise AssertionError("main ends with an exit code")
