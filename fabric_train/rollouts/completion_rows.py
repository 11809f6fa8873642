"""Pack completions into rows, and make batches of these rows.

Shapes: N targets in a batch, which are the tokens of its completions, and R rewards.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from fabric_train.data.batch import IGNORED_LABEL, Batch, Pieces, pad_rows
from fabric_train.data.rollout_values import RolloutValues
from fabric_train.rollouts.store import StoredCompletion
from fabric_train.token_dataset.rows import plan_rows


def pack_rows(completions: Sequence[StoredCompletion], row_length: int) -> list[list[StoredCompletion]]:
    """Return which completions are in which row, as chats are packed: prompts and completions are whole."""
    lengths = np.array([completion.num_tokens for completion in completions])
    plan = plan_rows(lengths, np.arange(len(lengths)), "best_fit", row_length, overlap=0)
    rows = []
    for row in range(plan.num_rows):
        pieces = slice(plan.row_offsets[row], plan.row_offsets[row + 1])
        rows.append([completions[document] for document in plan.documents(pieces)])
    return rows


def batch_completions(rows: Sequence[Sequence[StoredCompletion]], num_rewards: int) -> Batch:
    """Return rows of completions as a batch whose targets are the tokens of the completions.

    Args:
        rows: The completions in each row, at least one; no rows give the batch of a rank without any.
        num_rewards: The number of rewards of each completion.
    """
    row_ids = []
    row_labels = []
    row_starts = []
    for row in rows:
        ids: list[np.ndarray] = []
        labels: list[np.ndarray] = []
        for completion in row:
            ids += [completion.prompt_token_ids, completion.token_ids]
            labels += [np.full(len(completion.prompt_token_ids), IGNORED_LABEL), completion.token_ids]
        row_ids.append(np.concatenate(ids).astype(np.int64))
        row_labels.append(np.concatenate(labels).astype(np.int64))
        lengths = [completion.num_tokens for completion in row]
        row_starts.append(np.cumsum([0, *lengths[:-1]]))
    batch = pad_rows(row_ids, row_labels, row_starts)
    completions = list(chain.from_iterable(rows))
    return replace(batch, pieces=_describe_pieces(completions), rollout=_values_of_targets(completions, num_rewards))


def _describe_pieces(completions: Sequence[StoredCompletion]) -> Pieces:
    """Return the pieces of a batch with these completions, in order."""
    return Pieces(
        num_targets=torch.tensor([len(completion.token_ids) for completion in completions], dtype=torch.int64),
        sources=torch.tensor([completion.source for completion in completions], dtype=torch.int64),
        num_bytes=torch.full((len(completions),), torch.nan, dtype=torch.float64),
    )


def _values_of_targets(completions: Sequence[StoredCompletion], num_rewards: int) -> RolloutValues:
    """Return the values of the targets of a batch with these completions, in order."""
    lengths = np.array([len(completion.token_ids) for completion in completions], dtype=np.int64)
    log_probabilities = np.concatenate([np.empty(0), *(completion.log_probabilities for completion in completions)])
    rewards = np.empty((1 + num_rewards, len(completions)))
    for index, completion in enumerate(completions):
        rewards[:, index] = [completion.reward, *completion.rewards]

    def repeat_per_token(values: Sequence[float] | np.ndarray) -> torch.Tensor:
        """Return the value of each token's completion."""
        return torch.from_numpy(np.repeat(np.asarray(values, dtype=np.float64), lengths, axis=-1))

    def share_per_token(values: Sequence[float] | np.ndarray) -> torch.Tensor:
        """Return the value of each token's completion, divided by the completion's number of tokens."""
        return repeat_per_token(np.asarray(values) / lengths)

    return RolloutValues(
        log_probabilities=torch.from_numpy(log_probabilities).float(),
        advantages=repeat_per_token([completion.advantage for completion in completions]).float(),
        completion_shares=share_per_token(np.ones(len(completions))),
        is_cut=share_per_token([float(completion.finish_reason == "length") for completion in completions]),
        lacks_variance=share_per_token([float(completion.lacks_variance) for completion in completions]),
        has_failed=share_per_token([float(completion.reward_error is not None) for completion in completions]),
        rewards=share_per_token(rewards),
    )
