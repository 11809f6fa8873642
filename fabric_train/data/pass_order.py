"""The order of a stream's documents in a pass: how often each is read, which source comes next, what is shuffled.

All of it is a function of (seed, pass, document), so every process that reads a pass finds the same order.
"""

import heapq
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import TypeVar

import xxhash

T = TypeVar("T")

_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio


def times_read(document: int, epoch: int, share: Fraction, key: int) -> int:
    """Return how often pass ``epoch`` reads a document of a source with this share: the share, rounded up or down.

    A document has a fixed place u in [0, 1). Before pass p it has been read ``floor(p × share + u)`` times. So a share
    of 1/n reads each document once in any n passes. The places are the multiples of the golden ratio, modulo 1, so any
    stretch of the source has about the same share of documents that are read (H. Weyl: Über die Gleichverteilung von
    Zahlen mod. Eins, 1916).

    Args:
        document: its number in the source.
        epoch: the pass, from 0.
        share: above 0.
        key: below 2**64; the place of document 0.
    """
    place = (key + document * _GOLDEN_RATIO_64) % 2**64 * share.denominator
    one = share.denominator << 64
    until, after = ((passes * (share.numerator << 64) + place) // one for passes in (epoch, epoch + 1))
    return after - until


def read_share(
    read: Callable[[], Iterable[tuple[float, T]]], share: Fraction, epoch: int, key: int
) -> Iterator[tuple[float, T]]:
    """Yield the documents that a pass reads of a source, each with the part of them that is read after it, up to 1.

    A share above 1 reads the source several times, the last time only the documents that come once more.

    Args:
        read: yields the source's documents, each with the part of the source that is read after it.
        share: see :func:`times_read`.
        epoch: the pass.
        key: see :func:`times_read`.
    """
    for time in range(math.ceil(share)):
        of_this_time = min(1.0, float(share - time))
        for number, (read_part, document) in enumerate(read()):
            if times_read(number, epoch, share, key) > time:
                yield (time + of_this_time * read_part) / float(share), document


def interleave(sources: Sequence[Iterator[tuple[float, T]]]) -> Iterator[T]:
    """Yield the documents of all sources: the next one is of the source of which the smallest part is read.

    So the parts of any two sources never differ by more than the part that one document is, and all end together.

    Args:
        sources: the documents of each source, each with the part of the source that is read after it.
    """
    parts = [(0.0, number) for number in range(len(sources))]  # a heap
    while parts:
        number = parts[0][1]
        following = next(sources[number], None)
        if following is None:
            heapq.heappop(parts)
            continue
        read_part, document = following
        heapq.heapreplace(parts, (read_part, number))
        yield document


def shuffle(documents: Iterable[T], size: int, seed: int, epoch: int) -> Iterator[T]:
    """Yield the documents of a pass in a random order: each is drawn from a buffer, where the next one replaces it.

    The buffer holds ``size`` documents. At the end of the pass it is emptied.
    """
    buffer: list[T] = []
    drawn = 0
    for document in documents:
        if len(buffer) < size:
            buffer.append(document)
            continue
        place = draw(seed, epoch, drawn) % size
        drawn += 1
        document, buffer[place] = buffer[place], document
        yield document
    while buffer:
        place = draw(seed, epoch, drawn) % len(buffer)
        drawn += 1
        buffer[place], buffer[-1] = buffer[-1], buffer[place]
        yield buffer.pop()


def draw(*numbers: int) -> int:
    """Return a number below 2**64 that depends on ``numbers``, each from 0 to 2**63 - 1."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(numbers)}q", *numbers))
