"""The quarter of an hour with a GPU runs through on a pretended device, also compiled and with weights in 4 bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import OF_TRL
from benchmarks.quarter_hour import PARITY, PARTS
from tests.support.pretended_cuda.run import environment
from tests.support.programs import ROOT

pytestmark = pytest.mark.cuda_rehearsal
_ALLOWED_SECONDS = 3600


def test_the_quarter_of_an_hour_runs_through(tmp_path: Path) -> None:
    variables = {**os.environ, **environment(1, tmp_path, compiles=True)}
    command = [sys.executable, "-m", "benchmarks", "gpu", "--quarter_hour", "--sizes", "tiny", "--work", str(tmp_path)]
    finished = subprocess.run(
        command, cwd=ROOT, env=variables, text=True, capture_output=True, timeout=_ALLOWED_SECONDS, check=False
    )
    assert finished.returncode == 0, finished.stdout[-5000:] + finished.stderr[-2000:]
    (result,) = tmp_path.rglob("gpu-quarter-hour-*.json")
    content = json.loads(result.read_text(encoding="utf-8"))
    records = {name: record for name, (record,) in content["runs"].items()}
    assert list(records) == [part.name for part in PARTS]

    # what is not installed is left out
    left_out = {name for name, record in records.items() if record["status"] != "done"}
    assert left_out <= {name for name in records if OF_TRL in name or "float8" in name}
    trained = [record["figures"] for record in records.values() if "tokens_per_second" in record["figures"]]
    assert len(trained) == len(PARTS) - 2 - len(left_out)
    assert all(figures["tokens_per_second"]["median"] > 0 and figures["peak_bytes"] > 0 for figures in trained)

    # two adapters, in two dtypes, eager and compiled
    assert len(records[PARITY]["figures"]) == 2 * 2 * 2
    bars = content["summary"]["conclusion"]["bars"]
    assert bars[PARITY]["is_met"] is True
    assert "| bar | aimed at | measured | met |" in result.with_suffix(".md").read_text(encoding="utf-8")
