"""A policy gradient computed in chunks in the head equals plain PyTorch over full fp64 distributions."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_train.model import lm_head_loss
from fabric_train.model.lm_head_loss import TokenLoss, summed_token_loss
from fabric_train.model.policy_loss import PolicyLoss, TargetLogProbabilities

WIDTH = 16
REFERENCE_WIDTH = 24
VOCABULARY = 96
TOLERANCE = 1e-5
"""Relative to the sum of the terms' sizes: values and gradients are sums of about a hundred products in fp32."""
ROUNDED_LOGARITHM = 10.0
"""A weight is the exponential of a difference of log-probabilities, whose rounding errors grow with their size. From
this size on, they are the largest errors, and the tolerance grows with it."""


class Problem:
    """A policy, a reference and sampled tokens, all random."""

    def __init__(self, num_tokens: int, temperature: float, cap: float, kl_weight: float | None, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.temperature = temperature
        self.cap = cap
        self.kl_weight = kl_weight
        self.hidden = torch.randn(num_tokens, WIDTH, generator=random).requires_grad_()
        self.weight = (torch.randn(VOCABULARY, WIDTH, generator=random) / 2).requires_grad_()
        self.bias = torch.randn(VOCABULARY, generator=random).requires_grad_()
        self.reference_hidden = torch.randn(num_tokens, REFERENCE_WIDTH, generator=random)
        self.reference_weight = torch.randn(VOCABULARY, REFERENCE_WIDTH, generator=random) / 4
        self.targets = torch.randint(0, VOCABULARY, (num_tokens,), generator=random)
        self.advantages = torch.randn(num_tokens, generator=random)
        # the sampler's log-probabilities differ from the trainer's by up to about 2 nats, on both sides of the cap
        log_probabilities = self.policy().detach().gather(1, self.targets[:, None])[:, 0]
        self.sampled = (log_probabilities + torch.randn(num_tokens, generator=random)).float()

    def policy(self) -> torch.Tensor:
        """Return the policy's log-probabilities, fp64 [N, V]."""
        logits = self.hidden.double() @ self.weight.double().T + self.bias.double()
        return F.log_softmax(logits / self.temperature, dim=1)

    def reference(self) -> torch.Tensor:
        """Return the reference's log-probabilities, fp64 [N, V]."""
        logits = self.reference_hidden.double() @ self.reference_weight.double().T
        return F.log_softmax(logits / self.temperature, dim=1)

    def reference_log_probabilities(self) -> torch.Tensor:
        """Return those of the targets, as a reference computes them, fp32 [N]."""
        token_loss = TargetLogProbabilities(self.targets, self.temperature)
        positions = torch.arange(len(self.targets))
        _, values = summed_token_loss(self.reference_hidden, self.reference_weight, None, positions, token_loss)
        return values[0]

    def token_loss(self) -> PolicyLoss:
        """Return the loss under test."""
        reference_log_probabilities = None
        if self.kl_weight is not None:
            reference_log_probabilities = self.reference_log_probabilities()
        return PolicyLoss(
            self.targets,
            self.sampled,
            self.advantages,
            temperature=self.temperature,
            weight_cap=self.cap,
            reference_log_probabilities=reference_log_probabilities,
            kl_weight=self.kl_weight or 0.0,
        )

    def plain_values(self) -> torch.Tensor:
        """Return all values of each token by their formulas, fp64 [values, N]; the losses have a graph."""
        policy = self.policy()
        log_probability = policy.gather(1, self.targets[:, None])[:, 0]
        ratio = torch.exp(log_probability.detach() - self.sampled.double())
        weight = torch.minimum(ratio, torch.tensor(self.cap, dtype=torch.float64))
        losses = -self.advantages.double() * weight * log_probability
        entropy = -(policy.exp() * policy).sum(dim=1)
        values = [weight, (ratio > self.cap).double(), ratio - 1 - ratio.log(), entropy]
        if self.kl_weight is not None:
            reference = self.reference().gather(1, self.targets[:, None])[:, 0]
            kl = torch.exp(reference - log_probability) - (reference - log_probability) - 1
            losses = losses + self.kl_weight * kl
            values.append(kl)
        return torch.stack([losses, *values])


def assert_close(actual: torch.Tensor, expected: torch.Tensor, scale: float) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=TOLERANCE * max(scale, 1.0))


def assert_equals_plain(problem: Problem, chunk_size: int) -> None:
    """Compare the values and all gradients of a problem, computed in chunks of up to ``chunk_size`` tokens."""
    expected = problem.plain_values()
    parameters = [problem.hidden, problem.weight, problem.bias]
    expected_gradients = torch.autograd.grad(expected[0].sum(), parameters)

    positions = torch.arange(len(problem.targets))
    chunk_bytes = lm_head_loss._CHUNK_BYTES["cpu"]
    # fp32 logits and log-probabilities, and what the loss takes
    lm_head_loss._CHUNK_BYTES["cpu"] = chunk_size * VOCABULARY * (8 + PolicyLoss.bytes_per_logit)
    try:
        token_loss = problem.token_loss()
        total, values = summed_token_loss(problem.hidden, problem.weight, problem.bias, positions, token_loss)
    finally:
        lm_head_loss._CHUNK_BYTES["cpu"] = chunk_bytes
    gradients = torch.autograd.grad(total, parameters)

    sizes = expected.detach().abs()
    rounding = 1 + float(problem.policy().detach().abs().max()) / ROUNDED_LOGARITHM
    assert_close(total, expected[0].sum(), rounding * float(sizes[0].sum()))
    for value, expected_value, value_sizes in zip(values, expected, sizes, strict=True):
        assert_close(value, expected_value, rounding * float(value_sizes.max()))
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        largest = max(float(expected_gradient.abs().max()), float(sizes[0].sum()))
        assert_close(gradient, expected_gradient, rounding * largest)


@settings(max_examples=40)
@given(
    num_tokens=st.integers(1, 23),
    chunk_size=st.integers(1, 25),
    temperature=st.sampled_from([0.5, 0.7, 1.0, 1.3, 2.0]),
    cap=st.sampled_from([0.8, 2.0, 1e9]),
    kl_weight=st.sampled_from([None, 0.0, 0.1, 1.0]),
    seed=st.integers(0, 1000),
)
def test_loss_and_gradients_equal_those_of_full_distributions(
    num_tokens: int, chunk_size: int, temperature: float, cap: float, kl_weight: float | None, seed: int
) -> None:
    assert_equals_plain(Problem(num_tokens, temperature, cap, kl_weight, seed), chunk_size)


def differentiated_weight(problem: Problem) -> torch.Tensor:
    """Return the losses if the weight had a gradient."""
    log_probability = problem.policy().gather(1, problem.targets[:, None])[:, 0]
    weight = torch.exp(log_probability - problem.sampled.double()).clamp(max=problem.cap)
    return -problem.advantages.double() * weight * log_probability


def loss_at_temperature_1(problem: Problem) -> torch.Tensor:
    """Return the losses of a trainer that does not know the temperature of sampling."""
    other = Problem(len(problem.targets), 1.0, problem.cap, problem.kl_weight, seed=0)
    other.hidden = problem.hidden
    other.weight = problem.weight
    other.bias = problem.bias
    other.sampled = problem.sampled
    return other.plain_values()[0]


@pytest.mark.parametrize("defect", [differentiated_weight, loss_at_temperature_1])
def test_a_defect_would_change_the_gradient(defect: Callable[[Problem], torch.Tensor]) -> None:
    """The comparison above sees the most frequent faults of others: their gradients are not close to ours."""
    problem = Problem(23, 1.3, 2.0, None, seed=0)
    expected_gradient = torch.autograd.grad(defect(problem).sum(), problem.weight)[0]
    total, _ = summed_token_loss(problem.hidden, problem.weight, problem.bias, torch.arange(23), problem.token_loss())
    gradient = torch.autograd.grad(total, problem.weight)[0]
    with pytest.raises(AssertionError, match="not close"):
        assert_close(gradient, expected_gradient, float(expected_gradient.abs().max()))


def test_equal_models_have_weight_1_and_no_divergence() -> None:
    problem = Problem(23, 0.7, 2.0, 0.1, seed=0)
    problem.sampled = problem.policy().detach().gather(1, problem.targets[:, None])[:, 0].float()
    token_loss = problem.token_loss()
    token_loss.reference_log_probabilities = problem.sampled
    total, values = summed_token_loss(problem.hidden, problem.weight, problem.bias, torch.arange(23), token_loss)
    _, weights, cut, sampler_kl, _, reference_kl = values
    torch.testing.assert_close(weights, torch.ones(23), rtol=0, atol=TOLERANCE)
    assert cut.tolist() == [0] * 23
    # (e^x - 1) - x is x² / 2 for small x, and the log-probabilities have errors of about 1e-6
    assert float(sampler_kl.abs().max()) < 1e-6
    assert float(reference_kl.abs().max()) < 1e-6
    assert torch.isfinite(torch.autograd.grad(total, problem.weight)[0]).all()


def test_chunks_use_no_more_memory_than_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensors that live at a time are counted, beside the buffer of the chunk's logits."""
    rows = 64
    vocabulary = 4096
    torch.manual_seed(0)
    hidden = torch.randn(rows, WIDTH)
    targets = torch.randint(0, vocabulary, (rows,))
    zeros = torch.zeros(rows)
    policy_loss = PolicyLoss(
        targets, zeros, zeros, temperature=0.7, reference_log_probabilities=zeros - 8, kl_weight=0.1
    )
    cases: list[tuple[TokenLoss, torch.dtype]] = [
        (policy_loss, torch.float32),
        (policy_loss, torch.bfloat16),
        (TargetLogProbabilities(targets, 0.7), torch.bfloat16),
    ]
    for token_loss, dtype in cases:
        logits = (hidden @ torch.randn(WIDTH, vocabulary)).to(dtype)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            token_loss.compute(logits, slice(0, rows), token_loss is policy_loss)
        peak = 0
        allocated = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                allocated += event.nbytes()
                peak = max(peak, allocated)
        assert 0 < peak <= 1.02 * token_loss.bytes_per_logit * rows * vocabulary
