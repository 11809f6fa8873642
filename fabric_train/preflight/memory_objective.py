"""Build the objective whose memory a trace measures: cross entropy, a distillation, or a policy gradient.

Teachers, references and completions have no content. The memory of other objectives is estimated by cross entropy.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from fabric_train.data.batch import Batch, Targets
from fabric_train.data.rollout_values import RolloutValues
from fabric_train.model.divergence_loss import FullRows, NamedIds, TeacherHead, TopRows
from fabric_train.training.distillation import Distillation
from fabric_train.training.live_reference import Reference, ReferenceBesidePolicy
from fabric_train.training.objective import BatchLoss, CrossEntropy, Objective
from fabric_train.training.policy_gradient import PolicyGradient

if TYPE_CHECKING:
    from fabric_train.arguments import PreferenceArguments


@dataclass(frozen=True)
class TracedTeacher:
    """What the memory of a loss depends on in a teacher or a reference."""

    num_rows: int
    """The rows of its head."""
    hidden_size: int
    top_k: int | None = None
    """The number of likeliest tokens that are stored; None if the loss computes full distributions."""


@dataclass(frozen=True)
class TracedPolicy:
    """What the memory of a policy gradient's loss depends on, besides the model and the reference."""

    num_rewards: int
    compares_with_base: bool = False
    """Whether the reference is the base of the adapter that trains."""


class _EmptyTeacher:
    """A live teacher or reference, whose values have shapes and no content."""

    def __init__(self, teacher: TracedTeacher, head: TeacherHead) -> None:
        self._teacher = teacher
        self._head = head

    def read(self, batch: Batch, targets: Targets) -> FullRows:
        """Return distributions of the targets of a batch."""
        hidden = torch.empty(len(targets.ids), self._teacher.hidden_size, dtype=self._head.weight.dtype)
        return FullRows(hidden, self._head)


class _EmptyBase:
    """The base of the policy's adapter as the reference, whose values have no content.

    Its pass is not traced here, because ``memory_teacher`` counts it as a phase of its own.
    """

    def read_log_probabilities(self, policy: Any, batch: Batch, targets: Targets, temperature: float) -> torch.Tensor:
        """Return log-probabilities of the targets of a batch."""
        return torch.empty(len(targets.ids))


class _EmptyStoredTeacher:
    """A stored teacher, whose values have shapes and no content."""

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k

    def read(self, batch: Batch, targets: Targets) -> TopRows:
        """Return distributions of the targets of a batch."""
        num_targets = len(targets.ids)
        ids = torch.empty(num_targets, self._top_k, dtype=torch.int64)
        return TopRows(ids, torch.empty(num_targets, self._top_k + 1))


class _PolicyOfAllTargets(PolicyGradient):
    """A policy gradient of rows whose targets are all sampled; the values of their completions have no content."""

    def __init__(self, policy: TracedPolicy, reference: Reference | None) -> None:
        reward_names = [f"reward {index}" for index in range(policy.num_rewards)]
        kl_weight = 0.0 if reference is None else 1.0
        super().__init__(reward_names, temperature=1.0, max_new_tokens=1, kl_weight=kl_weight, reference=reference)

    def loss(self, model: Any, batch: Batch, scale: torch.Tensor | None = None) -> BatchLoss:
        """Return the loss of a batch, see ``Objective.loss``."""
        assert batch.targets is not None
        num_targets = len(batch.targets.ids)
        rollout = RolloutValues.without_content(num_targets, self._num_rewards)
        return super().loss(model, replace(batch, rollout=rollout), scale)


def make_head(teacher: TracedTeacher | None, dtype: torch.dtype) -> TeacherHead | None:
    """Make the head of a teacher or a reference, which the trace does not count; None if the loss needs none."""
    if teacher is None or teacher.top_k is not None:
        return None
    return TeacherHead(torch.empty(teacher.num_rows, teacher.hidden_size, dtype=dtype), bias=None)


def build_traced_objective(
    preference: "PreferenceArguments | None",
    policy: TracedPolicy | None,
    teacher: TracedTeacher | None,
    head: TeacherHead | None,
    vocab_size: int,
    memory_device: str,
) -> Objective:
    """Build the objective of a trace on fake tensors.

    Args:
        preference: The arguments of a distillation.
        policy: What a policy gradient's memory depends on; None for other objectives.
        teacher: The teacher of a distillation, or the reference of a policy gradient; None if there is none.
        head: Its head, see :func:`make_head`.
        vocab_size: The rows of the model's head.
        memory_device: The type of the device whose memory the trace measures.
    """
    live_teacher = None
    if teacher is not None and head is not None:
        live_teacher = _EmptyTeacher(teacher, head)
    if policy is not None:
        reference: Reference | None = None
        if live_teacher is not None:
            reference = ReferenceBesidePolicy(live_teacher, memory_device)
        elif policy.compares_with_base:
            reference = _EmptyBase()
        return _PolicyOfAllTargets(policy, reference)
    if preference is None or teacher is None:
        return CrossEntropy()
    objective = Distillation(preference)
    no_gaps = torch.empty(0, dtype=torch.int64)
    named_ids = NamedIds(min(teacher.num_rows, vocab_size), no_gaps)
    if live_teacher is not None:
        objective.use_teacher(live_teacher, named_ids)
    else:
        assert teacher.top_k is not None
        objective.use_teacher(_EmptyStoredTeacher(teacher.top_k), named_ids)
    return objective
