"""Make the windows of a run that samples its rows: prompts → completions → rewards → rows.

A step's completions are sampled with the weights after the previous step, rewarded, and stored (``store``). The rows of
the window are always made from what is stored. So a run that is killed and resumed trains on the same rows.
"""

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from lightning import Fabric

from fabric_train.cli.errors import note
from fabric_train.data.batch import Batch
from fabric_train.data.step_sampler import RolloutSeconds, Window, WindowOrder, WindowSource, positions
from fabric_train.distributed.ranks import gather_over_ranks
from fabric_train.distributed.signals import Heartbeat, StepPhase
from fabric_train.rollouts.advantages import compute_advantages, groups_without_variance
from fabric_train.rollouts.completion_rows import batch_completions, pack_rows
from fabric_train.rollouts.prompts import Prompt, Prompts
from fabric_train.rollouts.reward_errors import RewardErrors
from fabric_train.rollouts.rewards import Rewards
from fabric_train.rollouts.sampler import Completion, Sampler, SampleRequest
from fabric_train.rollouts.scoring import score_completions
from fabric_train.rollouts.store import (
    RolloutManifest,
    RolloutStore,
    StoredCompletion,
    read_rollouts,
)

_FLAT_STEPS_NOTED = 10
"""After so many steps in a row without anything to learn, a note says so."""
_MOST_REFILLS = 4
"""How often the prompts of a step may be replaced."""
_REPLACEMENT_STREAM = 1
"""The number of the random stream that orders the prompts which may replace others."""


@dataclass(frozen=True)
class RolloutPlan:
    """How the windows of a run are made."""

    group_size: int
    """The number of completions of each prompt."""
    seed: int
    advantage: str
    """A name in ``advantages.ADVANTAGES``."""
    refills: bool
    """Whether prompts whose completions all have the same reward are replaced with other prompts of the same source."""
    deciding_values: str
    """The values of the run that decide its weights beside its completions, as text; see :meth:`hash_policy`."""
    sampler_name: str

    def hash_policy(self, step: int, history: str) -> str:
        """Return a hash of what decides the weights that sample a step's completions.

        A run that resumes with the same values, after the same completions, has the same weights, bit for bit if it
        also has the same devices. So it takes the stored completions of the step. Otherwise they are sampled again.

        Args:
            step: The step.
            history: The hash of the completions that the steps before it were trained on.
        """
        return hashlib.sha256(json.dumps([self.deciding_values, step, history]).encode()).hexdigest()

    def completion_seed(self, step: int, prompt_index: int, completion: int) -> int:
        """Return the seed of a completion of a prompt, from 0 to 2³¹ - 1."""
        sequence = np.random.SeedSequence([self.seed, step, prompt_index, completion])
        return int(sequence.generate_state(1)[0]) >> 1

    def replacements_by_source(self, step: int, prompts: Sequence[Prompt], used: np.ndarray) -> dict[int, list[int]]:
        """Return the prompts that may replace those of a step, by source, in the order in which they are taken.

        The order is a function of the seed and the step. ``used`` are the prompts of the step.
        """
        shuffled = np.random.default_rng([self.seed, step, _REPLACEMENT_STREAM]).permutation(len(prompts))
        indices_by_source: dict[int, list[int]] = defaultdict(list)
        for index in shuffled[~np.isin(shuffled, used)].tolist():
            indices_by_source[prompts[index].source].append(index)
        return indices_by_source


@dataclass(frozen=True)
class _RewardedGroups:
    """Groups of this rank that were sampled and rewarded at once."""

    completions_by_group: dict[int, list[StoredCompletion]]
    sampling_seconds: float
    reward_seconds: float


@dataclass(frozen=True)
class RolloutWindows:
    """The ``WindowSource`` of a run with ``--prompts``. All ranks go through the windows together."""

    fabric: Fabric
    model: Any
    """The model that ``setup_model`` returned."""
    prompts: Prompts
    order: WindowOrder
    """The prompts of each step, in place of rows."""
    plan: RolloutPlan
    sampler: Sampler
    rewards: Rewards
    reward_errors: RewardErrors
    store: RolloutStore
    tokenizer: Any
    """transformers' tokenizer, which decodes completions for the rewards."""
    heartbeat: Heartbeat
    data_starts_after: int = 0
    """The run's step after which the order of the prompts begins, see ``StepPlan``."""
    rows_beside: WindowSource | None = None
    """The windows of a token dataset whose rows train beside the completions, for the same steps."""
    known_step: int = 0
    """The step of the checkpoint that the run resumed from."""
    known_hash: str = ""
    """The hash of the completions up to ``known_step``, the ``rows_hash`` of its window."""

    def windows(self, after_step: int, last_step: int) -> Iterator[Window]:
        """Yield the windows of the steps ``after_step + 1`` to ``last_step``.

        Raises:
            RunStopped: The ranks have agreed to stop while completions are sampled or rewarded.
        """
        order = self.order
        history = self.known_hash
        windows_beside: Iterator[Window] = iter(())
        if self.rows_beside is not None:
            windows_beside = self.rows_beside.windows(after_step, last_step)
        flat_steps = _FlatSteps()
        try:
            for step in range(after_step + 1, last_step + 1):
                order_step = step - self.data_starts_after  # the order counts its steps from where it begins
                prompt_indices = order.rows_of(order_step)
                started = time.perf_counter()
                policy = self.plan.hash_policy(step, history)
                self.heartbeat.enter(StepPhase.ROLLOUT, step=step)
                is_stored = self.store.keep_if_usable(step, policy)
                if not is_stored:
                    self._sample(step, prompt_indices, policy)
                rollouts = read_rollouts(self.store.path(step))
                rollout_seconds = RolloutSeconds(total=time.perf_counter() - started)
                if not is_stored:
                    rollout_seconds = replace(
                        rollout_seconds,
                        weights=rollouts.manifest.update_seconds,
                        sampling=rollouts.manifest.sampling_seconds,
                        rewards=rollouts.manifest.reward_seconds,
                    )
                history = rollouts.manifest.hash_after(history)
                flat_steps.count(rollouts.completions)
                rows = pack_rows(rollouts.completions, self.prompts.train.row_length)
                batches = self._make_batches(rows)
                window_beside = next(windows_beside, None)
                if window_beside is not None:
                    # their sources are not those of the prompts
                    batches += [replace(batch, pieces=None) for batch in window_beside.batches]
                epoch = order.epoch_of(order_step)
                yield Window(
                    step=step,
                    epoch=epoch,
                    ends_epoch=order.epoch_of(order_step + 1) > epoch,
                    rows=np.arange(len(rows)),
                    micro_batch_size=order.micro_batch_size,
                    batches=batches,
                    rows_hash=history,
                    rows_of_sources=order.mixture.count(prompt_indices) if order.mixture else None,
                    rollout_seconds=rollout_seconds,
                )
        finally:
            self.sampler.close()
            self.rewards.close()

    def _sample(self, step: int, prompt_indices: np.ndarray, policy: str) -> None:
        """Sample, reward and store the completions of this rank's prompts."""
        started = time.perf_counter()
        self.sampler.update_weights(self.model, step - 1)
        seconds = RolloutSeconds(weights=time.perf_counter() - started)
        # Ranks that train on the same rows sample different prompts: each can run the whole model.
        num_ranks = self.fabric.world_size
        groups = range(self.fabric.global_rank, len(prompt_indices), num_ranks)
        prompts = self.prompts.train.prompts
        replacements_by_source = self.plan.replacements_by_source(step, prompts, prompt_indices)
        # the prompts of this rank's groups that are to be sampled
        pending = {group: int(prompt_indices[group]) for group in groups}
        stored: dict[int, list[StoredCompletion]] = {}
        num_replaced = 0
        for attempt in range(1 + _MOST_REFILLS):
            rewarded = self._sample_and_reward(step, pending)
            stored |= rewarded.completions_by_group
            seconds = replace(
                seconds,
                sampling=seconds.sampling + rewarded.sampling_seconds,
                rewards=seconds.rewards + rewarded.reward_seconds,
            )
            if not self.plan.refills or attempt == _MOST_REFILLS:
                break
            # Every rank goes through the groups of all ranks, so all take the same prompts for them.
            replacements: dict[int, int] = {}
            for group in self._find_flat_groups(pending, stored, len(prompt_indices)):
                candidates = replacements_by_source[prompts[prompt_indices[group]].source]
                if candidates:
                    replacements[group] = candidates.pop(0)
            if not replacements:
                break
            num_replaced += len(replacements)
            pending = {group: replacements[group] for group in pending if group in replacements}

        slowest_seconds = self._find_slowest(seconds)
        manifest = RolloutManifest(
            step=step,
            policy=policy,
            reward_names=self.rewards.names,
            source_names=self.prompts.source_names,
            sampler=self.plan.sampler_name,
            num_ranks=num_ranks,
            sampling_seconds=slowest_seconds.sampling,
            reward_seconds=slowest_seconds.rewards,
            sha256=(),  # ``write`` adds them
            update_seconds=slowest_seconds.weights,
            num_replaced=num_replaced,
            num_reward_errors=self.reward_errors.take_count(),
        )
        completions = list(chain.from_iterable(stored[group] for group in sorted(stored)))
        self.store.write(completions, manifest)

    def _find_slowest(self, seconds: RolloutSeconds) -> RolloutSeconds:
        """Return the seconds of each part on the rank that took longest for it; all ranks call this together."""
        packed = torch.tensor([seconds.weights, seconds.sampling, seconds.rewards], dtype=torch.float64)
        weights, sampling, rewards = gather_over_ranks(self.fabric, packed).amax(dim=0).tolist()
        return RolloutSeconds(weights=weights, sampling=sampling, rewards=rewards)

    def _sample_and_reward(self, step: int, prompt_of_group: Mapping[int, int]) -> _RewardedGroups:
        """Sample and reward the completions of some groups of this rank; all ranks call this together.

        Args:
            step: The step.
            prompt_of_group: The index of each group's prompt.
        """
        started = time.perf_counter()
        requests = []
        for prompt_index in prompt_of_group.values():
            token_ids = self.prompts.train.prompts[prompt_index].token_ids
            for completion in range(self.plan.group_size):
                requests.append(SampleRequest(token_ids, self.plan.completion_seed(step, prompt_index, completion)))
        completions = self.sampler.sample(requests)
        sampled = time.perf_counter()
        completions_by_group = self._reward(prompt_of_group, completions)
        return _RewardedGroups(
            completions_by_group,
            sampling_seconds=sampled - started,
            reward_seconds=time.perf_counter() - sampled,
        )

    def _find_flat_groups(
        self, sampled: Collection[int], stored: Mapping[int, list[StoredCompletion]], num_groups: int
    ) -> list[int]:
        """Return the groups of all ranks whose completions have the same reward, ascending.

        Args:
            sampled: The groups of this rank that were sampled last; others are not looked at again.
            stored: The completions of this rank's groups.
            num_groups: The number of groups of all ranks.
        """
        is_flat = torch.zeros(num_groups, dtype=torch.int64)
        for group in sampled:
            is_flat[group] = int(stored[group][0].lacks_variance)
        is_flat_on_any_rank = gather_over_ranks(self.fabric, is_flat).sum(dim=0)
        return is_flat_on_any_rank.nonzero().flatten().tolist()

    def _reward(
        self, prompt_of_group: Mapping[int, int], completions: Sequence[Completion]
    ) -> dict[int, list[StoredCompletion]]:
        """Return the completions of each group with their rewards and advantages; all ranks call this together.

        Args:
            prompt_of_group: The index of each group's prompt.
            completions: The completions of the groups, one group after another.
        """
        group_size = self.plan.group_size
        prompts: list[Prompt] = []  # of each completion
        for prompt_index in prompt_of_group.values():
            prompts += [self.prompts.train.prompts[prompt_index]] * group_size
        scored = score_completions(
            self.rewards,
            self.tokenizer,
            prompts,
            completions,
            self.prompts.column_names,
            is_interrupted=self.heartbeat.stop_border.is_due,
        )
        table = scored.table
        self.reward_errors.report(self.rewards.names, table)
        totals = table.total.reshape(-1, group_size)
        advantages = compute_advantages(totals, self.plan.advantage)  # [groups, group_size]
        lacks_variance = groups_without_variance(totals)  # [groups]

        completions_by_group: dict[int, list[StoredCompletion]] = {}
        for group_index, group in enumerate(prompt_of_group):
            stored = []
            for index_in_group in range(group_size):
                index = group_index * group_size + index_in_group
                prompt = prompts[index]
                completion = completions[index]
                stored.append(
                    StoredCompletion(
                        group=group,
                        prompt_id=prompt.prompt_id,
                        source=prompt.source,
                        text=scored.texts[index],
                        prompt_token_ids=np.array(prompt.token_ids),
                        token_ids=completion.token_ids,
                        log_probabilities=completion.log_probabilities,
                        finish_reason=completion.finish_reason,
                        reward=float(table.total[index]),
                        advantage=float(advantages[group_index, index_in_group]),
                        lacks_variance=bool(lacks_variance[group_index]),
                        rewards=table.values[:, index],
                        reward_error=table.errors[index],
                    )
                )
            completions_by_group[group] = stored
        return completions_by_group

    def _make_batches(self, rows: Sequence[Sequence[StoredCompletion]]) -> list[Batch]:
        """Return this rank's micro-batches of a window's rows."""
        order = self.order
        num_rewards = len(self.rewards.names)
        batches = []
        for batch_index in range(order.num_batches(len(rows))):
            indices = positions(batch_index, order.micro_batch_size, order.world_size, order.rank)
            batch = batch_completions(rows[indices.start : indices.stop], num_rewards)
            batches.append(batch.pin_memory() if self.fabric.device.type == "cuda" else batch)
        return batches


class _FlatSteps:
    """Counts the steps in a row without anything to learn, and prints a note if there are too many."""

    def __init__(self) -> None:
        self._count = 0

    def count(self, completions: Sequence[StoredCompletion]) -> None:
        """Count the step of these completions if all completions of each of its prompts have the same reward."""
        is_flat = all(completion.lacks_variance for completion in completions)
        self._count = self._count + 1 if is_flat else 0
        if self._count == _FLAT_STEPS_NOTED:
            note(
                f"in the last {_FLAT_STEPS_NOTED} steps, all completions of each prompt had the same reward, so there "
                "is nothing to learn; see them with fabric-train rollouts"
            )
