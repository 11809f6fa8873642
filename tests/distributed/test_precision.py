"""Types inside the wrapped model on two real ranks: of weights, products, reductions and optimizer states."""

import json
from pathlib import Path

import pytest

from tests.support.forked_runs import ForkedRuns

FP32, BF16 = "torch.float32", "torch.bfloat16"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("precision", "held", "computed"),
    [("32-true", FP32, FP32), ("bf16-mixed", FP32, BF16), ("bf16-true", BF16, BF16)],
)
@pytest.mark.parametrize("parallelism", ["fsdp", "fsdp2", "ddp"])
def test_rotary_and_reduction_stay_fp32_in_every_precision(
    forked_runs: ForkedRuns, tiny_model_dir: Path, parallelism: str, precision: str, held: str, computed: str
) -> None:
    options = ["--train_data_dir", "unused", "--output_dir", "unused", "--model_name", tiny_model_dir]
    options += ["--accelerator", "cpu", "--parallelism", parallelism, "--precision", precision]
    run = forked_runs.start(options, 2, program="tests.support.two_ranks")
    run.finish()
    assert json.loads(run.stdout().splitlines()[-1]) == {
        "rotary": [FP32],
        "weights": [held],
        "moments": [held],
        "products": [computed],
        "loss": ["torch.float64"],
        "reduced": [FP32],
    }
