"""The advantages of completions over the other completions of the same prompt."""

from collections.abc import Callable

import numpy as np

_EPSILON = 1e-4
"""Added to the standard deviation, in units of the reward. The paper has none; this is TRL's."""


def compute_advantages(totals: np.ndarray, kind: str) -> np.ndarray:
    """Return how much better each completion is than its group.

    Args:
        totals: The rewards of the completions, fp64 [groups, completions], finite.
        kind: A name in ``ADVANTAGES``.

    Returns:
        The advantages, fp64 [groups, completions]; exactly 0 in groups without variance.
    """
    # Groups without variance get exactly 0: the rounded mean of equal rewards may differ from the rewards.
    advantages = np.zeros_like(totals)
    has_variance = ~groups_without_variance(totals)
    advantages[has_variance] = ADVANTAGES[kind](totals[has_variance])
    return advantages


def subtract_mean(totals: np.ndarray) -> np.ndarray:
    """Return the reward minus the mean of the group (Dr. GRPO, arXiv:2503.20783, section 3.2).

    Args:
        totals: The rewards of groups with variance, fp64 [groups, completions].
    """
    advantages: np.ndarray = totals - totals.mean(axis=1, keepdims=True)
    return advantages


def normalize_by_group(totals: np.ndarray) -> np.ndarray:
    """Return the reward minus the mean of the group, divided by the standard deviation of the group plus 1e-4.

    This is GRPO's (arXiv:2402.03300, section 4.1.2). The deviation is that of a sample (n - 1), as in TRL. Dividing
    gives prompts that are nearly always solved, or nearly never, more weight.

    Args:
        totals: The rewards of groups with variance, fp64 [groups, completions].
    """
    advantages = subtract_mean(totals)
    num_completions = totals.shape[1]
    squared_sums = np.square(advantages).sum(axis=1, keepdims=True)
    deviations = np.sqrt(squared_sums / (num_completions - 1))
    normalized: np.ndarray = advantages / (deviations + _EPSILON)
    return normalized


ADVANTAGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": subtract_mean,
    "group_norm": normalize_by_group,
}
"""The advantages of ``--advantage`` by name: functions of the rewards of groups whose rewards are not all equal."""


def groups_without_variance(totals: np.ndarray) -> np.ndarray:
    """Return which groups have equal rewards, so that nothing can be learned from them.

    Args:
        totals: The rewards of the completions, fp64 [groups, completions].

    Returns:
        bool [groups].
    """
    is_without_variance: np.ndarray = totals.max(axis=1) == totals.min(axis=1)
    return is_without_variance
