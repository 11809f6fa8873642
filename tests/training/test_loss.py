"""The loss and its gradient are the mean over the window's tokens, however the window is cut."""

import json
import math

import numpy as np
import pytest
import torch
from lightning import Fabric

from fabric_train.data.batch import IGNORED_LABEL, Batch, count_supervised
from fabric_train.data.step_sampler import Window
from fabric_train.distributed.gradients import clip_grad_norm
from fabric_train.training.objective import CrossEntropy
from fabric_train.training.step import accumulate
from tests.support.bigram import VOCABULARY, Bigram
from tests.support.forked_runs import ForkedRuns


@pytest.fixture
def fabric() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


def window(*batches: Batch) -> Window:
    return Window(step=1, epoch=0, ends_epoch=False, rows=np.arange(0), micro_batch_size=1, batches=list(batches))


def batch(input_ids: list[list[int]], labels: list[list[int]] | None = None) -> Batch:
    return Batch(torch.tensor(input_ids), torch.tensor(labels or input_ids))


@pytest.mark.numerical
def test_gradient_of_a_window_is_the_one_worked_out_by_hand(fabric: Fabric) -> None:
    # Uniform logits: every token costs log 5; its gradient in row "previous" is 1/5 everywhere, minus 1 at the target.
    # Micro-batch 1 supervises one token (0→1), micro-batch 2 three (0→2, 2→2, 2→3): 4 in all, each weighs 1/4.
    #   row 0: 2 tokens: 2/4 · 1/5 = 0.1 everywhere, minus 1/4 at 1 and at 2  → [0.1, -0.15, -0.15, 0.1, 0.1]
    #   row 2: 2 tokens: 0.1 everywhere, minus 1/4 at 2 and at 3              → [0.1, 0.1, -0.15, -0.15, 0.1]
    model = fabric.setup_module(Bigram())
    first = batch([[0, 1, 4, 4]], [[0, 1, IGNORED_LABEL, IGNORED_LABEL]])
    loss = accumulate(fabric, model, window(first, batch([[0, 2, 2, 3]])))
    expected = torch.zeros(VOCABULARY, VOCABULARY)
    expected[0] = torch.tensor([0.1, -0.15, -0.15, 0.1, 0.1])
    expected[2] = torch.tensor([0.1, 0.1, -0.15, -0.15, 0.1])
    torch.testing.assert_close(model.table.weight.grad, expected)
    torch.testing.assert_close(loss.mean, torch.log(torch.tensor(5.0)).double())


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", ["fsdp", "fsdp2", "ddp"])
@pytest.mark.parametrize("grad_clip", [0, 0.1])
def test_gradient_of_unequal_micro_batches_is_the_one_worked_out_by_hand(
    forked_runs: ForkedRuns, parallelism: str, grad_clip: float
) -> None:
    # The micro-batches of bigram.BATCHES supervise 0→1; nothing; 0→2, 2→2, 2→3; 1→0: 5 tokens, each weighs 1/5.
    # Uniform logits: a token's gradient in row "previous" is 1/5 · 1/5 = 0.04 everywhere, minus 1/5 at the target.
    gradient = torch.zeros(VOCABULARY, VOCABULARY)
    gradient[0] = torch.tensor([0.08, -0.12, -0.12, 0.08, 0.08])
    gradient[1] = torch.tensor([-0.16, 0.04, 0.04, 0.04, 0.04])
    gradient[2] = torch.tensor([0.08, 0.08, -0.12, -0.12, 0.08])
    norm = math.sqrt(0.128)  # squares of the rows: 0.048, 0.032, 0.048
    options = f"--accelerator cpu --precision 32-true --parallelism {parallelism} --grad_clip {grad_clip}".split()
    paths = ["--model_name", "none", "--train_data_dir", "none", "--output_dir", "none", "--devices", "2"]
    run = forked_runs.start([*paths, *options], 2, program="tests.support.bigram")
    run.finish()
    step = json.loads(run.stdout().splitlines()[-1])
    assert step["loss"] == pytest.approx(math.log(VOCABULARY), rel=1e-6)
    assert step["norm"] == pytest.approx(norm, rel=1e-6)
    scale = min(grad_clip / norm, 1) if grad_clip else 1
    # torch divides by the norm plus 1e-6, which is 3e-6 of the norm
    torch.testing.assert_close(torch.tensor(step["weights"]), -gradient * scale, rtol=1e-5, atol=1e-8)


@pytest.mark.numerical
def test_unequal_micro_batches_have_the_gradient_of_the_whole_window(fabric: Fabric) -> None:
    # six rows of which one has few labels and one has none
    rows = torch.randint(0, VOCABULARY, (6, 9), generator=torch.Generator().manual_seed(0))
    labels = rows.clone()
    labels[0, 2:] = IGNORED_LABEL
    labels[3] = IGNORED_LABEL

    def loss_and_gradient(rows_of_batches: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        model = fabric.setup_module(Bigram())
        batches = map(Batch, rows.split(rows_of_batches), labels.split(rows_of_batches))
        loss = accumulate(fabric, model, window(*batches))
        return loss.mean, model.table.weight.grad

    whole_loss, whole_gradient = loss_and_gradient([6])
    for rows_of_batches in ([1, 5], [2, 2, 2], [1, 1, 1, 1, 1, 1]):
        loss, gradient = loss_and_gradient(rows_of_batches)
        torch.testing.assert_close(gradient, whole_gradient, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(loss, whole_loss, rtol=1e-6, atol=0)


def test_a_window_without_supervised_tokens_has_loss_and_gradient_zero(fabric: Fabric) -> None:
    model = fabric.setup_module(Bigram())
    loss = accumulate(fabric, model, window(batch([[1, 2, 3]], [[IGNORED_LABEL] * 3])))
    assert loss.mean == 0
    assert not model.table.weight.grad.any()


def test_the_first_token_of_a_row_is_never_a_target(fabric: Fabric) -> None:
    rows = torch.tensor([[3, 1, 1], [4, 1, 1]])
    assert count_supervised(rows) == 4
    model = Bigram()
    with torch.no_grad():
        model.table.weight[:, 1] = 100.0  # predicts 1 after everything
    assert CrossEntropy().loss(model, Batch(rows, rows)).total == 0


def test_clipping_scales_to_the_norm_and_tells_the_norm_before(fabric: Fabric) -> None:
    for largest, expected in ((0.5, 0.5), (0.0, 5.0), (10.0, 5.0)):
        model = fabric.setup_module(Bigram())
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=1.0))
        model.table.weight.grad = torch.zeros(VOCABULARY, VOCABULARY)
        model.table.weight.grad[0, :2] = torch.tensor([3.0, 4.0])
        assert clip_grad_norm(fabric, model, optimizer, largest) == 5.0
        torch.testing.assert_close(model.table.weight.grad.norm(), torch.tensor(expected))
