"""Which checkpoint the name of a step means."""

from pathlib import Path

import pytest

from fabric_train.checkpoint import find_checkpoint
from fabric_train.cli.errors import InputError


def test_name_of_a_step_never_means_another_step(tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "step-00000002").mkdir(parents=True)
    (checkpoints / "step-00000007").write_text("a file in place of the folder")
    with pytest.raises(InputError, match=r"step-00000007 is damaged: checksums\.json is missing; use another"):
        find_checkpoint(tmp_path / "run" / "step-7")
    with pytest.raises(InputError, match="the run does not have this checkpoint; it has step-00000002, step-00000007"):
        find_checkpoint(tmp_path / "run" / "step-3")
