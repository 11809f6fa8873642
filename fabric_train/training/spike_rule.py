"""Tell a loss spike from the noise of a loss."""

import itertools
import statistics
from collections import deque


class SpikeRule:
    """A rule for loss spikes.

    A loss is a spike if it is above the median of the recent losses by more than ``CHANGES`` times the median change
    from one step to the next, and by more than ``LEAST_RISE`` of that median. For losses scattered by sigma around a
    level, the median change is 0.95 sigma. A few high losses do not hide the next one, and changes stay small while the
    loss falls. A rise is one spike, however many steps it lasts.
    """

    RECENT, FEWEST = 64, 20
    CHANGES, LEAST_RISE = 8.0, 0.1

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=self.RECENT)
        self._is_high = False

    def usual_before_spike(self, loss: float) -> float | None:
        """Add the next loss; return the median of the recent ones if a spike begins here, else None."""
        was_high, usual = self._is_high, None
        if len(self._recent) >= self.FEWEST:
            usual = statistics.median(self._recent)
            change = statistics.median(abs(later - earlier) for earlier, later in itertools.pairwise(self._recent))
            self._is_high = loss - usual > max(self.CHANGES * change, self.LEAST_RISE * usual)
        self._recent.append(loss)
        return usual if self._is_high and not was_high else None
