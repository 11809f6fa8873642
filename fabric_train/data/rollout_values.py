"""The values of sampled completions that reinforcement learning needs, as batches carry them.

Shapes: N targets in a batch, which are the tokens of completions, and R rewards.
"""

from dataclasses import dataclass

import torch

from fabric_train.data.tensor_record import TensorRecord


@dataclass(frozen=True)
class RolloutValues(TensorRecord):
    """The values of the targets of a batch, in their order.

    Values of a whole completion are divided by its number of tokens, so that their sum over the tokens of any set of
    completions is a sum over these completions, however rows and sources divide the tokens. They are fp64, so that a
    mean of rewards has no rounding errors that a reader would see.
    """

    log_probabilities: torch.Tensor
    """The log-probability of each token when it was sampled, at the temperature of sampling, fp32 [N]."""
    advantages: torch.Tensor
    """The advantage of the token's completion, fp32 [N], not divided."""
    completion_shares: torch.Tensor
    """1 over the number of tokens of the token's completion, fp64 [N]; their sum is the number of completions."""
    is_cut: torch.Tensor
    """The share, or 0 if the completion ended by itself and not at the largest number of tokens, fp64 [N]."""
    lacks_variance: torch.Tensor
    """The share, or 0 if the rewards in the completion's group differ, fp64 [N]."""
    has_failed: torch.Tensor
    """The share, or 0 if all rewards of the completion were computed, fp64 [N]."""
    rewards: torch.Tensor
    """The weighted sum of the completion's rewards, and each reward, times the share, fp64 [1 + R, N]."""

    @classmethod
    def without_content(cls, num_targets: int, num_rewards: int, device: torch.device | None = None) -> "RolloutValues":
        """Return values with the shapes of N targets and R rewards, whose content does not matter."""

        def make_tensor(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        return cls(
            log_probabilities=make_tensor(num_targets, dtype=torch.float32),
            advantages=make_tensor(num_targets, dtype=torch.float32),
            completion_shares=make_tensor(num_targets),
            is_cut=make_tensor(num_targets),
            lacks_variance=make_tensor(num_targets),
            has_failed=make_tensor(num_targets),
            rewards=make_tensor(1 + num_rewards, num_targets),
        )
