"""Statistics of losses: confidence intervals of models that are compared, and spikes in the loss of a run.

The intervals are by paired bootstrap over documents. Documents are drawn with replacement, the same ones for all
models. The interval of a statistic is between the 2.5th and the 97.5th percentile of its values on the draws (Efron
and Tibshirani 1993, chapter 13). Models are compared by the interval of their difference on the same draws (Koehn 2004,
Statistical Significance Tests for Machine Translation Evaluation). It says how sure a result is for documents like
these, not for other texts or another training run.

Shapes: M models, D documents, R resamples.
"""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fabric_train.checkpoint import TokenLoss

NUM_RESAMPLES = 2000
LEVEL = 95
FEWEST_DOCUMENTS = 10
"""Fewer documents get no interval: it would be far too narrow."""
_COUNTS_AT_ONCE = 1 << 24

Interval = tuple[float, float]


class SpikeRule:
    """A rule for loss spikes.

    A loss is a spike if it is above the median of the recent losses by more than ``CHANGES`` times the median change
    from one step to the next, and by more than ``LEAST_RISE`` of that median. For losses scattered by sigma around a
    level, the median change is 0.95 sigma. A few high losses do not hide the next one, and changes stay small while the
    loss falls. A rise is one spike, however many steps it lasts.
    """

    RECENT = 64
    FEWEST = 20
    CHANGES = 8.0
    LEAST_RISE = 0.1

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=self.RECENT)
        self._is_high = False

    def usual_before_spike(self, loss: float) -> float | None:
        """Add the next loss; return the median of the recent ones if a spike begins here, else None."""
        was_high = self._is_high
        usual = None
        if len(self._recent) >= self.FEWEST:
            usual = statistics.median(self._recent)
            change = statistics.median(abs(later - earlier) for earlier, later in itertools.pairwise(self._recent))
            self._is_high = loss - usual > max(self.CHANGES * change, self.LEAST_RISE * usual)
        self._recent.append(loss)
        return usual if self._is_high and not was_high else None


@dataclass(frozen=True)
class DocumentSums:
    """The losses of a model on the documents of a source: ``nats``, ``tokens`` and ``num_bytes``, each fp64 [D]."""

    nats: np.ndarray
    tokens: np.ndarray
    num_bytes: np.ndarray

    @property
    def total(self) -> TokenLoss:
        """The loss of all documents; without bytes if one document's are not known."""
        num_bytes = float(self.num_bytes.sum())
        return TokenLoss(math.fsum(self.nats), int(self.tokens.sum()), None if math.isnan(num_bytes) else num_bytes)


@dataclass(frozen=True)
class Difference:
    """How much a model's loss is above the first model's, in nats per token or bits per byte (``unit``)."""

    unit: str
    value: float
    interval: Interval

    @property
    def excludes_0(self) -> bool:
        """Whether the interval has only differences of one sign."""
        return self.interval[0] > 0 or self.interval[1] < 0


@dataclass(frozen=True)
class ModelLoss:
    """The loss of a model on a source; no intervals of too few documents."""

    total: TokenLoss
    num_documents: int
    loss: Interval | None = None  # of its nats per token
    bits_per_byte: Interval | None = None  # None if the bytes are not known, too
    difference: Difference | None = None  # also None if the tokens differ and the bytes are not known


def compare(of_models: Sequence[DocumentSums], seed: int) -> list[ModelLoss]:
    """Return the loss of each model on the same documents of a source, with intervals; ``seed`` decides the draws."""
    totals = [sums.total for sums in of_models]
    num_documents = len(of_models[0].nats)
    if num_documents < FEWEST_DOCUMENTS:
        return [ModelLoss(total, num_documents) for total in totals]
    nats = resample([sums.nats for sums in of_models], seed)
    tokens = resample([sums.tokens for sums in of_models], seed)
    bits = None
    if all(total.num_bytes for total in totals):
        bits = nats / (math.log(2) * resample([sums.num_bytes for sums in of_models], seed))
    losses = nats / tokens
    unit, values = ("loss", losses) if bits is None else ("bits_per_byte", bits)
    compared = []
    for number, total in enumerate(totals):
        difference = None
        if number and (bits is not None or np.array_equal(of_models[number].tokens, of_models[0].tokens)):
            above = getattr(total, unit) - getattr(totals[0], unit)
            difference = Difference(unit, above, interval_of(values[:, number] - values[:, 0]))
        in_bits = None if bits is None else interval_of(bits[:, number])
        compared.append(ModelLoss(total, num_documents, interval_of(losses[:, number]), in_bits, difference))
    return compared


def resample(values: Sequence[np.ndarray], seed: int) -> np.ndarray:
    """Return the sums, fp64 [R, M], of values, fp64 [D] for each model, over documents that ``seed`` draws."""
    columns = np.stack(values, axis=1)
    generator = np.random.default_rng(seed)
    sums = []
    num_documents = len(columns)
    at_once = max(1, _COUNTS_AT_ONCE // num_documents)
    for first in range(0, NUM_RESAMPLES, at_once):
        num_resamples = min(at_once, NUM_RESAMPLES - first)
        drawn = generator.integers(num_documents, size=(num_resamples, num_documents))
        drawn += num_documents * np.arange(num_resamples)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=num_resamples * num_documents)  # how often each is drawn
        sums.append(counts.reshape(num_resamples, num_documents).astype(np.float64) @ columns)
    return np.concatenate(sums)


def interval_of(values: np.ndarray) -> Interval:
    """Return the interval of a statistic from its values on the draws, [R]."""
    tail = (100 - LEVEL) / 2
    low, high = np.percentile(values, [tail, 100 - tail]).tolist()
    return low, high


def accuracy_interval(accuracy: float, ties: float, num_pairs: int) -> Interval | None:
    """Return the interval of a share of pairs in order, in which a tie counts one half; None of too few pairs.

    How many of the drawn pairs are in order, tied and not is multinomial, so all are drawn at once.
    """
    if num_pairs < FEWEST_DOCUMENTS:
        return None
    right = min(max(accuracy - ties / 2, 0.0), 1.0)
    shares = [right, min(ties, 1 - right), max(1 - right - ties, 0.0)]
    drawn = np.random.default_rng(0).multinomial(num_pairs, shares, NUM_RESAMPLES)
    return interval_of((drawn[:, 0] + drawn[:, 1] / 2) / num_pairs)
