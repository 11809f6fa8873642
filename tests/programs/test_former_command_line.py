"""A command line of the system that this project continues trains as it is."""

from pathlib import Path

import pytest

from tests.support.forked_runs import ForkedRuns
from tests.support.former_command_line import FORMER_COMMAND_LINE
from tests.support.unequal_rows import write_model, write_rows


@pytest.mark.slow
def test_the_former_command_line_trains_and_uploads_its_checkpoints(forked_runs: ForkedRuns, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    tokens = write_rows(tmp_path / "tokens", num_rows=12)
    line = FORMER_COMMAND_LINE.replace("/data/tokens", str(tokens)).replace("meta-llama/Meta-Llama-3-8B", str(model))
    forked_runs.start(line.replace("--devices 4", "--devices 2").split(), 2, cwd=tmp_path).finish()
    run = tmp_path / "runs" / "fabric_llama"
    saved = [folder.name for folder in sorted((run / "checkpoints").iterdir())]
    assert len(saved) == 2  # the ends of both epochs
    (offline,) = (run / "wandb").glob("offline-run-*")
    (log,) = offline.glob("*.wandb")
    assert all(name.encode() in log.read_bytes() for name in saved)
