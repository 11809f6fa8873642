"""Rows longer than the model's positions: what trains is what plain transformers computes of the export."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.exports import convert_run
from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.short_runs import argv, metrics
from tests.support.token_datasets import TEXTS, tokenize, write_jsonl

pytestmark = pytest.mark.slow
LENGTH = 512  # the tiny model has 256 positions


class LongRows:
    """Trains on rows of 512 tokens that are one text each."""

    def __init__(self, folder: Path, model: Path, runs: ForkedRuns) -> None:
        self.folder = folder
        self.model = model
        self._runs = runs
        documents = write_jsonl(folder / "long.jsonl", [" ".join(TEXTS)] * 40)
        tokenize(folder / "long", model, documents, validation_split=0.1, max_length=LENGTH)

    def start(self, run: str, **options: Any) -> ForkedRun:
        given: dict[str, Any] = {"max_step": 2, "micro_batch_size": 1, "total_batch_size": 2, "eval_iters": None}
        given |= {"save_step_interval": 1, "isolate_documents": "false", **options}
        return self._runs.start(argv(self.model, self.folder / "long", self.folder / run, **given), 1)

    def config(self, run: str, step: int = 2) -> dict[str, Any]:
        file = self.folder / run / "checkpoints" / f"step-{step:08d}" / "config.json"
        return dict(json.loads(file.read_text()))


@pytest.fixture(scope="module")
def long_rows(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, forked_runs: ForkedRuns) -> LongRows:
    return LongRows(tmp_path_factory.mktemp("long"), tiny_model_dir, forked_runs)


@pytest.fixture(scope="module")
def yarn(long_rows: LongRows) -> ForkedRun:
    run = long_rows.start("yarn", rope_scaling="yarn:4", rope_theta=500000)
    run.finish()
    return run


@torch.no_grad()
def validation_loss(model: Any, tokens: Path) -> float:
    """Return the mean loss of the validation rows, in which no document is kept apart."""
    rows = torch.tensor(datasets.load_from_disk(tokens)["validation"]["input_ids"][:])
    logits = model.eval()(rows, use_cache=False).logits[:, :-1]
    return float(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


def test_plain_transformers_computes_the_runs_loss_of_its_export(
    long_rows: LongRows, yarn: ForkedRun, forked_runs: ForkedRuns, tmp_path: Path
) -> None:
    line = "256 positions, theta 10,000 -> 1,024 positions, yarn factor 4 from 256 positions, theta 500,000"
    assert f"note: {long_rows.model}: {line}" in yarn.stdout()
    rope = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 256}
    assert long_rows.config("yarn")["rope_parameters"] == rope
    assert long_rows.config("yarn")["max_position_embeddings"] == 1024
    run = long_rows.folder / "yarn"
    export = tmp_path / "export"
    convert_run(forked_runs, export, "--checkpoint", run, "--dtype", "float32")
    config = json.loads((export / "config.json").read_text())
    assert (config["rope_parameters"], config["max_position_embeddings"]) == (rope, 1024)
    assert (config["rope_theta"], config["rope_scaling"]["rope_type"]) == (5e5, "yarn")  # for transformers 4
    assert json.loads((export / "tokenizer_config.json").read_text())["model_max_length"] == 1024
    model: Any = AutoModelForCausalLM.from_pretrained(export)
    trained = float(metrics(long_rows.folder / "yarn")[-1][3])
    assert validation_loss(model, long_rows.folder / "long") == pytest.approx(trained, abs=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(export, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    assert abs(validation_loss(plain, long_rows.folder / "long") - trained) > 1e-4


def test_a_run_that_resumes_keeps_its_rope(long_rows: LongRows, yarn: ForkedRun) -> None:
    """The same arguments, or none, go on from a checkpoint; others need --allow_changes."""
    checkpoint = long_rows.folder / "yarn" / "checkpoints" / "step-00000001"
    given: dict[str, Any] = {"rope_scaling": "yarn:4", "rope_theta": 500000, "checkpoint": checkpoint}
    long_rows.start("same", **given).finish()
    without = long_rows.start("without", checkpoint=checkpoint)
    without.finish()
    assert "note: changed since step-00000001: " in without.stdout()
    weights = [
        load_file(long_rows.folder / run / "checkpoints" / "step-00000002" / "model.safetensors")
        for run in ("yarn", "same", "without")
    ]
    for other in weights[1:]:
        assert all(torch.equal(other[name], weights[0][name]) for name in weights[0])
    refused = long_rows.start("refused", **{**given, "rope_scaling": "llama3:4"})
    assert refused.wait() == [2]
    assert f"error: rope_scaling: yarn:4 -> llama3:4 since {checkpoint}" in refused.stderr()
    changed = long_rows.start("changed", **{**given, "rope_scaling": "llama3:4", "allow_changes": "true"})
    changed.finish()
    assert long_rows.config("changed")["rope_parameters"]["original_max_position_embeddings"] == 256


def test_longer_rows_are_refused_in_one_line_that_says_how(long_rows: LongRows) -> None:
    run = long_rows.start("refused")
    assert run.wait() == [2]
    advice = "tokenize with --max_length 256 or less, or extend the positions: --rope_scaling llama3:2"
    assert advice in run.stderr()
    forced = long_rows.start("forced", allow_changes="true", max_step=1)
    forced.finish()
    config = long_rows.config("forced", 1)
    assert (config["max_position_embeddings"], config["rope_parameters"]["rope_type"]) == (LENGTH, "default")


def test_an_adapter_of_extended_positions_is_exported_merged(
    long_rows: LongRows, forked_runs: ForkedRuns, tmp_path: Path
) -> None:
    """peft would open it beside a base whose config.json has other positions."""
    long_rows.start("adapter", rope_scaling="llama3:2", adapter="lora", max_step=1).finish()
    words: list[Any] = ["--checkpoint", long_rows.folder / "adapter", "--output_dir", tmp_path / "export"]
    refused = forked_runs.start(words, 1, program="fabric_train.programs.convert_to_hf")
    assert refused.wait() == [2]
    assert "its run used --rope_scaling llama3:2, which the config.json of its base does not have" in refused.stderr()
    convert_run(forked_runs, tmp_path / "export", *words[:2], "--merge", "true")
    assert json.loads((tmp_path / "export" / "config.json").read_text())["max_position_embeddings"] == 512


def test_a_branch_may_extend_the_positions(long_rows: LongRows, yarn: ForkedRun) -> None:
    trunk = f"{long_rows.folder / 'yarn'}@1"
    branch = long_rows.start("branch", branch=trunk, rope_scaling="llama3:8", max_step=2)
    branch.finish()
    assert "rope_scaling: yarn:4 -> llama3:8" in branch.stdout()
    assert long_rows.config("branch")["max_position_embeddings"] == 2048
