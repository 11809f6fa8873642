"""Check every step before the optimizer takes it: a loss or gradient that is not finite, a loss far above the rest."""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from lightning import Fabric

from fabric_train.data.row_documents import describe_piece
from fabric_train.data.step_sampler import Window
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.data.token_mixture import TokenMixture
from fabric_train.distributed.collectives import data_ranks, gather_over_data_ranks
from fabric_train.training.objective import WindowLoss

_LISTED_ROWS = 64
_NUM_NAMED = 3


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

    def check(self, window: Window, loss: WindowLoss, grad_norm: torch.Tensor, of_pieces: torch.Tensor) -> StepCheck:
        """Check a step; the tensors are on the CPU, so that the host does not wait for the device.

        ``of_pieces`` are the losses of the pieces in this rank's micro-batches.

        An fp16 gradient that overflows while the loss is finite is not a fault: the scaler skips such a step itself.
        """
        mean, norm = torch.stack([loss.mean, grad_norm.to(loss.mean)]).tolist()
        if not math.isfinite(mean):
            wrong = (~loss.summed.isfinite()).nonzero().tolist()
            fault = f"step {window.step}: the loss is {mean}, from {self._place(window, wrong)}"
            return StepCheck(mean, norm, fault + self._worst(window, of_pieces))
        if not math.isfinite(norm) and self._scaler is None:
            what = f"the gradient norm is {norm} and every loss finite"
            return StepCheck(mean, norm, f"step {window.step}: {what}; the window is {self._window(window, loss)}")
        usual = self._spikes.usual_before_spike(mean)
        if usual is not None:
            self._warn(
                f"step {window.step}: loss {mean:.4f}, where the last steps' median is {usual:.4f}; highest in "
                f"{self._place(window, [_highest(loss)])}; the window is {self._window(window, loss)}"
                + self._worst(window, of_pieces)
            )
        return StepCheck(mean, norm, None)

    def leave_out(self) -> None:
        """Prepare an fp16 gradient scaler for the next step after one that is left out."""
        if self._scaler is not None:
            self._scaler.update(self._scaler.get_scale())

    def _window(self, window: Window, loss: WindowLoss) -> str:
        ranks, batches = loss.summed.shape
        return self._place(window, [(rank, batch) for rank in range(ranks) for batch in range(batches)])

    def _place(self, window: Window, micro_batches: Iterable[tuple[int, int]]) -> str:
        """Name the rows of micro-batches, each (rank, number), by rank."""
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
    level, the median change is 0.95 sigma. Medians are used so that a few high losses do not hide the next one; changes
    and not deviations, because they stay small while the loss falls. A rise is one spike, however many steps it lasts.
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


def _highest(loss: WindowLoss) -> tuple[int, int]:
    """Return rank and index of the micro-batch with the highest mean loss."""
    means = loss.summed / loss.counts.clamp(min=1)
    rank, batch = divmod(int(means.argmax()), means.shape[1])
    return rank, batch


@dataclass(frozen=True)
class WorstDocuments:
    """Names the documents of a window that have the highest mean losses over all ranks."""

    fabric: Fabric
    data: TokenDataset | TokenMixture

    def describe(self, window: Window, of_pieces: torch.Tensor) -> str:
        """Return a part of a message that names them; empty if no token dataset has a document index.

        All ranks call this together and get the same text.

        Args:
            window: this rank's part of the step.
            of_pieces: the summed losses of its pieces, fp64 [P] on the CPU.
        """
        everywhere = gather_over_data_ranks(self.fabric, self._worst(window, of_pieces)).flatten(0, 1).tolist()
        found = sorted(((loss, int(row), int(piece)) for loss, row, piece in everywhere if row >= 0), key=_order)
        named = [(loss, self._name(row, piece)) for loss, row, piece in found[:_NUM_NAMED]]
        documents = [f"{loss:.4f} {name}" for loss, name in named if name is not None]
        return f"; highest mean losses: {', '.join(documents)}" if documents else ""

    def _worst(self, window: Window, of_pieces: torch.Tensor) -> torch.Tensor:
        """Return the worst pieces of this rank, fp64 [3, 3]: mean loss, row of the run and piece in it; or row -1."""
        ranks, found, first = data_ranks(self.fabric), list[tuple[float, int, int]](), 0
        for number, batch in enumerate(window.batches):
            if batch.pieces is None or not len(of_pieces):  # the objective tells no tokens apart
                continue
            rows = np.array(window.rows_of(number, ranks.size, ranks.rank))
            owners = self.data.train.pieces(rows.tolist()).rows
            places = np.arange(len(owners)) - np.searchsorted(owners, owners)
            counts = batch.pieces.num_targets
            means = (of_pieces[first : first + len(owners)] / counts).tolist()
            first += len(owners)
            columns = zip(means, rows[owners].tolist(), places.tolist(), counts.tolist(), strict=True)
            found += [(mean, row, place) for mean, row, place, count in columns if count]
        worst = sorted(found, key=_order)[:_NUM_NAMED]
        return torch.tensor([*worst, *[(0.0, -1, -1)] * (_NUM_NAMED - len(worst))], dtype=torch.float64)

    def _name(self, row: int, piece: int) -> str | None:
        if isinstance(self.data, TokenDataset):
            return describe_piece(self.data, row, piece)
        part, number = self.data.train.place(row)
        return describe_piece(self.data.parts[part], number, piece)


def _order(found: tuple[float, int, int]) -> tuple[float, int, int]:
    """Return a key that sorts the highest losses first, and before them those that are not finite."""
    loss, row, piece = found
    return (-loss if math.isfinite(loss) else -math.inf), row, piece
