"""The example of one page trains as the program does: its losses are the program's."""

import csv
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support import short_runs
from tests.support.forked_runs import ForkedRuns
from tests.support.programs import ROOT, option_words

pytestmark = pytest.mark.slow

MAX_STEP = 6
SETTINGS = {"max_step": MAX_STEP, "total_batch_size": 12, "micro_batch_size": 2, "lr": 1e-3, "warmup_steps": 2}
SETTINGS |= {"weight_decay": 1.0, "grad_clip": 0.4, "save_step_interval": 4}
RUN_EXAMPLE = f"""
import os, runpy, sys
runpy.run_path({str(ROOT / "examples" / "minimal.py")!r}, run_name="__main__")
sys.stdout.flush()
os._exit(0)
"""
"""Code for a rank: run the example as a script, and end before the program begins."""


def run_example(
    forked_runs: ForkedRuns, model: Path, tokens: Path, output_dir: Path, num_processes: int
) -> list[float]:
    """Run the example on ``num_processes`` and return the losses of the steps that it took."""
    options = {"model_name": model, "train_data_dir": tokens, "output_dir": output_dir, **SETTINGS}
    # the ranks have torchrun's environment variables
    run = forked_runs.start(option_words(options), num_processes, before=RUN_EXAMPLE)
    run.finish()
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)", run.stdout(), re.MULTILINE)]


def test_the_example_has_the_losses_of_the_program(
    tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, forked_runs: ForkedRuns
) -> None:
    argv = short_runs.argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "program", **SETTINGS)
    forked_runs.start(argv, 2).finish()
    with (tmp_path / "program" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        expected = [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]
    assert len(expected) == MAX_STEP

    losses = run_example(forked_runs, tiny_model_dir, tiny_tokens_dir, tmp_path / "example", 2)
    assert losses == pytest.approx(expected, rel=1e-6)
    # weights in Hugging Face format with a tokenizer beside them, and no unfinished folder
    assert sorted(path.name for path in (tmp_path / "example").iterdir()) == ["model", "step-00000004", "step-00000006"]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "example" / "model")
    assert all(torch.isfinite(parameter).all() for parameter in exported.parameters())

    # the last checkpoint is lost: one process continues from the one before
    (tmp_path / "example" / "step-00000006").rename(tmp_path / "lost")
    losses = run_example(forked_runs, tiny_model_dir, tiny_tokens_dir, tmp_path / "example", 1)
    assert losses == pytest.approx(expected[4:], rel=1e-6)
