"""Build the objective whose memory a trace measures: cross entropy, or a distillation from a teacher without content.

The memory of other objectives is estimated by cross entropy.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fabric_train.data.batch import Batch, Targets
from fabric_train.model.divergence_loss import FullRows, NamedIds, TeacherHead, TopRows
from fabric_train.training.distillation import Distillation
from fabric_train.training.objective import CrossEntropy, Objective

if TYPE_CHECKING:
    from fabric_train.arguments import PreferenceArguments


@dataclass(frozen=True)
class TracedTeacher:
    """What the memory of a distillation's loss depends on, besides the student and the arguments."""

    num_rows: int
    """The rows of the teacher's head."""
    hidden_size: int
    top_k: int | None = None
    """The number of likeliest tokens that are stored; None if the loss computes the teacher's full distributions."""


class _EmptyTeacher:
    """A teacher whose values have shapes and no content."""

    def __init__(self, teacher: TracedTeacher, head: TeacherHead | None) -> None:
        self._teacher = teacher
        self._head = head

    def read(self, batch: Batch, targets: Targets) -> FullRows | TopRows:
        """Return distributions of the targets of a batch."""
        num_targets = len(targets.ids)
        if self._head is not None:
            hidden = torch.empty(num_targets, self._teacher.hidden_size, dtype=self._head.weight.dtype)
            return FullRows(hidden, self._head)
        assert self._teacher.top_k is not None
        ids = torch.empty(num_targets, self._teacher.top_k, dtype=torch.int64)
        return TopRows(ids, torch.empty(num_targets, self._teacher.top_k + 1))


def make_head(teacher: TracedTeacher | None, dtype: torch.dtype) -> TeacherHead | None:
    """Make the teacher's head, which is not part of the loss's memory; None if the loss needs none."""
    if teacher is None or teacher.top_k is not None:
        return None
    return TeacherHead(torch.empty(teacher.num_rows, teacher.hidden_size, dtype=dtype), bias=None)


def build_traced_objective(
    preference: "PreferenceArguments | None",
    teacher: TracedTeacher | None,
    head: TeacherHead | None,
    vocab_size: int,
) -> Objective:
    """Build the objective of a trace on fake tensors.

    Args:
        preference: The arguments of a distillation.
        teacher: The teacher of a distillation; None for cross entropy, as ``preference``.
        head: The teacher's head, see :func:`make_head`.
        vocab_size: The rows of the student's head.
    """
    if preference is None or teacher is None:
        return CrossEntropy()
    objective = Distillation(preference)
    no_gaps = torch.empty(0, dtype=torch.int64)
    named_ids = NamedIds(min(teacher.num_rows, vocab_size), no_gaps)
    objective.use_teacher(_EmptyTeacher(teacher, head), named_ids)
    return objective
