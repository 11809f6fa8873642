"""Estimate figures of models from samples of documents or pairs, with bootstrap intervals."""

from dataclasses import dataclass

import numpy as np

from fabric_train.training.statistics import FEWEST_DOCUMENTS, Interval, interval_of, resample


@dataclass(frozen=True)
class Estimate:
    """A figure of a model, with its interval, which is None for a small sample."""

    value: float
    ci: Interval | None

    def show(self, number_format: str) -> str:
        """Return the value and its interval in a format such as ``{:.1%}``."""
        value = number_format.format(self.value)
        if self.ci is None:
            return value
        low, high = (number_format.format(limit) for limit in self.ci)
        return f"{value} ({low} to {high})"


def mean_estimate(values: np.ndarray, seed: int) -> Estimate:
    """Return the mean of values [D], with a bootstrap interval if there are enough."""
    return ratio_estimate(values, np.ones(len(values)), seed)


def ratio_estimate(sums: np.ndarray, counts: np.ndarray, seed: int) -> Estimate:
    """Return all sums divided by all counts, such as a mean per token, with a bootstrap interval over documents.

    There is no interval if few documents count anything.

    Args:
        sums: The sum of each document's values, fp64 [D].
        counts: The number of values of each document, fp64 [D].
        seed: The seed of the bootstrap.
    """
    value = float(sums.sum() / counts.sum())
    if np.count_nonzero(counts) < FEWEST_DOCUMENTS:
        return Estimate(value, None)
    resampled_sums, resampled_counts = resample([sums, counts], seed).T
    return Estimate(value, interval_of(resampled_sums / resampled_counts))
