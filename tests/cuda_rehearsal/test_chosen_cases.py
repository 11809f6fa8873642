"""Training, saving and the other programs on pretended CUDA devices: the cases that catch the most."""

from pathlib import Path

import pytest

from tests.support.forked_runs import ForkedRuns
from tests.support.pretended_cuda.run import run_pretended
from tests.support.short_runs import argv, metrics

pytestmark = pytest.mark.slow
SETTINGS = {"max_step": 4, "eval_step_interval": 4, "save_step_interval": 2}


def losses(run: Path) -> list[float]:
    """Return the training losses and gradient norms of all steps, and the validation losses."""
    return [float(row[index]) for row in metrics(run) for index in (2, 3, 6) if row[index]]


def test_fsdp_on_two_devices_trains_as_on_two_cpu_ranks(
    tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, forked_runs: ForkedRuns
) -> None:
    options = {**SETTINGS, "parallelism": "fsdp"}
    forked_runs.start(argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "cpu", **options)).finish()
    given = argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "cuda", **{**options, "accelerator": "cuda"})
    run = run_pretended(["fabric_train", *given])
    assert run.returncode == 0, run.stderr
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), abs=1e-4)
    assert all(notes.collectives["reduce_scatter"] for notes in run.notes.values())
    assert len(run.notes) == 2
