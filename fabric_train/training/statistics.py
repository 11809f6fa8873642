"""Compute confidence intervals for the losses of compared models, and find spikes in the loss of a run.

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
"""The fewest documents for an interval; with fewer, it would be far too narrow."""
_COUNTS_AT_ONCE = 1 << 24  # numbers in memory

Interval = tuple[float, float]


class SpikeRule:
    """A rule for loss spikes.

    A loss is a spike if it is above the median of the recent losses by more than ``CHANGES`` times the median change
    from one step to the next, and by more than ``LEAST_RISE`` of that median. For losses scattered by sigma around a
    level, the median change is 0.95 sigma. A few high losses do not hide the next one, and changes stay small while the
    loss falls. A rise is one spike, however many steps it lasts.
    """

    RECENT = 64
    """The number of recent losses with which a loss is compared."""
    FEWEST = 20
    """The fewest recent losses; with fewer, no loss is a spike."""
    CHANGES = 8.0
    LEAST_RISE = 0.1

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=self.RECENT)
        self._is_high = False

    def usual_before_spike(self, loss: float) -> float | None:
        """Add the next loss; return the median of the recent losses if a spike begins here, and otherwise None."""
        was_high = self._is_high
        median = None
        if len(self._recent) >= self.FEWEST:
            median = statistics.median(self._recent)
            changes = [abs(later - earlier) for earlier, later in itertools.pairwise(self._recent)]
            threshold = max(self.CHANGES * statistics.median(changes), self.LEAST_RISE * median)
            self._is_high = loss - median > threshold
        self._recent.append(loss)
        begins_here = self._is_high and not was_high
        return median if begins_here else None


@dataclass(frozen=True)
class DocumentSums:
    """The losses of a model on the documents of a source, each fp64 [D]."""

    nats: np.ndarray
    tokens: np.ndarray
    num_bytes: np.ndarray
    """The bytes of each document; NaN if not known."""

    @property
    def total(self) -> TokenLoss:
        """The loss of all documents, without bytes if the bytes of any document are not known."""
        num_bytes = float(self.num_bytes.sum())
        known_bytes = None if math.isnan(num_bytes) else num_bytes
        return TokenLoss(math.fsum(self.nats), int(self.tokens.sum()), known_bytes)


@dataclass(frozen=True)
class Difference:
    """The difference between a model's loss and the first model's."""

    unit: str
    """"loss", in nats per token, or "bits_per_byte"."""
    value: float
    interval: Interval

    @property
    def excludes_0(self) -> bool:
        """Whether the interval has only differences of one sign."""
        low, high = self.interval
        return low > 0 or high < 0


@dataclass(frozen=True)
class ModelLoss:
    """The loss of a model on a source; it has no intervals if there are too few documents."""

    total: TokenLoss
    num_documents: int
    loss: Interval | None = None
    """The loss in nats per token."""
    bits_per_byte: Interval | None = None
    """Bits per byte; also None if the bytes are not known."""
    difference: Difference | None = None
    """The difference from the first model; also None if the tokens differ and the bytes are not known."""


def compare(model_sums: Sequence[DocumentSums], seed: int) -> list[ModelLoss]:
    """Return the loss of each model on the same documents of a source, with intervals from draws with ``seed``."""
    totals = [sums.total for sums in model_sums]
    num_documents = len(model_sums[0].nats)
    if num_documents < FEWEST_DOCUMENTS:
        return [ModelLoss(total, num_documents) for total in totals]

    # Losses on the draws, [R, M].
    nats = resample([sums.nats for sums in model_sums], seed)
    losses = nats / resample([sums.tokens for sums in model_sums], seed)
    bits = None
    if all(total.num_bytes for total in totals):
        bits = nats / (math.log(2) * resample([sums.num_bytes for sums in model_sums], seed))

    # Models are compared in bits per byte if possible: their tokens may differ.
    unit = "loss" if bits is None else "bits_per_byte"
    compared_values = losses if bits is None else bits
    model_losses = []
    for index, total in enumerate(totals):
        has_same_tokens = np.array_equal(model_sums[index].tokens, model_sums[0].tokens)
        difference = None
        if index > 0 and (bits is not None or has_same_tokens):
            value = getattr(total, unit) - getattr(totals[0], unit)
            interval = interval_of(compared_values[:, index] - compared_values[:, 0])
            difference = Difference(unit, value, interval)
        model_loss = ModelLoss(
            total,
            num_documents,
            loss=interval_of(losses[:, index]),
            bits_per_byte=None if bits is None else interval_of(bits[:, index]),
            difference=difference,
        )
        model_losses.append(model_loss)
    return model_losses


def resample(values: Sequence[np.ndarray], seed: int) -> np.ndarray:
    """Return the sums, fp64 [R, M], of values, fp64 [D] for each model, over documents that ``seed`` draws."""
    columns = np.stack(values, axis=1)  # [D, M]
    num_documents = len(columns)
    generator = np.random.default_rng(seed)
    sums = []
    max_resamples = max(1, _COUNTS_AT_ONCE // num_documents)
    for begin in range(0, NUM_RESAMPLES, max_resamples):
        num_resamples = min(max_resamples, NUM_RESAMPLES - begin)
        drawn = generator.integers(num_documents, size=(num_resamples, num_documents))
        # Count how often each document is drawn: a sum over draws is then a matrix product. Each resample has
        # num_documents bins of its own.
        drawn += num_documents * np.arange(num_resamples)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=num_resamples * num_documents)
        sums.append(counts.reshape(num_resamples, num_documents).astype(np.float64) @ columns)
    return np.concatenate(sums)


def interval_of(values: np.ndarray) -> Interval:
    """Return the interval of a statistic from its values on the draws, [R]."""
    tail = (100 - LEVEL) / 2
    low, high = np.percentile(values, [tail, 100 - tail]).tolist()
    return low, high


def accuracy_interval(accuracy: float, ties: float, num_pairs: int) -> Interval | None:
    """Return the interval of the share of pairs in order, where a tie counts one half; None for too few pairs.

    The numbers of drawn pairs in order, tied and out of order are multinomial, so they are drawn directly.
    """
    if num_pairs < FEWEST_DOCUMENTS:
        return None
    in_order = min(max(accuracy - ties / 2, 0.0), 1.0)
    tied = min(ties, 1 - in_order)
    out_of_order = max(1 - in_order - ties, 0.0)
    shares = [in_order, tied, out_of_order]
    counts = np.random.default_rng(0).multinomial(num_pairs, shares, NUM_RESAMPLES)  # [R, 3]
    accuracies = (counts[:, 0] + counts[:, 1] / 2) / num_pairs
    return interval_of(accuracies)
