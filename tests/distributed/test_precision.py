"""Precision inside the wrapped model, on two real ranks: what is held, computed and reduced in which type."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.programs import ROOT

FP32, BF16 = "torch.float32", "torch.bfloat16"
PROBE = ROOT / "tests" / "support" / "two_ranks.py"

pytestmark = pytest.mark.slow


def types_inside(model: Path, parallelism: str, port: int) -> dict[str, dict[str, list[str]]]:
    options = ["--train_data_dir", "unused", "--output_dir", "unused", "--model_name", str(model)]
    options += ["--accelerator", "cpu", "--parallelism", parallelism]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    finished = subprocess.run(
        [*launcher, str(PROBE), *options], capture_output=True, text=True, timeout=200, check=False
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.parametrize("parallelism", ["fsdp", "fsdp2", "ddp"])
def test_rotary_and_reduction_stay_fp32_in_every_precision(
    tiny_model_dir: Path, free_port: Callable[[], int], parallelism: str
) -> None:
    inside = types_inside(tiny_model_dir, parallelism, free_port())
    for precision, held, computed in (("32-true", FP32, FP32), ("bf16-mixed", FP32, BF16), ("bf16-true", BF16, BF16)):
        assert inside[precision] == {
            "rotary": [FP32],
            "weights": [held],
            "moments": [held],
            "products": [computed],
            "loss": ["torch.float64"],
            "reduced": [FP32],
        }, precision
