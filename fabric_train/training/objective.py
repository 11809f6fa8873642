"""Define the objective, which computes what the documents of a batch add to the loss of a window.

The default is cross entropy, which is here. ``OBJECTIVES`` has all objectives by name; CONTRIBUTING.md says how to add
one, here or in a module of your own. Losses of preference pairs are in ``preference``.

A loss is a sum, and the objective says over how many things it sums. The step divides by their number in the entire
window on all ranks.

Shapes: B rows, T tokens per row, V tokens in the vocabulary, N supervised tokens, P pieces of documents (or pairs).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from lightning import Fabric

from fabric_train.cli.tables import OBJECTIVES, resolve_settings
from fabric_train.data.batch import Batch, Targets, count_supervised, find_targets
from fabric_train.model.attention import forward_batch
from fabric_train.model.context_parallel import whole_losses
from fabric_train.model.lm_head_loss import has_loss_in_head

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments
    from fabric_train.training.prepared_run import PreparedRun


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a batch. Only ``total`` can be differentiated.

    With neither ``token_losses`` nor ``piece_losses``, the loss is not known by source or document.
    """

    total: torch.Tensor
    """The sum over the batch, fp64 []."""
    token_losses: torch.Tensor | None = None
    """The losses of the targets, in order, fp32 [N]; None if the loss is not a sum over single tokens."""
    metrics: torch.Tensor | None = None
    """The sums of the objective's metrics over the batch, fp64 [metrics]; None without metrics."""
    piece_losses: torch.Tensor | None = None
    """The losses of full pieces, such as preference pairs, fp64 [P]; None if the loss is not a sum over pieces."""
    piece_metrics: torch.Tensor | None = None
    """The metrics of these pieces, fp64 [metrics, P]."""
    token_metrics: torch.Tensor | None = None
    """The metrics of the targets, in order, fp32 [metrics, N]; None if the metrics are not sums over single tokens."""


class Objective(Protocol):
    """The loss that training minimizes and evaluation reports.

    For each name in ``metric_names``, the mean over a window is the column ``train_NAME`` of metrics.csv, and the mean
    over the validation split is ``val_NAME``. An objective with an attribute ``counts_pieces`` that is True sums over
    pieces of documents, and returns ``piece_losses`` and ``piece_metrics``. A class that sets ``is_likelihood`` to True
    has a loss in nats per token, from which perplexity and bits per byte are computed. ``WindowObjective`` has more
    methods, which an objective may have.
    """

    @property
    def metric_names(self) -> tuple[str, ...]: ...

    def count(self, batch: Batch) -> torch.Tensor:
        """Return how many things the loss of a batch sums over, int64 []. It must not depend on how rows are split."""

    def loss(self, model: Any, batch: Batch, scale: torch.Tensor | None = None) -> BatchLoss:
        """Return the loss of a batch.

        Args:
            model: The model that ``setup_model`` returned.
            batch: The rows, on the model's device, with its ``pieces`` on the CPU.
            scale: The factor by which the caller multiplies the total before the backward pass, [] on that device;
                models with the loss in their head use it, see ``lm_head_loss.summed_cross_entropy``.
        """


class WindowObjective(Objective, Protocol):
    """An objective whose loss depends on the entire window, or whose metrics are not means over all it counts.

    An objective may have one of these methods, or both.
    """

    def prepare_window(
        self, fabric: Fabric, model: Any, batches: Iterable[Batch], is_interrupted: Callable[[int], bool]
    ) -> Iterable[Batch] | None:
        """Return batches that replace this rank's batches of a window, for ``count`` and ``loss``.

        All ranks call this together before the first backward pass of a step, and before an evaluation, whose window is
        the entire split. It must not compute gradients.

        Args:
            fabric: The run's Fabric, whose ranks share the window.
            model: The model that ``setup_model`` returned.
            batches: This rank's batches on the CPU; they can be read several times.
            is_interrupted: Called with the index of each batch before it is computed; returns the same on all ranks. If
                it returns True, return None.
        """

    def finish_metrics(self, means: Sequence[float], count: int) -> Sequence[float | None]:
        """Return the metrics from their means over ``count`` things, in the order of ``metric_names``.

        A metric that cannot be computed from these things is None.
        """


@dataclass(frozen=True)
class WindowLoss:
    """The losses of the micro-batches of a window on all ranks."""

    summed: torch.Tensor
    """The sum over each micro-batch, fp64 [data ranks, micro-batches of one rank]."""
    counts: torch.Tensor
    """The number of things in each of these sums, int64 of the same shape."""

    @property
    def mean(self) -> torch.Tensor:
        """The loss of the window, such as nats per supervised token, fp64 []; 0 if nothing is counted."""
        return self.summed.sum() / self.counts.sum().clamp(min=1)


class CrossEntropy:
    """The cross entropy of the next token, summed over the supervised tokens."""

    metric_names = ()
    is_likelihood = True

    def count(self, batch: Batch) -> torch.Tensor:
        """Return the number of supervised tokens."""
        return count_supervised(batch.labels)

    def loss(self, model: Any, batch: Batch, scale: torch.Tensor | None = None) -> BatchLoss:
        """Return the loss, 0 if nothing is supervised.

        ``model.parallelize.setup_model`` replaces the head of a Llama, so the model returns the loss itself, and no
        logits exist (``model.lm_head_loss``). A model whose head cannot be replaced returns logits [B, T, V].
        """
        total, token_losses = losses_at_targets(model, batch, scale)
        return BatchLoss(total, token_losses.detach())


def losses_at_targets(
    model: Any, batch: Batch, scale: torch.Tensor | None = None, *, by_token: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross entropy summed over the targets of a batch, fp64 [], and of each target, fp32 [N].

    If the batch has a slice of the rows (context parallelism), this rank computes the targets in its slice, and gets
    the others' values from its group.

    Args:
        model: The model that ``setup_model`` returned.
        batch: The rows, on the model's device.
        scale: See :meth:`Objective.loss`.
        by_token: Whether the losses of single targets can be differentiated, too, not only the sum.
    """
    targets = batch.targets
    if targets is None:
        targets = find_targets(batch.labels)
    row_slice = batch.row_slice
    local_targets = targets if row_slice is None else Targets(row_slice.positions, row_slice.target_ids)

    # Forward pass: the model's head returns the losses of the targets alone, or else all logits.
    total = None
    if has_loss_in_head(model):
        head_options = {"by_token": True} if by_token else {"scale": scale}
        output = forward_batch(
            model, batch, positions=local_targets.positions, targets=local_targets.ids, **head_options
        )
        if by_token:
            local_losses = output
        else:
            total, local_losses = output
    else:
        logits = forward_batch(model, batch).logits.flatten(0, 1)  # [B * T, V]
        target_logits = logits.index_select(0, local_targets.positions).float()  # fp32 [targets, V]
        local_losses = F.cross_entropy(target_logits, local_targets.ids, reduction="none")

    # Losses of all targets, also those in the slices of other ranks.
    losses = local_losses
    if row_slice is not None:
        losses = whole_losses(row_slice, local_losses, len(targets.ids))
    if total is None:
        return losses.sum(dtype=torch.float64), losses
    if row_slice is not None:
        # The gradient is that of this rank's sum, the value that of the whole group's.
        group_total = losses.sum(dtype=torch.float64)
        total = total + (group_total - total).detach()
    return total, losses


BuildObjective = Callable[..., Objective]
"""A function that builds an objective from the arguments of a run, and from settings, which have defaults."""


def build_cross_entropy(arguments: "TrainArguments") -> CrossEntropy:
    """Build the objective of ``--objective sft``."""
    return CrossEntropy()


def build_objective(arguments: "TrainArguments") -> Objective:
    """Build the objective that ``--objective`` names, with its settings."""
    name = arguments.preference.objective
    settings = resolve_settings(OBJECTIVES, name, arguments.preference.objective_settings)
    return OBJECTIVES[name](arguments, **settings)


def counts_pieces(objective: Objective) -> bool:
    """Return whether an objective sums over pieces of documents, rather than over tokens or something else."""
    return getattr(objective, "counts_pieces", False)


def metrics_by_source(objective: Objective) -> tuple[str, ...]:
    """Return the metrics of an objective that are known for single sources: those of pieces, or of single tokens.

    An objective that returns ``token_metrics`` has an attribute ``has_token_metrics`` that is True.
    """
    is_known = counts_pieces(objective) or getattr(objective, "has_token_metrics", False)
    return tuple(objective.metric_names) if is_known else ()


def counts_answers(objective: Objective) -> bool:
    """Return whether an objective sums over unpaired answers, rather than pairs."""
    return getattr(objective, "counts_answers", False)


def prepare_window(
    objective: Objective,
    fabric: Fabric,
    model: Any,
    batches: Iterable[Batch],
    is_interrupted: Callable[[int], bool],
) -> Iterable[Batch] | None:
    """Return the batches of a window as an objective computes them, see ``WindowObjective.prepare_window``."""
    prepare = getattr(objective, "prepare_window", None)
    if prepare is None:
        return batches
    prepared: Iterable[Batch] | None = prepare(fabric, model, batches, is_interrupted)
    return prepared


def connect_objective(objective: Objective, fabric: Fabric, run: "PreparedRun") -> "PreparedRun":
    """Let an objective set up what it needs beside the run's model, and return the run with a record of it.

    An objective may have a method ``connect(fabric, run)`` for this. All ranks call it together, before the run's model
    is built.
    """
    connect = getattr(objective, "connect", None)
    if connect is None:
        return run
    connected: PreparedRun = connect(fabric, run)
    return connected


def name_metrics(objective: Objective, means: Sequence[float], count: int) -> dict[str, float | None]:
    """Return the metrics of an objective by name, from their means over ``count`` things."""
    finish = getattr(objective, "finish_metrics", None)
    values = means if finish is None else finish(means, count)
    return dict(zip(objective.metric_names, values, strict=True))


def is_likelihood(objective: Objective) -> bool:
    """Return whether the loss of an objective is in nats per token.

    A subclass, which may change the loss, must say so itself.
    """
    return bool(vars(type(objective)).get("is_likelihood", False))
