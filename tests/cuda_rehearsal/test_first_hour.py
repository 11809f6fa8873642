"""The first hour with a GPU runs through on pretended devices, so that no minute of a real one is lost to a mistake."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.first_hour import PARTS
from tests.support.pretended_cuda.run import environment
from tests.support.programs import ROOT

pytestmark = pytest.mark.cuda_rehearsal
_ALLOWED_SECONDS = 3600


def test_the_first_hour_runs_through_on_two_devices(tmp_path: Path) -> None:
    variables = {
        **os.environ,
        **environment(2, tmp_path),
        "PYTEST_ADDOPTS": "-k 'not flex_attention'",  # compiled for a GPU
    }
    command = [sys.executable, "-m", "benchmarks", "gpu", "--first_hour", "--sizes", "tiny", "--work", str(tmp_path)]
    finished = subprocess.run(
        command, cwd=ROOT, env=variables, text=True, capture_output=True, timeout=_ALLOWED_SECONDS, check=False
    )
    assert finished.returncode == 0, finished.stdout[-5000:] + finished.stderr[-2000:]
    (result,) = tmp_path.rglob("gpu-first-hour-*.json")
    records = {name: record for name, (record,) in json.loads(result.read_text(encoding="utf-8"))["runs"].items()}
    assert list(records) == [part.name for part in PARTS]
    left_out = {name for name, record in records.items() if record["status"] != "done"}
    assert left_out <= {name for name in records if name.endswith(", trl")}  # which may not be installed
    assert records["tests"]["figures"]["tests"] > records["tests"]["figures"]["skipped"]
    trained = [record["figures"] for name, record in records.items() if name.endswith(", fabric_train")]
    assert all(figures["mfu"] > 0 and figures["planned_bytes"] > 0 for figures in trained)
    assert result.with_suffix(".md").read_text(encoding="utf-8").count("| done |") >= len(PARTS) - 2
