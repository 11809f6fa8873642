"""Compute the divergence between a teacher's and a student's next-token distributions in the student's head.

Neither the student's nor the teacher's logits exist for more than one chunk of tokens, see ``lm_head_loss``.

The teacher's distribution is computed from its last hidden states, or it is stored for its likeliest tokens only. In
that case the classes are these tokens, and all other tokens together as one more class: the divergence is exactly that
of the coarsened distributions.

Shapes: N tokens, C of them in a chunk, V rows in the student's head, K classes, k likeliest tokens.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from fabric_train.model.divergences import DIVERGENCES

VALUES = ("loss", "divergence", "cross_entropy", "agreement")
"""The values of each token. ``agreement`` is 1 if both models find the same token likeliest, and otherwise 0."""
ABSENT_LOGIT = -1e30
"""The logit of an id without a token: finite, and so low that its probability is exactly 0 in fp32 beside any other."""


@dataclass(frozen=True)
class NamedIds:
    """The token ids that the tokenizer has tokens for. Other rows of a head are padding."""

    end: int
    """One more than the largest id."""
    gaps: torch.Tensor
    """The ids below ``end`` without a token, int64 [gaps], on the head's device."""

    def are_all_rows(self, num_rows: int) -> bool:
        """Return whether each row of a head of ``num_rows`` has a token."""
        return self.end == num_rows and len(self.gaps) == 0

    def log_probabilities(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        """Return the log-probabilities of the ids below ``end``, fp32 [C, end], from logits [C, rows of the head].

        The logits are divided by the temperature. Ids without a token have probability 0.
        """
        scaled = logits[:, : self.end].float()
        if temperature != 1:
            scaled = scaled / temperature
        if len(self.gaps):
            scaled = scaled.index_fill(1, self.gaps, ABSENT_LOGIT)
        return torch.log_softmax(scaled, dim=1)


class TeacherRows(Protocol):
    """A teacher's distributions of the next token, for N tokens."""

    bytes_per_logit: int
    """The memory that the methods need for each of the student's logits, in bytes."""

    def compare(
        self, student: torch.Tensor, chunk: slice, loss: "DivergenceLoss", needs_gradient: bool
    ) -> "Comparison":
        """Compare the student with the teacher.

        Args:
            student: The student's log-probabilities of the named ids, fp32 [C, ids]; they may be overwritten.
            chunk: The indices of the C tokens among the N tokens.
            loss: The divergence and its settings.
            needs_gradient: Whether the gradient is needed.
        """


@dataclass(frozen=True)
class Comparison:
    """A student compared with its teacher."""

    divergences: torch.Tensor
    """fp32 [C]."""
    likeliest: torch.Tensor
    """The teacher's likeliest token, int64 [C]."""
    gradient: torch.Tensor | None
    """The derivatives of the divergences with respect to the student's logits divided by the temperature, fp32
    [C, ids]; None if they are not needed."""


@dataclass(frozen=True)
class TeacherHead:
    """The teacher's head. It does not train."""

    weight: torch.Tensor
    """[rows, H], in the dtype in which the logits are computed."""
    bias: torch.Tensor | None
    """[rows]."""


@dataclass(frozen=True)
class FullRows:
    """A teacher's full distributions, computed from its hidden states."""

    hidden: torch.Tensor
    """The inputs of the teacher's head, [N, H]."""
    head: TeacherHead
    bytes_per_logit = 28

    def compute_logits(self, chunk: slice) -> torch.Tensor:
        """Return the teacher's logits of the C tokens of a chunk, [C, rows of the head]."""
        hidden = self.hidden[chunk].to(self.head.weight.dtype)
        return torch.nn.functional.linear(hidden, self.head.weight, self.head.bias)

    def compare(self, student: torch.Tensor, chunk: slice, loss: "DivergenceLoss", needs_gradient: bool) -> Comparison:
        """Compare all named ids, see ``TeacherRows.compare``."""
        teacher = loss.named_ids.log_probabilities(self.compute_logits(chunk), loss.temperature)
        divergences, slopes = DIVERGENCES[loss.divergence](student, teacher, loss.jsd_beta)
        gradient = None
        if needs_gradient:
            gradient = slopes - student.exp_() * slopes.sum(dim=1, keepdim=True)
        return Comparison(divergences, teacher.argmax(dim=1), gradient)


@dataclass(frozen=True)
class TopRows:
    """A teacher's distributions as they are stored: the k likeliest tokens, and the mass of the rest.

    They are coarsened at the temperature at which they were stored.
    """

    ids: torch.Tensor
    """The likeliest tokens, int64 [N, k], in descending order of their probabilities."""
    log_probabilities: torch.Tensor
    """The log-probabilities of these tokens, and of all others together, fp32 [N, k + 1]."""
    bytes_per_logit = 12

    def compare(self, student: torch.Tensor, chunk: slice, loss: "DivergenceLoss", needs_gradient: bool) -> Comparison:
        """Compare k + 1 classes, see ``TeacherRows.compare``."""
        ids = self.ids[chunk]
        teacher = self.log_probabilities[chunk]

        # The student's classes. The rest is summed without the k tokens: 1 minus their sum would lose its digits.
        top = student.gather(1, ids)  # [C, k]
        others = student.scatter_(1, ids, -torch.inf)
        rest = others.logsumexp(dim=1, keepdim=True).clamp(min=ABSENT_LOGIT)  # [C, 1]; -inf, without others, gives NaN
        coarsened = torch.cat([top, rest], dim=1)
        divergences, slopes = DIVERGENCES[loss.divergence](coarsened, teacher, loss.jsd_beta)

        # The derivative of the rest's log-probability is shared by its tokens, in proportion to their probabilities.
        gradient = None
        if needs_gradient:
            total = slopes.sum(dim=1, keepdim=True)  # [C, 1]
            top_gradient = slopes[:, :-1] - top.exp() * total
            shares_of_rest = others.sub_(rest).exp_()  # [C, ids]
            gradient = shares_of_rest.mul_(slopes[:, -1:] - rest.exp() * total)
            gradient.scatter_(1, ids, top_gradient)
        return Comparison(divergences, ids[:, 0], gradient)


class DivergenceLoss:
    """A ``lm_head_loss.TokenLoss``: the divergence from a teacher, and if asked for, the cross entropy of the targets.

    Both distributions are at the same temperature, and only over the named ids. The cross entropy is at temperature 1
    and over all rows of the head, as in training without a teacher.

    This is not a dataclass, because Fabric and FSDP convert the tensors in a dataclass that a model gets.
    """

    num_values = len(VALUES)

    def __init__(
        self,
        teacher: TeacherRows,
        targets: torch.Tensor,
        named_ids: NamedIds,
        divergence: str,
        jsd_beta: float = 0.5,
        temperature: float = 1.0,
        cross_entropy_weight: float = 0.0,
        is_supervised: torch.Tensor | None = None,
    ) -> None:
        """Make the loss of N tokens.

        Args:
            teacher: The teacher's distributions.
            targets: The next tokens, int64 [N].
            named_ids: The ids with a token.
            divergence: A name in ``DIVERGENCES``.
            jsd_beta: See ``divergences.jsd``.
            temperature: Both models' logits are divided by it.
            cross_entropy_weight: The weight of the cross entropy in the loss.
            is_supervised: The tokens whose cross entropy is part of the loss, bool [N]; None for all of them.
        """
        self.teacher = teacher
        self.targets = targets
        self.named_ids = named_ids
        self.divergence = divergence
        self.jsd_beta = jsd_beta
        self.temperature = temperature
        self.cross_entropy_weight = cross_entropy_weight
        self.is_supervised = is_supervised

    @property
    def bytes_per_logit(self) -> int:
        """The memory for log-probabilities, slopes and gradients, in bytes for each logit."""
        return self.teacher.bytes_per_logit + (4 if self.cross_entropy_weight else 0)

    def __len__(self) -> int:
        return len(self.targets)

    def compute(self, logits: torch.Tensor, chunk: slice, needs_gradient: bool) -> torch.Tensor:
        """Return the ``VALUES`` of the tokens of a chunk, fp32 [4, C], see ``lm_head_loss.TokenLoss.compute``."""
        targets = self.targets[chunk, None]  # [C, 1]
        student = self.named_ids.log_probabilities(logits, self.temperature)
        if self.temperature == 1 and self.named_ids.are_all_rows(logits.shape[1]):
            cross_entropy = -student.gather(1, targets)[:, 0]
        else:
            cross_entropy = torch.logsumexp(logits.float(), dim=1) - logits.gather(1, targets)[:, 0].float()
        likeliest = student.argmax(dim=1)  # before ``compare`` overwrites the log-probabilities
        comparison = self.teacher.compare(student, chunk, self, needs_gradient)
        weights = torch.full_like(cross_entropy, self.cross_entropy_weight)  # [C]
        if self.is_supervised is not None:
            weights = weights * self.is_supervised[chunk]
        if comparison.gradient is not None:
            self._write_gradient(logits, comparison.gradient, targets, cross_entropy, weights)

        loss = comparison.divergences
        if self.cross_entropy_weight:
            loss = loss + weights * cross_entropy
        agreement = (likeliest == comparison.likeliest).float()
        return torch.stack([loss, comparison.divergences, cross_entropy, agreement])

    def _write_gradient(
        self,
        logits: torch.Tensor,
        gradient: torch.Tensor,
        targets: torch.Tensor,
        cross_entropy: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Write the gradient of the loss over the logits [C, V].

        Args:
            logits: The logits, which are read before they are overwritten.
            gradient: The divergence's gradient, fp32 [C, ids], see ``Comparison.gradient``.
            targets: int64 [C, 1].
            cross_entropy: The cross entropy of the targets, fp32 [C].
            weights: The weight of each token's cross entropy, fp32 [C].
        """
        if self.temperature != 1:
            gradient = gradient / self.temperature
        named_end = self.named_ids.end
        if not self.cross_entropy_weight:
            logits[:, :named_end] = gradient
            logits[:, named_end:] = 0
            return
        # the logarithm of the exponentials' sum is the target's logit plus its cross entropy, [C, 1]
        log_normalizer = logits.gather(1, targets).float() + cross_entropy[:, None]
        # the probabilities, less 1 at the target: the cross entropy's gradient, [C, V]
        total = torch.exp(logits.float() - log_normalizer)
        target_gradient = total.gather(1, targets) - 1
        total.scatter_(1, targets, target_gradient)
        total *= weights[:, None]
        total[:, :named_end] += gradient
        logits.copy_(total)
