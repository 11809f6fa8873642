"""Compute the policy gradient of sampled tokens in the model's head, see ``lm_head_loss``.

The loss of a token is -A w log π, with the advantage A of its completion, the probability π that the model gives it,
and the weight w = min(π / μ, cap), in which μ is the probability with which it was sampled. The weight corrects for the
differences between the engine that samples and the model that trains, which has the same weights but other kernels. It
is not differentiated. This is truncated importance sampling (Yao et al. 2025, "On the Rollout-Training Mismatch in
Modern RL Systems", https://openreview.net/forum?id=xsonlP8DRV).

All distributions are those of the logits divided by the temperature of sampling, over all rows of the head: so the
sampler draws the tokens.

Shapes: N tokens, C of them in a chunk, V rows in the head.
"""

import torch

from fabric_train.model.lm_head_loss import write_log_softmax

WEIGHT_CAP = 2.0
"""The largest weight of a token."""
VALUES = ("loss", "sampler_weight", "weights_cut", "sampler_kl", "entropy")
"""The values of each token. ``weights_cut`` is 1 if its ratio π / μ is above the cap, and otherwise 0. ``sampler_kl``
estimates the divergence of the model from the sampler, KL(μ ‖ π), see :func:`estimate_kl`. ``entropy`` is that of the
model's distribution. With a reference, ``reference_kl`` follows, which estimates KL(π ‖ reference), taking the tokens
for samples of π: they were drawn from μ, and no weight corrects for it."""


def estimate_kl(log_ratios: torch.Tensor) -> torch.Tensor:
    """Estimate KL(p ‖ q) in nats from each of some tokens, taking them for samples of p.

    This is the estimator k3 of John Schulman (http://joschu.net/blog/kl-approx.html), r - 1 - log r with r = q / p, as
    in equation 4 of arXiv:2402.03300. It is never negative, and its mean over samples of p is the divergence.

    Args:
        log_ratios: log q - log p of each token.
    """
    return torch.expm1(log_ratios) - log_ratios


class TargetLogProbabilities:
    """A ``lm_head_loss.TokenLoss`` whose only values are the log-probabilities of the targets; it has no gradient."""

    num_values = 1
    bytes_per_logit = 4
    """The fp32 log-probabilities."""

    def __init__(self, targets: torch.Tensor, temperature: float) -> None:
        """Take N targets, int64 [N], and the temperature by which logits are divided."""
        self.targets = targets
        self.temperature = temperature

    def __len__(self) -> int:
        return len(self.targets)

    def compute(self, logits: torch.Tensor, chunk: slice, needs_gradient: bool) -> torch.Tensor:
        """Return the log-probabilities of a chunk's targets, fp32 [1, C], see ``lm_head_loss.TokenLoss.compute``."""
        assert not needs_gradient
        log_probabilities = _write_log_probabilities(logits, self.temperature)  # [C, V]
        return log_probabilities.gather(1, self.targets[chunk, None]).t()


class PolicyLoss:
    """A ``lm_head_loss.TokenLoss``: the policy gradient of sampled tokens, and if asked for, a distance from a model.

    With the log-probabilities of a reference, ``kl_weight`` times ``reference_kl`` is added to each token's loss.

    This is not a dataclass, because Fabric and FSDP convert the tensors in a dataclass that a model gets.
    """

    bytes_per_logit = 8
    """The fp32 log-probabilities and probabilities."""

    def __init__(
        self,
        targets: torch.Tensor,
        sampled_log_probabilities: torch.Tensor,
        advantages: torch.Tensor,
        *,
        temperature: float = 1.0,
        weight_cap: float = WEIGHT_CAP,
        reference_log_probabilities: torch.Tensor | None = None,
        kl_weight: float = 0.0,
    ) -> None:
        """Make the loss of N tokens.

        Args:
            targets: The sampled tokens, int64 [N].
            sampled_log_probabilities: Their log-probabilities when they were sampled, at ``temperature``, fp32 [N].
            advantages: The advantage of each token's completion, fp32 [N].
            temperature: The temperature of sampling, by which logits are divided.
            weight_cap: The largest weight of a token.
            reference_log_probabilities: The tokens' log-probabilities under the model that the policy should stay close
                to, at ``temperature``, fp32 [N].
            kl_weight: The weight of ``reference_kl`` in the loss.
        """
        self.targets = targets
        self.sampled_log_probabilities = sampled_log_probabilities
        self.advantages = advantages
        self.temperature = temperature
        self.weight_cap = weight_cap
        self.reference_log_probabilities = reference_log_probabilities
        self.kl_weight = kl_weight

    @property
    def num_values(self) -> int:
        """The number of ``VALUES``, and of ``reference_kl`` with a reference."""
        return len(VALUES) + (self.reference_log_probabilities is not None)

    def __len__(self) -> int:
        return len(self.targets)

    def compute(self, logits: torch.Tensor, chunk: slice, needs_gradient: bool) -> torch.Tensor:
        """Return the ``VALUES`` of the tokens of a chunk, fp32 [values, C], see ``lm_head_loss.TokenLoss.compute``."""
        targets = self.targets[chunk, None]  # [C, 1]

        # The probabilities, and the entropy, which is computed over the log-probabilities.
        log_probabilities = _write_log_probabilities(logits, self.temperature)  # [C, V]
        log_probability = log_probabilities.gather(1, targets)[:, 0]  # [C]
        probabilities = log_probabilities.exp()
        entropy = -log_probabilities.mul_(probabilities).sum(dim=1)

        # The loss, and its derivative with respect to the token's log-probability, [C].
        advantages = self.advantages[chunk]
        log_ratio = log_probability - self.sampled_log_probabilities[chunk]
        ratio = log_ratio.exp()
        weight = ratio.clamp(max=self.weight_cap)
        slope = -advantages * weight
        loss = slope * log_probability
        values = [weight, (ratio > self.weight_cap).float(), estimate_kl(log_ratio), entropy]
        if self.reference_log_probabilities is not None:
            reference_log_ratio = self.reference_log_probabilities[chunk] - log_probability
            reference_kl = estimate_kl(reference_log_ratio)
            values.append(reference_kl)
            loss = loss + self.kl_weight * reference_kl
            slope = slope - self.kl_weight * torch.expm1(reference_log_ratio)

        # The derivative of a log-probability: 1 at the token minus the probabilities, divided by the temperature.
        if needs_gradient:
            gradient = probabilities.neg_()
            gradient.scatter_(1, targets, -torch.expm1(log_probability)[:, None])
            gradient *= (slope / self.temperature)[:, None]
            logits.copy_(gradient)
        return torch.stack([loss, *values])


def _write_log_probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the log-probabilities of logits [C, V] at a temperature, fp32 [C, V], written over fp32 logits."""
    log_probabilities = logits.float()
    if temperature != 1:
        log_probabilities /= temperature
    write_log_softmax(log_probabilities)
    return log_probabilities
