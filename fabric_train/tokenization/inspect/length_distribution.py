"""Describe the lengths of documents: bars of a histogram, percentiles and mean."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

PERCENTILES = (5, 25, 50, 75, 95)
_BARS = 10


@dataclass(frozen=True)
class Bar:
    """A bar of the histogram: the number of documents of ``low`` to ``high`` tokens."""

    low: int
    high: int
    count: int


def histograms(*lengths: Mapping[int, int]) -> list[list[Bar]]:
    """Return the same bars for several numbers of documents by length: powers of two if lengths differ widely, else ten
    equal steps.
    """
    given = [length for of_one in lengths for length in of_one]
    if not given:
        return [[] for _ in lengths]
    low, high = min(given), max(given)
    if high >= 32 * max(low, 1):
        edges = [1 << power for power in range(max(low, 1).bit_length() - 1, high.bit_length() + 1)]
        edges = edges if low else [0, *edges]
    else:
        width = -(-(high - low + 1) // _BARS)
        edges = list(range(low, high + 1 + width, width))
    return [_bars(of_one, edges, high) for of_one in lengths]


def _bars(lengths: Mapping[int, int], edges: list[int], high: int) -> list[Bar]:
    found, _ = np.histogram(list(lengths), bins=edges, weights=list(lengths.values()))
    bars = zip(edges, edges[1:], found, strict=False)
    return [Bar(first, min(stop - 1, high), int(count)) for first, stop, count in bars if first <= high]


def length_facts(lengths: Mapping[int, int]) -> list[tuple[str, int]]:
    """Return shortest, percentiles, longest and mean of numbers of documents by length."""
    documents = sum(lengths.values())
    if not documents:
        return []
    numbers = np.array(sorted(lengths))
    running = np.cumsum([lengths[int(number)] for number in numbers])
    ranks = [max(1, -(-documents * percentile // 100)) for percentile in PERCENTILES]
    at = [int(numbers[np.searchsorted(running, rank)]) for rank in ranks]
    total = sum(length * count for length, count in lengths.items())
    names = [f"{percentile} %" for percentile in PERCENTILES]
    return [
        ("shortest", int(numbers[0])),
        *zip(names, at, strict=True),
        ("longest", int(numbers[-1])),
        ("mean", round(total / documents)),
    ]
