"""The objective: what the documents of a batch add to the loss of a window. Cross entropy is the default.

``OBJECTIVES`` has objectives by name; CONTRIBUTING.md says how to add one, also from outside.

A loss is a sum, and says over how many things it sums. The step divides by the number in the whole window on all ranks.

DPO, IPO, SimPO and ORPO are functions of the log-probabilities of both answers of preference pairs. A log-probability
is the sum over an answer's tokens, its end-of-turn token included and its prompt not. To add such a loss, write a
function of ``Pairs`` here, list it in ``LOSSES``, and its arguments in ``PreferenceArguments``.

Shapes: B rows, T tokens a row, N supervised tokens, P pieces of documents, or pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F

from fabric_train.cli.tables import OBJECTIVES, resolve_settings
from fabric_train.data.batch import Batch, Targets, count_supervised, find_targets
from fabric_train.distributed.ranks import to_device_async
from fabric_train.model.attention import forward_batch
from fabric_train.model.context_parallel import whole_losses
from fabric_train.model.lm_head_loss import has_loss_in_head

if TYPE_CHECKING:
    from fabric_train.arguments import PreferenceArguments, TrainArguments


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
    that is True sums over pieces of documents, and returns ``of_pieces`` and ``metrics_of_pieces``. A class that sets
    ``is_likelihood`` to True has a loss in nats per token, from which perplexity and bits per byte are computed.
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
    is_likelihood = True

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
    targets = batch.targets or find_targets(batch.labels)
    part = batch.row_slice
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


MakeObjective = Callable[..., Objective]
"""Makes an objective of the arguments of a run, and of settings: its further parameters, which have defaults."""


def cross_entropy(arguments: "TrainArguments") -> CrossEntropy:
    """Make the objective of ``--objective sft``."""
    return CrossEntropy()


def objective_of(arguments: "TrainArguments") -> Objective:
    """Return the objective that ``--objective`` names, with its settings."""
    given = arguments.preference
    settings = resolve_settings(OBJECTIVES, given.objective, given.objective_settings)
    return OBJECTIVES[given.objective](arguments, **settings)


def counts_pieces(objective: Objective) -> bool:
    """Whether an objective sums over pieces of documents, and not over tokens or something else."""
    return getattr(objective, "counts_pieces", False)


def is_likelihood(objective: Objective) -> bool:
    """Whether the loss of an objective is in nats per token; a subclass, which may change the loss, says it anew."""
    return bool(vars(type(objective)).get("is_likelihood", False))


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


@dataclass(frozen=True)
class Pairs:
    """P pairs: log-probabilities of both answers, of the policy and of the reference, and numbers of their tokens.

    All are fp64 [P]. Without a reference model, its log-probabilities are 0.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    reference_chosen: torch.Tensor
    reference_rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor

    def per_token(self) -> "Pairs":
        """Return the means over the tokens of each answer, in place of the sums."""
        chosen = self.chosen_tokens.clamp(min=1)
        rejected = self.rejected_tokens.clamp(min=1)
        of_policy = self.chosen / chosen, self.rejected / rejected
        of_reference = self.reference_chosen / chosen, self.reference_rejected / rejected
        return Pairs(*of_policy, *of_reference, self.chosen_tokens, self.rejected_tokens)

    @property
    def chosen_ratio(self) -> torch.Tensor:
        """How much likelier the policy finds the chosen answers than the reference does: a difference of logarithms."""
        return self.chosen - self.reference_chosen

    @property
    def rejected_ratio(self) -> torch.Tensor:
        return self.rejected - self.reference_rejected


def dpo(pairs: Pairs, given: "PreferenceArguments") -> torch.Tensor:
    """Return the loss of Direct Preference Optimization (arXiv:2305.18290, equation 7) of each pair, fp64 [P].

    ``length_normalised`` takes the log-probabilities per token (Tülu 3, arXiv:2411.15124, section 5). With
    ``label_smoothing`` ε, each pair counts as the other way round with weight ε (cDPO, Mitchell 2023).
    """
    pairs = pairs.per_token() if given.length_normalised else pairs
    return _smoothed(given.dpo_beta * (pairs.chosen_ratio - pairs.rejected_ratio), given.label_smoothing)


def apo_zero(pairs: Pairs, given: "PreferenceArguments") -> torch.Tensor:
    """Return the loss of Anchored Preference Optimization, zero (arXiv:2408.06266, table 1), of each pair, fp64 [P].

    Each answer has a loss of its own, so that the chosen one becomes likelier and the rejected one less likely.
    """
    return F.sigmoid(-given.dpo_beta * pairs.chosen_ratio) + F.sigmoid(given.dpo_beta * pairs.rejected_ratio)


def dpop(pairs: Pairs, given: "PreferenceArguments") -> torch.Tensor:
    """Return the loss of DPO-Positive (arXiv:2402.13228, equation 3) of each pair, fp64 [P].

    ``dpop_lambda`` times what the chosen answer is less likely than with the reference is taken from the margin.
    """
    lost = (-pairs.chosen_ratio).clamp(min=0)
    margins = pairs.chosen_ratio - pairs.rejected_ratio - given.dpop_lambda * lost
    return _smoothed(given.dpo_beta * margins, 0.0)


def ipo(pairs: Pairs, given: "PreferenceArguments") -> torch.Tensor:
    """Return the loss of Identity Preference Optimization (arXiv:2310.12036, equation 17) of each pair, fp64 [P].

    Log-probabilities are per token, as in the authors' experiments and in TRL.
    """
    pairs = pairs.per_token()
    return (pairs.chosen_ratio - pairs.rejected_ratio - 1 / (2 * given.dpo_beta)) ** 2


def simpo(pairs: Pairs, given: "PreferenceArguments") -> torch.Tensor:
    """Return the loss of Simple Preference Optimization (arXiv:2405.14734, equation 6) of each pair, fp64 [P]."""
    pairs = pairs.per_token()
    return _smoothed(given.dpo_beta * (pairs.chosen - pairs.rejected) - given.simpo_gamma, given.label_smoothing)


def orpo(pairs: Pairs, given: "PreferenceArguments") -> torch.Tensor:
    """Return the loss of Odds Ratio Preference Optimization (arXiv:2403.07691, equations 6 and 7) of each pair, [P].

    It is the chosen answer's cross entropy per token, and ``dpo_beta`` (λ in the paper) times the loss of the odds.
    """
    pairs = pairs.per_token()
    chosen, rejected = (odds - _log_of_the_others(odds) for odds in (pairs.chosen, pairs.rejected))
    return -pairs.chosen - given.dpo_beta * F.logsigmoid(chosen - rejected)


def _smoothed(margins: torch.Tensor, share: float) -> torch.Tensor:
    """Return the loss of reward margins; a ``share`` of them may have the wrong sign."""
    return -(1 - share) * F.logsigmoid(margins) - share * F.logsigmoid(-margins)


def _log_of_the_others(logs: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(x)) for x below 0, exact near 0 and far from it; at 0 as for the number next to it."""
    logs = logs.clamp(max=-torch.finfo(logs.dtype).tiny)
    return torch.where(logs > -0.6931471805599453, torch.log(-torch.expm1(logs)), torch.log1p(-logs.exp()))


LOSSES: dict[str, Callable[[Pairs, "PreferenceArguments"], torch.Tensor]] = {
    "dpo": dpo,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
    "apo_zero": apo_zero,
    "dpop": dpop,
}
_METRICS = (
    *("reward_chosen", "reward_rejected", "margin", "accuracy", "ties"),
    *("logp_chosen", "logp_rejected", "length_chosen", "length_rejected", "sft_loss"),
)


_OF_SUMS = ("dpo", "apo_zero", "dpop")
"""The losses of log-probabilities of whole answers; the others take means over their tokens."""


class Preference:
    """A loss of ``LOSSES``, summed over the pairs; a pair is one piece of its row."""

    counts_pieces = True

    def __init__(self, given: "PreferenceArguments") -> None:
        self._given = given
        self._of_pairs = LOSSES[given.objective]
        self.metric_names = (*_METRICS, *(("kl",) if given.needs_reference else ()))

    def count(self, batch: Batch) -> torch.Tensor:
        """Return the number of pairs, int64 [], 0 for a rank without rows."""
        return torch.tensor(batch.num_pairs, device=batch.labels.device)

    def loss(self, model: Any, batch: Batch, scale: torch.Tensor | None = None) -> BatchLoss:
        """Return the loss and the metrics of each pair; ``scale`` is not used."""
        of_answers, num_tokens = answers_of(model, batch)
        if not batch.num_pairs:
            return BatchLoss(of_answers.sum())  # 0, and other ranks wait for this one's backward pass
        pairs = self._pairs(of_answers, num_tokens, batch.reference)
        losses = self._of_pairs(pairs, self._given)
        if self._given.sft_weight:  # Llama 3 (arXiv:2407.21783, section 4.1.4), per token as in arXiv:2404.19733
            losses = losses - self._given.sft_weight * pairs.per_token().chosen
        found = self._metrics(pairs)
        of_pieces = torch.stack([found[name] for name in self.metric_names]).detach()
        return BatchLoss(losses.sum(), None, of_pieces.sum(dim=1), losses.detach(), of_pieces)

    def _pairs(self, of_answers: torch.Tensor, num_tokens: torch.Tensor, reference: torch.Tensor | None) -> Pairs:
        if self._given.needs_reference:
            assert reference is not None  # ``training.reference`` has computed it
        else:
            reference = torch.zeros_like(of_answers)
        columns = (*of_answers.T, *reference.T, *num_tokens.T)
        return Pairs(*columns)

    def _metrics(self, pairs: Pairs) -> dict[str, torch.Tensor]:
        """Return the metrics of each pair, fp64 [P].

        A reward is ``dpo_beta`` times the log-probability beyond the reference's, per token where the loss is. ``kl``
        is the mean over both answers of the reference's log-probability beyond the policy's, per token: an estimate of
        KL(reference ‖ policy) as far as the answers are such as the reference gives.
        """
        per_token = pairs.per_token()
        takes_sums = self._given.objective in _OF_SUMS and not self._given.length_normalised
        scored = pairs if takes_sums else per_token
        chosen = self._given.dpo_beta * scored.chosen_ratio
        rejected = self._given.dpo_beta * scored.rejected_ratio
        ties = (chosen == rejected).double()
        return {
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            "margin": chosen - rejected,
            "accuracy": (chosen > rejected).double() + ties / 2,
            "ties": ties,
            "logp_chosen": pairs.chosen,
            "logp_rejected": pairs.rejected,
            "length_chosen": pairs.chosen_tokens,
            "length_rejected": pairs.rejected_tokens,
            "sft_loss": -per_token.chosen,
            "kl": -(per_token.chosen_ratio + per_token.rejected_ratio) / 2,
        }


def preference(arguments: "TrainArguments") -> Preference:
    """Make the objective of ``--objective dpo`` and the others of ``LOSSES``."""
    return Preference(arguments.preference)


def answers_of(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of the answers of a batch and the numbers of their tokens, both fp64 [P, 2].

    The first column is of the chosen answers. Only the former can be differentiated; without pairs it is [0, 2].
    """
    losses = losses_at_targets(model, batch, by_token=True)[1]
    if batch.documents is None:
        return -losses.double().expand(2, -1).T, losses.new_zeros(0, 2)
    # a target belongs to the sequence that its own token is in, which is one after the position that predicts it
    targets = batch.targets or find_targets(batch.labels)
    ends = torch.searchsorted(targets.positions + 1, batch.documents.borders.long())
    lengths = ends.diff()
    return -sum_segments(losses.double(), lengths).view(-1, 2), lengths.double().view(-1, 2)
