"""Run ``fabric_train`` without writing checkpoints and without checking memory and disk space.

The checkpoint of the largest models that train on a GPU would not fit on every disk.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

from fabric_train.__main__ import main as train
from fabric_train.checkpoint.manager import CheckpointManager
from fabric_train.cli.errors import run_program
from fabric_train.preflight import memory_forecast as plan

MEMORY_CHECK = "check_memory"


def main() -> None:
    """Train with the arguments on the command line."""
    with patch.object(plan, MEMORY_CHECK, lambda _: None), patch.object(CheckpointManager, "save", _save_nothing):
        train()


def _save_nothing(checkpoints: CheckpointManager, state: Any, *_: Any, **__: Any) -> Path:
    return checkpoints.path(state)


if __name__ == "__main__":
    run_program(main)
