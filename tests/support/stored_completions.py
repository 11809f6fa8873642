"""Write RUN/rollouts/step-… as a run with --prompts does, with chosen texts and rewards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from lightning import Fabric

from fabric_train.rollouts.store import RolloutManifest, RolloutStore, StoredCompletion


@dataclass(frozen=True)
class Answer:
    """A completion of a test."""

    text: str
    exact: float = 0.0
    brief: float = 0.0
    tokens: int = 4
    is_cut: bool = False
    error: str | None = None

    @property
    def reward(self) -> float:
        return self.exact + 0.5 * self.brief


def write_step(
    run: Path,
    step: int,
    answers_by_prompt: Mapping[str, Sequence[Answer]],
    prompt_token_ids: Sequence[int] = (0, 5),
    sampling_seconds: float = 2.0,
) -> None:
    """Store the completions of a step, whose prompts are in the order of groups."""
    completions = []
    for group, (prompt_id, answers) in enumerate(answers_by_prompt.items()):
        rewards = np.array([answer.reward for answer in answers])
        for answer in answers:
            completions.append(
                StoredCompletion(
                    group=group,
                    prompt_id=prompt_id,
                    source=0,
                    text=answer.text,
                    prompt_token_ids=np.array(prompt_token_ids, dtype=np.int32),
                    token_ids=np.arange(answer.tokens, dtype=np.int32),
                    log_probabilities=np.full(answer.tokens, -0.5, dtype=np.float32),
                    finish_reason="length" if answer.is_cut else "stop",
                    reward=answer.reward,
                    advantage=float(answer.reward - rewards.mean()),
                    lacks_variance=bool(rewards.min() == rewards.max()),
                    rewards=np.array([answer.exact, answer.brief]),
                    reward_error=answer.error,
                )
            )
    manifest = RolloutManifest(
        step=step,
        policy="a",
        reward_names=("exact", "brief"),
        source_names=("math",),
        sampler="in_process",
        num_ranks=1,
        sampling_seconds=sampling_seconds,
        reward_seconds=0.25,
        sha256=(),
        update_seconds=0.5,
    )
    store = RolloutStore(run, Fabric(accelerator="cpu", devices=1), keep=None)
    store.write(completions, manifest)
