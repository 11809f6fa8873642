"""The reference of a policy gradient is the model that the run starts from, also after a resume."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.support.forked_runs import ForkedRuns
from tests.support.unequal_rows import argv, metrics, write_model, write_rows

NUM_STEPS = 4
OBJECTIVE = """
import torch
from dataclasses import replace
from fabric_train import arguments
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
arguments.OBJECTIVE_ARGUMENTS["rl-on-rows"] = ("reference",)
arguments.TOKEN_OBJECTIVES = (*arguments.TOKEN_OBJECTIVES, "rl-on-rows")  # without pairs
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


LORA = {"adapter": "lora", "lora_rank": 4, "lr": 1e-2, "micro_batch_size": 2}
WITH_SECOND_MODEL = """
from fabric_train.training import live_reference
live_reference.compares_with_base = lambda run: False
"""
"""The base is a model beside the policy, as a model of ``--reference`` is."""
COUNTS_WEIGHTS = """
from torch.nn.modules.module import register_module_forward_pre_hook

weights = set()

def add_weights(module, inputs):
    weights.update(parameter for parameter in module.parameters(recurse=False) if not parameter.is_meta)

register_module_forward_pre_hook(add_weights)

class CountsWeights(OnRows):
    def loss(self, model, batch, scale=None):
        loss = super().loss(model, batch, scale)
        print("weights that are read:", sum(weight.numel() for weight in weights))
        return loss

OBJECTIVES["rl-on-rows"] = lambda arguments: CountsWeights((), temperature=1.0, max_new_tokens=1, kl_weight=0.1)
"""
"""Each step prints the number of weights of all models that have run, without those of adapters."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), hidden_size=64, intermediate_size=128)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("tokens"))


@pytest.mark.numerical
@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (1, {"activation_checkpointing": "full"}),
        (1, {"adapter": "dora", "lora_dropout": 0.2}),
        (1, {"base_weights": "nf4", "precision": "bf16-true"}),
        (2, {"parallelism": "ddp"}),
        (2, {"parallelism": "fsdp"}),
        (2, {"parallelism": "fsdp2", "activation_checkpointing": "selective"}),
    ],
    ids=lambda value: str(value),
)
def test_the_policy_without_its_adapter_computes_what_a_second_model_does(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, tokens: Path, num_ranks: int, options: dict[str, Any]
) -> None:
    options = {**LORA, "devices": num_ranks, **options}
    base = tmp_path / "base"
    second = tmp_path / "second"
    for run, change in ((base, ""), (second, WITH_SECOND_MODEL)):
        words = run_words(model, tokens, run, NUM_STEPS, **options)
        forked_runs.start(words, num_ranks, before=OBJECTIVE + change).finish()
    for row, expected in zip(metrics(base), metrics(second), strict=True):
        for name in ("train_loss", "grad_norm", "train_reference_kl"):
            assert float(row[name]) == pytest.approx(float(expected[name]), rel=1e-5, abs=1e-7), name
    first, *later = divergences(base)
    if "lora_dropout" not in options:  # else the policy drops inputs, but its base does not
        assert first == pytest.approx(0, abs=1e-7)
    assert later[-1] > 1e-6


@pytest.mark.slow
def test_a_new_adapter_has_one_base_in_memory_that_is_its_reference(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, tokens: Path
) -> None:
    weights: dict[str, int] = {}
    cases: dict[str, dict[str, Path]] = {"base": {}, "named": {"reference": model}}
    for name, options in cases.items():
        words = run_words(model, tokens, tmp_path / name, NUM_STEPS, **LORA, **options)
        run = forked_runs.start(words, 1, before=OBJECTIVE + COUNTS_WEIGHTS)
        run.finish()
        counts = re.findall(r"weights that are read: (\d+)", run.stdout())
        weights[name] = int(counts[-1])
    assert divergences(tmp_path / "base") == pytest.approx(divergences(tmp_path / "named"), rel=1e-4, abs=1e-7)
    base = load_file(model / "model.safetensors")
    num_weights = sum(weight.numel() for weight in base.values())
    num_head = base["lm_head.weight"].numel()  # a second model has it beside its parameters
    assert weights == {"base": num_weights, "named": 2 * num_weights - num_head}


@pytest.mark.slow
def test_the_reference_of_a_new_adapter_is_its_base_also_after_a_resume(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, tokens: Path
) -> None:
    whole = tmp_path / "whole"
    forked_runs.start(run_words(model, tokens, whole, NUM_STEPS, **LORA), 1, before=OBJECTIVE).finish()
    parts = tmp_path / "parts"
    forked_runs.start(run_words(model, tokens, parts, 2, **LORA), 1, before=OBJECTIVE).finish()
    (checkpoint,) = (parts / "checkpoints").glob("step-*")
    saved = json.loads((checkpoint / "trainer.json").read_text())
    assert saved["reference"]["location"] == str(model)
    words = run_words(model, tokens, parts, NUM_STEPS, resume="true", **LORA)
    forked_runs.start(words, 1, before=OBJECTIVE).finish()
    assert divergences(parts) == pytest.approx(divergences(whole), rel=1e-4, abs=1e-7)

    # an adapter that had been trained before the run is compared with itself as it was then
    continued = tmp_path / "continued"
    words = run_words(model, tokens, continued, 2, init_adapter=checkpoint, lr=1e-2)
    forked_runs.start(words, 1, before=OBJECTIVE).finish()
    first, second = divergences(continued)
    assert first == pytest.approx(0, abs=1e-7)
    assert second > 1e-6
    (last,) = (continued / "checkpoints").glob("step-*")
    assert json.loads((last / "trainer.json").read_text())["reference"]["location"] == str(checkpoint)


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
