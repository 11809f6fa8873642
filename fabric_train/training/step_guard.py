"""Check the loss and the gradient norm of every step, and say which rows a bad value comes from."""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from lightning import Fabric

from fabric_train.data.step_sampler import Window
from fabric_train.distributed.ranks import data_ranks, gather_over_data_ranks
from fabric_train.training.objective import WindowLoss
from fabric_train.training.statistics import SpikeRule

_MAX_LISTED_ROWS = 64


@dataclass(frozen=True)
class StepCheck:
    """The result of the check of a step."""

    loss: float | None
    """The mean loss of the window; None if the objective counts nothing in it, such as no supervised token."""
    grad_norm: float | None
    """The norm of the gradient before clipping; None if the loss is None."""
    fault: str | None
    """Why the step must not be taken; None if it may be taken."""

    @property
    def has_targets(self) -> bool:
        """Whether the objective counts something in the window."""
        return self.loss is not None

    @property
    def is_taken(self) -> bool:
        """Whether the optimizer takes the step."""
        return self.fault is None and self.has_targets


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
        """Prepare the guard of a run.

        Args:
            fabric: The run's Fabric, whose ranks take the steps.
            data: The origin of the rows, for messages.
            warn: A function that shows the user a line, once for all ranks.
            row_name: A function that returns the name of a row in messages.
            worst: A function that names the documents with the highest losses, ``WorstDocuments.describe``.
        """
        self._fabric = fabric
        self._data = data
        self._warn = warn
        self._row_name = row_name
        self._worst = worst
        self._scaler = getattr(fabric.strategy.precision, "scaler", None)  # of 16-mixed
        self._spikes = SpikeRule()

    def check(
        self,
        window: Window,
        loss: torch.Tensor,
        grad_norm: torch.Tensor,
        piece_losses: torch.Tensor,
        gather_losses: Callable[[], WindowLoss],
    ) -> StepCheck:
        """Check a step. The tensors are on the CPU, so the host does not wait for the device.

        An fp16 gradient that overflows while the loss is finite is not a fault: the scaler skips such a step itself.

        Args:
            window: The window of the step.
            loss: The window's mean loss, fp64 [].
            grad_norm: Norm of the gradient before clipping, [].
            piece_losses: Losses of the pieces of documents on this rank, [P].
            gather_losses: A function that gathers the losses of all micro-batches from all ranks; only called for a bad
                step.
        """
        mean_loss = float(loss)
        norm = float(grad_norm)

        # A loss that is not finite: name the rows of its micro-batches.
        if not math.isfinite(mean_loss):
            bad_micro_batches = (~gather_losses().summed.isfinite()).nonzero().tolist()
            rows = self._describe_rows(window, bad_micro_batches)
            fault = f"step {window.step}: the loss is {mean_loss}, from {rows}"
            return StepCheck(mean_loss, norm, fault + self._worst(window, piece_losses))

        # A gradient that overflows cannot be traced to rows, so the window is named.
        if not math.isfinite(norm) and self._scaler is None:
            fault = (
                f"step {window.step}: the gradient norm is {norm}, although every loss is finite; the window is "
                f"{self._describe_window(window)}"
            )
            return StepCheck(mean_loss, norm, fault)

        # A spike is only reported; the step is taken.
        median = self._spikes.usual_before_spike(mean_loss)
        if median is not None:
            losses = gather_losses()
            means = losses.summed / losses.counts.clamp(min=1)  # [data ranks, micro-batches]
            rank, micro_batch = divmod(int(means.argmax()), means.shape[1])
            highest = self._describe_rows(window, [(rank, micro_batch)])
            self._warn(
                f"step {window.step}: loss {mean_loss:.4f}, while the median of the last steps is {median:.4f}; "
                f"highest in {highest}; the window is {self._describe_window(window)}"
                + self._worst(window, piece_losses)
            )
        return StepCheck(mean_loss, norm, None)

    def leave_out(self) -> None:
        """Prepare an fp16 gradient scaler for the next step, after a step that was left out."""
        if self._scaler is not None:
            # ``update`` must follow ``unscale_``; the present scale as argument keeps it.
            self._scaler.update(self._scaler.get_scale())

    def _describe_window(self, window: Window) -> str:
        """Name all rows of a window."""
        ranks = range(data_ranks(self._fabric).size)
        micro_batches = range(len(window.batches))
        return self._describe_rows(window, itertools.product(ranks, micro_batches))

    def _describe_rows(self, window: Window, micro_batches: Iterable[tuple[int, int]]) -> str:
        """Name the rows of some micro-batches, each a data rank and an index; at most 64 rows are listed."""
        row_names = self._row_names(window)
        names_by_rank: dict[int, list[str]] = {}
        for rank, micro_batch in micro_batches:
            rows = window.rows_of(micro_batch, data_ranks(self._fabric).size, rank)
            names_by_rank.setdefault(rank, []).extend(row_names[row] for row in rows)

        # The limit holds for all ranks together.
        num_left = _MAX_LISTED_ROWS
        descriptions = []
        for rank, names in names_by_rank.items():
            if not names:
                continue
            listed = ", ".join(names[:num_left])
            if len(names) > num_left:
                listed += f" and {len(names) - num_left} more"
            descriptions.append(f"{listed} (rank {rank})")
            num_left = max(num_left - len(names), 0)
        return f"rows {', '.join(descriptions)} of {self._data}"

    def _row_names(self, window: Window) -> dict[int, str]:
        """Name every row of the window: by its index, or in a stream by its lane and the document after it."""
        if window.cursors is None:
            return {row: self._row_name(row) for row in window.rows.tolist()}
        local_cursors = torch.from_numpy(window.cursors).to(self._fabric.device)
        cursors = gather_over_data_ranks(self._fabric, local_cursors).flatten(0, -2).tolist()
        return {lane: f"{lane} up to document {document} of pass {epoch}" for lane, epoch, document, *_ in cursors}
