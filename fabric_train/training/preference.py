"""Objectives of preference pairs: DPO, IPO, SimPO and ORPO, each a function of the log-probabilities of both answers.

A log-probability is the sum over an answer's tokens, its end-of-turn token included and its prompt not. To add a loss,
write a function of ``Pairs`` here, list it in ``LOSSES``, and its arguments in ``PreferenceArguments``.
Shapes: P pairs, N supervised tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from fabric_train.data.batch import Batch, find_targets
from fabric_train.training.objective import BatchLoss, losses_at_targets, sum_segments

if TYPE_CHECKING:
    from arguments import PreferenceArguments


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
        chosen, rejected = self.chosen_tokens.clamp(min=1), self.rejected_tokens.clamp(min=1)
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
}
_METRICS = (
    *("reward_chosen", "reward_rejected", "margin", "accuracy", "ties"),
    *("logp_chosen", "logp_rejected", "length_chosen", "length_rejected", "sft_loss"),
)


class Preference:
    """A loss of ``LOSSES``, summed over the pairs; a pair is one piece of its row."""

    counts_pieces = True

    def __init__(self, given: "PreferenceArguments") -> None:
        self._given, self._of_pairs = given, LOSSES[given.objective]
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
        scored = per_token if self._given.objective != "dpo" or self._given.length_normalised else pairs
        chosen, rejected = self._given.dpo_beta * scored.chosen_ratio, self._given.dpo_beta * scored.rejected_ratio
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
