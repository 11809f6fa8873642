"""Advantages follow the formulas of their papers."""

from typing import get_args, get_type_hints

import numpy as np
import pytest

from fabric_train.arguments import RolloutArguments
from fabric_train.rollouts.advantages import ADVANTAGES, compute_advantages, groups_without_variance

TOTALS = np.array([[0.0, 1.0, 1.0, 2.0], [0.1, 0.1, 0.1, 0.1], [0.0, 0.0, 0.0, 1.0]])


def test_the_mean_advantage_is_the_reward_minus_the_mean_of_the_group() -> None:
    """Worked by hand: the means are 1, 0.1 and 0.25."""
    advantages = compute_advantages(TOTALS, "mean")
    assert advantages.dtype == np.float64
    expected = [[-1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [-0.25, -0.25, -0.25, 0.75]]
    assert advantages.tolist() == expected


def test_group_norm_also_divides_by_the_deviation_of_the_sample() -> None:
    """Worked by hand: the squared deviations add up to 2 and 0.75, so the variances of n - 1 = 3 are 2/3 and 1/4."""
    advantages = compute_advantages(TOTALS, "group_norm")
    first = np.array([-1.0, 0.0, 0.0, 1.0]) / ((2 / 3) ** 0.5 + 1e-4)
    last = np.array([-0.25, -0.25, -0.25, 0.75]) / (0.5 + 1e-4)
    np.testing.assert_allclose(advantages, [first, [0.0] * 4, last], rtol=1e-14)  # five roundings of fp64


def test_the_argument_offers_each_advantage_of_the_table() -> None:
    assert get_args(get_type_hints(RolloutArguments)["advantage"]) == tuple(ADVANTAGES)


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_groups_without_variance_have_advantage_zero(kind: str) -> None:
    assert groups_without_variance(TOTALS).tolist() == [False, True, False]
    # 0.1 * 8 / 8 is not 0.1 in fp64 for every way of adding
    for num_completions in (1, 3, 7, 8):
        equal = np.full((2, num_completions), 0.1)
        assert compute_advantages(equal, kind).tolist() == np.zeros((2, num_completions)).tolist()
        assert groups_without_variance(equal).all()


def test_the_advantages_of_a_group_do_not_depend_on_other_groups() -> None:
    for row in range(len(TOTALS)):
        alone = compute_advantages(TOTALS[row : row + 1], "group_norm")
        assert alone.tolist() == compute_advantages(TOTALS, "group_norm")[row : row + 1].tolist()
