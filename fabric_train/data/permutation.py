"""Permute row numbers by index: where one row moves is computed without shuffling all of them.

A permutation of ``num_rows`` rows takes no memory, so orders of many rows and many passes cost nothing to begin.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

_NUM_ROUNDS = 8
_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio
_Bijection: TypeAlias = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def permute(index: np.ndarray, num_rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return where a permutation of ``range(num_rows)`` moves each index.

    A Feistel network permutes width × height values, at least ``num_rows`` and fewer than ``num_rows + width``; cycle
    walking restricts it to ``num_rows``. This is the generalized Feistel cipher of J. Black, P. Rogaway: Ciphers with
    Arbitrary Finite Domains, CT-RSA 2002. Its round function is :func:`_mix`, which is fast and not secret.

    Args:
        index: int64 [n], each below its ``num_rows``.
        num_rows: int64 [n], the size of each permutation, below 2**53.
        keys: uint64 [n], which choose the permutation; see :func:`permutation_keys`.

    Returns:
        int64 [n].
    """
    return _walk_cycles(_feistel, index, num_rows, keys)


def unpermute(permuted: np.ndarray, num_rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the index that :func:`permute` moves to each of ``permuted``; arguments and result as there."""
    return _walk_cycles(_inverse_feistel, permuted, num_rows, keys)


def permutation_keys(seed: int, sources: np.ndarray, passes: np.ndarray) -> np.ndarray:
    """Return a key, uint64 [n], for each (seed, source, pass); ``sources`` and ``passes`` are integers [n]."""
    key: np.ndarray = np.full(len(sources), seed, np.uint64)
    key = _mix(key + np.uint64(_GOLDEN_RATIO_64)) ^ sources.astype(np.uint64)
    key = _mix(key + np.uint64(_GOLDEN_RATIO_64)) ^ passes.astype(np.uint64)
    return _mix(key + np.uint64(_GOLDEN_RATIO_64))


def _walk_cycles(bijection: _Bijection, start: np.ndarray, num_rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Apply a bijection of ``range(width × height)`` until every value is below its ``num_rows``.

    The values below ``num_rows`` on a cycle of the bijection then follow one another: a bijection of these alone.
    """
    width = np.ceil(np.sqrt(num_rows)).astype(np.uint64)
    height = -(-num_rows // width.astype(np.int64)).astype(np.uint64)  # rounded up
    num_values = num_rows.astype(np.uint64)
    values = start.astype(np.uint64)
    unfinished: np.ndarray = np.arange(len(values))
    while len(unfinished):
        values[unfinished] = bijection(values[unfinished], width[unfinished], height[unfinished], keys[unfinished])
        is_outside = values[unfinished] >= num_values[unfinished]
        unfinished = unfinished[is_outside]
    return values.astype(np.int64)


def _feistel(values: np.ndarray, width: np.ndarray, height: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Apply a bijection of ``range(width × height)``; all arguments and the result are uint64 [n]."""
    high, low = np.divmod(values, width)
    for round_number in range(0, _NUM_ROUNDS, 2):
        low = (low + _mix(keys + _round_constant(round_number) ^ high) % width) % width
        high = (high + _mix(keys + _round_constant(round_number + 1) ^ low) % height) % height
    return high * width + low


def _inverse_feistel(values: np.ndarray, width: np.ndarray, height: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Undo :func:`_feistel`: the rounds in reverse, each subtracting what was added (modulo width or height)."""
    high, low = np.divmod(values, width)
    for round_number in reversed(range(0, _NUM_ROUNDS, 2)):
        high = (high + height - _mix(keys + _round_constant(round_number + 1) ^ low) % height) % height
        low = (low + width - _mix(keys + _round_constant(round_number) ^ high) % width) % width
    return high * width + low


def _round_constant(round_number: int) -> np.uint64:
    return np.uint64((round_number + 1) * _GOLDEN_RATIO_64 % 2**64)


def _mix(values: np.ndarray) -> np.ndarray:
    """Return the output function of SplitMix64, a bijection of uint64 (Steele, Lea, Flood: OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
