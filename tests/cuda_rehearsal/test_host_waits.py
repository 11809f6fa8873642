"""The host waits for the device once in a step, where it reads the losses and the flags of all ranks."""

from collections import Counter
from pathlib import Path

import pytest

from tests.support.pretended_cuda.run import run_pretended
from tests.support.short_runs import argv

pytestmark = pytest.mark.slow
STEPS = (2, 5)


@pytest.mark.parametrize("parallelism", ["fsdp2", "fsdp"])
def test_a_step_has_one_place_where_the_host_waits(
    tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, parallelism: str
) -> None:
    given = {"accelerator": "cuda", "parallelism": parallelism, "precision": "bf16-true", "log_step_interval": 1}
    given |= {"eval_step_interval": 100, "save_step_interval": 100}
    waits, collectives = [], []
    for steps in STEPS:
        options = {**given, "max_step": steps}
        line = argv(tiny_model_dir, tiny_tokens_dir, tmp_path / str(steps), **options)
        run = run_pretended(["fabric_train", *line])
        assert run.returncode == 0, run.stderr
        assert "note: AdamW: " in run.stdout  # which step runs
        waits.append(Counter(run.notes[0].waits))
        collectives.append(Counter(run.notes[0].collectives))
    of_steps = waits[1] - waits[0]  # of three steps: start and end of both runs are the same
    if parallelism == "fsdp":  # which lets the host run ahead by two units at most
        of_steps = Counter({place: count for place, count in of_steps.items() if "event.synchronize" not in place})
    assert list(of_steps.values()) == [STEPS[1] - STEPS[0]], of_steps
    (place,) = of_steps
    assert " exchange_step < _take_step < " in place
    added = collectives[1] - collectives[0]
    assert not added["barrier"]
    assert added["allreduce"] == 3 * (STEPS[1] - STEPS[0])  # supervised tokens, gradient norm, the rest
