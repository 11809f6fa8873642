"""What a sampler of completions does, whichever engine it uses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

FinishReason: TypeAlias = Literal["stop", "length"]
"""Why a completion ended: by a token that ends it, or because it had the largest number of tokens."""


@dataclass(frozen=True)
class SampleRequest:
    """A prompt to complete once."""

    prompt_ids: tuple[int, ...]
    """The token ids of the prompt, at least one."""
    seed: int
    """The seed of the random numbers of this completion, from 0 to 2³¹ - 1."""


@dataclass(frozen=True)
class Completion:
    """A sampled completion, exactly as it was sampled: its text is never encoded again."""

    token_ids: np.ndarray
    """The tokens, int64 [T], at least one, with the token that ended it, if one did."""
    log_probabilities: np.ndarray
    """The log-probability of each token under the distribution that it was sampled from, fp32 [T]."""
    finish_reason: FinishReason


@dataclass(frozen=True)
class SamplingSettings:
    """How to sample. The tokens are drawn from the full distribution at a temperature, without a change of it."""

    temperature: float
    """The logits are divided by it, above 0."""
    max_new_tokens: int
    """The largest number of tokens of a completion."""
    end_ids: tuple[int, ...]
    """The tokens that end a completion."""


class Sampler(Protocol):
    """Samples completions with the weights of the model in training.

    All ranks call ``update_weights`` and ``sample`` together; ``update_weights`` comes first.
    """

    def update_weights(self, model: Any, step: int) -> None:
        """Take over the weights of the model.

        Args:
            model: The model that ``setup_model`` returned.
            step: The optimizer step that the weights are from; 0 before the first step.

        Raises:
            RunError: The sampler does not have the weights of the model afterwards.
        """

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Return a completion for each request of this rank, in their order. Ranks may have different numbers.

        Raises:
            RunStopped: The ranks have agreed to stop while they sample; raised on all ranks.
            RunError: The completions could not be sampled; raised on all ranks.
        """

    def close(self) -> None:
        """Free what the sampler holds, such as a server. Any rank may call this alone, at any time."""
