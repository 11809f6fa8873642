"""The reference of a policy gradient is the model that the run starts from, also after a resume."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.forked_runs import ForkedRuns
from tests.support.unequal_rows import argv, metrics, write_model, write_rows

NUM_STEPS = 4
OBJECTIVE = """
import torch
from dataclasses import replace
from fabric_train.cli.tables import OBJECTIVES
from fabric_train.data.batch import count_supervised
from fabric_train.data.rollout_values import RolloutValues
from fabric_train.training.policy_gradient import PolicyGradient

class OnRows(PolicyGradient):
    # the supervised tokens of a token dataset, as if a model had sampled them
    def count(self, batch):
        return count_supervised(batch.labels)

    def loss(self, model, batch, scale=None):
        zeros = torch.zeros(len(batch.targets.ids))
        ones = zeros + 1
        rollout = RolloutValues(zeros - 5.7, ones, ones, zeros, zeros, zeros, ones[None])
        return super().loss(model, replace(batch, rollout=rollout), scale)

OBJECTIVES["rl-on-rows"] = lambda arguments: OnRows((), temperature=1.0, max_new_tokens=1, kl_weight=0.1)
"""


def run_words(model: Path, tokens: Path, run: Path, num_steps: int, **options: object) -> list[str]:
    return argv(
        model,
        tokens,
        run,
        objective="rl-on-rows",
        max_step=num_steps,
        lr_schedule="constant",  # the same with fewer steps
        log_step_interval=1,
        report="false",
        **options,
    )


def divergences(run: Path) -> list[float]:
    return [float(row["train_reference_kl"]) for row in metrics(run)]


@pytest.mark.slow
def test_the_reference_is_the_start_of_the_run_also_after_a_resume(forked_runs: ForkedRuns, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    tokens = write_rows(tmp_path / "tokens")
    whole = tmp_path / "whole"
    forked_runs.start(run_words(model, tokens, whole, NUM_STEPS), 1, before=OBJECTIVE).finish()
    first, *later = divergences(whole)
    assert first == pytest.approx(0, abs=1e-7)
    assert min(later) > 1e-6

    # interrupted after two steps, on two ranks
    parts = tmp_path / "parts"
    forked_runs.start(run_words(model, tokens, parts, 2), 1, before=OBJECTIVE).finish()
    (checkpoint,) = (parts / "checkpoints").glob("step-*")
    saved = json.loads((checkpoint / "trainer.json").read_text())
    assert saved["reference"]["location"] == str(model)
    words = run_words(model, tokens, parts, NUM_STEPS, parallelism="fsdp2", devices=2, resume="true")
    forked_runs.start(words, 2, before=OBJECTIVE).finish()
    assert divergences(parts) == pytest.approx(divergences(whole), rel=1e-4, abs=1e-7)


@pytest.mark.slow
def test_the_reference_of_a_new_adapter_is_its_base(forked_runs: ForkedRuns, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    tokens = write_rows(tmp_path / "tokens")
    run = tmp_path / "run"
    words = run_words(model, tokens, run, NUM_STEPS, adapter="lora", lora_rank=4, lr=1e-2)
    forked_runs.start(words, 1, before=OBJECTIVE).finish()
    first, *later = divergences(run)
    assert first == pytest.approx(0, abs=1e-7)
    assert later[-1] > 1e-6


@pytest.mark.slow
def test_a_reference_with_other_weights_is_refused(forked_runs: ForkedRuns, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    tokens = write_rows(tmp_path / "tokens")
    run = tmp_path / "run"
    forked_runs.start(run_words(model, tokens, run, 1), 1, before=OBJECTIVE).finish()
    weights = load_file(model / "model.safetensors")
    save_file({name: 2 * weight for name, weight in weights.items()}, model / "model.safetensors")

    refused = forked_runs.start(run_words(model, tokens, run, 2, resume="true"), 1, before=OBJECTIVE)
    assert refused.wait() == [2]
    assert f"the weights of the reference model {model} have changed since the run began" in refused.stderr()
