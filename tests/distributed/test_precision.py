"""Precision inside the wrapped model, on two real ranks: the types of weights, products, reductions and moments."""

import json
import math
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv

FP32 = "torch.float32"
BF16 = "torch.bfloat16"

_NOTING_DIVISIONS = """
import torch.distributed.fsdp._runtime_utils as fsdp

def divide(tensor, factor, original=fsdp._div_if_needed):
    if factor != 1:
        print("divided", tensor.numel(), "by", factor)
    original(tensor, factor)

fsdp._div_if_needed = divide
"""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("parallelism", ["fsdp", "fsdp2", "ddp"])
@pytest.mark.parametrize(
    ("precision", "held", "computed"), [("32-true", FP32, FP32), ("bf16-mixed", FP32, BF16), ("bf16-true", BF16, BF16)]
)
def test_rotary_and_reduction_stay_fp32_in_every_precision(
    forked_runs: ForkedRuns, tiny_model_dir: Path, parallelism: str, precision: str, held: str, computed: str
) -> None:
    line = ["--train_data_dir", "unused", "--output_dir", "unused", "--model_name", tiny_model_dir]
    line += ["--accelerator", "cpu", "--parallelism", parallelism, "--precision", precision]
    run = forked_runs.start(line, program="tests.support.step_dtypes")
    run.finish()
    assert json.loads(run.stdout().splitlines()[-1]) == {
        "rotary": [FP32],
        "weights": [held],
        "moments": [held],
        "products": [computed],
        "loss": ["torch.float64"],
        "reduced": [FP32],
    }


def test_fsdp_divides_only_the_shards_of_summed_gradients(
    forked_runs: ForkedRuns, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> None:
    options = {"parallelism": "fsdp", "max_step": 1, "log_step_interval": 1}
    run = forked_runs.start(
        argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run", **options), before=_NOTING_DIVISIONS
    )
    run.finish()
    divided = [line.split() for line in run.stdout().splitlines() if line.startswith("divided")]
    with safe_open(next((tmp_path / "run").rglob("model.safetensors")), "pt") as file:
        total = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    assert {float(factor) for *_, factor in divided} == {2}
    assert 0 <= sum(int(number) for _, number, *_ in divided) - total / 2 < len(divided)  # with padding
