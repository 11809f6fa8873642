"""Score completions: decode them, and compute the rewards of their texts."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from fabric_train.inference.generate import continuation
from fabric_train.rollouts.prompts import Prompt
from fabric_train.rollouts.rewards import Rewards, RewardTable
from fabric_train.rollouts.sampler import Completion


@dataclass(frozen=True)
class ScoredTexts:
    """The texts of completions, and their rewards."""

    texts: list[str]
    table: RewardTable


def score_completions(
    rewards: Rewards,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    column_names: Collection[str],
    *,
    is_interrupted: Callable[[], bool],
) -> ScoredTexts:
    """Return the texts and rewards of completions, see ``Rewards.compute``.

    Args:
        rewards: The rewards of the run.
        tokenizer: transformers' tokenizer.
        prompts: The prompt of each completion.
        completions: The completions, of which there may be none.
        column_names: The columns of the prompts that the rewards receive.
        is_interrupted: True ends the call, see ``Rewards.compute``.
    """
    texts = []
    for prompt, completion in zip(prompts, completions, strict=True):
        texts.append(continuation(tokenizer, list(prompt.token_ids), completion.token_ids.tolist()))
    columns = {name: [prompt.columns[name] for prompt in prompts] for name in column_names}
    table = rewards.compute(texts, [prompt.content for prompt in prompts], columns, is_interrupted)
    return ScoredTexts(texts, table)
