"""A model with dropout: evaluations have none, and every step and rank draws numbers of its own, also when resumed."""

import json
import math
from pathlib import Path

import pytest
import torch
from lightning import Fabric
from transformers import LlamaForCausalLM

from fabric_train.data.batch import Batch
from fabric_train.training.evaluation import evaluate
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv, metrics
from tests.support.unequal_rows import VOCABULARY, write_model, write_rows


def write_model_with_dropout(folder: Path) -> Path:
    write_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    return folder


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_evaluation_has_no_dropout_and_the_steps_after_it_do(tmp_path: Path, interrupted: bool) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    model = LlamaForCausalLM.from_pretrained(write_model_with_dropout(tmp_path / "model"))
    ids = torch.arange(48).view(2, 24) * 7 % VOCABULARY
    with torch.no_grad():
        expected = model.eval()(input_ids=ids, labels=ids).loss.item()
        dropped = model.train()(input_ids=ids, labels=ids).loss.item()
    assert not math.isclose(dropped, expected, rel_tol=1e-4)
    set_up = fabric.setup_module(model)
    found = evaluate(fabric, set_up, [Batch(ids, ids)], is_interrupted=lambda _: interrupted)
    assert set_up.training
    if interrupted:
        assert found is None
    else:
        assert found is not None
        assert found.whole.loss == pytest.approx(expected, rel=1e-5)


NOTE_SEEDS = """
import torch
import fabric_train.training.step as steps

backpropagate = steps.backpropagate

def noting(fabric, model, window, objective, **options):
    print("seed", window.step, rank, torch.initial_seed())
    return backpropagate(fabric, model, window, objective, **options)

steps.backpropagate = noting
"""


@pytest.mark.slow
def test_every_step_and_rank_has_a_seed_of_its_own_also_resumed(forked_runs: ForkedRuns, tmp_path: Path) -> None:
    model = write_model_with_dropout(tmp_path / "model")
    tokens = write_rows(tmp_path / "tokens")

    def train(name: str, **options: object) -> dict[tuple[int, int], int]:
        """Return the seeds by step and rank."""
        given: dict[str, object] = {"parallelism": "ddp", "max_step": 4, "save_step_interval": 2, **options}
        words = argv(model, tokens, tmp_path / name, **given)
        run = forked_runs.start(words, 2, before=NOTE_SEEDS)
        run.finish()
        lines = [line.split()[1:] for rank in (0, 1) for line in run.lines(rank) if line.startswith("seed")]
        return {(int(step), int(rank)): int(seed) for step, rank, seed in lines}

    whole = train("whole")
    assert sorted(whole) == [(step, rank) for step in (1, 2, 3, 4) for rank in (0, 1)]
    assert len(set(whole.values())) == 8
    resumed = train("resumed", checkpoint=tmp_path / "whole" / "checkpoints" / "step-00000002")
    assert resumed == {key: seed for key, seed in whole.items() if key[0] > 2}
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "whole")[2:]
    other = train("other", max_step=1, seed=1)
    assert not set(other.values()) & set(whole.values())
