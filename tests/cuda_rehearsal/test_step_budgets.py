"""What a step on a GPU may take: kernels, host waits, memory. Counted on fake tensors, which have no content."""

import pytest

from benchmarks.fake_rank import FakeRun
from benchmarks.measure import ROOT
from benchmarks.rehearsal import TOLERANCE, Case, plan_error, read_fake_run
from tests.support.pretended_cuda.run import run_pretended

LAYERS = 3
MOST_KERNELS = {
    "optimizer": 4,  # one launch for the weights of each kind of storage, and the counts of steps
    "clip": 50,  # operations on lists of gradients, not on each one
    "head": 103,  # twelve for each chunk of the logits
}
MOST_WAITS = 2
"""The reading of the step's results, and one number that the model's forward pass copies to the device."""


def fake_step(parallelism: str, checkpointing: str) -> FakeRun:
    case = Case("llama-3-8b", 1, parallelism, checkpointing)
    argv = ["benchmarks.fake_rank", *case.argv, "--num_layers", str(LAYERS)]
    run = run_pretended(argv, devices=8, ranks=1, cwd=ROOT, timeout=300)
    assert run.returncode == 0, run.stderr
    return read_fake_run(run.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("parallelism", "checkpointing"), [("fsdp", "full"), ("fsdp2", "none")])
def test_step_takes_no_more_than_its_budget(parallelism: str, checkpointing: str) -> None:
    found = fake_step(parallelism, checkpointing)
    kernels = {part: found.step.parts[part].number for part in MOST_KERNELS}
    over = {part: number for part, number in kernels.items() if number > MOST_KERNELS[part]}
    assert over == {}
    assert sum(found.step.host_waits.values()) <= MOST_WAITS, found.step.host_waits
    assert plan_error(found) == pytest.approx(0, abs=TOLERANCE)
