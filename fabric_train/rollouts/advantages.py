"""The advantages of completions over the other completions of the same prompt."""

from typing import Literal

import numpy as np

_EPSILON = 1e-4
"""Added to the standard deviation, in units of the reward. The paper has none; this is TRL's."""


def compute_advantages(totals: np.ndarray, kind: Literal["mean", "group_norm"]) -> np.ndarray:
    """Return how much better each completion is than its group.

    ``mean`` is the reward minus the mean of the group (Dr. GRPO, arXiv:2503.20783, section 3.2). ``group_norm`` also
    divides by the standard deviation of the group plus 1e-4 (GRPO, arXiv:2402.03300, section 4.1.2). The deviation is
    that of a sample (n - 1), as in TRL. Dividing gives prompts that are nearly always solved, or nearly never, more
    weight.

    Args:
        totals: The rewards of the completions, fp64 [groups, completions], finite.
        kind: Which advantage.

    Returns:
        The advantages, fp64 [groups, completions]; exactly 0 in groups without variance.
    """
    advantages = totals - totals.mean(axis=1, keepdims=True)
    has_variance = ~groups_without_variance(totals)
    if kind == "group_norm":
        num_completions = totals.shape[1]
        squared_sums = np.square(advantages[has_variance]).sum(axis=1, keepdims=True)
        deviations = np.sqrt(squared_sums / (num_completions - 1))
        advantages[has_variance] /= deviations + _EPSILON
    advantages[~has_variance] = 0.0  # a mean of equal numbers may be rounded
    return advantages


def groups_without_variance(totals: np.ndarray) -> np.ndarray:
    """Return which groups have equal rewards, so that nothing can be learned from them.

    Args:
        totals: The rewards of the completions, fp64 [groups, completions].

    Returns:
        bool [groups].
    """
    is_without_variance: np.ndarray = totals.max(axis=1) == totals.min(axis=1)
    return is_without_variance
