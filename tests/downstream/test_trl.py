"""TRL's two distillation losses of the same tensors equal ours, with their gradients."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.packages import install_packages
from fabric_train.model.divergence_loss import DivergenceLoss, FullRows, NamedIds, TeacherHead
from fabric_train.model.lm_head_loss import summed_token_loss
from tests.support.downstream_uses import Checked
from tests.support.environments import run_inside

pytestmark = [pytest.mark.slow, pytest.mark.downstream]

NUM_TOKENS = 50
NUM_IDS = 200
WIDTH = 16
TEACHER_WIDTH = 24
TOLERANCE = 1e-5  # relative, in fp32
# TRL's beta: 0 is the forward KL divergence, 1 the reverse one
DIVERGENCES = [
    ("forward_kl", 0.0, 1.0),
    ("reverse_kl", 1.0, 1.0),
    ("jsd", 0.5, 1.0),
    ("jsd", 0.1, 2.0),
    ("forward_kl", 0.0, 0.7),
    ("reverse_kl", 1.0, 3.0),
]


def test_losses_and_gradients_are_those_of_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: Checked
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(install_packages("trl")))
    torch.manual_seed(0)
    tensors = {
        "hidden": torch.randn(NUM_TOKENS, WIDTH),
        "weight": 0.5 * torch.randn(NUM_IDS, WIDTH),
        "teacher_hidden": torch.randn(NUM_TOKENS, TEACHER_WIDTH),
        "teacher_weight": 0.5 * torch.randn(NUM_IDS, TEACHER_WIDTH),
    }
    file = tmp_path / "tensors.npz"
    np.savez(file, allow_pickle=False, **{name: tensor.numpy() for name, tensor in tensors.items()})
    settings = json.dumps([(beta, temperature) for _, beta, temperature in DIVERGENCES])
    printed = run_inside(sys.executable, "in_trl.py", file, settings)
    gradients = np.load(tmp_path / "gradients.npz")

    rows = FullRows(tensors["teacher_hidden"], TeacherHead(tensors["teacher_weight"], None))
    named_ids = NamedIds(NUM_IDS, torch.tensor([], dtype=torch.int64))
    targets = torch.zeros(NUM_TOKENS, dtype=torch.int64)
    weight = tensors["weight"].requires_grad_()
    for index, (divergence, beta, temperature) in enumerate(DIVERGENCES):
        token_loss = DivergenceLoss(rows, targets, named_ids, divergence, beta, temperature)
        total, _ = summed_token_loss(tensors["hidden"], weight, None, torch.arange(NUM_TOKENS), token_loss)
        (gradient,) = torch.autograd.grad(total / NUM_TOKENS, weight)
        for trainer, losses in printed["losses"].items():
            assert float(total.detach()) / NUM_TOKENS == pytest.approx(losses[index], rel=TOLERANCE)
            expected = torch.from_numpy(gradients[f"{trainer}-{index}"])
            tolerance = TOLERANCE * float(expected.abs().max())
            torch.testing.assert_close(gradient, expected, rtol=0, atol=tolerance)

    what = "the losses of GKDTrainer and DistillationTrainer on the same tensors equal ours, with their gradients"
    checked("TRL", printed["version"], what)
