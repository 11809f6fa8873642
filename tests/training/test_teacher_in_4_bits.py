"""A teacher in 4 bits is the same model on any ranks and in stored values, and another one than in 32 bits."""

import csv
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support import short_runs
from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.programs import option_words

NUM_STEPS = 2


def start(
    forked_runs: ForkedRuns, run: Path, model: Path, tokens: Path, num_ranks: int = 1, **options: object
) -> ForkedRun:
    """Start a run whose teacher is the model itself, unless ``options`` name another one."""
    settings = {"objective": "distill", "teacher": model, "max_step": NUM_STEPS, "eval_step_interval": 9, **options}
    return forked_runs.start(short_runs.argv(model, tokens, run, **settings), num_ranks)


def divergences(
    forked_runs: ForkedRuns, run: Path, model: Path, tokens: Path, num_ranks: int = 1, **options: object
) -> list[float]:
    """Train, and return the divergence of each step."""
    start(forked_runs, run, model, tokens, num_ranks, **options).finish()
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as lines:
        return [float(row["train_divergence"]) for row in csv.DictReader(lines)]


def start_teach(forked_runs: ForkedRuns, states: Path, model: Path, tokens: Path, **options: object) -> ForkedRun:
    """Start to store the model's distributions over all tokens."""
    settings = {
        "teacher": model,
        "train_data_dir": tokens,
        "output_dir": states,
        "top_k": len(AutoTokenizer.from_pretrained(model)),
        "precision": "32-true",
        **options,
    }
    return forked_runs.start(option_words(settings), 1, program="fabric_train.teacher_states.__main__")


@pytest.mark.parametrize("weights", ["nf4", "nf4_double"])
def test_every_sharding_reads_the_same_teacher(
    forked_runs_in_4_bits: ForkedRuns, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, weights: str
) -> None:
    folders = (tiny_model_dir, tiny_tokens_dir)
    options: dict[str, Any] = {"teacher_weights": weights}
    alone = divergences(forked_runs_in_4_bits, tmp_path / "alone", *folders, **options)
    assert alone[0] > 1e-5  # the student is the teacher before it was quantized
    for parallelism in ("fsdp", "fsdp2"):
        options["parallelism"] = parallelism
        sharded = divergences(forked_runs_in_4_bits, tmp_path / parallelism, *folders, num_ranks=2, **options)
        assert sharded == pytest.approx(alone, rel=1e-2)  # sums of terms that nearly cancel, in fp32

    # the stored values of the same teacher
    states = tmp_path / "states"
    start_teach(forked_runs_in_4_bits, states, *folders, teacher_weights=weights).finish()
    stored_options: dict[str, Any] = {"teacher": None, "teacher_states": states}
    run = tmp_path / "from-states"
    stored = divergences(forked_runs_in_4_bits, run, *folders, **stored_options, teacher_weights=weights)
    assert stored == pytest.approx(alone, rel=1e-2)

    # they are not those of a teacher in 32 bits
    refused = start(forked_runs_in_4_bits, tmp_path / "refused", *folders, **stored_options)
    assert refused.wait() == [2]
    assert f"another --teacher_weights: {weights}, but the run has 16bit" in refused.stderr()


def test_a_teacher_in_full_precision_equals_its_student_at_first(
    forked_runs: ForkedRuns, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> None:
    alone = divergences(forked_runs, tmp_path / "alone", tiny_model_dir, tiny_tokens_dir)
    assert abs(alone[0]) < 1e-6
