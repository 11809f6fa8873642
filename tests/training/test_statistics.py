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
    resampled_sums = resample([values, 10 * values], seed=0)
    assert resampled_sums.shape == (NUM_RESAMPLES, 2)
    assert (resampled_sums[:, 1] == 10 * resampled_sums[:, 0]).all()
    generator = np.random.default_rng(0)
    expected = [values[generator.integers(4, size=4)].sum() for _ in range(NUM_RESAMPLES)]
    assert resampled_sums[:, 0].tolist() == expected
    assert (resample([values], seed=1) != resample([values], seed=0)).any()


def test_the_interval_is_as_wide_as_the_ratio_estimators_error() -> None:
    (compared,) = compare([sums(NATS)], seed=0)
    assert compared.loss is not None
    low, high = compared.loss
    ratio = NATS.sum() / TOKENS.sum()
    error = math.sqrt(((NATS - ratio * TOKENS) ** 2).sum()) / TOKENS.sum()  # Cochran 1977, section 6.4
    assert compared.total.loss == pytest.approx(ratio)
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.08)
    assert (low + high) / 2 == pytest.approx(ratio, abs=error / 4)


def test_a_small_difference_on_every_document_excludes_0() -> None:
    better_nats = NATS - TOKENS * GENERATOR.normal(0.01, 0.02, 300)
    _, better, equal = compare([sums(NATS), sums(better_nats), sums(NATS)], seed=0)
    assert better.loss is not None
    assert better.difference is not None
    low, high = better.difference.interval
    assert better.difference.excludes_0
    assert low < better.difference.value < high < 0
    assert better.loss[0] < NATS.sum() / TOKENS.sum() < better.loss[1]  # the intervals of the models overlap
    # a model with the same losses
    assert equal.difference is not None
    assert equal.difference.value == 0
    assert equal.difference.interval == (0, 0)
    assert not equal.difference.excludes_0


def test_noise_is_no_difference() -> None:
    noisy = NATS + TOKENS * GENERATOR.normal(0, 0.1, 300)
    difference = compare([sums(NATS), sums(noisy)], seed=0)[1].difference
    assert difference is not None
    assert not difference.excludes_0


def test_models_with_other_tokens_differ_in_bits_per_byte_only() -> None:
    base, with_more_tokens = compare([sums(NATS), sums(NATS, TOKENS * 1.5)], seed=0)
    assert with_more_tokens.total.loss < base.total.loss
    assert with_more_tokens.difference is not None
    assert with_more_tokens.difference.unit == "bits_per_byte"
    assert with_more_tokens.difference.value == 0

    # where the bytes are not known
    without_bytes = [sums(NATS, tokens, math.nan) for tokens in (TOKENS, TOKENS, TOKENS * 1.5)]
    base, with_same_tokens, with_more_tokens = compare(without_bytes, seed=0)
    assert base.bits_per_byte is None
    assert with_same_tokens.difference is not None
    assert with_same_tokens.difference.unit == "loss"
    assert with_more_tokens.difference is None


def test_few_documents_get_no_interval() -> None:
    nine_documents = DocumentSums(NATS[:9], TOKENS[:9], TOKENS[:9])
    for compared in compare([nine_documents, nine_documents], seed=0):
        assert compared.loss is None
        assert compared.difference is None


def test_an_accuracy_has_the_interval_of_pairs_that_are_drawn_again() -> None:
    # of 1,000 pairs, 100 ties count half: 550 + 100 / 2 = 600
    low, high = accuracy_interval(0.6, 0.1, 1000) or (0.0, 0.0)
    pairs = np.repeat([1.0, 0.5, 0.0], [550, 100, 350])
    resampled_accuracies = resample([pairs], seed=1)[:, 0] / 1000
    assert (low, high) == pytest.approx(interval_of(resampled_accuracies), abs=0.005)
    assert 0.55 < low < 0.58 < 0.62 < high < 0.65
    assert accuracy_interval(0.6, 0.1, 9) is None
