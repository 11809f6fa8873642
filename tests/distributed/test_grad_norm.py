"""The gradient's norm is the true one, however large and however cut the gradient is."""

import json

import pytest

from tests.support.forked_runs import ForkedRuns


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallelism", "num_ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2), ("fsdp2", 2), ("fsdp2", 4)]
)
def test_the_norm_of_a_large_gradient_is_the_true_one(
    forked_runs: ForkedRuns, parallelism: str, num_ranks: int
) -> None:
    line = f"--accelerator cpu --precision 32-true --parallelism {parallelism} --train_data_dir unused"
    line += f" --output_dir unused --model_name none --devices {num_ranks}"
    run = forked_runs.start(line.split(), num_ranks, program="tests.support.large_gradient")
    run.finish()
    printed = json.loads(run.stdout().splitlines()[-1])
    assert printed["before"] == pytest.approx(printed["exact"], rel=1e-6)
    assert printed["clipped"] == pytest.approx(1.0, rel=1e-5)
