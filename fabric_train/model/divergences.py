"""Define the divergences by which a student is distilled from a teacher.

Each is a function of the log-probabilities of C tokens over K classes. It returns the divergence of each token, and its
slopes: the derivatives with respect to the student's log-probabilities, without terms that are proportional to the
student's probabilities, because normalization cancels these: the gradient with respect to the student's logits is
``slopes - P * slopes.sum()``, and any multiple of P in the slopes cancels.

The teacher's distribution is Q and the student's P. To add a divergence, write a function here and list it in
``DIVERGENCES``.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch


class Divergence(NamedTuple):
    """The divergence of each of C tokens in nats, fp32 [C], and its slopes, fp32 [C, K]."""

    values: torch.Tensor
    slopes: torch.Tensor


def forward_kl(student: torch.Tensor, teacher: torch.Tensor, jsd_beta: float) -> Divergence:
    """Return KL(Q ‖ P), the loss of knowledge distillation (arXiv:1503.02531), apart from a constant.

    Args:
        student: Log-probabilities, fp32 [C, K].
        teacher: Log-probabilities, fp32 [C, K].
        jsd_beta: Not used.
    """
    teacher_probabilities = teacher.exp()
    values = (teacher_probabilities * (teacher - student)).sum(dim=1)
    return Divergence(values, -teacher_probabilities)


def reverse_kl(student: torch.Tensor, teacher: torch.Tensor, jsd_beta: float) -> Divergence:
    """Return KL(P ‖ Q), which lets the student leave out what it cannot represent (arXiv:2306.13649, section 2).

    For the arguments see :func:`forward_kl`.
    """
    slopes = student.exp() * (student - teacher)
    return Divergence(slopes.sum(dim=1), slopes)


def jsd(student: torch.Tensor, teacher: torch.Tensor, jsd_beta: float) -> Divergence:
    """Return the generalized Jensen-Shannon divergence (arXiv:2306.13649, equation 1).

    This is β KL(Q ‖ M) + (1 - β) KL(P ‖ M), with the mixture M = βQ + (1 - β)P and β = ``jsd_beta``, between 0 and 1.
    For the other arguments see :func:`forward_kl`.
    """
    mixture = torch.logaddexp(student + math.log1p(-jsd_beta), teacher + math.log(jsd_beta))
    teacher_terms = jsd_beta * teacher.exp() * (teacher - mixture)
    slopes = (1 - jsd_beta) * student.exp() * (student - mixture)
    return Divergence((teacher_terms + slopes).sum(dim=1), slopes)


DivergenceFunction: TypeAlias = Callable[[torch.Tensor, torch.Tensor, float], Divergence]
DIVERGENCES: dict[str, DivergenceFunction] = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jsd}
"""The divergences by the name that ``--divergence`` gives."""
