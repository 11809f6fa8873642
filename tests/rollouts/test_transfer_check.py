"""The comparison of an engine's log-probabilities with those of the model in training, without an engine."""

from pathlib import Path

import numpy as np
import pytest
import torch
from lightning import Fabric
from transformers import AutoModelForCausalLM

from fabric_train.rollouts.transfer_check import (
    ProbeAnswer,
    TrainerAnswer,
    TransferCheck,
    compute_answer,
    log_probability_tolerance,
)

TEMPERATURE = 0.5


def answers(text: np.ndarray, error: float, sampled_error: float = 0.0) -> tuple[ProbeAnswer, TrainerAnswer]:
    """Return answers for a text, in which the engine's log-probabilities differ by the errors."""
    sampled = np.linspace(-3, -1, 5, dtype=np.float32)
    trainer = TrainerAnswer(text=text, sampled=sampled, logit_deviation=3.0)
    return ProbeAnswer(text=text + np.float32(error), sampled=sampled + np.float32(sampled_error)), trainer


@pytest.fixture
def check() -> TransferCheck:
    return TransferCheck(torch.bfloat16, num_layers=32, width=14_336, temperature=TEMPERATURE)


@pytest.fixture
def text() -> np.ndarray:
    return np.linspace(-9, -1, 20, dtype=np.float32)


def test_differences_that_rounding_explains_are_no_fault(check: TransferCheck, text: np.ndarray) -> None:
    tolerance = log_probability_tolerance(torch.bfloat16, 32, 14_336, 3.0)
    assert check.find_fault(*answers(text, 0.9 * tolerance, 0.9 * tolerance / TEMPERATURE)) is None


def test_larger_differences_are_a_fault(check: TransferCheck, text: np.ndarray) -> None:
    tolerance = log_probability_tolerance(torch.bfloat16, 32, 14_336, 3.0)
    assert "of a text differ" in str(check.find_fault(*answers(text, 1.1 * tolerance)))
    sampled = check.find_fault(*answers(text, 0, 1.1 * tolerance / TEMPERATURE))
    assert "what it sampled differ from those of the model in training at temperature 0.5" in str(sampled)
    assert "of a text differ" in str(check.find_fault(*answers(text, np.nan)))


def test_weights_from_before_are_noticed_though_rounding_is_larger_than_the_step(
    check: TransferCheck, text: np.ndarray
) -> None:
    engine, trainer = answers(text, 0.01)
    assert check.find_fault(engine, trainer) is None
    assert check.find_fault(engine, trainer) is None  # nothing was trained: a learning rate of 0
    _, trained = answers(text + np.float32(1e-4), 0)
    assert "still has the weights from before" in str(check.find_fault(engine, trained))


def test_the_tolerance_follows_the_dtype_and_the_depth() -> None:
    """bf16 has 16 bits fewer than fp32, whose error in sums of 16,384 terms is 128 times its unit roundoff."""
    fp32 = log_probability_tolerance(torch.float32, 32, 16_384, 3.0)
    bf16 = log_probability_tolerance(torch.bfloat16, 32, 16_384, 3.0)
    assert bf16 / fp32 == 2.0**15 / 128
    assert log_probability_tolerance(torch.bfloat16, 128, 16_384, 3.0) == 2 * bf16


def test_a_model_stays_in_training_if_its_answer_fails(tiny_model_dir: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    unwrapped = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model = fabric.setup_module(unwrapped)
    model.train()
    missing_id: int = unwrapped.config.vocab_size
    with pytest.raises(IndexError):
        compute_answer(fabric, model, [5, missing_id], [6], 1.0)
    assert model.training
