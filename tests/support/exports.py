"""Make exports, and verify them without a fresh process, whose start takes seconds, where it is not the claim."""

import importlib
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from fabric_train.export import verification
from tests.support.forked_runs import ForkedRuns

VERIFY_IN_PROCESS = "from tests.support import exports; exports.verify_in_this_process().__enter__()"
"""Source that a forked run executes first."""


def verify_in_this_process() -> AbstractContextManager[Any]:
    """Return a context in which exports are verified by calling the ``main`` of the module that verifies them."""
    return patch.object(verification, "subprocess", SimpleNamespace(run=_run))


def convert_run(runs: ForkedRuns, folder: Path, *words: object) -> Path:
    """Run ``convert_to_hf.py --output_dir FOLDER WORDS``; return the folder."""
    given = ["--output_dir", folder, *words]
    runs.start(given, 1, program="fabric_train.programs.convert_to_hf", before=VERIFY_IN_PROCESS).finish(900)
    return folder


def _run(command: list[str], env: dict[str, str], check: bool) -> "subprocess.CompletedProcess[str]":
    with patch.object(sys, "argv", command[2:]):  # without python -m
        try:
            importlib.import_module(command[2]).main()
        except SystemExit as end:
            return subprocess.CompletedProcess(command, int(end.code or 0))
    raise AssertionError("main ends with an exit code")
