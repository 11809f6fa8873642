"""Evaluate a run with held-out prompts: the model completes each of them once, and the rewards are the result.

An evaluation samples at the run's temperature, with seeds of its own that are the same in each evaluation. It changes
nothing that a step of training reads, and its results do not depend on the number of ranks but for rounding in the
sampler.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning import Fabric

from fabric_train.checkpoint import Evaluation, TokenLoss
from fabric_train.cli.argument_types import REWARD
from fabric_train.distributed.ranks import gather_over_ranks
from fabric_train.distributed.signals import Heartbeat, RunStopped, StepPhase
from fabric_train.rollouts.prompts import ValidationPrompts
from fabric_train.rollouts.reward_errors import RewardErrors
from fabric_train.rollouts.rewards import Rewards
from fabric_train.rollouts.sampler import Completion, Sampler, SampleRequest
from fabric_train.rollouts.scoring import score_completions
from fabric_train.rollouts.windows import RolloutPlan

_SEED_STEP = 0
"""The step of the seeds of all evaluations. Steps of training count from 1, so no step has these seeds."""
_COMPLETION_FIGURES = ("completion_tokens", "cut_completions", "failed_rewards")
"""The figures beside the rewards, as in training: the mean number of tokens, the share that has the largest number of
tokens without an end, and the share of which a reward failed."""


def name_figures(reward_names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the figures of an evaluation: those of training, and the standard errors of the rewards."""
    reward_figures = _name_rewards(reward_names)
    return (*reward_figures, *_COMPLETION_FIGURES, *name_standard_errors(reward_names))


def name_standard_errors(reward_names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the standard errors of the rewards, which training does not have."""
    return tuple(f"stderr_{figure}" for figure in _name_rewards(reward_names))


def _name_rewards(reward_names: Sequence[str]) -> tuple[str, ...]:
    return (REWARD, *(f"{REWARD}_{name}" for name in reward_names))


@dataclass(frozen=True)
class PromptEvaluator:
    """The ``Evaluator`` of the completions of held-out prompts. Rank r of R completes the prompts r, r + R, ….

    P is the number of prompts, and V the number of values of a completion: the weighted sum of its rewards, each
    reward, and those in ``_COMPLETION_FIGURES``.
    """

    fabric: Fabric
    model: Any
    """The model that ``setup_model`` returned."""
    prompts: ValidationPrompts
    plan: RolloutPlan
    """Its ``completion_seed`` gives the seed of each completion."""
    sampler: Sampler
    """The sampler of the steps."""
    rewards: Rewards
    """The rewards of the steps."""
    reward_errors: RewardErrors
    tokenizer: Any
    """transformers' tokenizer, which decodes completions for the rewards."""
    heartbeat: Heartbeat
    enter_batch: Callable[[], None]
    """Called before each batch of rewards; raises RunStopped where the ranks stop."""
    completions_per_call: int
    """The most completions of a rank that are scored at once: as many as in a step of training, because
    ``--reward_timeout`` limits the time for that many."""
    rows: str
    """A hash of the prompts, the rewards and the settings of sampling, see ``Evaluation.rows``."""

    def evaluate(self, step: int) -> Evaluation | None:
        """Return the evaluation of the model after ``step``; None if a signal stops the run."""
        self.heartbeat.enter(StepPhase.VALIDATION)
        self.heartbeat.take_time()
        try:
            values = self._complete_and_score(step)
        except RunStopped:
            return None
        values_by_prompt = gather_over_ranks(self.fabric, values).sum(dim=0).cpu().numpy()  # [P, V]
        whole = self._summarize(values_by_prompt)
        sources = {}
        prompt_sources = np.array([prompt.source for prompt in self.prompts.prompts])
        for source_index, name in enumerate(self.prompts.source_names):
            source_values = values_by_prompt[prompt_sources == source_index]
            if len(source_values):  # all prompts of a source may be too long
                sources[name] = self._summarize(source_values)
        return Evaluation(whole, sources, step=step, rows=self.rows)

    def close(self) -> None:
        """End the sampler and the processes of the rewards; nothing else ends them if the run takes no step."""
        self.sampler.close()
        self.rewards.close()

    def _complete_and_score(self, step: int) -> torch.Tensor:
        """Complete this rank's prompts, and return the values of the completions.

        Returns:
            fp64 [P, V], on the CPU; the prompts of other ranks have zeros, so that the sum over the ranks is exact.

        Raises:
            RunStopped: The ranks have agreed to stop.
        """
        self.sampler.update_weights(self.model, step)
        all_prompts = self.prompts.prompts
        num_ranks = self.fabric.world_size
        indices = range(self.fabric.global_rank, len(all_prompts), num_ranks)
        requests = []
        for index in indices:
            seed = self.plan.completion_seed(_SEED_STEP, index, completion=0)
            requests.append(SampleRequest(all_prompts[index].token_ids, seed))
        completions = self.sampler.sample(requests)

        # All ranks score equally often, some of them nothing in the end: they report failures of rewards together.
        values = torch.zeros(len(all_prompts), self._num_values, dtype=torch.float64)
        most_completions = math.ceil(len(all_prompts) / num_ranks)
        for start in range(0, most_completions, self.completions_per_call):
            self.enter_batch()
            chunk = slice(start, start + self.completions_per_call)
            scored = self._score(indices[chunk], completions[chunk])
            values[list(indices[chunk])] = torch.from_numpy(scored)
        return values

    def _score(self, indices: Sequence[int], completions: Sequence[Completion]) -> np.ndarray:
        """Return the values of some completions of this rank, fp64 [completions, V]; all ranks call this together."""
        prompts = [self.prompts.prompts[index] for index in indices]
        scored = score_completions(
            self.rewards,
            self.tokenizer,
            prompts,
            completions,
            self.prompts.column_names,
            is_interrupted=self.heartbeat.stop_border.is_due,
        )
        self.reward_errors.report(self.rewards.names, scored.table)
        num_tokens = [len(completion.token_ids) for completion in completions]
        is_cut = [completion.finish_reason == "length" for completion in completions]
        has_failed = [error is not None for error in scored.table.errors]
        rows = [scored.table.total, *scored.table.values, num_tokens, is_cut, has_failed]
        return np.array(rows, dtype=np.float64).T

    @property
    def _num_values(self) -> int:
        return 1 + len(self.rewards.names) + len(_COMPLETION_FIGURES)

    def _summarize(self, values: np.ndarray) -> TokenLoss:
        """Return the means over completions, and the standard errors of the rewards, from values [completions, V]."""
        num_completions = len(values)
        means = values.mean(axis=0)
        names = (*_name_rewards(self.rewards.names), *_COMPLETION_FIGURES)
        figures: dict[str, float | None] = dict(zip(names, means.tolist(), strict=True))
        for index, name in enumerate(name_standard_errors(self.rewards.names)):  # the rewards are the first values
            figures[name] = None  # one completion has no variance
            if num_completions > 1:
                figures[name] = float(values[:, index].std(ddof=1) / math.sqrt(num_completions))
        return TokenLoss(nats=0.0, num_tokens=num_completions, further=figures, of_completions=True)
