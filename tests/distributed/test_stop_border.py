"""All ranks stop before the same micro-batch, wherever each of them is when the signal comes."""

import random
import threading
import time

import pytest

from fabric_train.distributed.signals import RunStopped, StopBorder

NUM_MICRO_BATCHES = 4
Stopped = list[tuple[int, int] | None]


def train_until_stopped(borders: list[StopBorder], stopped: Stopped, rank: int, meet: threading.Barrier) -> None:
    """Pass one border after the other; every micro-batch has a collective, which needs all ranks."""
    for step in range(1, 10_000):
        for micro_batch in range(NUM_MICRO_BATCHES):
            try:
                borders[rank].enter(step, micro_batch)
            except RunStopped:
                stopped[rank] = (step, micro_batch)
                return
            meet.wait(timeout=20)


@pytest.mark.parametrize("seed", range(20))
def test_all_ranks_stop_before_the_same_micro_batch(seed: int) -> None:
    """The ranks are asked one after the other while they run: some are a micro-batch ahead then."""
    draw = random.Random(seed)
    borders = [StopBorder() for _ in range(4)]
    stopped: Stopped = [None] * len(borders)
    meet = threading.Barrier(len(borders))
    ranks = [
        threading.Thread(target=train_until_stopped, args=(borders, stopped, rank, meet), daemon=True)
        for rank in range(len(borders))
    ]
    for thread in ranks:
        thread.start()
    time.sleep(draw.random() / 50)
    passed = []
    for border in draw.sample(borders, len(borders)):
        passed.append(border.freeze())
        time.sleep(draw.random() / 500)
    for border in draw.sample(borders, len(borders)):
        border.stop_after(max(passed), signal=2)
        time.sleep(draw.random() / 500)
    for thread in ranks:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in ranks)
    step, micro_batch = max(passed)
    following = (step, micro_batch + 1) if micro_batch + 1 < NUM_MICRO_BATCHES else (step + 1, 0)
    assert stopped == [following] * len(borders)


def test_a_frozen_rank_waits_at_its_next_border_only() -> None:
    border = StopBorder()
    border.enter(1, 0)
    assert border.freeze() == (1, 0)
    waiting = threading.Thread(target=border.enter, args=(1, 1), daemon=True)
    waiting.start()
    waiting.join(timeout=0.2)
    assert waiting.is_alive()
    border.stop_after((1, 1), signal=15)
    waiting.join(timeout=5)
    assert not waiting.is_alive()
    with pytest.raises(RunStopped):
        border.enter(1, 2)


def test_a_stop_is_due_after_the_last_border() -> None:
    border = StopBorder()
    border.enter(1, -2)
    border.freeze()
    assert not border.is_due()  # the ranks have not agreed yet
    border.stop_after((1, -1), signal=15)
    assert not border.is_due()  # another rank is ahead
    border.enter(1, -1)
    assert border.is_due()


def test_a_rank_that_hears_of_the_stop_from_another_rank_waits_for_the_signal() -> None:
    border = StopBorder()
    signals: list[int] = []

    def stop() -> None:
        with pytest.raises(RunStopped):
            border.stop()
        signals.append(border.signal)

    stopping = threading.Thread(target=stop, daemon=True)
    stopping.start()
    stopping.join(timeout=0.2)
    assert stopping.is_alive()
    border.freeze()
    border.stop_after((1, 0), signal=15)
    stopping.join(timeout=5)
    assert signals == [15]
