"""Kahneman-Tversky Optimization (KTO, arXiv:2402.01306) for unpaired answers, each of which is desirable or not.

The log-ratio of an answer says how much likelier the policy finds it than the reference does. It is compared with the
KL divergence between policy and reference. The paper estimates the divergence from a batch. Here it is estimated from
the window, over all ranks, so that the loss does not depend on how the window is split.

Shapes: A answers of a batch, N supervised tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from lightning import Fabric

from fabric_train.data.batch import Batch
from fabric_train.data.unpaired_batch import ANSWER, MISMATCHED, select_sequences
from fabric_train.distributed.ranks import sum_over_data_ranks
from fabric_train.model.context_parallel import place_batch
from fabric_train.training.objective import BatchLoss, losses_at_targets
from fabric_train.training.source_losses import sum_by_piece

if TYPE_CHECKING:
    from fabric_train.arguments import PreferenceArguments, TrainArguments


def kto_losses(
    log_ratios: torch.Tensor, is_desirable: torch.Tensor, kl: torch.Tensor, arguments: "PreferenceArguments"
) -> torch.Tensor:
    """Return KTO's loss (arXiv:2402.01306, equations 7 and 8) for each answer, fp64 [A].

    Args:
        log_ratios: The log-probability of each answer under the policy minus that under the reference, fp64 [A].
        is_desirable: The labels, bool [A].
        kl: The estimate of the KL divergence in nats, 0 or more, fp64 []; z_0 in the paper.
        arguments: β and the weights of both kinds of answers.
    """
    rewards = arguments.dpo_beta * (log_ratios - kl)
    desirable_losses = arguments.kto_desirable_weight * F.sigmoid(-rewards)  # 1 - σ(x) is σ(-x)
    undesirable_losses = arguments.kto_undesirable_weight * F.sigmoid(rewards)
    return torch.where(is_desirable, desirable_losses, undesirable_losses)


class KTO:
    """The loss of KTO or APO-zero, summed over the answers; an answer is one piece of its row.

    A row has each answer with its prompt, and the same prompt with another row's answer, which only estimates the KL
    divergence. :meth:`prepare_window` computes the latter without a gradient and removes them from the batches. So an
    answer takes one more forward pass than in training on texts, and no more backward passes. APO-zero for unpaired
    answers (arXiv:2408.06266, table 1) is the same loss with a divergence of 0, so it needs no such pass.
    """

    counts_pieces = True
    counts_answers = True
    metric_names = (
        *("reward_desirable", "reward_undesirable", "margin", "kl", "desirable", "undesirable"),
        *("logp_desirable", "logp_undesirable"),
    )

    def __init__(self, arguments: "PreferenceArguments") -> None:
        self._arguments = arguments
        self._estimates_kl = arguments.objective == "kto"

    def prepare_window(
        self, fabric: Fabric, model: Any, batches: Iterable[Batch], is_interrupted: Callable[[int], bool]
    ) -> Iterator[Batch] | None:
        """Return the batches of a window with its KL divergence, and without the sequences that only estimate it.

        All ranks call this together. See :meth:`~fabric_train.training.objective.WindowObjective.prepare_window`.
        """
        kl: torch.Tensor | None = torch.zeros((), dtype=torch.float64, device=fabric.device)
        if self._estimates_kl:
            kl = _estimate_kl(fabric, model, batches, is_interrupted)
        if kl is None:
            return None
        return (replace(select_sequences(batch, ANSWER), kl=kl) for batch in batches)

    def count(self, batch: Batch) -> torch.Tensor:
        """Return the number of answers, int64 [], 0 for a rank without rows."""
        num_answers = 0 if batch.is_desirable is None else len(batch.is_desirable)
        return torch.tensor(num_answers, device=batch.labels.device)

    def loss(self, model: Any, batch: Batch, scale: torch.Tensor | None = None) -> BatchLoss:
        """Return the loss and the metrics of each answer of a batch of ``prepare_window``; ``scale`` is not used."""
        if batch.is_desirable is None:
            # 0, but the other ranks wait for the backward pass of this rank
            return BatchLoss(losses_at_targets(model, batch, by_token=True)[1].sum(dtype=torch.float64))
        assert batch.kl is not None  # prepare_window has estimated it
        assert batch.reference is not None  # training.reference has computed it
        log_ratios = compute_log_ratios(model, batch)
        losses = kto_losses(log_ratios, batch.is_desirable, batch.kl, self._arguments)

        # The metrics are sums of one kind of answers each, which ``finish_metrics`` divides by the number of that kind.
        log_ratios = log_ratios.detach()
        rewards = self._arguments.dpo_beta * log_ratios
        logps = log_ratios + batch.reference
        desirable = batch.is_desirable.double()
        undesirable = 1 - desirable
        sums = {
            "reward_desirable": rewards * desirable,
            "reward_undesirable": rewards * undesirable,
            "margin": torch.zeros_like(rewards),  # it follows from the two before it
            "kl": batch.kl.expand_as(rewards),
            "desirable": desirable,
            "undesirable": undesirable,
            "logp_desirable": logps * desirable,
            "logp_undesirable": logps * undesirable,
        }
        piece_metrics = torch.stack([sums[name] for name in self.metric_names])  # [metrics, A]
        return BatchLoss(
            total=losses.sum(),
            metrics=piece_metrics.sum(dim=1),
            piece_losses=losses.detach(),
            piece_metrics=piece_metrics,
        )

    def finish_metrics(self, means: Sequence[float], count: int) -> list[float | None]:
        """Return the metrics from their means over ``count`` answers; the mean over no answers is None.

        Rewards and log-probabilities are means over the answers of one kind, ``margin`` is the difference of both
        rewards, and ``desirable`` and ``undesirable`` are numbers of answers.
        """
        values: dict[str, float | None] = dict(zip(self.metric_names, means, strict=True))
        mean_by_name = dict(zip(self.metric_names, means, strict=True))
        for kind in ("desirable", "undesirable"):
            share = mean_by_name[kind]
            for name in (f"reward_{kind}", f"logp_{kind}"):
                values[name] = mean_by_name[name] / share if share else None
            values[kind] = round(share * count)
        reward_desirable = values["reward_desirable"]
        reward_undesirable = values["reward_undesirable"]
        values["margin"] = None
        if reward_desirable is not None and reward_undesirable is not None:
            values["margin"] = reward_desirable - reward_undesirable
        return list(values.values())


@torch.no_grad()
def _estimate_kl(
    fabric: Fabric, model: Any, batches: Iterable[Batch], is_interrupted: Callable[[int], bool]
) -> torch.Tensor | None:
    """Return the KL divergence of a window over all ranks in nats, fp64 []; None if ``is_interrupted`` returned True.

    This is the mean log-ratio of the other rows' answers, or 0 if that is negative (arXiv:2402.01306, section 4.1).
    """
    totals = torch.zeros(2, dtype=torch.float64, device=fabric.device)  # log-ratios, and their number
    for index, batch in enumerate(batches):
        if is_interrupted(index):
            return None
        log_ratios = compute_log_ratios(model, place_batch(fabric, select_sequences(batch, MISMATCHED)))
        totals[0] += log_ratios.sum()
        totals[1] += len(log_ratios)
    log_ratio_sum, num_answers = sum_over_data_ranks(fabric, totals)
    return (log_ratio_sum / num_answers.clamp(min=1)).clamp(min=0)


def compute_log_ratios(model: Any, batch: Batch) -> torch.Tensor:
    """Return how much likelier the policy finds each answer of a batch than the reference does, fp64 [A].

    The batch is one of ``select_sequences`` on the model's device: each of its documents is an answer with its prompt.
    """
    token_losses = losses_at_targets(model, batch, by_token=True)[1]  # fp32 [N]
    if batch.reference is None:
        return token_losses.new_zeros(0, dtype=torch.float64)  # a rank without rows
    return -sum_by_piece(token_losses, batch) - batch.reference


def build_kto(arguments: "TrainArguments") -> KTO:
    """Build the objective of ``--objective kto`` and ``--objective apo_zero_unpaired``."""
    return KTO(arguments.preference)
