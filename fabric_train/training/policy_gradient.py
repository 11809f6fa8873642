"""Reinforcement learning on sampled completions: the objective of ``--objective rl``.

The loss of a token is in ``model.policy_loss``. The loss of a window is its sum over the tokens of all completions on
all ranks, divided by their number (``--loss_normalisation tokens``), or by the number of completions times the largest
number of tokens that a completion can have (``constant``, arXiv:2503.20783). Both divisors are known before the first
backward pass, so loss and gradient do not depend on how the window is split.

Shapes: N targets in a batch, which are the tokens of completions, and R rewards.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning import Fabric

from fabric_train.data.batch import Batch, count_supervised, find_targets
from fabric_train.data.rollout_values import RolloutValues
from fabric_train.distributed.ranks import sum_over_data_ranks
from fabric_train.model.attention import forward_batch
from fabric_train.model.policy_loss import VALUES, PolicyLoss
from fabric_train.model.teacher_head import check_head
from fabric_train.rollouts.rewards import name_rewards
from fabric_train.training.live_reference import Reference, set_up_live_reference
from fabric_train.training.objective import BatchLoss, losses_at_targets
from fabric_train.training.prepared_run import PreparedRun

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments

_COMPLETION_NAMES = ("completions", "completion_tokens", "cut_completions", "flat_groups", "failed_rewards")
"""The metrics of completions beside the rewards: their number, their mean number of tokens, the share that has the
largest number of tokens without an end, the share in groups whose rewards are all equal, and the share of which a
reward failed."""

_SFT_NAMES = ("sft_tokens", "sft_loss")
"""The metrics of the rows of a token dataset: the number of supervised tokens, and their mean cross entropy."""


class PolicyGradient:
    """The policy gradient of sampled completions, summed over their tokens.

    Metrics of completions are means over completions, and those of ``policy_loss.VALUES`` are means over tokens.
    """

    has_token_metrics = True

    def __init__(
        self,
        reward_names: Sequence[str],
        *,
        temperature: float,
        max_new_tokens: int,
        loss_normalisation: Literal["tokens", "constant"] = "tokens",
        kl_weight: float = 0.0,
        sft_weight: float = 0.0,
        reference: Reference | None = None,
    ) -> None:
        """Make the objective.

        Args:
            reward_names: The names of the rewards, in the order of ``RolloutValues.rewards``.
            temperature: The temperature of sampling.
            max_new_tokens: The largest number of tokens of a completion.
            loss_normalisation: What the sum over the tokens is divided by.
            kl_weight: The weight of the divergence from the reference.
            sft_weight: The weight of the mean cross entropy of rows of a token dataset, which train beside the
                completions.
            reference: The model that the policy should stay close to; if it is None, :meth:`connect` sets one up if
                ``kl_weight`` is above 0.
        """
        self._num_rewards = len(reward_names)
        # the weighted sum comes first
        self._reward_metrics = ("reward", *(f"reward_{name}" for name in reward_names))
        self._policy_metrics: tuple[str, ...] = VALUES[1:]  # without the loss
        if kl_weight > 0:
            self._policy_metrics = (*self._policy_metrics, "reference_kl")
        self._temperature = temperature
        self._max_new_tokens = max_new_tokens
        self._loss_normalisation = loss_normalisation
        self._kl_weight = kl_weight
        self._sft_weight = sft_weight
        self._reference = reference

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics of completions, and then those of tokens."""
        names = (*self._reward_metrics, *_COMPLETION_NAMES, *self._policy_metrics)
        if self._sft_weight > 0:
            names = (*names, *_SFT_NAMES)
        return names

    def connect(self, fabric: Fabric, run: PreparedRun) -> PreparedRun:
        """Set up the reference if there is one, and return the run with its record; see ``connect_objective``.

        Raises:
            InputError: The model has no head in which the loss can be computed, or the reference cannot be used.
        """
        check_head(run.model, f"--model_name {run.model.source}", "rl")
        if self._kl_weight > 0:
            run, self._reference = set_up_live_reference(fabric, run)
        return run

    def count(self, batch: Batch) -> torch.Tensor:
        """Return the number by which a sum over the batch is divided, int64 []."""
        if batch.rollout is None:  # no row, or rows of a token dataset, see ``prepare_window``
            return torch.zeros((), dtype=torch.int64, device=batch.labels.device)
        if self._loss_normalisation == "tokens":
            return count_supervised(batch.labels)
        # a row has entire completions, and their rounding errors are far below one half
        num_completions = batch.rollout.completion_shares.sum(dtype=torch.float64).round().long()
        return num_completions * self._max_new_tokens

    def prepare_window(
        self, fabric: Fabric, model: Any, batches: Iterable[Batch], is_interrupted: Callable[[int], bool]
    ) -> Iterable[Batch]:
        """Let the loss of rows of a token dataset be their mean times ``sft_weight``, see ``WindowObjective``.

        The step divides the sum over a window by the count of its completions. So the factor of these rows is this
        count divided by their own.
        """
        if self._sft_weight == 0:
            return batches
        listed_batches = list(batches)
        window_count = torch.zeros((), dtype=torch.int64)
        num_sft_tokens = torch.zeros((), dtype=torch.int64)
        for batch in listed_batches:
            window_count += self.count(batch)
            if batch.rollout is None:
                num_sft_tokens += count_supervised(batch.labels)
        window_count, num_sft_tokens = sum_over_data_ranks(fabric, torch.stack([window_count, num_sft_tokens]))
        factor = self._sft_weight * window_count.clamp(min=1).double() / num_sft_tokens.clamp(min=1)
        prepared = []
        for batch in listed_batches:
            if batch.rollout is None:
                batch = replace(batch, loss_factor=factor)
            prepared.append(batch)
        return prepared

    def loss(self, model: Any, batch: Batch, scale: torch.Tensor | None = None) -> BatchLoss:
        """Return the loss, 0 for a rank without rows; see ``Objective.loss``.

        The logits [B * T, V] do not exist.
        """
        targets = batch.targets
        if targets is None:
            targets = find_targets(batch.labels)
        rollout = batch.rollout
        if rollout is None:
            if batch.loss_factor is not None:
                return self._cross_entropy(model, batch, batch.loss_factor, scale)
            assert len(targets.ids) == 0  # all other rows are completions
            rollout = RolloutValues.without_content(0, self._num_rewards, targets.ids.device)
        reference_log_probabilities = None
        if self._kl_weight > 0:
            assert self._reference is not None  # ``connect`` has set it up
            reference_log_probabilities = self._reference.read_log_probabilities(
                model, batch, targets, self._temperature
            )
        token_loss = PolicyLoss(
            targets.ids,
            rollout.log_probabilities,
            rollout.advantages,
            temperature=self._temperature,
            reference_log_probabilities=reference_log_probabilities,
            kl_weight=self._kl_weight,
        )
        total, values = forward_batch(model, batch, positions=targets.positions, token_loss=token_loss, scale=scale)
        token_losses, *policy_metrics = values.detach()

        # The metrics of each token, [N], by name; ``finish_metrics`` makes means of their sums.
        zeros = torch.zeros_like(token_losses)
        metrics_by_name = {
            **dict(zip(self._reward_metrics, rollout.rewards, strict=True)),
            "completions": rollout.completion_shares,
            "completion_tokens": torch.ones_like(token_losses),
            "cut_completions": rollout.is_cut,
            "flat_groups": rollout.lacks_variance,
            "failed_rewards": rollout.has_failed,
            **dict(zip(self._policy_metrics, policy_metrics, strict=True)),
            "sft_tokens": zeros,
            "sft_loss": zeros,
        }
        token_metrics = torch.stack([metrics_by_name[name] for name in self.metric_names])  # [metrics, N]
        return BatchLoss(
            total,
            token_losses=token_losses,
            metrics=token_metrics.sum(dim=1, dtype=torch.float64),
            token_metrics=token_metrics,
        )

    def _cross_entropy(self, model: Any, batch: Batch, factor: torch.Tensor, scale: torch.Tensor | None) -> BatchLoss:
        """Return the cross entropy of rows of a token dataset, times ``factor``; it is not known by source."""
        total, token_losses = losses_at_targets(model, batch, None if scale is None else scale * factor)
        metrics = torch.zeros(len(self.metric_names), dtype=torch.float64, device=total.device)
        metrics[self.metric_names.index("sft_tokens")] = len(token_losses)
        metrics[self.metric_names.index("sft_loss")] = total.detach()
        return BatchLoss(total * factor, metrics=metrics)

    def finish_metrics(self, means: Sequence[float], count: int) -> list[float | None]:
        """Return the metrics from their sums divided by ``count``; those of no completion are None.

        The sums are divided by the numbers of completions and tokens among them, so ``count`` may be that of a window,
        or the number of tokens of a source.
        """
        sums = {name: mean * count for name, mean in zip(self.metric_names, means, strict=True)}
        # These are whole numbers: rounding takes away the errors of the shares.
        num_completions = round(sums["completions"])
        num_tokens = round(sums["completion_tokens"])
        if num_completions == 0:
            return [0.0 if name == "completions" else None for name in self.metric_names]

        values: dict[str, float | None] = {
            "completions": float(num_completions),
            "completion_tokens": num_tokens / num_completions,
        }
        for name in self._reward_metrics:
            values[name] = sums[name] / num_completions
        for name in ("cut_completions", "flat_groups", "failed_rewards"):
            values[name] = round(sums[name]) / num_completions
        for name in self._policy_metrics:
            values[name] = sums[name] / num_tokens
        values["weights_cut"] = round(sums["weights_cut"]) / num_tokens
        if self._sft_weight > 0:
            num_sft_tokens = round(sums["sft_tokens"])
            values["sft_tokens"] = float(num_sft_tokens)
            values["sft_loss"] = sums["sft_loss"] / num_sft_tokens if num_sft_tokens else None
        return [values[name] for name in self.metric_names]


def build_policy_gradient(arguments: "TrainArguments") -> PolicyGradient:
    """Build the objective of ``--objective rl``."""
    rollouts = arguments.rollouts
    return PolicyGradient(
        name_rewards(rollouts.rewards or ()),
        temperature=rollouts.temperature,
        max_new_tokens=rollouts.max_new_tokens,
        loss_normalisation=rollouts.loss_normalisation,
        kl_weight=rollouts.kl_weight,
        sft_weight=arguments.preference.sft_weight,
    )
