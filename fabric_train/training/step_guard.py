"""Check every step before the optimizer takes it: a loss or gradient that is not finite, and losses that jump."""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from lightning import Fabric

from fabric_train.data.step_sampler import Window
from fabric_train.distributed.ranks import data_ranks, gather_over_data_ranks
from fabric_train.training.objective import WindowLoss

_LISTED_ROWS = 64


@dataclass(frozen=True)
class StepCheck:
    """A window's mean ``loss`` and ``grad_norm``; ``fault`` says why its step must not be taken, None if it may."""

    loss: float
    grad_norm: float
    fault: str | None


class StepGuard:
    """Checks the loss and the gradient norm of every step. All ranks call it together and get the same result."""

    def __init__(
        self,
        fabric: Fabric,
        data: str,
        warn: Callable[[str], None],
        row_name: Callable[[int], str] = str,
        worst: Callable[[Window, torch.Tensor], str] = lambda *_: "",
    ) -> None:
        """``data`` and ``row_name`` name the rows in messages; ``warn`` shows the user a line, once for all ranks.

        ``worst`` names the documents with the highest losses (``WorstDocuments.describe``).
        """
        self._fabric, self._data, self._warn, self._row_name, self._worst = fabric, data, warn, row_name, worst
        self._scaler = getattr(fabric.strategy.precision, "scaler", None)
        self._spikes = SpikeRule()

    def check(
        self,
        window: Window,
        loss: torch.Tensor,
        grad_norm: torch.Tensor,
        of_pieces: torch.Tensor,
        losses: Callable[[], WindowLoss],
    ) -> StepCheck:
        """Check a step; the tensors are on the CPU, so that the host does not wait for the device.

        ``loss``, fp64 [], is the mean of the window, and ``losses`` gathers those of its micro-batches from all ranks.
        An fp16 gradient that overflows while the loss is finite is not a fault: the scaler skips such a step itself.
        """
        mean, norm = torch.stack([loss, grad_norm.to(loss)]).tolist()
        if not math.isfinite(mean):
            wrong = (~losses().summed.isfinite()).nonzero().tolist()
            fault = f"step {window.step}: the loss is {mean}, from {self._place(window, wrong)}"
            return StepCheck(mean, norm, fault + self._worst(window, of_pieces))
        if not math.isfinite(norm) and self._scaler is None:
            what = f"the gradient norm is {norm} and every loss finite"
            return StepCheck(mean, norm, f"step {window.step}: {what}; the window is {self._window(window)}")
        usual = self._spikes.usual_before_spike(mean)
        if usual is not None:
            of_all = losses()
            means = of_all.summed / of_all.counts.clamp(min=1)
            rank, batch = divmod(int(means.argmax()), means.shape[1])
            self._warn(
                f"step {window.step}: loss {mean:.4f}, where the last steps' median is {usual:.4f}; highest in "
                f"{self._place(window, [(rank, batch)])}; the window is {self._window(window)}"
                + self._worst(window, of_pieces)
            )
        return StepCheck(mean, norm, None)

    def leave_out(self) -> None:
        """Prepare an fp16 gradient scaler for the next step after one that is left out."""
        if self._scaler is not None:
            self._scaler.update(self._scaler.get_scale())

    def _window(self, window: Window) -> str:
        ranks = range(data_ranks(self._fabric).size)
        return self._place(window, itertools.product(ranks, range(len(window.batches))))

    def _place(self, window: Window, micro_batches: Iterable[tuple[int, int]]) -> str:
        names = self._names(window)
        by_rank: dict[int, list[str]] = {}
        for rank, batch in micro_batches:
            rows = window.rows_of(batch, data_ranks(self._fabric).size, rank)
            by_rank.setdefault(rank, []).extend(names[row] for row in rows)
        left, parts = _LISTED_ROWS, []
        for rank, named in by_rank.items():
            if named:
                more = f" and {len(named) - left} more" if len(named) > left else ""
                parts.append(f"{', '.join(named[:left])}{more} (rank {rank})")
                left = max(left - len(named), 0)
        return f"rows {', '.join(parts)} of {self._data}"

    def _names(self, window: Window) -> dict[int, str]:
        """Name every row of the window: by its index, or in a stream by its lane and the document after it."""
        if window.cursors is None:
            return {row: self._row_name(row) for row in window.rows.tolist()}
        own = torch.from_numpy(window.cursors).to(self._fabric.device)
        cursors = gather_over_data_ranks(self._fabric, own).flatten(0, -2).tolist()
        return {lane: f"{lane} up to document {document} of pass {epoch}" for lane, epoch, document, *_ in cursors}


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
