"""Compute by index which rows of several sources an optimizer step takes, in constant memory.

This is version 2 of the order; version 1 is ``step_sampler.WindowOrder`` without a mixture. Row r of a window follows
from (seed, epoch, window, r): each source has the same number of rows in every window, up or down to a whole number
(:class:`Mixture`). So the row is the q-th that the run reads of its source. These make passes over the source, each in
a new order, a permutation that is computed by index (:func:`permute`).

Example: sources of 6 and 2 rows, shares 1 and 2, windows of 5 rows, so an epoch has 6 + 4 = 10 rows in 2 windows of 3 +
2 rows. The rows of the second source are read twice in each epoch.
"""

import functools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import ClassVar, Protocol, TypeAlias

import numpy as np

from fabric_train.data.batch import hash_of

_ROUNDS = 8
_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio
_Bijection: TypeAlias = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
_INVERSE_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
_TRIED_STEPS = 100


def permute(index: np.ndarray, num_rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the place of each index, int64 [n], in a permutation of ``range(num_rows)`` that its key, uint64 [n],
    chooses.

    A Feistel network on a × b values, at least ``num_rows`` (below 2**53) and fewer than ``num_rows + a``, with cycle
    walking: the generalized Feistel cipher of J. Black, P. Rogaway: Ciphers with Arbitrary Finite Domains, CT-RSA 2002.
    The round function is :func:`_mix`, which is not secret. Eight rounds.
    """
    return _walk(_feistel, index, num_rows, keys)


def unpermute(places: np.ndarray, num_rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the index that :func:`permute` moves to each place."""
    return _walk(_inverse_feistel, places, num_rows, keys)


def _walk(bijection: _Bijection, start: np.ndarray, num_rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Apply a bijection of ``range(width × height)`` until each value is below ``num_rows``, int64 [n]."""
    size = num_rows.astype(np.uint64)
    width = np.ceil(np.sqrt(num_rows)).astype(np.uint64)
    height = -(-num_rows // width.astype(np.int64)).astype(np.uint64)
    values = start.astype(np.uint64)
    outside: np.ndarray = np.arange(len(values))
    while len(outside):
        values[outside] = bijection(values[outside], width[outside], height[outside], keys[outside])
        outside = outside[values[outside] >= size[outside]]
    return values.astype(np.int64)


def _feistel(values: np.ndarray, width: np.ndarray, height: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return a bijection of ``range(width × height)``; all arguments and the result are uint64 [n]."""
    right, left = np.divmod(values, width)
    for number in range(0, _ROUNDS, 2):
        left = (left + _mix(keys + _round_constant(number) ^ right) % width) % width
        right = (right + _mix(keys + _round_constant(number + 1) ^ left) % height) % height
    return right * width + left


def _inverse_feistel(values: np.ndarray, width: np.ndarray, height: np.ndarray, keys: np.ndarray) -> np.ndarray:
    right, left = np.divmod(values, width)
    for number in reversed(range(0, _ROUNDS, 2)):
        right = (right + height - _mix(keys + _round_constant(number + 1) ^ left) % height) % height
        left = (left + width - _mix(keys + _round_constant(number) ^ right) % width) % width
    return right * width + left


def _round_constant(number: int) -> np.uint64:
    return np.uint64((number + 1) * _GOLDEN_RATIO_64 % 2**64)


def permutation_keys(seed: int, sources: np.ndarray, passes: np.ndarray) -> np.ndarray:
    """Return a key, uint64 [n], for each (seed, source, pass)."""
    key: np.ndarray = np.full(len(sources), seed, np.uint64)
    for part in (sources, passes):
        key = _mix(key + np.uint64(_GOLDEN_RATIO_64)) ^ part.astype(np.uint64)
    return _mix(key + np.uint64(_GOLDEN_RATIO_64))


def _mix(values: np.ndarray) -> np.ndarray:
    """Return the output function of SplitMix64, a bijection of uint64 (Steele, Lea, Flood: OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True)
class Mixture:
    """The rows of every window of a mixture, as a function of (seed, epoch, window).

    ``num_rows`` and ``rows_per_epoch`` have one number for each source: the rows that it has, and those that an epoch
    takes of it, which may be 0. A row is an index into the sources' rows one after the other. ``already_read`` are the
    rows of each source that a run has read before (see ``mixture_order``): its passes go on from there. Empty is none.

    Each window has, of every source, ``rows in the window × rows_per_epoch[source] / rows of an epoch`` rows, rounded
    up or down, and an epoch has exactly ``rows_per_epoch``.

    The windows of an epoch but a shorter last one are alike. Let M be their number. In each of them a source has g/M
    rows more than a whole number, and G is the sum of g up to this source, so G of the last one is a multiple of M.
    With an offset u between 0 and M - 1, the source gets one more row in the window if a multiple of M lies between its
    two sums plus u: systematic sampling (W. G. Madow, L. H. Madow: On the theory of systematic sampling, 1944). Window
    v has the offset v × s mod M, where s and M have no common divisor, so M windows have all offsets and give the
    source exactly g rows. s is near M divided by the golden ratio, so that a source's rows are spread over the epoch:
    in any stretch of consecutive windows of an epoch, each source had its share to within 6.5 rows in 5,830 random
    mixtures of 2 to 100 sources and up to 200,000 windows.
    """

    num_rows: tuple[int, ...]
    rows_per_epoch: tuple[int, ...]
    rows_per_window: int
    seed: int
    already_read: tuple[int, ...] = ()

    VERSION: ClassVar[int] = 2

    def rows_in(self, epoch: int, window: int) -> np.ndarray:
        """Return the rows of an epoch's window, counted from 0, int64; the rows of each source are spread evenly."""
        before, counts = np.array(self.rows_before(window)), np.array(self._counts(window))
        sources = np.repeat(np.arange(len(counts)), counts)
        nth = np.arange(len(sources)) - np.repeat(np.cumsum(counts) - counts, counts)
        in_order = np.argsort((2 * nth + 1) / counts[sources], kind="stable")
        sources, nth = sources[in_order], nth[in_order]
        sizes = np.array(self.num_rows)[sources]
        read = np.array(self.already_read or [0] * len(counts)) + epoch * np.array(self.rows_per_epoch) + before
        passes, index = np.divmod(read[sources] + nth, sizes)
        return self._offsets[sources] + permute(index, sizes, permutation_keys(self.seed, sources, passes))

    def rows_before(self, window: int, only: int | None = None) -> list[int]:
        """Return how many rows of each source, or ``only`` one, come before a window: O(sources × log windows)."""
        chosen = slice(only, None if only is None else only + 1)
        if window == 0:
            return [0] * len(self.num_rows[chosen])
        if window > self._full_windows:
            return list(self.rows_per_epoch[chosen])
        sums = self._sums if only is None else self._sums[only : only + 2]
        # the offset of window i is step × i without multiples of M; these are the same in two sums, and cancel out
        further = [floor_sum(window, self._full_windows, self._step, sum_) for sum_ in sums]
        bases = self._bases[chosen]
        return [window * base + after - until for base, (until, after) in zip(bases, pairwise(further), strict=True)]

    def rows_until(self, step: int) -> list[int]:
        """Return how many rows of each source are read after ``step`` windows, with those that were read before."""
        epochs, window = divmod(step, self.windows_per_epoch)
        read = self.already_read or [0] * len(self.num_rows)
        of_epochs = zip(read, self.rows_per_epoch, self.rows_before(window), strict=True)
        return [first + epochs * rows + more for first, rows, more in of_epochs]

    def steps_of(self, row: int, num_steps: int) -> list[int]:
        """Return which of the first ``num_steps`` steps read a row: O(passes over its source × log windows)."""
        source = int(np.searchsorted(self._offsets, row, side="right")) - 1
        size, (first, last) = self.num_rows[source], (self.rows_until(step)[source] for step in (0, num_steps))
        passes = np.arange(first // size, -(-last // size))
        keys = permutation_keys(self.seed, np.full(len(passes), source), passes)
        places = np.full(len(passes), row - self._offsets[source])
        nth = passes * size + unpermute(places, np.full(len(passes), size), keys)
        return [self._step_with(source, number - first) for number in nth.tolist() if first <= number < last]

    def _step_with(self, source: int, nth: int) -> int:
        """Return the step, counted from 1, with the ``nth`` row that this mixture takes of a source, counted from 0."""
        epoch, number = divmod(nth, self.rows_per_epoch[source])
        windows = range(self.windows_per_epoch)
        following = bisect_right(windows, number, key=lambda window: self.rows_before(window, source)[0])
        return epoch * len(windows) + following

    def count(self, rows: np.ndarray) -> list[int]:
        sources = np.searchsorted(self._offsets, rows, side="right") - 1
        return np.bincount(sources, minlength=len(self.num_rows)).tolist()

    def _counts(self, window: int) -> list[int]:
        if window == self._full_windows:
            return list(self._in_last_window)
        offset = self._step * window % self._full_windows
        further = [(sum_ + offset) // self._full_windows for sum_ in self._sums]
        return [base + after - until for base, (until, after) in zip(self._bases, pairwise(further), strict=True)]

    @functools.cached_property
    def windows_per_epoch(self) -> int:
        """The number of windows in an epoch; the last one has the remaining rows."""
        return -(-sum(self.rows_per_epoch) // self.rows_per_window)

    @functools.cached_property
    def _offsets(self) -> np.ndarray:
        return np.array([0, *accumulate(self.num_rows)][:-1])

    @functools.cached_property
    def _full_windows(self) -> int:
        return sum(self.rows_per_epoch) // self.rows_per_window

    @functools.cached_property
    def _in_last_window(self) -> list[int]:
        """The rows of each source in the shorter last window; 0 if all windows are full.

        The rest, for the M full windows, then has the bounds that the class promises. Let a source's share of such a
        window be x. It keeps a whole number of rows that differs from M × x by less than 1. So it is not below
        M × floor(x) nor above M × ceil(x), which are whole numbers too.
        """
        return apportion(self.rows_per_epoch, sum(self.rows_per_epoch) % self.rows_per_window)

    @functools.cached_property
    def _in_full_windows(self) -> list[int]:
        return [rows - last for rows, last in zip(self.rows_per_epoch, self._in_last_window, strict=True)]

    @functools.cached_property
    def _bases(self) -> list[int]:
        return [rows // self._full_windows for rows in self._in_full_windows]

    @functools.cached_property
    def _sums(self) -> list[int]:
        """The sums G of the rows beyond ``_bases`` [sources + 1], from 0."""
        return [0, *accumulate(rows % self._full_windows for rows in self._in_full_windows)]

    @functools.cached_property
    def _step(self) -> int:
        return spreading_step(self._full_windows)


def apportion(weights: Sequence[int | Fraction], total: int) -> list[int]:
    """Return whole numbers with the sum ``total``: each is ``total × weight / sum of weights``, rounded up or down."""
    sums = [0, *accumulate(weights)]
    borders = [math.floor(total * Fraction(sum_) / Fraction(sums[-1])) for sum_ in sums]
    return [after - until for until, after in pairwise(borders)]


def rows_of_shares(num_rows: Sequence[int], shares: Sequence[float]) -> list[int]:
    """Return how many rows of each source an epoch takes, others in each: 1 is all, 0.15 is 15 % of them."""
    return [round(Fraction(str(share)) * rows) for rows, share in zip(num_rows, shares, strict=True)]


def rows_of_token_shares(num_rows: Sequence[int], token_shares: Sequence[float]) -> list[int]:
    """Return how many rows of each source an epoch takes if it has as many rows as all sources together."""
    return apportion([Fraction(str(share)) for share in token_shares], sum(num_rows))


def floor_sum(count: int, modulus: int, step: int, start: int) -> int:
    """Return ``sum((start + step * i) // modulus for i in range(count))`` in O(log modulus) operations.

    By Euclid's algorithm: Graham, Knuth, Patashnik: Concrete Mathematics, section 3.5; AtCoder Library, ``floor_sum``.
    """
    total = 0
    while True:
        total += count * (count - 1) // 2 * (step // modulus) + count * (start // modulus)
        step, start = step % modulus, start % modulus
        last = step * count + start
        if last < modulus:
            return total
        count, start = divmod(last, modulus)
        modulus, step = step, modulus


@functools.lru_cache
def spreading_step(modulus: int) -> int:
    """Return a number s without a common divisor with ``modulus`` whose multiples spread evenly over its residues.

    Of the numbers near ``modulus`` divided by the golden ratio, s has the continued fraction s / modulus with the
    smallest sum of partial quotients, which bounds the discrepancy of its multiples (H. Niederreiter: Random Number
    Generation and Quasi-Monte Carlo Methods, 1992, chapter 3).
    """
    near = round(modulus * _INVERSE_GOLDEN_RATIO)
    tried = range(max(1, near - _TRIED_STEPS), max(2, min(modulus, near + _TRIED_STEPS + 1)))
    coprime = [number for number in tried if math.gcd(number, modulus) == 1]
    return min(coprime, key=lambda number: sum(_partial_quotients(number, modulus)))


def _partial_quotients(number: int, modulus: int) -> Iterator[int]:
    while number:
        quotient, rest = divmod(modulus, number)
        yield quotient
        modulus, number = number, rest


@dataclass(frozen=True)
class MixtureOrder:
    """The rows of every step, counted from 1, as a function of the step: O(log phases) beside a ``Mixture``'s.

    Each of ``mixtures`` is a phase that begins an epoch in the step after its ``starts_after``, 0 for the first.
    """

    mixtures: tuple[Mixture, ...]
    starts_after: tuple[int, ...] = (0,)

    def followed_by(self, starts_after: int, rows_per_epoch: Sequence[int]) -> "MixtureOrder":
        """Return this order up to a step of the last phase, then a phase of other rows; one without steps goes."""
        *before, last = self.mixtures
        phase = replace(last, rows_per_epoch=tuple(rows_per_epoch), already_read=tuple(self.rows_until(starts_after)))
        if starts_after == self.starts_after[-1]:
            return MixtureOrder((*before, phase), self.starts_after)
        return MixtureOrder((*self.mixtures, phase), (*self.starts_after, starts_after))

    @property
    def num_rows(self) -> tuple[int, ...]:
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
        for start, end, own in zip(self.starts_after, (*self.starts_after[1:], num_steps), self.mixtures, strict=True):
            if start < num_steps:
                found += [start + step for step in own.steps_of(row, min(end, num_steps) - start)]
        return found

    def rows_hash(self, step: int) -> str:
        """Hash the rows of the steps 1, ..., ``step // 4``, ``step // 2``, ``step``, which a resumed run compares.

        The rows of other steps follow from the same numbers, so they need no replay.
        """
        return rows_hash_by_halves(self, step)

    def epoch_ends(self, last_step: int) -> Iterator[int]:
        """Yield the steps up to ``last_step`` that end an epoch or a phase."""
        for start, end, own in zip(self.starts_after, (*self.starts_after[1:], last_step), self.mixtures, strict=True):
            yield from range(start + own.windows_per_epoch, end, own.windows_per_epoch)
            yield end

    def count(self, rows: np.ndarray) -> list[int]:
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


class StepRows(Protocol):
    def rows_of(self, step: int) -> np.ndarray: ...

    def __hash__(self) -> int: ...


@functools.lru_cache(maxsize=64)  # of a run's next step, all but one or two are known
def rows_hash_by_halves(order: StepRows, step: int) -> str:
    """Hash the rows of the steps 1, ..., ``step // 4``, ``step // 2``, ``step``."""
    if step == 0:
        return ""
    return hash_of(order.rows_of(step), rows_hash_by_halves(order, step // 2))
