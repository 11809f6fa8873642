"""Choose the rows of each optimizer step and split them into the micro-batches of each rank.

A *window* is the rows that one optimizer step consumes over all ranks; the last one of an epoch may be shorter. A
*micro-batch* is the rows of one forward pass on one rank; all ranks have equally many in a window. The order of the
rows is a function of (seed, epoch), and the window is a function of the step. Neither depends on the number of ranks.
``data_order`` is the part of the order that a checkpoint stores.

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
from fabric_train.data.batch import Batch, hash_numbers
from fabric_train.data.data_order import SHUFFLED
from fabric_train.data.mixture_order import MixtureOrder, rows_hash_by_halves
from fabric_train.data.permutation import permutation_keys, permute, unpermute
from fabric_train.data.token_dataset import IndexedRows
from fabric_train.distributed.signals import ignore_signals_in_worker

VALIDATION_VERSION = "3"
"""The version of the rows that ``--eval_iters`` chooses, which a resumed run compares.

Version 1 took the first rows of the split. Version 2 took a share of each source.
"""


@dataclass(frozen=True)
class RolloutSeconds:
    """The seconds in which the completions of a window were made; 0 for those that were stored before."""

    weights: float = 0.0
    """Until the sampler had the weights, on the slowest rank."""
    sampling: float = 0.0
    """On the slowest rank."""
    rewards: float = 0.0
    """On the slowest rank."""
    total: float = 0.0
    """On this rank, with storing, reading and the waits for other ranks."""


@dataclass(frozen=True)
class Window:
    """The data of one optimizer step on one rank."""

    step: int
    """Counted from 1."""
    epoch: int
    """Counted from 0."""
    ends_epoch: bool
    rows: np.ndarray
    """The rows over all ranks in order, int64 [rows]: indices into the train split, or a stream's lanes."""
    micro_batch_size: int
    batches: list[Batch]
    """This rank's micro-batches."""
    cursors: np.ndarray | None = None
    """A stream's positions after this window, see ``StreamBatch``; None for a token dataset."""
    rows_hash: str | None = None
    """The hash of all rows up to this window, see ``WindowOrder.rows_hash``; None for a stream."""
    rows_of_sources: list[int] | None = None
    """How many rows of each source of a mixture the window has; None without a mixture."""
    rollout_seconds: RolloutSeconds | None = None
    """None for rows that are not sampled."""

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
    """The rows of every window and micro-batch, as functions of the step (counted from 1), the seed and the rank."""

    num_rows: int
    """The rows of an epoch."""
    rows_per_window: int
    micro_batch_size: int
    world_size: int
    """The number of data ranks."""
    rank: int
    """This data rank."""
    seed: int
    mixture: MixtureOrder | None = None
    """The order of a mixture, which then decides the rows."""
    version: int = SHUFFLED
    """The version of the order without a mixture, see ``DataOrder.version``."""

    def rows_of(self, step: int) -> np.ndarray:
        """Return the row indices of a step's window over all ranks, int64 in order."""
        if self.mixture:
            return self.mixture.rows_of(step)
        epoch, window = divmod(step - 1, self._windows_per_epoch)
        start = window * self.rows_per_window
        return self._rows_at(epoch, start, min(start + self.rows_per_window, self.num_rows))

    def epoch_of(self, step: int) -> int:
        """Return the epoch of a step, counted from 0."""
        if self.mixture:
            return self.mixture.epoch_of(step)
        return (step - 1) // self._windows_per_epoch

    def epoch_order(self, epoch: int) -> np.ndarray:
        """Return the row indices of an epoch without a mixture: a permutation [num_rows] of seed and epoch."""
        return self._rows_at(epoch, 0, self.num_rows)

    def _rows_at(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return the rows at the positions ``start`` to ``stop - 1`` of an epoch, int64."""
        if self.version == SHUFFLED:
            return _shuffle_rows(self.num_rows, self.seed, epoch)[start:stop].astype(np.int64)
        epoch_positions = np.arange(start, stop)
        num_rows, keys = self._permutation_arguments(epoch, len(epoch_positions))
        return permute(epoch_positions, num_rows, keys)

    def _positions_of(self, epoch: int, rows: np.ndarray) -> list[int]:
        """Return the positions of some rows in an epoch: the inverse of ``_rows_at``."""
        if self.version == SHUFFLED:
            has_row = np.isin(_shuffle_rows(self.num_rows, self.seed, epoch), rows)
            return np.flatnonzero(has_row).tolist()
        num_rows, keys = self._permutation_arguments(epoch, len(rows))
        return unpermute(rows, num_rows, keys).tolist()

    def _permutation_arguments(self, epoch: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ``num_rows`` and ``keys`` of ``permute`` for ``count`` rows of an epoch, the same for each row."""
        key = permutation_keys(self.seed, np.zeros(1, np.int64), np.array([epoch]))
        return np.full(count, self.num_rows), np.repeat(key, count)

    def reads_of(self, rows: np.ndarray, num_steps: int) -> list[RowRead]:
        """Return which of the first ``num_steps`` steps read some rows; O(epochs × rows) with version 1."""
        # a row may be read several times, and a position may be beyond the last step
        steps_and_rows: list[tuple[int, int]] = []
        if self.mixture:
            for row in rows.tolist():
                for step in self.mixture.steps_of(row, num_steps):
                    steps_and_rows.append((step, row))
        else:
            for epoch in range(self.epoch_of(num_steps) + 1):
                for position in self._positions_of(epoch, rows):
                    window = position // self.rows_per_window
                    step = epoch * self._windows_per_epoch + window + 1
                    (row,) = self._rows_at(epoch, position, position + 1)
                    steps_and_rows.append((step, int(row)))
        steps_and_rows.sort()
        return [RowRead(step, self.epoch_of(step), row) for step, row in steps_and_rows if step <= num_steps]

    def rows_hash(self, step: int, known_step: int = 0, known_hash: str = "") -> str:
        """Hash the rows of all steps up to ``step`` in order; for versions 2 and 3, see ``MixtureOrder.rows_hash``.

        For version 1, this shuffles all rows of every epoch from the beginning. If the hash of an earlier step is
        known, it begins there.
        """
        if self.mixture:
            return self.mixture.rows_hash(step)
        if self.version != SHUFFLED:
            return rows_hash_by_halves(self, step)
        rows_hash = known_hash
        for hashed_step in range(known_step + 1, step + 1):
            rows_hash = hash_numbers(self.rows_of(hashed_step), rows_hash)
        return rows_hash

    def rows_hash_after(self, step: int, rows: np.ndarray, previous_hash: str) -> str:
        """Return :meth:`rows_hash` of a step from its rows and the hash of the step before it."""
        if self.mixture or self.version != SHUFFLED:
            return self.rows_hash(step)
        return hash_numbers(rows, previous_hash)

    def num_batches(self, num_rows: int) -> int:
        """Return the number of micro-batches in a window of ``num_rows``, which is the same on every rank."""
        return math.ceil(num_rows / (self.micro_batch_size * self.world_size))

    def batches(self, after_step: int, last_step: int) -> Iterator[list[int]]:
        """Yield the row indices of this rank's micro-batches of the steps ``after_step + 1`` to ``last_step``."""
        for step in range(after_step + 1, last_step + 1):
            rows = self.rows_of(step)
            for batch in range(self.num_batches(len(rows))):
                # past the end of a shorter window, a slice is shorter or empty
                indices = positions(batch, self.micro_batch_size, self.world_size, self.rank)
                yield rows[indices.start : indices.stop].tolist()

    @property
    def _windows_per_epoch(self) -> int:
        return math.ceil(self.num_rows / self.rows_per_window)


class WorkerLoader(DataLoader):
    """A DataLoader that raises the errors among its items, without the traceback that torch adds to a worker's."""

    def __init__(self, items: Dataset, num_workers: int, pin_memory: bool = False, **loader_arguments: Any) -> None:
        super().__init__(
            items,
            num_workers=num_workers,
            pin_memory=pin_memory,
            collate_fn=_identity,  # items are whole batches
            prefetch_factor=8 if num_workers else None,  # without workers, torch accepts only None
            worker_init_fn=ignore_signals_in_worker,
            **loader_arguments,
        )

    def __iter__(self) -> Any:
        try:
            return map(_raise_error_item, super().__iter__())
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            fix = "make it larger (docker run --shm-size 1g), or give --num_workers 0"
            raise RunError(f"/dev/shm is full, but data workers need it for their semaphores; {fix}") from None


@dataclass(frozen=True)
class TrainBatches:
    """The windows of a token dataset on this rank, prefetched by ``num_workers`` processes."""

    rows: IndexedRows
    order: WindowOrder
    num_workers: int
    pin_memory: bool
    data_starts_after: int = 0
    """The run's step after which the order begins: 0, or the step of the checkpoint after which the data changed."""
    known_step: int = 0
    """The step of the checkpoint that the run resumed from."""
    known_hash: str = ""
    """The hash of the rows up to ``known_step``."""

    def windows(self, after_step: int, last_step: int) -> Iterator[Window]:
        """Yield the windows of the run's steps ``after_step + 1`` to ``last_step``."""
        # the order counts its steps from where it begins: its step 1 is the run's step ``data_starts_after + 1``
        order = self.order
        after_order_step = after_step - self.data_starts_after
        last_order_step = last_step - self.data_starts_after
        known_order_step = self.known_step - self.data_starts_after

        # the hash of the rows before the first window; hashing them all again would take long
        if 0 < known_order_step <= after_order_step:
            rows_hash = order.rows_hash(after_order_step, known_order_step, self.known_hash)
        else:
            rows_hash = order.rows_hash(after_order_step)

        # the loader yields the micro-batches of all windows, one after the other
        epoch = order.epoch_of(after_order_step + 1)
        items = _ErrorsAsItems(self.rows)
        row_batches = order.batches(after_order_step, last_order_step)
        batches = iter(WorkerLoader(items, self.num_workers, self.pin_memory, batch_sampler=row_batches))
        for order_step in range(after_order_step + 1, last_order_step + 1):
            rows = order.rows_of(order_step)
            next_epoch = order.epoch_of(order_step + 1)
            rows_hash = order.rows_hash_after(order_step, rows, rows_hash)
            yield Window(
                step=self.data_starts_after + order_step,
                epoch=epoch,
                ends_epoch=next_epoch > epoch,
                rows=rows,
                micro_batch_size=order.micro_batch_size,
                batches=[next(batches) for _ in range(order.num_batches(len(rows)))],
                rows_hash=rows_hash,
                rows_of_sources=order.mixture.count(rows) if order.mixture else None,
            )
            epoch = next_epoch


def validation_rows(sources: np.ndarray, limit: int | None, seed: int) -> np.ndarray:
    """Return the rows of the validation split that every evaluation reads, ascending.

    Without a ``limit``, these are all rows. Otherwise each source gets an equal number, or all of its rows if it has
    fewer. To choose n rows of a source, its rows are cut into n intervals of equal size, and the seed draws one row
    from each.

    Args:
        sources: The source of each row of the split, int64 [rows].
        limit: The number of rows to choose.
        seed: The seed of the choice.

    Returns:
        The chosen rows, int64 [limit], or [rows] without a limit.
    """
    if limit is None or limit >= len(sources):
        return np.arange(len(sources))
    rows_by_source = np.argsort(sources, kind="stable")  # the rows of source 0, then of source 1, ...
    rows_of_sources = np.bincount(sources).tolist()
    chosen_of_sources = _share_equally(rows_of_sources, limit)
    generator = np.random.default_rng(seed)
    chosen_rows = []
    start = 0  # of the source, in ``rows_by_source``
    for num_rows, num_chosen in zip(rows_of_sources, chosen_of_sources, strict=True):
        borders = start + np.arange(num_chosen + 1) * num_rows // max(num_chosen, 1)
        drawn_indices = generator.integers(borders[:-1], borders[1:])
        chosen_rows.append(rows_by_source[drawn_indices])
        start += num_rows
    return np.sort(np.concatenate(chosen_rows))


def _share_equally(limits: Sequence[int], total: int) -> list[int]:
    """Return shares with the sum ``total``, as equal as possible, none above its limit.

    Example: limits 2, 10, 10 and the total 9 give the shares 2, 3, 4.
    """
    shares = [0] * len(limits)
    remaining = total
    # the smallest limit first: what it cannot take is shared among the others
    ascending = sorted(range(len(limits)), key=lambda index: limits[index])
    for num_shared, index in enumerate(ascending):
        num_sharing = len(limits) - num_shared
        shares[index] = min(limits[index], remaining // num_sharing)
        remaining -= shares[index]
    return shares


def select_validation_rows(rows: IndexedRows, batch_size: int, limit: int | None, seed: int) -> list[int]:
    """Return the rows of a split that ``limit`` batches of an evaluation read, or all without a limit."""
    if limit is None:
        return list(range(len(rows)))
    return validation_rows(rows.main_sources(), limit * batch_size, seed).tolist()


def validation_batches(
    rows: IndexedRows, batch_size: int, world_size: int, rank: int, limit: int | None, seed: int, num_workers: int
) -> DataLoader:
    """Return a loader of this rank's rows of a split, in equally many batches on all ranks.

    The ranks together read each of the :func:`validation_rows` once, so their number does not change the rows.
    """
    chosen_rows = select_validation_rows(rows, batch_size, limit, seed)
    num_batches = math.ceil(len(chosen_rows) / (batch_size * world_size))
    batches = []
    for batch in range(num_batches):
        # past the end of the chosen rows, a slice is shorter or empty
        indices = positions(batch, batch_size, world_size, rank)
        batches.append(chosen_rows[indices.start : indices.stop])
    return WorkerLoader(_ErrorsAsItems(rows), num_workers, batch_sampler=batches)


@dataclass(frozen=True)
class _ErrorsAsItems(Dataset):
    """Rows whose errors are returned as items, since torch adds a traceback to errors that a worker raises."""

    rows: IndexedRows

    def __getitems__(self, indices: Sequence[int]) -> Batch | InputError | RunError:
        try:
            return self.rows.__getitems__(indices)
        except (InputError, RunError) as error:
            return error


def _raise_error_item(item: Any) -> Any:
    if isinstance(item, Exception):
        raise item
    return item


def _identity(item: Any) -> Any:
    return item


@functools.lru_cache(maxsize=2)
def _shuffle_rows(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return numpy's permutation of the rows, as int32 if possible: numpy's generator shuffles both types alike."""
    dtype = np.int32 if num_rows < 1 << 31 else np.int64
    rows = np.arange(num_rows, dtype=dtype)
    np.random.default_rng([seed, epoch]).shuffle(rows)
    return rows
