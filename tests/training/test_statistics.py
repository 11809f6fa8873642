"""Intervals of losses: paired, over documents, of ratios of sums."""

import math

import numpy as np
import pytest

from fabric_train.training.statistics import (
    NUM_RESAMPLES,
    DocumentSums,
    accuracy_interval,
    compare,
    interval_of,
    resample,
)

GENERATOR = np.random.default_rng(7)
TOKENS = GENERATOR.integers(20, 400, 300).astype(np.float64)
NATS = TOKENS * GENERATOR.normal(3.0, 0.5, 300)


def sums(nats: np.ndarray, tokens: np.ndarray = TOKENS, bytes_per_token: float = 4.0) -> DocumentSums:
    return DocumentSums(nats, tokens, TOKENS * bytes_per_token)


def test_resamples_are_sums_over_the_same_documents_for_all_models() -> None:
    values = np.arange(1.0, 5.0)
    drawn = resample([values, 10 * values], seed=0)
    assert drawn.shape == (NUM_RESAMPLES, 2)
    assert (drawn[:, 1] == 10 * drawn[:, 0]).all()
    generator = np.random.default_rng(0)
    expected = [values[generator.integers(4, size=4)].sum() for _ in range(NUM_RESAMPLES)]
    assert drawn[:, 0].tolist() == expected
    assert (resample([values], seed=1) != resample([values], seed=0)).any()


def test_the_interval_is_as_wide_as_the_ratio_estimators_error() -> None:
    (found,) = compare([sums(NATS)], seed=0)
    assert found.loss is not None
    ratio = NATS.sum() / TOKENS.sum()
    error = math.sqrt(((NATS - ratio * TOKENS) ** 2).sum()) / TOKENS.sum()  # Cochran 1977, section 6.4
    assert found.total.loss == pytest.approx(ratio)
    assert (found.loss[1] - found.loss[0]) / 2 == pytest.approx(1.96 * error, rel=0.08)
    assert sum(found.loss) / 2 == pytest.approx(ratio, abs=error / 4)


def test_a_small_difference_on_every_document_excludes_0() -> None:
    better = NATS - TOKENS * GENERATOR.normal(0.01, 0.02, 300)
    _, found, same = compare([sums(NATS), sums(better), sums(NATS)], seed=0)
    assert found.loss is not None
    assert found.difference is not None
    assert same.difference is not None
    assert found.difference.excludes_0
    assert found.difference.interval[0] < found.difference.value < found.difference.interval[1] < 0
    assert found.loss[0] < NATS.sum() / TOKENS.sum() < found.loss[1]  # the intervals of the models overlap
    assert (same.difference.value, same.difference.interval, same.difference.excludes_0) == (0, (0, 0), False)


def test_noise_is_no_difference() -> None:
    noisy = NATS + TOKENS * GENERATOR.normal(0, 0.1, 300)
    difference = compare([sums(NATS), sums(noisy)], seed=0)[1].difference
    assert difference is not None
    assert not difference.excludes_0


def test_models_with_other_tokens_differ_in_bits_per_byte_only() -> None:
    first, other = compare([sums(NATS), sums(NATS, TOKENS * 1.5)], seed=0)
    assert other.total.loss < first.total.loss
    assert other.difference is not None
    assert (other.difference.unit, other.difference.value) == ("bits_per_byte", 0)
    unknown = [sums(NATS, tokens, math.nan) for tokens in (TOKENS, TOKENS, TOKENS * 1.5)]
    found = compare(unknown, seed=0)
    assert found[0].bits_per_byte is None
    assert found[1].difference is not None
    assert found[1].difference.unit == "loss"
    assert found[2].difference is None


def test_few_documents_get_no_interval() -> None:
    few = DocumentSums(NATS[:9], TOKENS[:9], TOKENS[:9])
    assert [(found.loss, found.difference) for found in compare([few, few], seed=0)] == [(None, None)] * 2


def test_an_accuracy_has_the_interval_of_pairs_that_are_drawn_again() -> None:
    low, high = accuracy_interval(0.6, 0.1, 1000) or (0.0, 0.0)
    one_by_one = resample([np.repeat([1.0, 0.5, 0.0], [550, 100, 350])], seed=1)[:, 0] / 1000
    assert (low, high) == pytest.approx(interval_of(one_by_one), abs=0.005)
    assert 0.55 < low < 0.58 < 0.62 < high < 0.65
    assert accuracy_interval(0.6, 0.1, 9) is None
