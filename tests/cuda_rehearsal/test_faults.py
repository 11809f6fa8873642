"""Faults that only a device shows: what ``--cpu_offload`` keeps on the host, waits, and contexts on other devices."""

import shutil
from pathlib import Path

import pytest

from tests.support.pretended_cuda.run import PretendedRun, run_pretended
from tests.support.short_runs import argv, metrics

pytestmark = [pytest.mark.slow, pytest.mark.cuda_rehearsal]
SETTINGS = {"accelerator": "cuda", "max_step": 4, "eval_step_interval": 4, "save_step_interval": 2}


def run_and_resume(line: list[str], run: Path, devices: int) -> tuple[PretendedRun, PretendedRun]:
    """Run to the end, and once more from the middle; return both after comparing their metrics."""
    first = run_pretended(["fabric_train", *line], devices)
    assert first.returncode == 0, first.stderr
    expected = metrics(run)
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    resumed = run_pretended(["fabric_train", *line, "--resume", "true"], devices)
    assert resumed.returncode == 0, resumed.stderr
    assert metrics(run) == expected
    return first, resumed


@pytest.mark.parametrize(
    "options",
    [
        {"parallelism": "fsdp", "state_dict_type": "sharded"},  # shards end within rows
        {"parallelism": "fsdp2", "tensor_parallel_size": 2},
    ],
    ids=["fsdp", "tensor parallel"],
)
def test_offloaded_state_is_saved_and_restored(
    tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, options: dict[str, object]
) -> None:
    run = tmp_path / "run"
    given = argv(tiny_model_dir, tiny_tokens_dir, run, **{**SETTINGS, **options, "cpu_offload": "true"})
    for ended in run_and_resume(given, run, devices=2):
        for rank, notes in ended.notes.items():
            assert set(notes.contexts) == {str(rank)}  # a background save touches no other device


def test_a_resumed_fp16_run_reads_no_counts_from_the_device(
    tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> None:
    run = tmp_path / "run"
    given = argv(tiny_model_dir, tiny_tokens_dir, run, **{**SETTINGS, "parallelism": "single", "precision": "16-mixed"})
    first, resumed = run_and_resume(given, run, devices=1)

    def waits(ended: PretendedRun) -> int:
        """Return how often the host waited for a number in the optimizer's steps."""
        return sum(count for place, count in ended.notes[0].waits.items() if "item at" in place and "step.py" in place)

    assert waits(resumed) == waits(first) // 2  # of the steps 3 and 4 alone
