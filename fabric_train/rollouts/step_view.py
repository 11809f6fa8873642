"""Read what people look at of a run's stored completions: the means of a step, and its groups with their prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pyarrow import compute

from fabric_train.cli.errors import InputError, missing_folder
from fabric_train.cli.output import number_ranges
from fabric_train.rollouts.store import (
    ROLLOUTS,
    RolloutManifest,
    StoredCompletion,
    list_steps,
    read_manifest,
    read_rollouts,
    read_tables,
    step_folder,
)
from fabric_train.tokenization.tokenizers.vocabulary import Vocabulary, load_vocabulary

_SUMMARIZED_COLUMNS = ("group", "token_ids", "finish_reason", "reward", "lacks_variance", "rewards", "reward_error")


@dataclass(frozen=True)
class StepSummary:
    """The means of a step's completions."""

    step: int
    completions: int
    groups: int
    reward: float
    """The mean of the weighted sum of the rewards."""
    rewards: dict[str, float]
    """The mean of each reward, without its weight, by name."""
    tokens: float
    """The mean number of tokens."""
    share_cut: float
    """The share of completions that have the largest number of tokens without an end."""
    share_without_variance: float
    """The share of groups whose completions all have the same reward."""
    replaced_prompts: int
    """The number of prompts that --refill replaced, because all their completions had the same reward."""
    reward_errors: int
    """The number of completions for which a reward function failed."""
    sampling_seconds: float
    reward_seconds: float


@dataclass(frozen=True)
class CompletionGroup:
    """A prompt of a step, and its completions."""

    group: int
    prompt_id: str
    source: str
    prompt: str
    """The text of the prompt's tokens, with special tokens such as those of a chat template."""
    completions: tuple[StoredCompletion, ...]

    @property
    def mean_reward(self) -> float:
        return float(np.mean([completion.reward for completion in self.completions]))

    @property
    def mean_tokens(self) -> float:
        """The mean number of tokens of the completions, without the prompt."""
        return float(np.mean([len(completion.token_ids) for completion in self.completions]))

    @property
    def lacks_variance(self) -> bool:
        """Whether all completions have the same reward, so that the step learns nothing from them."""
        return self.completions[0].lacks_variance


@dataclass(frozen=True)
class StepGroups:
    """The groups of a step."""

    manifest: RolloutManifest
    groups: tuple[CompletionGroup, ...]

    def only(self, group: int) -> "StepGroups":
        """Return one group alone.

        Raises:
            InputError: The step has no such group.
        """
        groups = tuple(candidate for candidate in self.groups if candidate.group == group)
        if not groups:
            stored = number_ranges(candidate.group for candidate in self.groups)
            raise InputError(f"--group {group}: step {self.manifest.step} has no such group; it has {stored}")
        return StepGroups(self.manifest, groups)


def find_steps(run_folder: Path) -> list[int]:
    """Return the steps of a run whose completions are stored, ascending; an InputError if there are none."""
    if not run_folder.is_dir():
        raise InputError(f"{run_folder}: {missing_folder(run_folder)}; give a run folder, the --output_dir of training")
    steps = list_steps(run_folder)
    if not steps:
        raise InputError(
            f"{run_folder}: no completions in {ROLLOUTS}/; give the --output_dir of a run with --prompts that has "
            "sampled a step"
        )
    return steps


def check_step(step: int, steps: Sequence[int]) -> None:
    """Raise an InputError if a step is not one of the stored ``steps``."""
    if step not in steps:
        raise InputError(f"--step {step}: its completions are not stored; the run has steps {number_ranges(steps)}")


def summarize_step(run_folder: Path, step: int) -> StepSummary:
    """Return the means of a step's completions, without reading their texts; errors are as in ``read_rollouts``."""
    folder = step_folder(run_folder, step)
    manifest = read_manifest(folder)
    groups: list[int] = []
    lengths: list[int] = []
    totals: list[float] = []
    rewards: list[list[float]] = []  # of each completion
    num_cut = 0
    num_errors = 0
    flat_groups: set[int] = set()
    for table in read_tables(folder, manifest, _SUMMARIZED_COLUMNS):
        table_groups = table["group"].to_pylist()
        groups += table_groups
        lengths += compute.list_value_length(table["token_ids"]).to_pylist()
        totals += table["reward"].to_pylist()
        rewards += table["rewards"].to_pylist()
        num_cut += table["finish_reason"].to_pylist().count("length")
        num_errors += len(table) - table["reward_error"].null_count
        for group, lacks_variance in zip(table_groups, table["lacks_variance"].to_pylist(), strict=True):
            if lacks_variance:
                flat_groups.add(group)
    mean_rewards = np.mean(np.array(rewards), axis=0).tolist()
    num_groups = len(set(groups))
    return StepSummary(
        step=step,
        completions=len(groups),
        groups=num_groups,
        reward=float(np.mean(totals)),
        rewards=dict(zip(manifest.reward_names, mean_rewards, strict=True)),
        tokens=float(np.mean(lengths)),
        share_cut=num_cut / len(groups),
        share_without_variance=len(flat_groups) / num_groups,
        replaced_prompts=manifest.num_replaced,
        reward_errors=num_errors,
        sampling_seconds=manifest.sampling_seconds,
        reward_seconds=manifest.reward_seconds,
    )


def read_groups(run_folder: Path, step: int) -> StepGroups:
    """Read all completions of a step, by group; errors are as in ``read_rollouts``."""
    rollouts = read_rollouts(step_folder(run_folder, step))
    vocabulary = load_vocabulary(run_folder / "tokenizer")
    completions_by_group: dict[int, list[StoredCompletion]] = {}
    for completion in rollouts.completions:
        completions_by_group.setdefault(completion.group, []).append(completion)
    groups = []
    for group, completions in completions_by_group.items():
        first = completions[0]
        groups.append(
            CompletionGroup(
                group=group,
                prompt_id=first.prompt_id,
                source=rollouts.manifest.source_names[first.source],
                prompt=_decode(first.prompt_token_ids.tolist(), vocabulary),
                completions=tuple(completions),
            )
        )
    return StepGroups(rollouts.manifest, tuple(groups))


def _decode(token_ids: list[int], vocabulary: Vocabulary | None) -> str:
    """Return the text of tokens with special tokens; their ids if the run has no ``tokenizer.json``."""
    if vocabulary is None:
        return "".join(f"⟨{token_id}⟩" for token_id in token_ids)
    return "".join(text for _, text in vocabulary.spans(token_ids))


def rewards_by_name(manifest: RolloutManifest, completion: StoredCompletion) -> dict[str, float]:
    """Return each reward of a completion, without its weight."""
    return dict(zip(manifest.reward_names, completion.rewards.tolist(), strict=True))
