"""Sampling in the processes that train: the tokens' log-probabilities, ends, seeds and temperature."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Fabric
from transformers import AutoModelForCausalLM

from fabric_train.rollouts.process_sampler import ProcessSampler, _Drawing
from fabric_train.rollouts.sampler import Completion, SampleRequest, SamplingSettings

REQUESTS = [SampleRequest((0, 5, 6), 1), SampleRequest((0, 9), 2), SampleRequest((0, 3, 4, 5, 6), 3)]
ROUNDING = 1e-5
"""fp32 sums of a few hundred terms near 1, in another order: some 1e-7 each, over two layers and a log-softmax."""


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Any:
    fabric = Fabric(accelerator="cpu", devices=1)
    return fabric.setup(AutoModelForCausalLM.from_pretrained(tiny_model_dir))


def sample(
    model: Any, requests: Sequence[SampleRequest], settings: SamplingSettings, batch_size: int = 8
) -> list[Completion]:
    fabric = Fabric(accelerator="cpu", devices=1)
    sampler = ProcessSampler(fabric, settings, batch_size, open_copy=lambda: None, on_batch=lambda: None)
    sampler.update_weights(model, 0)
    return sampler.sample(requests)


def every_token_ends(model: Any) -> tuple[int, ...]:
    return tuple(range(model.module.config.vocab_size))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_a_pass_without_cache(model: Any, temperature: float) -> None:
    completions = sample(model, REQUESTS, SamplingSettings(temperature, 12, end_ids=(1,)))
    for request, completion in zip(REQUESTS, completions, strict=True):
        row = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        with torch.no_grad():
            logits = model.module(row).logits[0, len(request.prompt_ids) - 1 : -1]
        expected = torch.log_softmax(logits / temperature, dim=-1).gather(
            1, torch.from_numpy(completion.token_ids)[:, None]
        )
        np.testing.assert_allclose(completion.log_probabilities, expected[:, 0].numpy(), rtol=0, atol=ROUNDING)


def test_a_completion_depends_on_its_seed_and_not_on_its_batch(model: Any) -> None:
    settings = SamplingSettings(1.0, 12, end_ids=(1,))
    together = sample(model, REQUESTS, settings)
    alone = [sample(model, [request], settings)[0] for request in REQUESTS]
    in_batches = sample(model, REQUESTS, settings, batch_size=2)
    for one, two, three in zip(together, alone, in_batches, strict=True):
        np.testing.assert_array_equal(one.token_ids, two.token_ids)
        np.testing.assert_array_equal(one.token_ids, three.token_ids)
    (other_seed,) = sample(model, [SampleRequest(REQUESTS[0].prompt_ids, 4)], settings)
    assert other_seed.token_ids.tolist() != together[0].token_ids.tolist()


def test_a_completion_ends_with_the_token_that_ends_it(model: Any) -> None:
    (completion,) = sample(model, REQUESTS[:1], SamplingSettings(1.0, 12, every_token_ends(model)))
    assert len(completion.token_ids) == 1
    assert completion.finish_reason == "stop"
    (cut,) = sample(model, REQUESTS[:1], SamplingSettings(1.0, 12, end_ids=()))
    assert len(cut.token_ids) == 12
    assert cut.finish_reason == "length"


def test_the_model_is_in_training_mode_afterwards(model: Any) -> None:
    model.module.train()
    config = model.module.generation_config
    sample(model, REQUESTS, SamplingSettings(1.0, 4, end_ids=(1,)))
    assert model.module.training
    assert model.module.generation_config is config


def test_the_first_token_has_the_models_distribution(model: Any) -> None:
    """Of 4,000 draws, the share of each likely token differs from its probability by at most 5 standard deviations."""
    requests = [SampleRequest((0, 5, 6), seed) for seed in range(4000)]
    completions = sample(model, requests, SamplingSettings(1.0, 1, end_ids=()), batch_size=4000)
    with torch.no_grad():
        probabilities = torch.softmax(model.module(torch.tensor([[0, 5, 6]])).logits[0, -1].double(), dim=-1).numpy()
    counts = np.bincount([int(completion.token_ids[0]) for completion in completions], minlength=len(probabilities))
    deviations = np.sqrt(len(requests) * probabilities * (1 - probabilities))
    assert np.all(np.abs(counts - len(requests) * probabilities) <= 5 * deviations + 1)


def test_a_token_without_probability_is_never_drawn() -> None:
    num_rows = 2000
    drawing = _Drawing(SamplingSettings(1.0, 1, end_ids=()), range(num_rows), torch.device("cpu"))
    scores = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]).repeat(num_rows, 1)
    drawn = drawing(torch.zeros(num_rows, 1), scores).argmax(dim=1)
    assert set(drawn.tolist()) == {1, 3}
    np.testing.assert_allclose(drawing.log_probabilities[0].numpy(), np.log(0.5), rtol=1e-6)


def test_the_largest_number_draws_a_token_that_has_a_probability() -> None:
    """The number is larger than the rounded sum of these probabilities."""
    drawing = _Drawing(SamplingSettings(1.0, 1, end_ids=()), [0], torch.device("cpu"))
    drawing._numbers = torch.full_like(drawing._numbers, 1 - 2**-53)
    scores = torch.tensor([[0.0, 1.0, 2.3, -torch.inf]])
    assert drawing(torch.zeros(1, 1), scores).argmax(dim=1).tolist() == [2]
