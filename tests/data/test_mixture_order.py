"""Phases of a mixture: shares that change at given steps, passes that go on, and the same windows from any step."""

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_train.data.data_order import KEYED, MOST_SHUFFLED, SHUFFLED, DataOrder, describe_changes
from fabric_train.data.mixture import Mixture
from fabric_train.data.mixture_order import MixtureOrder
from fabric_train.data.step_sampler import RowRead, TrainBatches, Window, WindowOrder
from tests.data.test_batch import numbered, row_numbers

NUM_STEPS = 40
FIRST_ROWS = [[84233583, 82968211, 81186463, 7845453], [76858878, 69565845, 56588012, 23091416]]
ROWS_HASH = "9bb8b0f0b1d9fcb8428ae01a7c9db6a4"


@st.composite
def orders(draw: st.DrawFn) -> MixtureOrder:
    num_rows = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=5)))
    an_epoch = st.lists(st.integers(0, 80), min_size=len(num_rows), max_size=len(num_rows)).filter(any)
    rows_per_epoch = tuple(draw(an_epoch))
    rows_per_window = draw(st.integers(1, 30))
    seed = draw(st.integers(0, 99))
    order = MixtureOrder((Mixture(num_rows, rows_per_epoch, rows_per_window, seed),))
    for last_step in sorted(draw(st.sets(st.integers(0, NUM_STEPS - 1), max_size=3))):
        order = order.followed_by(last_step, draw(an_epoch))
    return order


def phases_of(order: MixtureOrder) -> list[tuple[Mixture, range]]:
    """The mixture of each phase and its steps."""
    borders = [*order.phases_start_after, NUM_STEPS]
    steps = [range(start + 1, end + 1) for start, end in pairwise(borders)]
    return list(zip(order.mixtures, steps, strict=True))


@settings(deadline=None, max_examples=30)
@given(orders())
def test_every_window_of_a_phase_has_each_source_in_its_share(order: MixtureOrder) -> None:
    seen = np.zeros(len(order.num_rows), int)
    for mixture, steps in phases_of(order):
        total = sum(mixture.rows_per_epoch)
        for step in steps:
            assert order.rows_until(step - 1) == seen.tolist()
            counts = order.count(order.rows_of(step))
            for count, wanted in zip(counts, mixture.rows_per_epoch, strict=True):
                share = Fraction(wanted * sum(counts), total)
                assert math.floor(share) <= count <= math.ceil(share)  # so a share of 0 has no row
            seen += counts
    assert order.rows_until(NUM_STEPS) == seen.tolist()


@settings(deadline=None, max_examples=30)
@given(orders())
def test_a_phase_goes_on_in_the_passes_of_the_phase_before(order: MixtureOrder) -> None:
    read = np.concatenate([order.rows_of(step) for step in range(1, NUM_STEPS + 1)]).tolist()
    alone = Mixture(order.num_rows, order.num_rows, 30, order.mixtures[0].seed)  # whole passes over every source
    passes = np.concatenate([alone.rows_in(0, window) for window in range(alone.windows_per_epoch)]).tolist()
    first = 0
    for num_rows in order.num_rows:
        of_source = [row for row in read if first <= row < first + num_rows]
        for start in range(0, len(of_source), num_rows):
            one_pass = of_source[start : start + num_rows]
            assert len(set(one_pass)) == len(one_pass)
        # the q-th row that is read of a source does not depend on shares and phases
        first_pass = [row for row in passes if first <= row < first + num_rows]
        assert of_source[:num_rows] == first_pass[: len(of_source)]
        first += num_rows


@settings(deadline=None, max_examples=30)
@given(orders())
def test_a_phase_begins_an_epoch(order: MixtureOrder) -> None:
    epoch = -1
    epochs = []
    for mixture, steps in phases_of(order):
        for window in range(len(steps)):  # of the phase
            if window % mixture.windows_per_epoch == 0:
                epoch += 1
            epochs.append(epoch)
    ends = [step for step in range(1, NUM_STEPS) if epochs[step] > epochs[step - 1]]
    assert [order.epoch_of(step) for step in range(1, NUM_STEPS + 1)] == epochs
    assert sorted({*order.epoch_ends(NUM_STEPS)} - {NUM_STEPS}) == ends


@pytest.mark.parametrize("num_workers", [0, 2])
def test_windows_across_a_phase_border_are_the_same_from_any_step(num_workers: int) -> None:
    order = MixtureOrder((Mixture((20, 11), (20, 11), 4, seed=3),)).followed_by(3, (0, 11)).followed_by(6, (5, 5))

    def windows(after_step: int, rank: int = 1) -> list[Window]:
        cut: dict[str, Any] = {"micro_batch_size": 1, "world_size": 2, "rank": rank, "seed": 3, "mixture": order}
        batches = TrainBatches(numbered(31), WindowOrder(31, 4, **cut), num_workers, pin_memory=False)
        return list(batches.windows(after_step, 10))

    whole = windows(0)
    assert [window.step for window in whole if window.ends_epoch] == [3, 6, 9]
    for step in range(10) if num_workers == 0 else (2, 3):
        for again, window in zip(windows(step), whole[step:], strict=True):
            assert (again.step, again.epoch, again.rows_hash) == (window.step, window.epoch, window.rows_hash)
            assert again.rows_of_sources == window.rows_of_sources
            for index, batch in enumerate(window.batches):
                assert again.batches[index].input_ids.tolist() == batch.input_ids.tolist()
                assert row_numbers(batch) == window.rows_of(index, world_size=2, rank=1)


def test_an_appended_phase_leaves_the_steps_before_it_as_they_were() -> None:
    order = MixtureOrder((Mixture((20, 11), (20, 11), 4, seed=3),)).followed_by(5, (10, 11))
    longer = order.followed_by(8, (0, 11))
    for step in range(9):
        assert longer.rows_hash(step) == order.rows_hash(step)
        assert longer.rows_until(step) == order.rows_until(step)
    assert longer.rows_hash(9) != order.rows_hash(9)
    assert order.followed_by(5, (0, 11)).phases_start_after == (0, 5)  # in place of a phase without a step


@settings(deadline=None, max_examples=20)
@given(orders(), st.integers(1, NUM_STEPS))
def test_steps_of_a_row_are_those_whose_windows_have_it(mixture: MixtureOrder, num_steps: int) -> None:
    num_rows = sum(mixture.num_rows)
    rows_per_window = mixture.mixtures[0].rows_per_window
    check_inverse(WindowOrder(num_rows, rows_per_window, 1, 1, 0, 0, mixture), num_rows, num_steps)


@pytest.mark.parametrize(("num_rows", "rows_per_window"), [(1, 1), (7, 3), (12, 4), (5, 9)])
def test_steps_of_a_row_without_a_mixture_are_those_whose_windows_have_it(num_rows: int, rows_per_window: int) -> None:
    for num_steps in (1, 3, 10):
        check_inverse(WindowOrder(num_rows, rows_per_window, 1, 1, 0, seed=9), num_rows, num_steps)


@settings(deadline=None, max_examples=13)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 2**64 - 1))
def test_an_order_by_index_reads_each_row_once_an_epoch(num_rows: int, rows_per_window: int, seed: int) -> None:
    order = WindowOrder(num_rows, rows_per_window, 1, 1, 0, seed, version=KEYED)
    per_epoch = -(-num_rows // rows_per_window)
    for epoch in range(2):
        steps = range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1)
        rows = np.concatenate([order.rows_of(step) for step in steps]).tolist()
        assert sorted(rows) == list(range(num_rows))
        assert rows == order.epoch_order(epoch).tolist()
    check_inverse(order, num_rows, 2 * per_epoch)


def test_rows_of_the_order_by_index_never_change() -> None:
    order = WindowOrder(10**8, 4, 1, 1, 0, seed=7, version=KEYED)  # runs that have begun go on in it
    assert [order.rows_of(step).tolist() for step in (1, 10**6)] == FIRST_ROWS
    assert order.rows_hash(10**6) == ROWS_HASH


@pytest.mark.parametrize("version", [SHUFFLED, KEYED])
def test_the_hash_of_a_checkpoint_goes_on_as_that_of_all_steps(version: int) -> None:
    order = WindowOrder(31, 4, 2, 1, 0, seed=3, version=version)
    known_hash = order.rows_hash(6)
    assert order.rows_hash(11, 6, known_hash) == order.rows_hash(11)
    for data_starts_after in (0, 20):
        known_step = data_starts_after + 6
        batches = TrainBatches(
            numbered(31),
            order,
            num_workers=0,
            pin_memory=False,
            data_starts_after=data_starts_after,
            known_step=known_step,
            known_hash=known_hash,
        )
        windows = batches.windows(known_step, data_starts_after + 9)
        assert [window.rows_hash for window in windows] == [order.rows_hash(step) for step in (7, 8, 9)]


def test_a_run_keeps_the_order_that_it_began_with() -> None:
    many_rows = MOST_SHUFFLED + 1
    assert DataOrder.for_dataset("fingerprint", many_rows, 8, 0).version == KEYED
    assert DataOrder.for_dataset("fingerprint", MOST_SHUFFLED, 8, 0).version == SHUFFLED
    earlier = DataOrder("fingerprint", many_rows, 8, 0)  # of a version of the program that had no other
    assert DataOrder.for_dataset("fingerprint", many_rows, 8, 0, earlier) == earlier
    by_index = DataOrder("fingerprint", 10, 8, 0, KEYED)  # of a version with another limit
    assert DataOrder.for_dataset("fingerprint", 10, 8, 0, by_index) == by_index
    assert DataOrder.for_dataset("another", many_rows, 8, 0, earlier).version == KEYED


def test_numpy_shuffles_int32_as_it_permutes_int64() -> None:
    order = WindowOrder(1000, 8, 1, 1, 0, seed=3).epoch_order(2)
    assert order.tolist() == np.random.default_rng([3, 2]).permutation(1000).tolist()


def check_inverse(order: WindowOrder, num_rows: int, num_steps: int) -> None:
    """Compare the steps of every row with a scan over all windows."""
    scanned: list[RowRead] = []
    for step in range(1, num_steps + 1):
        for row in sorted(order.rows_of(step).tolist()):
            scanned.append(RowRead(step, order.epoch_of(step), row))
    assert order.reads_of(np.arange(num_rows), num_steps) == scanned
    assert order.reads_of(np.arange(0, num_rows, 3), num_steps) == [read for read in scanned if read.row % 3 == 0]


def test_other_data_are_one_line_whatever_follows_from_them() -> None:
    saved = DataOrder("aaaa", 10, 2, 0)
    (line,) = describe_changes(saved, DataOrder("bbbb", 12, 2, 0, 2, [5, 7]), 3)
    assert "--train_data_dir is another token dataset" in line
    both = describe_changes(saved, DataOrder("bbbb", 12, 2, 1), 3)
    assert len(both) == 2  # the seed is a cause of its own
