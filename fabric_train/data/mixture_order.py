"""Compute the rows of each step of a mixture whose shares may change in phases, and the hash of these rows."""

import functools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import numpy as np

from fabric_train.data.batch import hash_numbers
from fabric_train.data.mixture import Mixture


@dataclass(frozen=True)
class MixtureOrder:
    """The rows of every step as a function of the step, counted from 1; a ``Mixture`` and O(log phases) more."""

    mixtures: tuple[Mixture, ...]
    """The mixture of each phase."""
    phases_start_after: tuple[int, ...] = (0,)
    """The step after which each phase, and a new epoch, begins; 0 for the first phase."""

    def followed_by(self, last_step: int, rows_per_epoch: Sequence[int]) -> "MixtureOrder":
        """Return this order up to ``last_step``, a step of its last phase, then a phase with other ``rows_per_epoch``.

        If the last phase would have no step, the new phase takes its place.
        """
        *earlier_mixtures, last_mixture = self.mixtures
        already_read = tuple(self.rows_until(last_step))
        phase = replace(last_mixture, rows_per_epoch=tuple(rows_per_epoch), already_read=already_read)
        if last_step == self.phases_start_after[-1]:
            return MixtureOrder((*earlier_mixtures, phase), self.phases_start_after)
        return MixtureOrder((*self.mixtures, phase), (*self.phases_start_after, last_step))

    @property
    def num_rows(self) -> tuple[int, ...]:
        """The rows that each source has."""
        return self.mixtures[0].num_rows

    def rows_of(self, step: int) -> np.ndarray:
        """Return the rows of a step as int64 [rows of the step]."""
        phase = self._phase_of(step)
        mixture = self.mixtures[phase]
        epoch, window = divmod(step - 1 - self.phases_start_after[phase], mixture.windows_per_epoch)
        return mixture.rows_in(epoch, window)

    def epoch_of(self, step: int) -> int:
        """Return the epoch of a step; epochs are counted from 0 over all phases."""
        phase = self._phase_of(step)
        epoch_of_phase = (step - 1 - self.phases_start_after[phase]) // self.mixtures[phase].windows_per_epoch
        return self._epochs_before[phase] + epoch_of_phase

    def rows_until(self, step: int) -> list[int]:
        """Return how many rows of each source the first ``step`` steps take."""
        phase = self._phase_of(step) if step else 0
        return self.mixtures[phase].rows_until(step - self.phases_start_after[phase])

    def steps_of(self, row: int, num_steps: int) -> list[int]:
        """Return which of the first ``num_steps`` steps read a row, in order: the inverse of ``rows_of``."""
        steps: list[int] = []
        for start, end, mixture in self._phases(num_steps):
            if start < num_steps:
                steps += [start + step for step in mixture.steps_of(row, min(end, num_steps) - start)]
        return steps

    def rows_hash(self, step: int) -> str:
        """Hash the rows of the steps 1, ..., ``step // 4``, ``step // 2``, ``step``, which a resumed run compares.

        The rows of other steps follow from the same numbers, so they need no replay.
        """
        return rows_hash_by_halves(self, step)

    def epoch_ends(self, last_step: int) -> Iterator[int]:
        """Yield the steps up to ``last_step`` that end an epoch or a phase."""
        for start, end, mixture in self._phases(last_step):
            yield from range(start + mixture.windows_per_epoch, end, mixture.windows_per_epoch)
            yield end

    def count(self, rows: np.ndarray) -> list[int]:
        """Count the rows by source."""
        return self.mixtures[0].count(rows)

    def _phases(self, last_step: int) -> Iterator[tuple[int, int, Mixture]]:
        """Yield the step after which each phase begins, its last step, and its mixture."""
        ends = (*self.phases_start_after[1:], last_step)
        yield from zip(self.phases_start_after, ends, self.mixtures, strict=True)

    def _phase_of(self, step: int) -> int:
        return bisect_right(self.phases_start_after, step - 1) - 1

    @functools.cached_property
    def _epochs_before(self) -> list[int]:
        """The number of epochs before each phase, of which the last one may be cut short."""
        epochs = [0]
        for (start, end), mixture in zip(pairwise(self.phases_start_after), self.mixtures, strict=False):
            epochs.append(epochs[-1] + math.ceil((end - start) / mixture.windows_per_epoch))
        return epochs


class StepRows(Protocol):
    """An order that knows the rows of each step."""

    def rows_of(self, step: int) -> np.ndarray: ...

    def __hash__(self) -> int: ...


@functools.lru_cache(maxsize=64)  # of a run's next step, all but one or two are known
def rows_hash_by_halves(order: StepRows, step: int) -> str:
    """Hash the rows of the steps 1, ..., ``step // 4``, ``step // 2``, ``step``."""
    if step == 0:
        return ""
    return hash_numbers(order.rows_of(step), rows_hash_by_halves(order, step // 2))
