"""What a step on a GPU may take: kernels, host waits, memory. Counted on fake tensors, which have no content."""

import pytest

from benchmarks.fake_rank import FakeRun
from benchmarks.measure import ROOT
from benchmarks.rehearsal import TOLERANCE, Case, plan_error, read_fake_run
from tests.support.pretended_cuda.run import run_pretended

LAYERS = 3
MOST_KERNELS = {
    # of three layers of the 8B, whose largest parameters are updated in four pieces
    "optimizer": {"fsdp": 673, "fsdp2": 1218},
    # eight for each parameter, and fsdp's first and last parameters are cut in two
    "clip": {"fsdp": 127, "fsdp2": 259},
    # 32 chunks of 256 tokens
    "head": {"fsdp": 127, "fsdp2": 127},
}
MOST_WAITS = 7
"""Three barriers of Fabric's all_reduce, three readings of a result, and one number that transformers' masks copy."""


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
    over = {part: number for part, number in kernels.items() if number > MOST_KERNELS[part][parallelism]}
    assert over == {}
    assert sum(found.step.host_waits.values()) <= MOST_WAITS, found.step.host_waits
    assert plan_error(found) == pytest.approx(0, abs=TOLERANCE)
