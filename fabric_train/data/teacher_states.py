"""Values of a teacher that were stored for the targets of rows, as batches carry them.

``fabric_train.teacher_states`` stores and reads them. Shapes: N targets, k likeliest tokens, H the teacher's hidden
size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol, TypeAlias

import torch

from fabric_train.data.tensor_record import TensorRecord


@dataclass(frozen=True)
class TopStates(TensorRecord):
    """The teacher's k likeliest tokens for each target, and the mass of all others."""

    ids: torch.Tensor
    """int32 [N, k], in descending order of their probabilities."""
    log_probabilities: torch.Tensor
    """The log-probabilities of these tokens, and of all others together, fp32 [N, k + 1]."""


@dataclass(frozen=True)
class HiddenStates(TensorRecord):
    """The inputs of the teacher's head for each target."""

    bits: torch.Tensor
    """The bits of bfloat16 values, int16 [N, H]: NumPy has no bfloat16."""


TeacherStates: TypeAlias = TopStates | HiddenStates


class StatesReader(Protocol):
    """The stored values of a teacher for the rows of a split."""

    def read(self, row: int, row_hash: int) -> TeacherStates:
        """Return the values for the targets of a row, in their order.

        Args:
            row: The row of the split.
            row_hash: The ``batch.hash_row`` of the row.

        Raises:
            RunError: The values are damaged, or were computed for another row.
        """


def join_states(states_of_rows: Sequence[TeacherStates]) -> TeacherStates:
    """Return the values of several rows, which have the same form, as those of one batch."""
    kind = type(states_of_rows[0])
    joined = []
    for field in fields(kind):
        joined.append(torch.cat([getattr(states, field.name) for states in states_of_rows]))
    return kind(*joined)
