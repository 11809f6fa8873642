"""The order of a run whose mixture changes at given steps: phases, each with other shares of the same sources.

A phase reads every source on from where the phase before stopped: in the same pass, at the next row. So no row is
repeated before its pass is over. Example: sources of 6 and 4 rows, windows of 4 rows. A step takes 2 + 2 rows, and
from step 2 on 3 + 1. So step 2 has the rows 3, 4 and 5 of the first pass over the first source, and row 3 of the
second one, in the orders of these passes.
"""

import functools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from fabric_train.data.mixture import Mixture
from fabric_train.data.row_hash import hash_of


@dataclass(frozen=True)
class MixtureOrder:
    """The rows of every step, counted from 1, as a function of the step: O(log phases) beside those of a ``Mixture``.

    ``mixtures`` are the phases, and the first window of each is that of the step after ``starts_after``: 0 for the
    first phase, then increasing. Each phase begins an epoch of its mixture.
    """

    mixtures: tuple[Mixture, ...]
    starts_after: tuple[int, ...] = (0,)

    def followed_by(self, starts_after: int, rows_per_epoch: Sequence[int]) -> "MixtureOrder":
        """Return this order up to a step, not before the last phase, followed by a phase that takes other rows.

        A phase that would have no step is left out.
        """
        *before, last = self.mixtures
        phase = replace(last, rows_per_epoch=tuple(rows_per_epoch), already_read=tuple(self.rows_until(starts_after)))
        if starts_after == self.starts_after[-1]:
            return MixtureOrder((*before, phase), self.starts_after)
        return MixtureOrder((*self.mixtures, phase), (*self.starts_after, starts_after))

    @property
    def num_rows(self) -> tuple[int, ...]:
        """The rows of each source."""
        return self.mixtures[0].num_rows

    def rows_of(self, step: int) -> np.ndarray:
        """Return the rows of a step as int64 [rows of the step]."""
        phase = self._phase_of(step)
        mixture = self.mixtures[phase]
        return mixture.rows_in(*divmod(step - 1 - self.starts_after[phase], mixture.windows_per_epoch))

    def epoch_of(self, step: int) -> int:
        """Return the epoch of a step; epochs are counted from 0 over all phases."""
        phase = self._phase_of(step)
        within = (step - 1 - self.starts_after[phase]) // self.mixtures[phase].windows_per_epoch
        return self._epochs_before[phase] + within

    def rows_until(self, step: int) -> list[int]:
        """Return how many rows of each source the first ``step`` steps take."""
        phase = self._phase_of(step) if step else 0
        return self.mixtures[phase].rows_until(step - self.starts_after[phase])

    def steps_of(self, row: int, num_steps: int) -> list[int]:
        """Return which of the first ``num_steps`` steps read a row, in order: the inverse of ``rows_of``."""
        found = list[int]()
        for start, end, mixture in zip(
            self.starts_after, (*self.starts_after[1:], num_steps), self.mixtures, strict=True
        ):
            if start < num_steps:
                found += [start + step for step in mixture.steps_of(row, min(end, num_steps) - start)]
        return found

    def rows_hash(self, step: int) -> str:
        """Hash the rows of the steps 1, ..., ``step // 4``, ``step // 2``, ``step``: O(log step) windows.

        A resumed run compares it. The rows of other steps follow from the same numbers, so they need no replay.
        """
        return _rows_hash(self, step)

    def epoch_ends(self, last_step: int) -> Iterator[int]:
        """Yield the steps up to ``last_step`` that end an epoch or a phase."""
        for start, end, mixture in zip(
            self.starts_after, (*self.starts_after[1:], last_step), self.mixtures, strict=True
        ):
            yield from range(start + mixture.windows_per_epoch, end, mixture.windows_per_epoch)
            yield end

    def count(self, rows: np.ndarray) -> list[int]:
        """Count the rows of each source among ``rows``, which are int64 of any length."""
        return self.mixtures[0].count(rows)

    def _phase_of(self, step: int) -> int:
        return bisect_right(self.starts_after, step - 1) - 1

    @functools.cached_property
    def _epochs_before(self) -> list[int]:
        """The epochs that begin before each phase; the last one before a phase may be cut short."""
        epochs = [0]
        for (start, end), mixture in zip(pairwise(self.starts_after), self.mixtures, strict=False):
            epochs.append(epochs[-1] + math.ceil((end - start) / mixture.windows_per_epoch))
        return epochs


@functools.lru_cache(maxsize=64)  # of a run's next step, all but one or two are known
def _rows_hash(order: MixtureOrder, step: int) -> str:
    if step == 0:
        return ""
    return hash_of(order.rows_of(step), _rows_hash(order, step // 2))
