"""The host waits for the device once in a step, where it reads the losses and the flags of all ranks."""

from collections import Counter
from pathlib import Path

import pytest

from tests.support.pretended_cuda.run import run_pretended
from tests.support.short_runs import argv
from tests.support.token_datasets import TEXTS, tokenize, write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.cuda_rehearsal]
STEPS = (2, 5)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A token dataset of two sources, whose losses are told apart."""
    folder = tmp_path_factory.mktemp("waits")
    files = [f"{name}={write_jsonl(folder / f'{name}.jsonl', TEXTS)}" for name in ("es", "va")]
    tokenize(folder / "tokens", tiny_model_dir, *files, validation_split=0.1)
    return folder / "tokens"


@pytest.mark.parametrize("parallelism", ["fsdp2", "fsdp"])
def test_a_step_has_one_place_where_the_host_waits(
    tmp_path: Path, tiny_model_dir: Path, tokens: Path, parallelism: str
) -> None:
    given = {"accelerator": "cuda", "parallelism": parallelism, "precision": "bf16-true", "log_step_interval": 1}
    given |= {"eval_step_interval": 100, "save_step_interval": 100}
    waits = []
    collectives = []
    for steps in STEPS:
        options = {**given, "max_step": steps}
        line = argv(tiny_model_dir, tokens, tmp_path / str(steps), **options)
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
    assert " exchange_step < take_step < " in place
    added = collectives[1] - collectives[0]
    assert not added["barrier"]
    assert added["allreduce"] == 3 * (STEPS[1] - STEPS[0])  # supervised tokens, gradient norm, the rest
