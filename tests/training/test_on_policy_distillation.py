"""Distillation on a student's own completions (arXiv:2306.13649) is the divergence on their tokens."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from lightning import Fabric

from fabric_train.arguments import TrainArguments, parse
from fabric_train.model.divergence_loss import NamedIds
from fabric_train.model.parallelize import setup_model
from fabric_train.training.distillation import Distillation
from tests.support.policy_windows import (
    LAYERS,
    VOCABULARY,
    Row,
    build_policy,
    build_reference,
    draw_windows,
    make_batch,
    plain_distributions,
    set_up_reference,
)


def plain_divergence(rows: list[Row]) -> float:
    """Return the forward KL divergence summed over the completions, each alone."""
    student = build_policy()
    teacher = build_reference()
    total = 0.0
    for row in rows:
        for completion in row:
            student_log_probabilities = plain_distributions(student, completion, temperature=1.0)
            teacher_log_probabilities = plain_distributions(teacher, completion, temperature=1.0)
            divergence = F.kl_div(
                student_log_probabilities, teacher_log_probabilities, reduction="sum", log_target=True
            )
            total += divergence.item()
    return total


def test_distillation_ignores_what_rewards_say_of_completions() -> None:
    paths = ["--model_name", "none", "--train_data_dir", "none", "--output_dir", "none"]
    arguments = parse(TrainArguments, [*paths, "--objective", "distill", "--teacher", "none"])
    fabric = Fabric(accelerator="cpu", devices=1)
    objective = Distillation(arguments.preference)
    named_ids = NamedIds(VOCABULARY, torch.tensor([], dtype=torch.int64))
    objective.use_teacher(set_up_reference(fabric, arguments).reader, named_ids)
    model = setup_model(fabric, build_policy(), LAYERS, arguments)
    rows = draw_windows()[0]
    batch = make_batch(rows)

    loss = objective.loss(model, batch)

    num_tokens = 0
    for row in rows:
        num_tokens += sum(len(completion.token_ids) for completion in row)
    assert int(objective.count(batch)) == num_tokens
    assert loss.total.item() == pytest.approx(plain_divergence(rows), rel=1e-5)
    assert objective.loss(model, replace(batch, rollout=None)).total.item() == loss.total.item()
