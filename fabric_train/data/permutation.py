"""Permute rows by index, in constant memory: the order of each pass over a source, and its inverse."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

_ROUNDS = 8
_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio

_Bijection: TypeAlias = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def permute(index: np.ndarray, num_rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the place of each index in a permutation of ``range(num_rows)`` that its key chooses.

    A Feistel network on a × b values, at least ``num_rows`` and fewer than ``num_rows + a``, with cycle walking: the
    generalized Feistel cipher of J. Black, P. Rogaway: Ciphers with Arbitrary Finite Domains, CT-RSA 2002. The round
    function is :func:`_mix`, which is not secret. Eight rounds.

    Args:
        index: int64 [n], from 0 to ``num_rows`` - 1.
        num_rows: int64 [n], above 0 and below 2**53.
        keys: uint64 [n].

    Returns:
        int64 [n], from 0 to ``num_rows`` - 1; for one key a bijection.
    """
    return _walk(_feistel, index, num_rows, keys)


def unpermute(places: np.ndarray, num_rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the index that :func:`permute` moves to each place; arguments and result are like those of it."""
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
    """Return the values that :func:`_feistel` maps to these."""
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
