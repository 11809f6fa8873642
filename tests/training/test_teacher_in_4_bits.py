"""A teacher in 4 bits is the same model on any ranks, and another one than in 32 bits."""

import csv
from pathlib import Path
from typing import Any

import pytest

from tests.support import short_runs
from tests.support.forked_runs import ForkedRuns

NUM_STEPS = 2


def divergences(
    forked_runs: ForkedRuns, run: Path, model: Path, tokens: Path, num_ranks: int, **options: object
) -> list[float]:
    """Return the divergence of each step from the model itself as teacher."""
    settings = {"objective": "distill", "teacher": model, "max_step": NUM_STEPS, "eval_step_interval": 9, **options}
    forked_runs.start(short_runs.argv(model, tokens, run, **settings), num_ranks).finish()
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as lines:
        return [float(row["train_divergence"]) for row in csv.DictReader(lines)]


@pytest.mark.parametrize("weights", ["nf4", "nf4_double"])
def test_every_sharding_reads_the_same_teacher(
    forked_runs_in_4_bits: ForkedRuns, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, weights: str
) -> None:
    folders = (tiny_model_dir, tiny_tokens_dir)
    options: dict[str, Any] = {"teacher_weights": weights}
    alone = divergences(forked_runs_in_4_bits, tmp_path / "alone", *folders, num_ranks=1, **options)
    assert alone[0] > 1e-5  # the student is the teacher before it was quantized
    for parallelism in ("fsdp", "fsdp2"):
        options["parallelism"] = parallelism
        sharded = divergences(forked_runs_in_4_bits, tmp_path / parallelism, *folders, num_ranks=2, **options)
        assert sharded == pytest.approx(alone, rel=1e-2)  # sums of terms that nearly cancel, in fp32


def test_a_teacher_in_full_precision_equals_its_student_at_first(
    forked_runs: ForkedRuns, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> None:
    alone = divergences(forked_runs, tmp_path / "alone", tiny_model_dir, tiny_tokens_dir, num_ranks=1)
    assert abs(alone[0]) < 1e-6
