"""Choose the rows of each optimizer step and split them into the micro-batches of each rank.

A *window* is the rows that one optimizer step consumes over all ranks; the last one of an epoch may be shorter. A
*micro-batch* is the rows of one forward pass on one rank; all ranks have equally many in a window. The order of the
rows is a function of (seed, epoch), and the window is a function of the step. Neither depends on the number of ranks.
``fabric_train.data`` has what a checkpoint keeps of the order.
One token dataset without shares has version 1 of the order, numpy's permutation of all rows for each epoch. With more
than ``MOST_SHUFFLED`` rows it has version 3, a permutation that is computed by index. A mixture has version 2; see
``mixture`` for both. Example: a window of 5 rows, micro-batches of 1 row, 2 ranks::

    rows in order   17 4 23 8 11
    rank 0          [17] [23] [11]
    rank 1          [4]  [8]  []      an empty micro-batch: the rank takes part without supervised tokens
"""

import errno
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch.utils.data import DataLoader, Dataset

from fabric_train.cli.errors import InputError, RunError
from fabric_train.data import SHUFFLED
from fabric_train.data.batch import Batch, hash_of
from fabric_train.data.mixture_order import MixtureOrder, rows_hash_by_halves
from fabric_train.data.permutation import permutation_keys, permute, unpermute
from fabric_train.data.token_dataset import IndexedRows
from fabric_train.distributed.signals import ignore_signals_in_worker

VALIDATION_VERSION = "3"
"""Of the rows that ``--eval_iters`` chooses: version 1 took the first of the split, version 2 shares of each source."""


@dataclass(frozen=True)
class Window:
    """The data of one optimizer step on one rank.

    ``step`` counts from 1, ``epoch`` from 0. ``rows``, int64 [rows of all ranks], are the window's rows in order:
    indices into the train split, or a stream's lanes. ``batches`` are this rank's micro-batches. ``cursors`` are a
    stream's positions after this window, see ``StreamBatch``; None for a token dataset. ``rows_hash`` is the hash of
    ``WindowOrder``; None for a stream. ``rows_of_sources`` counts the rows of each source of a mixture.
    """

    step: int
    epoch: int
    ends_epoch: bool
    rows: np.ndarray
    micro_batch_size: int
    batches: list[Batch]
    cursors: np.ndarray | None = None
    rows_hash: str | None = None
    rows_of_sources: list[int] | None = None

    @property
    def num_rows(self) -> int:
        """The number of rows over all ranks."""
        return len(self.rows)

    def rows_of(self, batch: int, world_size: int, rank: int) -> list[int]:
        """Return the rows of a rank's micro-batch number ``batch``, counted from 0."""
        indices = positions(batch, self.micro_batch_size, world_size, rank)
        return self.rows[indices.start : indices.stop].tolist()


class WindowSource(Protocol):
    """A source of windows for the training loop."""

    def windows(self, after_step: int, last_step: int) -> Iterator[Window]:
        """Yield the windows of the steps ``after_step + 1`` to ``last_step``."""


def positions(batch: int, micro_batch_size: int, world_size: int, rank: int) -> range:
    """Return the positions in a full window of the rows in a rank's micro-batch number ``batch``, counted from 0."""
    begin = (batch * world_size + rank) * micro_batch_size
    return range(begin, begin + micro_batch_size)


def rank_at(position: int, micro_batch_size: int, world_size: int) -> int:
    """Return the rank that has the row at a position in a window: the inverse of :func:`positions`."""
    return position // micro_batch_size % world_size


@dataclass(frozen=True)
class RowRead:
    """A step, counted from 1, that reads a row, and its epoch, counted from 0."""

    step: int
    epoch: int
    row: int


@dataclass(frozen=True)
class WindowOrder:
    """The rows of every window and micro-batch, as functions of the step (counted from 1), the seed and the rank.

    ``num_rows`` are an epoch's, ``world_size`` and ``rank`` count data ranks. A ``mixture`` decides the rows; without
    one, the ``version`` of the order does.
    """

    num_rows: int
    rows_per_window: int
    micro_batch_size: int
    world_size: int
    rank: int
    seed: int
    mixture: MixtureOrder | None = None
    version: int = SHUFFLED

    def rows_of(self, step: int) -> np.ndarray:
        """Return the row indices of a step's window over all ranks, int64 in order."""
        if self.mixture:
            return self.mixture.rows_of(step)
        epoch, window = divmod(step - 1, self._windows_per_epoch)
        start = window * self.rows_per_window
        return self._rows_at(epoch, start, min(start + self.rows_per_window, self.num_rows))

    def epoch_of(self, step: int) -> int:
        """Return the epoch of a step, counted from 0."""
        return self.mixture.epoch_of(step) if self.mixture else (step - 1) // self._windows_per_epoch

    def epoch_order(self, epoch: int) -> np.ndarray:
        """Return the row indices of an epoch without a mixture: a permutation [num_rows] of seed and epoch."""
        return self._rows_at(epoch, 0, self.num_rows)

    def _rows_at(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return the rows at the places ``start`` to ``stop - 1`` of an epoch, int64."""
        if self.version == SHUFFLED:
            return _permutation(self.num_rows, self.seed, epoch)[start:stop].astype(np.int64)
        places = np.arange(start, stop)
        return permute(places, *self._sizes_and_keys(epoch, len(places)))

    def _places_of(self, epoch: int, rows: np.ndarray) -> list[int]:
        """Return the places of some rows in an epoch: the inverse of ``_rows_at``."""
        if self.version == SHUFFLED:
            return np.flatnonzero(np.isin(_permutation(self.num_rows, self.seed, epoch), rows)).tolist()
        return unpermute(rows, *self._sizes_and_keys(epoch, len(rows))).tolist()

    def _sizes_and_keys(self, epoch: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        key = permutation_keys(self.seed, np.zeros(1, np.int64), np.array([epoch]))
        return np.full(count, self.num_rows), np.repeat(key, count)

    def reads_of(self, rows: np.ndarray, num_steps: int) -> list[RowRead]:
        """Return which of the first ``num_steps`` steps read some rows; O(epochs × rows) with version 1."""
        if self.mixture:
            found = [(step, row) for row in rows.tolist() for step in self.mixture.steps_of(row, num_steps)]
        else:
            found = [
                (epoch * self._windows_per_epoch + place // self.rows_per_window + 1, row)
                for epoch in range(self.epoch_of(num_steps) + 1)
                for place in self._places_of(epoch, rows)
                for row in self._rows_at(epoch, place, place + 1).tolist()
            ]
        return [RowRead(step, self.epoch_of(step), row) for step, row in sorted(found) if step <= num_steps]

    def rows_hash(self, step: int, known: tuple[int, str] = (0, "")) -> str:
        """Hash the rows of all steps up to ``step`` in order; with versions 2 and 3 see ``MixtureOrder.rows_hash``.

        ``known`` is an earlier step and its hash. From the beginning, version 1 shuffles all rows in all epochs.
        """
        if self.mixture:
            return self.mixture.rows_hash(step)
        if self.version != SHUFFLED:
            return rows_hash_by_halves(self, step)
        last, rows_hash = known
        for done in range(last + 1, step + 1):
            rows_hash = hash_of(self.rows_of(done), rows_hash)
        return rows_hash

    def rows_hash_after(self, step: int, rows: np.ndarray, before: str) -> str:
        if self.mixture or self.version != SHUFFLED:
            return self.rows_hash(step)
        return hash_of(rows, before)

    def num_batches(self, num_rows: int) -> int:
        """Return the number of micro-batches in a window of ``num_rows``, which is the same on every rank."""
        return math.ceil(num_rows / (self.micro_batch_size * self.world_size))

    def batches(self, after_step: int, last_step: int) -> Iterator[list[int]]:
        """Yield the row indices of this rank's micro-batches of the steps ``after_step + 1`` to ``last_step``."""
        for step in range(after_step + 1, last_step + 1):
            rows = self.rows_of(step)
            for batch in range(self.num_batches(len(rows))):
                indices = positions(batch, self.micro_batch_size, self.world_size, self.rank)
                yield rows[indices.start : indices.stop].tolist()

    @property
    def _windows_per_epoch(self) -> int:
        return math.ceil(self.num_rows / self.rows_per_window)


class WorkerLoader(DataLoader):
    """A DataLoader that raises the errors among its items, without the traceback that torch adds to a worker's."""

    def __init__(self, items: Dataset, num_workers: int, pin_memory: bool = False, **more: Any) -> None:
        more |= {"prefetch_factor": 8 if num_workers else None, "worker_init_fn": ignore_signals_in_worker}
        more["collate_fn"] = _identity  # items are whole batches
        super().__init__(items, num_workers=num_workers, pin_memory=pin_memory, **more)

    def __iter__(self) -> Any:
        try:
            return map(_raised, super().__iter__())
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            fix = "make it larger (docker run --shm-size 1g), or give --num_workers 0"
            raise RunError(f"/dev/shm is full, where data workers have their semaphores; {fix}") from None


@dataclass(frozen=True)
class TrainBatches:
    """The windows of a token dataset on this rank after ``starts_after``, prefetched by ``num_workers`` processes.

    ``known`` is a step of the run and the hash of the rows up to it, as in its checkpoint.
    """

    rows: IndexedRows
    order: WindowOrder
    num_workers: int
    pin_memory: bool
    starts_after: int = 0
    known: tuple[int, str] = (0, "")

    def windows(self, after_step: int, last_step: int) -> Iterator[Window]:
        order = self.order
        begin = after_step - self.starts_after
        end = last_step - self.starts_after
        last = self.known[0] - self.starts_after
        known = self.known[1]
        rows_hash = order.rows_hash(begin, (last, known) if 0 < last <= begin else (0, ""))
        epoch = order.epoch_of(begin + 1)
        indices = order.batches(begin, end)
        items = _ErrorsAsItems(self.rows)
        batches = iter(WorkerLoader(items, self.num_workers, self.pin_memory, batch_sampler=indices))
        for step in range(begin + 1, end + 1):
            window = order.rows_of(step)
            next_epoch = order.epoch_of(step + 1)
            rows_hash = order.rows_hash_after(step, window, rows_hash)
            yield Window(
                step=self.starts_after + step,
                epoch=epoch,
                ends_epoch=next_epoch > epoch,
                rows=window,
                micro_batch_size=order.micro_batch_size,
                batches=[next(batches) for _ in range(order.num_batches(len(window)))],
                rows_hash=rows_hash,
                rows_of_sources=order.mixture.count(window) if order.mixture else None,
            )
            epoch = next_epoch


def validation_rows(sources: np.ndarray, limit: int | None, seed: int) -> np.ndarray:
    """Return the rows of the validation split that every evaluation reads, int64 in the order of the split.

    Without a ``limit`` these are all. Otherwise each source has equally many of them, as far as it has so many rows:
    its rows are cut into so many parts of equal size, and the seed chooses one row of each. ``sources``, int64 [rows],
    has the source of each row of the split.
    """
    if limit is None or limit >= len(sources):
        return np.arange(len(sources))
    in_order = np.argsort(sources, kind="stable")
    num_rows = np.bincount(sources)
    num_chosen = _share_equally(num_rows.tolist(), limit)
    random = np.random.default_rng(seed)
    chosen = []
    first = 0
    for of_source, number in zip(num_rows.tolist(), num_chosen, strict=True):
        borders = first + np.arange(number + 1) * of_source // max(number, 1)
        chosen.append(in_order[random.integers(borders[:-1], borders[1:])])
        first += of_source
    return np.sort(np.concatenate(chosen))


def _share_equally(most: Sequence[int], total: int) -> list[int]:
    """Return numbers with the sum ``total``, as equal as possible, none above its ``most``; the first ones get more."""
    shares = [0] * len(most)
    left = total
    for taken, index in enumerate(sorted(range(len(most)), key=most.__getitem__)):  # who has few rows comes first
        shares[index] = min(most[index], left // (len(most) - taken))
        left -= shares[index]
    return shares


def select_validation_rows(rows: IndexedRows, batch_size: int, limit: int | None, seed: int) -> list[int]:
    """Return the rows of a split that ``limit`` batches of an evaluation read, all without a limit."""
    sources = rows.main_sources() if limit else np.zeros(len(rows), dtype=np.int64)
    return validation_rows(sources, limit and limit * batch_size, seed).tolist()


def validation_batches(
    rows: IndexedRows, batch_size: int, world_size: int, rank: int, limit: int | None, seed: int, num_workers: int
) -> DataLoader:
    """Return a loader of this rank's rows of a split, in equally many batches on all ranks.

    The ranks together read each of the :func:`validation_rows` once, so their number does not change the rows.
    """
    chosen = select_validation_rows(rows, batch_size, limit, seed)
    num_batches = math.ceil(len(chosen) / (batch_size * world_size))
    places = [positions(batch, batch_size, world_size, rank) for batch in range(num_batches)]
    indices = [chosen[place.start : place.stop] for place in places]
    return WorkerLoader(_ErrorsAsItems(rows), num_workers, batch_sampler=indices)


@dataclass(frozen=True)
class _ErrorsAsItems(Dataset):
    rows: IndexedRows

    def __getitems__(self, indices: Sequence[int]) -> Batch | InputError | RunError:
        try:
            return self.rows.__getitems__(indices)
        except (InputError, RunError) as error:
            return error


def _raised(item: Any) -> Any:
    if isinstance(item, Exception):
        raise item
    return item


def _identity(item: Any) -> Any:
    return item


@functools.lru_cache(maxsize=2)
def _permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return numpy's permutation of the rows, int32 if they are so few: numpy's generator then draws the same."""
    rows = np.arange(num_rows, dtype=np.int32 if num_rows < 1 << 31 else np.int64)
    np.random.default_rng([seed, epoch]).shuffle(rows)
    return rows
