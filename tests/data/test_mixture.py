"""The order of a mixture, computed by index: shares of every window, passes over a source, permutations."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_train.data.mixture import (
    Mixture,
    apportion,
    floor_sum,
    rows_of_shares,
    rows_of_token_shares,
    spreading_step,
)
from fabric_train.data.mixture_order import MixtureOrder
from fabric_train.data.permutation import permute, unpermute
from fabric_train.data.step_sampler import WindowOrder

ROWS = [
    [206109775, 905940152, 350661467, 127652371, 583650407, 1000000011, 222395621, 94837719, 480121329, 863839449],
    [944887984, 761446509, 90407250, 749838768, 93331503, 530271677, 959334099, 323843396, 896463153, 311102691],
]
HASH = "2c4771eead685146dbc45db7ea99ae7b"


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    sizes = draw(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 60)), min_size=1, max_size=6))
    num_rows, rows_per_epoch = zip(*sizes, strict=True)
    return Mixture(num_rows, rows_per_epoch, draw(st.integers(1, 40)), draw(st.integers(0, 2**63 - 1)))


def epoch_of(mixture: Mixture, epoch: int) -> list[np.ndarray]:
    return [mixture.rows_in(epoch, window) for window in range(mixture.windows_per_epoch)]


@settings(deadline=None, max_examples=30)
@given(mixtures())
def test_every_window_has_each_source_in_its_share_to_within_a_row(mixture: Mixture) -> None:
    total = sum(mixture.rows_per_epoch)
    for rows in epoch_of(mixture, 0):
        for count, wanted in zip(mixture.count(rows), mixture.rows_per_epoch, strict=True):
            share = Fraction(wanted * len(rows), total)
            assert math.floor(share) <= count <= math.ceil(share)


@settings(deadline=None, max_examples=30)
@given(mixtures())
def test_counts_before_a_window_are_those_of_the_windows(mixture: Mixture) -> None:
    seen = np.zeros(len(mixture.num_rows), int)  # rows of each source so far
    num_steps = 0
    for epoch in range(2):
        remaining = sum(mixture.rows_per_epoch)
        for rows in epoch_of(mixture, epoch):
            assert mixture.rows_until(num_steps) == seen.tolist()
            assert len(rows) == min(mixture.rows_per_window, remaining)
            remaining -= len(rows)
            seen += mixture.count(rows)
            num_steps += 1
        assert seen.tolist() == [(epoch + 1) * rows for rows in mixture.rows_per_epoch]
    assert mixture.rows_until(num_steps) == seen.tolist()


@settings(deadline=None, max_examples=30)
@given(mixtures())
def test_no_row_is_read_again_before_all_of_its_source_are_read(mixture: Mixture) -> None:
    read = np.concatenate([rows for epoch in range(3) for rows in epoch_of(mixture, epoch)]).tolist()
    first = 0
    for num_rows in mixture.num_rows:
        of_source = [row for row in read if first <= row < first + num_rows]
        for start in range(0, len(of_source), num_rows):
            one_pass = of_source[start : start + num_rows]
            assert len(set(one_pass)) == len(one_pass)
        first += num_rows
    assert all(0 <= row < first for row in read)


def test_steps_of_a_row_among_a_billion_are_found_by_index() -> None:
    mixture = Mixture((10**9, 7, 300), (10**9, 14, 45), 10, seed=2**63 - 1)
    assert mixture.steps_of(ROWS[0][0], 1) == [1]
    step = 2 * mixture.windows_per_epoch + 100_000_000
    assert mixture.steps_of(ROWS[1][3], step)[-1] == step
    assert mixture.steps_of(ROWS[1][3], step - 1) == mixture.steps_of(ROWS[1][3], step)[:-1]


def test_epochs_and_passes_have_orders_of_their_own() -> None:
    mixture = Mixture((1000, 1000), (1000, 2000), 50, seed=7)
    epochs = [np.concatenate(epoch_of(mixture, epoch)) for epoch in range(2)]
    passes = [rows[rows < 1000].tolist() for rows in epochs]
    second = [row - 1000 for row in epochs[0].tolist() if row >= 1000]
    orders = [*passes, second[:1000], second[1000:]]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(1000)) for order in orders)
    other = Mixture((1000, 1000), (1000, 2000), 50, seed=8)
    assert not np.array_equal(other.rows_in(0, 0), mixture.rows_in(0, 0))


def test_rows_of_this_version_of_the_order_never_change() -> None:
    # runs that have begun go on in their order: a change needs another version
    mixture = Mixture((10**9, 7, 300), (10**9, 14, 45), 10, seed=2**63 - 1)
    assert mixture.rows_in(0, 0).tolist() == ROWS[0]
    assert mixture.rows_in(2, 99_999_999).tolist() == ROWS[1]
    assert MixtureOrder((mixture,)).rows_hash(1_000_000) == HASH


@pytest.mark.parametrize("num_rows", [1, 2, 3, 10, 17, 256, 1000, 65_537])
def test_permutation_by_index_is_a_permutation(num_rows: int) -> None:
    for key in (0, 1, 2**64 - 1):
        index = np.arange(num_rows)
        permuted = permute(index, np.full(num_rows, num_rows), np.full(num_rows, key, np.uint64))
        assert sorted(permuted.tolist()) == index.tolist()
        back = unpermute(permuted, np.full(num_rows, num_rows), np.full(num_rows, key, np.uint64))
        assert back.tolist() == index.tolist()


def test_permutations_are_as_even_as_random_ones() -> None:
    # chi-squared tests of the place of an index, and of the difference of neighbours: 30 degrees of freedom, mean 30
    keys = np.random.default_rng(0).integers(0, 2**64, 31_000, np.uint64)
    sizes = np.full(len(keys), 31)
    first, second = (permute(np.full(len(keys), index), sizes, keys) for index in (3, 4))
    for values in (first, second):
        assert ((np.bincount(values, minlength=31) - 1000) ** 2).sum() / 1000 < 60
    differences = np.bincount((second - first) % 31, minlength=31)[1:]
    assert ((differences - 31_000 / 30) ** 2).sum() / (31_000 / 30) < 60


@settings(deadline=None)
@given(st.integers(1, 500), st.data())
def test_floor_sum_equals_the_sum(modulus: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, modulus))
    start = data.draw(st.integers(0, 10 * modulus))
    step = spreading_step(modulus)
    assert math.gcd(step, modulus) == 1
    assert floor_sum(count, modulus, step, start) == sum((start + step * i) // modulus for i in range(count))


def test_a_source_is_spread_over_the_epoch() -> None:
    # 1,000 rows in 15,000 windows of 64, and 99 other sources: each stretch has its share to within a few rows
    generator = np.random.default_rng(3)
    rows = tuple(generator.integers(1000, 20_000, 100).tolist())
    mixture = Mixture(rows, rows, 64, seed=0)
    windows = mixture.windows_per_epoch
    shares = np.array(rows) / sum(rows) * 64
    before = np.array([mixture.rows_before(window) for window in range(0, windows, 97)])
    drift = before - np.arange(0, windows, 97)[:, None] * shares
    assert np.abs(drift).max() < 4


def test_any_stretch_of_windows_has_each_source_in_its_share_to_a_few_rows() -> None:
    generator = np.random.default_rng(0)
    for num_sources in (2, 3, 5, 30) * 3:
        rows = tuple(generator.integers(1, 400, num_sources).tolist())
        mixture = Mixture(rows, rows, int(generator.choice([4, 8, 64])), seed=0)
        before = np.array([mixture.rows_before(window) for window in range(mixture.windows_per_epoch + 1)])
        drift = before - before.sum(axis=1, keepdims=True) * np.array(rows) / sum(rows)
        assert (drift.max(axis=0) - drift.min(axis=0)).max() < 5  # of the worst stretch


def test_shares_say_how_many_rows_an_epoch_takes() -> None:
    assert rows_of_shares([1000, 1000, 1000, 30], [1.0, 0.15, 2.0, 0.01]) == [1000, 150, 2000, 0]
    assert rows_of_token_shares([100, 300, 600], [0.7, 0.2, 0.1]) == [700, 200, 100]
    assert rows_of_token_shares([100, 300, 600], [7, 2, 1]) == [700, 200, 100]
    assert sum(rows_of_token_shares([101, 307, 611], [0.3, 0.3, 0.4])) == 101 + 307 + 611
    assert apportion([1, 1, 1], 2) == [0, 1, 1]


def test_any_number_of_ranks_reads_the_same_windows() -> None:
    mixture = Mixture((30, 50, 9), (30, 25, 18), 12, seed=5)
    order = MixtureOrder((mixture,)).followed_by(4, (0, 40, 9))
    for world_size, micro_batch_size in ((1, 3), (2, 2), (3, 1), (4, 3)):
        orders = [WindowOrder(73, 12, micro_batch_size, world_size, rank, 5, order) for rank in range(world_size)]
        batches_of_ranks = [rank_order.batches(0, 12) for rank_order in orders]
        for step in range(1, 13):
            expected_rows = order.rows_of(step).tolist()
            rows: list[int] = []
            for _ in range(orders[0].num_batches(len(expected_rows))):
                for batches in batches_of_ranks:
                    rows += next(batches)
            assert rows == expected_rows


def test_hash_of_a_mixture_needs_no_replay_and_depends_on_the_rows() -> None:
    mixture = Mixture((30, 50), (30, 25), 12, seed=5)
    order = WindowOrder(55, 12, 1, 2, 1, 5, MixtureOrder((mixture,)))
    hashes = [order.rows_hash(step) for step in range(12)]
    assert len(set(hashes)) == 12
    assert order.rows_hash_after(7, np.arange(3), "") == hashes[7]
    counts = Counter(MixtureOrder((Mixture((30, 50), (30, 25), 12, seed),)).rows_hash(7) for seed in range(5))
    assert max(counts.values()) == 1
    huge = MixtureOrder((Mixture((10**9,) * 3, (10**9,) * 3, 512, seed=5),))
    assert huge.rows_hash(5_000_000) != huge.rows_hash(5_000_001)
