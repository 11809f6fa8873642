"""The objective: what the documents of a batch add to the loss of a window, and cross entropy, which is the default.

A loss is a sum, and says over how many things it sums. The step divides by the number in the whole window on all ranks.
Shapes: B rows, T tokens a row, N supervised tokens, P pieces of documents.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F

from fabric_train.data.batch import Batch, Targets, count_supervised, find_targets
from fabric_train.distributed.ranks import to_device_async
from fabric_train.model.attention import forward_batch
from fabric_train.model.context_parallel import whole_losses
from fabric_train.model.lm_head_loss import has_loss_in_head

if TYPE_CHECKING:
    from arguments import TrainArguments


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a batch.

    ``total``, fp64 [], can be differentiated. ``of_tokens``, fp32 [N] without a gradient, are the losses of the targets
    in their order; None if the loss is none of single tokens. ``metrics``, fp64 [metrics] without a gradient, are sums
    like the total; None without metrics. A loss of whole pieces, such as pairs, has their losses in ``of_pieces``, fp64
    [P], and their metrics in ``metrics_of_pieces``, fp64 [metrics, P], both without a gradient. With neither tokens nor
    pieces, the loss is not told apart by source and document.
    """

    total: torch.Tensor
    of_tokens: torch.Tensor | None = None
    metrics: torch.Tensor | None = None
    of_pieces: torch.Tensor | None = None
    metrics_of_pieces: torch.Tensor | None = None


class Objective(Protocol):
    """The loss that training minimizes and evaluation reports.

    The means of its ``metrics`` over a window are the columns ``train_NAME`` of metrics.csv, and those over the
    validation split ``val_NAME``, for each name of ``metric_names``. An objective with an attribute ``counts_pieces``
    that is True sums over pieces of documents, and returns ``of_pieces`` and ``metrics_of_pieces``.
    """

    @property
    def metric_names(self) -> tuple[str, ...]: ...

    def count(self, batch: Batch) -> torch.Tensor:
        """Return how many things the loss of a batch sums over: int64 []. It must not depend on how rows are split."""

    def loss(self, model: Any, batch: Batch, scale: torch.Tensor | None = None) -> BatchLoss:
        """Return the loss of a batch, which is on the model's device, with its ``pieces`` on the CPU.

        ``scale`` is the factor that the caller multiplies the total by before the backward pass, [] on that device, for
        models with the loss in their head, see ``lm_head_loss.summed_cross_entropy``.
        """


@dataclass(frozen=True)
class WindowLoss:
    """The losses of a window: ``summed``, fp64, and ``counts``, int64, both [data ranks, micro-batches of one rank]."""

    summed: torch.Tensor
    counts: torch.Tensor

    @property
    def mean(self) -> torch.Tensor:
        """The loss of the window, such as nats per supervised token, fp64 []; 0 if nothing is counted."""
        return self.summed.sum() / self.counts.sum().clamp(min=1)


class CrossEntropy:
    """The cross entropy of the next token, summed over the supervised tokens."""

    metric_names = ()

    def count(self, batch: Batch) -> torch.Tensor:
        """Return the number of supervised tokens."""
        return count_supervised(batch.labels)

    def loss(self, model: Any, batch: Batch, scale: torch.Tensor | None = None) -> BatchLoss:
        """Return the loss, 0 if nothing is supervised.

        ``model.parallelize.setup_model`` replaces the head of a Llama, so the model returns the loss itself, and no
        logits exist (``model.lm_head_loss``). A model whose head cannot be replaced returns logits [B, T, V].
        """
        total, losses = losses_at_targets(model, batch, scale)
        return BatchLoss(total, losses.detach())


def losses_at_targets(
    model: Any, batch: Batch, scale: torch.Tensor | None = None, by_token: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross entropy of the targets of a batch, its sum, fp64 [], and each one's, fp32 [N].

    The sum can be differentiated, and the others too with ``by_token``. For ``scale`` see :meth:`Objective.loss`. If
    the batch has a slice of the rows, this rank computes the targets in it, and gets the others from its group.
    """
    targets, part = batch.targets or find_targets(batch.labels), batch.row_slice
    own = targets if part is None else Targets(part.positions, part.target_ids)
    if has_loss_in_head(model):
        given = {"by_token": True} if by_token else {"scale": scale}
        found = forward_batch(model, batch, positions=own.positions, targets=own.ids, **given)
        total, losses = (None, found) if by_token else found
    else:
        logits = forward_batch(model, batch).logits.flatten(0, 1)
        losses = F.cross_entropy(logits.index_select(0, own.positions).float(), own.ids, reduction="none")
        total = None
    of_all = losses if part is None else whole_losses(part, losses, len(targets.ids))
    if total is None:
        return of_all.sum(dtype=torch.float64), of_all
    if part is not None:  # the gradient is of this rank's sum, and the value of all
        total = total + (of_all.sum(dtype=torch.float64) - total).detach()
    return total, of_all


MakeObjective = Callable[["TrainArguments"], Objective]
_make: MakeObjective | None = None


def use_objective(make: MakeObjective) -> None:
    """Let the runs of this process train with another objective; ``make`` gets their arguments."""
    global _make
    _make = make


def objective_of(arguments: "TrainArguments") -> Objective:
    """Return the objective of ``use_objective``, or else the one that ``--objective`` names."""
    if _make is not None:
        return _make(arguments)
    if not arguments.preference.needs_pairs:
        return CrossEntropy()
    from fabric_train.training.preference import Preference  # which imports this module

    return Preference(arguments.preference)


def counts_pieces(objective: Objective) -> bool:
    """Whether an objective sums over pieces of documents, and not over tokens or something else."""
    return getattr(objective, "counts_pieces", False)


def by_piece(loss: BatchLoss, batch: Batch) -> torch.Tensor | None:
    """Return the losses of the pieces of a batch and, of an objective of pieces, their metrics: fp64 [1 + metrics, P].

    None if they are not known. See :func:`sum_by_piece`.
    """
    if batch.pieces is None or (loss.of_tokens is None and loss.of_pieces is None):
        return None
    if loss.of_pieces is None or loss.metrics_of_pieces is None:
        assert loss.of_tokens is not None
        return sum_by_piece(loss.of_tokens, batch)[None]
    return torch.cat([loss.of_pieces[None], loss.metrics_of_pieces])


def losses_of_targets(of_tokens: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the losses of the targets alone, [N]: for XLA, where every position has a target, on the CPU."""
    if of_tokens.device.type != "xla":
        return of_tokens
    return of_tokens.cpu().index_select(0, (batch.targets or find_targets(batch.labels)).positions)


def sum_by_piece(of_tokens: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Sum the losses of a batch by the pieces of documents that its targets belong to.

    The host does not wait for a GPU, and the sums are the same each time: ``segment_reduce`` adds in a fixed order. A
    loss that is not finite is in its own piece only. The sums are fp64 [P] on the device of ``of_tokens`` [N]; for XLA,
    whose shapes must not change, on the CPU, where the batch is.
    """
    assert batch.pieces is not None
    return sum_segments(losses_of_targets(of_tokens, batch).double(), batch.pieces.num_targets)


def sum_by_source(of_pieces: torch.Tensor, sources: torch.Tensor, num_sources: int) -> torch.Tensor:
    """Sum figures of pieces, fp64 [..., P], by their sources, int64 [P] on the CPU, to fp64 [..., sources]."""
    ordered, order = sources.sort(stable=True)
    lengths = torch.searchsorted(ordered, torch.arange(num_sources + 1)).diff()
    in_order = of_pieces.movedim(-1, 0).index_select(0, to_device_async(order, of_pieces.device))
    return sum_segments(in_order, lengths).movedim(0, -1)


def sum_segments(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the sums of consecutive parts of ``values`` [N, ...]. Their ``lengths`` are int64, also on the CPU."""
    if not len(values):
        return values.new_zeros(len(lengths), *values.shape[1:])
    lengths = to_device_async(lengths, values.device)
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)  # else it reads the lengths, and waits
