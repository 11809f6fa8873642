"""An objective from outside trains a model: a preference loss of the two documents in each row."""

import csv
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv
from tests.support.unequal_rows import VOCABULARY, write_model

PREFERENCE = """
import torch
import torch.nn.functional as F
from fabric_train.data.batch import next_token_labels
from fabric_train.model.attention import forward
from fabric_train import OBJECTIVES
from fabric_train.training.objective import BatchLoss

class Preference:
    metric_names = ("pairs_in_order",)

    def count(self, batch):
        return torch.tensor(0 if batch.documents is None else (len(batch.documents.borders) - 1) // 2)

    def loss(self, model, batch, scale=None):
        logits = forward(model, batch.input_ids, batch.documents).logits.flatten(0, 1)
        if batch.documents is None:  # a rank without rows
            return BatchLoss(0 * logits.double().sum())
        losses = F.cross_entropy(logits, next_token_labels(batch.labels).flatten(), reduction="none")
        documents = losses.tensor_split(batch.documents.borders[1:-1].tolist())
        chosen, rejected = torch.stack([document.sum() for document in documents]).view(-1, 2).T
        margins = (rejected - chosen).double()
        return BatchLoss(-F.logsigmoid(margins).sum(), metrics=(margins > 0).double().sum()[None])

OBJECTIVES["in-order"] = lambda arguments: Preference()
"""
PAIRS = 8
LENGTH = 12


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token dataset whose rows hold two documents of 12 tokens each."""
    folder = tmp_path_factory.mktemp("pairs") / "tokens"
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (PAIRS, 2 * LENGTH))
    rows = datasets.Dataset.from_dict({"input_ids": ids.tolist(), "document_starts": [[0, LENGTH]] * PAIRS})
    datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(folder)
    return folder


def by_hand(model: LlamaForCausalLM, tokens: Path) -> tuple[float, float]:
    """Return the loss, and the share of pairs in order."""
    ids = torch.tensor(datasets.load_from_disk(tokens)["train"]["input_ids"][:]).view(PAIRS, 2, LENGTH)
    with torch.no_grad():
        sums = torch.tensor([[float(model(input_ids=one[None], labels=one[None]).loss) for one in row] for row in ids])
    margins = (sums[:, 1] - sums[:, 0]) * (LENGTH - 1)
    return float(-F.logsigmoid(margins).mean()), float((margins > 0).float().mean())


def test_outside_objective_is_logged_and_independent_of_the_split(
    forked_runs: ForkedRuns, tmp_path: Path, pairs: Path
) -> None:
    model = write_model(tmp_path / "model")
    loss, in_order = by_hand(LlamaForCausalLM.from_pretrained(model).eval(), pairs)
    found = []
    for num_ranks, parallelism, rows in ((1, "single", 8), (1, "single", 3), (2, "fsdp", 3)):
        given = {
            "objective": "in-order",
            "parallelism": parallelism,
            "micro_batch_size": rows,
            "total_batch_size": None,
            "lr": 5e-3,
        }
        given |= {"gradient_accumulation_steps": -(-PAIRS // (rows * num_ranks)), "max_step": 5, "log_step_interval": 1}
        given |= {"eval_at_start": "true", "eval_iters": None, "loggers": "tensorboard", "save_step_interval": 5}
        run = tmp_path / f"{rows}-{num_ranks}"
        forked_runs.start(argv(model, pairs, run, **given), num_ranks, before=PREFERENCE).finish()
        with (run / "metrics.csv").open(newline="") as file:
            table = list(csv.DictReader(file))
        first = table[1]
        last = table[-1]
        for train, val, expected in (("train_loss", "val_loss", loss), ("train_pairs_in_order",) * 2 + (in_order,)):
            val = val.replace("train_", "val_")
            assert float(first[train]) == pytest.approx(expected, rel=1e-5), (train, rows)
            assert float(table[0][val]) == pytest.approx(expected, rel=1e-5), (val, rows)
        assert (float(last["val_pairs_in_order"]), float(last["val_loss"]) < 0.5 * loss) == (1.0, True)
        found.append([float(row[name]) for row in table[1:] for name in ("train_loss", "grad_norm")])
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[2] == pytest.approx(found[0], rel=1e-4)
