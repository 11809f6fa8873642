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
    wrapped = fabric.setup_module(model)
    evaluation = evaluate(fabric, wrapped, [Batch(ids, ids)], is_interrupted=lambda _: interrupted)
    assert wrapped.training
    if interrupted:
        assert evaluation is None
    else:
        assert evaluation is not None
        assert evaluation.whole.loss == pytest.approx(expected, rel=1e-5)


PRINT_SEEDS = """
import torch
import fabric_train.training.step as steps

backpropagate = steps.backpropagate

def print_seed_and_backpropagate(fabric, model, window, objective, **options):
    print("seed", window.step, rank, torch.initial_seed())
    return backpropagate(fabric, model, window, objective, **options)

steps.backpropagate = print_seed_and_backpropagate
"""


@pytest.mark.slow
def test_every_step_and_rank_has_a_seed_of_its_own_also_resumed(forked_runs: ForkedRuns, tmp_path: Path) -> None:
    model = write_model_with_dropout(tmp_path / "model")
    tokens = write_rows(tmp_path / "tokens")

    def train(name: str, **options: object) -> dict[tuple[int, int], int]:
        """Return the seeds by step and rank."""
        settings: dict[str, object] = {"parallelism": "ddp", "max_step": 4, "save_step_interval": 2, **options}
        words = argv(model, tokens, tmp_path / name, **settings)
        run = forked_runs.start(words, 2, before=PRINT_SEEDS)
        run.finish()
        seeds = {}
        for line in (*run.lines(0), *run.lines(1)):
            if line.startswith("seed"):
                _, step, rank, seed = line.split()
                seeds[int(step), int(rank)] = int(seed)
        return seeds

    whole = train("whole")
    assert sorted(whole) == [(step, rank) for step in (1, 2, 3, 4) for rank in (0, 1)]
    assert len(set(whole.values())) == 8

    # a resumed run has the seeds, and so the losses, of the run that was not stopped
    resumed = train("resumed", checkpoint=tmp_path / "whole" / "checkpoints" / "step-00000002")
    assert resumed == {(step, rank): seed for (step, rank), seed in whole.items() if step > 2}
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "whole")[2:]

    # a run with another seed has none of them
    with_seed_1 = train("other", max_step=1, seed=1)
    assert not set(with_seed_1.values()) & set(whole.values())
