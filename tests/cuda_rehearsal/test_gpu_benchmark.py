"""The benchmark of a GPU runs through on pretended devices, with small models; a system that fails is left out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_sizes import SIZES
from tests.support.pretended_cuda.run import environment
from tests.support.programs import ROOT

pytestmark = pytest.mark.cuda_rehearsal
_ALLOWED_SECONDS = 3600
_MEASURE = """
import json, sys, tempfile
from dataclasses import asdict
from pathlib import Path
from benchmarks import gpu
from benchmarks.measure import ROOT
from fabric_train.sample_data import real_data

gpu.LENGTH, gpu.STEPS, gpu.WARM_UP_STEPS = 256, 3, 1
gpu.LONG = {512: 2, 1024: 1}
gpu.PROMPT_WORDS, gpu.ANSWER_WORDS, gpu.COMPLETION_TOKENS = 4, 12, 8
gpu.WAYS, gpu.PEERS, gpu.LAYERS_OF_LARGE = {f"{gpu.SMALL}, single": (gpu.SMALL, "--parallelism single")}, {}, ()
with tempfile.TemporaryDirectory(dir=real_data.CACHE) as folder:
    kept = Path(folder, "kept.json")
    gpu.measure(Path(folder, "first").relative_to(ROOT), sys.argv[1], "single$", 1, kept)
    report = gpu.measure(Path(folder, "second").relative_to(ROOT), sys.argv[1], "", 1, kept)
print(json.dumps(asdict(report.summary)))
"""


def test_rows_of_adapters_pairs_distillation_and_rl_run_and_what_fails_is_left_out(tmp_path: Path) -> None:
    variables = {**os.environ, **environment(1, tmp_path)}
    command = [sys.executable, "-c", _MEASURE, SIZES["tiny"].options]
    finished = subprocess.run(
        command, cwd=ROOT, env=variables, text=True, capture_output=True, timeout=_ALLOWED_SECONDS, check=False
    )
    assert finished.returncode == 0, finished.stdout[-5000:] + finished.stderr[-2000:]
    summary = json.loads(finished.stdout.splitlines()[-1])
    expected = {f"{gpu.SMALL}, single", *gpu.ADAPTED, *gpu.PAIRED, *gpu.DISTILLED}
    long_rows = {f"{gpu.MIDDLE} with rows of {length}k tokens, single, in tiles" for length in (0, 1)}
    expected |= long_rows
    with_vllm = {name for name in gpu.REINFORCED if "vLLM" in name}
    expected |= gpu.REINFORCED.keys() - with_vllm
    ours = {name for name in summary["ways"] if gpu.OF_TRL not in name}
    assert ours == expected, summary["left_out"]
    assert all(way["tokens_per_second"]["median"] > 0 for way in summary["ways"].values())
    assert all(way["peak_bytes"]["median"] > 0 for way in summary["ways"].values())
    for name, way in summary["ways"].items():
        assert (way["step_seconds"] is not None) == (name in gpu.REINFORCED)
    for name in with_vllm:  # the pretended devices have none
        assert "vLLM" in summary["left_out"].pop(name)
    peers = {name for name in summary["ways"] if gpu.OF_TRL in name}
    assert all("cannot be installed" in reason for reason in summary["left_out"].values()), summary["left_out"]
    assert len(peers) in (0, len(gpu.ADAPTED) + len(gpu.PAIRED))  # TRL may not be installed
