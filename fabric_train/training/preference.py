"""Compute the losses of preference pairs: DPO, IPO, SimPO, ORPO, APO-zero and DPO-Positive.

Each loss is a function of the log-probabilities of a pair's answers. A log-probability is the sum over an answer's
tokens, including its end-of-turn token and excluding its prompt. To add a loss, write a function of ``Pairs``
here, list it in ``LOSSES``, and its arguments in ``PreferenceArguments``.

Shapes: N supervised tokens, P preference pairs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from fabric_train.data.batch import Batch, find_targets
from fabric_train.training.objective import BatchLoss, losses_at_targets
from fabric_train.training.source_losses import sum_segments

if TYPE_CHECKING:
    from fabric_train.arguments import PreferenceArguments, TrainArguments


@dataclass(frozen=True)
class Pairs:
    """The log-probabilities of both answers of P pairs, and the answers' numbers of tokens, all fp64 [P].

    Without a reference model, the reference log-probabilities are 0.
    """

    chosen: torch.Tensor
    """The log-probability of the chosen answer under the policy."""
    rejected: torch.Tensor
    reference_chosen: torch.Tensor
    """The log-probability of the chosen answer under the reference model."""
    reference_rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor

    def per_token(self) -> "Pairs":
        """Return the means over the tokens of each answer, instead of the sums."""
        chosen_tokens = self.chosen_tokens.clamp(min=1)
        rejected_tokens = self.rejected_tokens.clamp(min=1)
        return Pairs(
            chosen=self.chosen / chosen_tokens,
            rejected=self.rejected / rejected_tokens,
            reference_chosen=self.reference_chosen / chosen_tokens,
            reference_rejected=self.reference_rejected / rejected_tokens,
            chosen_tokens=self.chosen_tokens,
            rejected_tokens=self.rejected_tokens,
        )

    @property
    def chosen_ratio(self) -> torch.Tensor:
        """The log-ratio of the chosen answer: how much likelier the policy finds it than the reference does."""
        return self.chosen - self.reference_chosen

    @property
    def rejected_ratio(self) -> torch.Tensor:
        """The log-ratio of the rejected answer."""
        return self.rejected - self.reference_rejected


def dpo(pairs: Pairs, arguments: "PreferenceArguments") -> torch.Tensor:
    """Return the loss of Direct Preference Optimization (arXiv:2305.18290, equation 7) of each pair, fp64 [P].

    ``length_normalised`` takes the log-probabilities per token (Tülu 3, arXiv:2411.15124, section 5). With
    ``label_smoothing`` ε, each pair also counts the other way round, with weight ε (cDPO, Mitchell 2023).
    """
    if arguments.length_normalised:
        pairs = pairs.per_token()
    margins = arguments.dpo_beta * (pairs.chosen_ratio - pairs.rejected_ratio)
    return _smoothed_logistic_loss(margins, arguments.label_smoothing)


def apo_zero(pairs: Pairs, arguments: "PreferenceArguments") -> torch.Tensor:
    """Return the loss of Anchored Preference Optimization, zero (arXiv:2408.06266, table 1), of each pair, fp64 [P].

    Each answer has its own loss: the chosen one becomes likelier and the rejected one less likely.
    """
    chosen_loss = F.sigmoid(-arguments.dpo_beta * pairs.chosen_ratio)
    rejected_loss = F.sigmoid(arguments.dpo_beta * pairs.rejected_ratio)
    return chosen_loss + rejected_loss


def dpop(pairs: Pairs, arguments: "PreferenceArguments") -> torch.Tensor:
    """Return the loss of DPO-Positive (arXiv:2402.13228, equation 3) of each pair, fp64 [P].

    If the policy finds the chosen answer less likely than the reference does, the margin is reduced by
    ``dpop_lambda`` times the difference.
    """
    penalty = (-pairs.chosen_ratio).clamp(min=0)
    margins = pairs.chosen_ratio - pairs.rejected_ratio - arguments.dpop_lambda * penalty
    return _smoothed_logistic_loss(arguments.dpo_beta * margins, 0.0)


def ipo(pairs: Pairs, arguments: "PreferenceArguments") -> torch.Tensor:
    """Return the loss of Identity Preference Optimization (arXiv:2310.12036, equation 17) of each pair, fp64 [P].

    Log-probabilities are per token, as in the authors' experiments and in TRL.
    """
    pairs = pairs.per_token()
    margins = pairs.chosen_ratio - pairs.rejected_ratio
    return (margins - 1 / (2 * arguments.dpo_beta)) ** 2


def simpo(pairs: Pairs, arguments: "PreferenceArguments") -> torch.Tensor:
    """Return the loss of Simple Preference Optimization (arXiv:2405.14734, equation 6) of each pair, fp64 [P]."""
    pairs = pairs.per_token()
    margins = arguments.dpo_beta * (pairs.chosen - pairs.rejected) - arguments.simpo_gamma
    return _smoothed_logistic_loss(margins, arguments.label_smoothing)


def orpo(pairs: Pairs, arguments: "PreferenceArguments") -> torch.Tensor:
    """Return the loss of Odds Ratio Preference Optimization (arXiv:2403.07691, equations 6 and 7) of each pair, [P].

    This is the chosen answer's cross entropy per token, plus ``dpo_beta`` (λ in the paper) times the loss of the odds
    ratio. The odds of an answer are p / (1 - p), with p its probability per token.
    """
    pairs = pairs.per_token()
    chosen_log_odds = pairs.chosen - log1mexp(pairs.chosen)
    rejected_log_odds = pairs.rejected - log1mexp(pairs.rejected)
    return -pairs.chosen - arguments.dpo_beta * F.logsigmoid(chosen_log_odds - rejected_log_odds)


def _smoothed_logistic_loss(margins: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """Return the logistic loss of reward margins, of which the share ``label_smoothing`` may have the wrong sign."""
    return -(1 - label_smoothing) * F.logsigmoid(margins) - label_smoothing * F.logsigmoid(-margins)


def log1mexp(logs: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(x)) for x below 0, exact near 0 and far from it (Mächler 2012).

    At 0, where the result would be infinite, return the result for the largest number below 0.
    """
    logs = logs.clamp(max=-torch.finfo(logs.dtype).tiny)
    return torch.where(logs > -math.log(2), torch.log(-torch.expm1(logs)), torch.log1p(-logs.exp()))


LOSSES: dict[str, Callable[[Pairs, "PreferenceArguments"], torch.Tensor]] = {
    "dpo": dpo,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
    "apo_zero": apo_zero,
    "dpop": dpop,
}
_LOSSES_OF_SUMS = ("dpo", "apo_zero", "dpop")
"""The losses that use log-probabilities of full answers; the others use means over an answer's tokens."""
_METRIC_NAMES = (
    *("reward_chosen", "reward_rejected", "margin", "accuracy", "ties"),
    *("logp_chosen", "logp_rejected", "length_chosen", "length_rejected", "sft_loss"),
)


class Preference:
    """A loss of ``LOSSES``, summed over the pairs; a pair is one piece of its row."""

    counts_pieces = True

    def __init__(self, arguments: "PreferenceArguments") -> None:
        self._arguments = arguments
        self._pair_loss = LOSSES[arguments.objective]
        self.metric_names: tuple[str, ...] = _METRIC_NAMES
        if arguments.needs_reference:
            self.metric_names = (*_METRIC_NAMES, "kl")

    def count(self, batch: Batch) -> torch.Tensor:
        """Return the number of pairs, int64 [], 0 for a rank without rows."""
        return torch.tensor(batch.num_pairs, device=batch.labels.device)

    def loss(self, model: Any, batch: Batch, scale: torch.Tensor | None = None) -> BatchLoss:
        """Return the loss and the metrics of each pair; ``scale`` is not used."""
        logps, num_tokens = answer_logps(model, batch)
        if not batch.num_pairs:
            return BatchLoss(logps.sum())  # 0, but the other ranks wait for the backward pass of this rank
        pairs = self._collect_pairs(logps, num_tokens, batch.reference)
        losses = self._pair_loss(pairs, self._arguments)
        if self._arguments.sft_weight:
            # Llama 3 (arXiv:2407.21783, section 4.1.4), per token as in arXiv:2404.19733
            losses = losses - self._arguments.sft_weight * pairs.per_token().chosen
        metrics = self.compute_metrics(pairs)
        piece_metrics = torch.stack([metrics[name] for name in self.metric_names]).detach()  # [metrics, P]
        return BatchLoss(
            total=losses.sum(),
            metrics=piece_metrics.sum(dim=1),
            piece_losses=losses.detach(),
            piece_metrics=piece_metrics,
        )

    def _collect_pairs(self, logps: torch.Tensor, num_tokens: torch.Tensor, reference: torch.Tensor | None) -> Pairs:
        """Return the pairs of [P, 2] tensors, whose first column belongs to the chosen answers."""
        if self._arguments.needs_reference:
            assert reference is not None  # ``training.reference`` has computed it
        else:
            reference = torch.zeros_like(logps)
        return Pairs(
            chosen=logps[:, 0],
            rejected=logps[:, 1],
            reference_chosen=reference[:, 0],
            reference_rejected=reference[:, 1],
            chosen_tokens=num_tokens[:, 0],
            rejected_tokens=num_tokens[:, 1],
        )

    def compute_metrics(self, pairs: Pairs) -> dict[str, torch.Tensor]:
        """Return the metrics of each pair, fp64 [P].

        A reward is ``dpo_beta`` times the log-ratio of an answer, per token where the loss is. ``kl`` estimates
        KL(reference ‖ policy) per token: it is the mean over both answers of the reference's log-probability minus the
        policy's. The estimate is good if the answers are similar to what the reference would generate.
        """
        # Rewards are computed from the log-probabilities that the loss takes.
        per_token = pairs.per_token()
        takes_sums = self._arguments.objective in _LOSSES_OF_SUMS and not self._arguments.length_normalised
        rewarded = pairs if takes_sums else per_token
        reward_chosen = self._arguments.dpo_beta * rewarded.chosen_ratio
        reward_rejected = self._arguments.dpo_beta * rewarded.rejected_ratio
        ties = (reward_chosen == reward_rejected).double()
        return {
            "reward_chosen": reward_chosen,
            "reward_rejected": reward_rejected,
            "margin": reward_chosen - reward_rejected,
            "accuracy": (reward_chosen > reward_rejected).double() + ties / 2,
            "ties": ties,
            "logp_chosen": pairs.chosen,
            "logp_rejected": pairs.rejected,
            "length_chosen": pairs.chosen_tokens,
            "length_rejected": pairs.rejected_tokens,
            "sft_loss": -per_token.chosen,
            "kl": -(per_token.chosen_ratio + per_token.rejected_ratio) / 2,
        }


def build_preference(arguments: "TrainArguments") -> Preference:
    """Build the objective of ``--objective dpo`` and the other names in ``LOSSES``."""
    return Preference(arguments.preference)


def answer_logps(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of the answers of a batch and the numbers of their tokens, both fp64 [P, 2].

    The first column belongs to the chosen answers. Only the log-probabilities can be differentiated; without pairs they
    are [0, 2].
    """
    losses = losses_at_targets(model, batch, by_token=True)[1]  # fp32 [N]
    if batch.documents is None:
        return -losses.double().expand(2, -1).T, losses.new_zeros(0, 2)
    targets = batch.targets
    if targets is None:
        targets = find_targets(batch.labels)
    # A target belongs to the answer that its own token is in, which is one position after the one that predicts it.
    token_positions = targets.positions + 1
    borders = torch.searchsorted(token_positions, batch.documents.borders.long())  # [documents + 1], indices of targets
    lengths = borders.diff()
    logps = -sum_segments(losses.double(), lengths)  # [documents]: chosen and rejected by turns
    return logps.view(-1, 2), lengths.double().view(-1, 2)
