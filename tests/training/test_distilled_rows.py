"""Any rows and settings give the loss and the gradients of plain PyTorch over full distributions."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fabric_train.data.batch import IGNORED_LABEL, Batch, find_targets, pad_rows
from fabric_train.model import lm_head_loss
from fabric_train.model.divergence_loss import DivergenceLoss, FullRows, NamedIds, TeacherHead, TeacherRows, TopRows
from fabric_train.model.divergences import DIVERGENCES
from fabric_train.model.lm_head_loss import summed_token_loss
from fabric_train.teacher_states.teacher import top_states
from tests.support.plain_distillation import coarsen, plain_divergence

WIDTH = 5
TEACHER_WIDTH = 7
# fp32 sums of at most 36 tokens, and of products over at most 15 rows of a head
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """Rows, two vocabularies, and the settings of a distillation."""

    document_lengths: list[list[int]]
    """The tokens of the documents of each row."""
    named_ids: list[int]
    """The ids with a token, in ascending order."""
    student_padding: int
    """The rows of the student's head after the last named id."""
    teacher_padding: int
    has_bias: bool
    teacher_has_bias: bool
    top_k: int | None
    """None for the full distributions."""
    divergence: str
    jsd_beta: float
    temperature: float
    sft_weight: float
    distills_all: bool
    share_supervised: float
    tokens_per_chunk: int
    seed: int

    @property
    def end(self) -> int:
        return self.named_ids[-1] + 1

    @property
    def gaps(self) -> torch.Tensor:
        """The ids without a token."""
        gaps = [token_id for token_id in range(self.end) if token_id not in self.named_ids]
        return torch.tensor(gaps, dtype=torch.int64)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    named_ids = sorted(draw(st.sets(st.integers(0, 11), min_size=2)))
    num_rows = draw(st.sampled_from([1, 2, 3, 0]))  # a rank may have no rows left
    row = st.lists(st.sampled_from([3, 4, 2, 1]), min_size=1, max_size=3)
    return Case(
        document_lengths=draw(st.lists(row, min_size=num_rows, max_size=num_rows)),
        named_ids=named_ids,
        student_padding=draw(st.integers(0, 3)),
        teacher_padding=draw(st.integers(0, 3)),
        has_bias=draw(st.booleans()),
        teacher_has_bias=draw(st.booleans()),
        top_k=draw(st.none() | st.integers(1, len(named_ids))),
        divergence=draw(st.sampled_from(sorted(DIVERGENCES))),
        jsd_beta=draw(st.sampled_from([0.5, 0.05, 0.9])),
        temperature=draw(st.sampled_from([1.0, 0.5, 3.0])),
        sft_weight=draw(st.sampled_from([0.5, 0.0, 1.5])),
        distills_all=draw(st.booleans()),
        share_supervised=draw(st.sampled_from([0.5, 0.0, 1.0])),
        tokens_per_chunk=draw(st.integers(1, 40)),
        seed=draw(st.integers(0, 2**31)),
    )


def make_rows(case: Case) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return random ids of each row, and its labels."""
    generator = np.random.default_rng(case.seed)
    rows = []
    labels = []
    for lengths in case.document_lengths:
        row = generator.choice(case.named_ids, sum(lengths))
        is_supervised = generator.random(len(row)) < case.share_supervised
        is_supervised[-1] = True  # equal tokens without a label at the end of a row count as padding
        rows.append(row)
        labels.append(np.where(is_supervised, row, IGNORED_LABEL))
    return rows, labels


def make_batch(case: Case, rows: list[np.ndarray], labels: list[np.ndarray]) -> Batch:
    starts = [np.cumsum([0, *lengths[:-1]]) for lengths in case.document_lengths]
    return pad_rows(rows, [label.copy() for label in labels], starts, predicts_all=case.distills_all)


@dataclass(frozen=True)
class Target:
    """A distilled token."""

    row: int
    position: int
    """The position in the row whose next token it is."""
    token_id: int
    is_supervised: bool


def list_targets(case: Case, rows: list[np.ndarray], labels: list[np.ndarray]) -> list[Target]:
    """Return the distilled tokens, in the order of the rows: no first token of a document is one."""
    targets = []
    for row, lengths in enumerate(case.document_lengths):
        begin = 0
        for length in lengths:
            for position in range(begin, begin + length - 1):
                is_supervised = labels[row][position + 1] != IGNORED_LABEL
                if is_supervised or case.distills_all:
                    targets.append(Target(row, position, int(rows[row][position + 1]), bool(is_supervised)))
            begin += length
    return targets


@dataclass(frozen=True)
class Student:
    """The parts of a student that get a gradient."""

    hidden: torch.Tensor
    """The inputs of its head, [B, T, H]."""
    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [leaf for leaf in (self.hidden, self.weight, self.bias) if leaf is not None]


def draw_student(case: Case, batch: Batch) -> Student:
    num_rows = case.end + case.student_padding
    return Student(
        hidden=torch.randn(*batch.input_ids.shape, WIDTH, requires_grad=True),
        weight=torch.randn(num_rows, WIDTH, requires_grad=True),
        bias=torch.randn(num_rows, requires_grad=True) if case.has_bias else None,
    )


def draw_teacher_head(case: Case) -> TeacherHead:
    num_rows = case.end + case.teacher_padding
    bias = torch.randn(num_rows) if case.teacher_has_bias else None
    return TeacherHead(torch.randn(num_rows, TEACHER_WIDTH), bias)


@dataclass(frozen=True)
class PlainLoss:
    """The sum of the losses, and the divergence and the cross entropy of each distilled token, fp64."""

    total: torch.Tensor
    divergences: torch.Tensor
    cross_entropies: torch.Tensor


def compute_plainly(
    case: Case, student: Student, teacher_hidden: torch.Tensor, head: TeacherHead, targets: list[Target]
) -> PlainLoss:
    """Compute the loss token by token. ``teacher_hidden`` are the inputs of the teacher's head, [B, T, teacher's H]."""
    total = student.hidden.double().sum() * 0  # also without targets
    divergences = []
    cross_entropies = []
    for target in targets:
        hidden = student.hidden[target.row, target.position]
        logits = F.linear(hidden, student.weight, student.bias)[None].double()
        teacher_logits = F.linear(teacher_hidden[target.row, target.position], head.weight, head.bias)[None].double()
        student_classes = F.log_softmax(logits[:, case.named_ids] / case.temperature, dim=1)
        teacher_classes = F.log_softmax(teacher_logits[:, case.named_ids] / case.temperature, dim=1)
        if case.top_k is not None and case.top_k < len(case.named_ids):  # else there are no other tokens
            top = teacher_classes.topk(case.top_k, dim=1).indices
            student_classes = coarsen(student_classes, top)
            teacher_classes = coarsen(teacher_classes, top)
        divergence = plain_divergence(case.divergence, student_classes, teacher_classes, case.jsd_beta)
        cross_entropy = F.cross_entropy(logits, torch.tensor([target.token_id]))
        total = total + divergence[0]
        if target.is_supervised:
            total = total + case.sft_weight * cross_entropy
        divergences.append(divergence.item())
        cross_entropies.append(cross_entropy.item())
    return PlainLoss(total, torch.tensor(divergences), torch.tensor(cross_entropies))


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    scale = max([1.0, *expected.detach().abs().flatten().tolist()])
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=TOLERANCE * scale)


@given(cases())
def test_loss_and_gradients_equal_plain_pytorch(case: Case) -> None:
    torch.manual_seed(case.seed)
    rows, labels = make_rows(case)
    batch = make_batch(case, rows, labels)
    student = draw_student(case, batch)
    head = draw_teacher_head(case)
    teacher_hidden = torch.randn(*batch.input_ids.shape, TEACHER_WIDTH)
    expected = compute_plainly(case, student, teacher_hidden, head, list_targets(case, rows, labels))
    expected_gradients = torch.autograd.grad(expected.total, student.leaves, materialize_grads=True)

    targets = batch.targets or find_targets(batch.labels)
    named_ids = NamedIds(case.end, case.gaps)
    hidden_of_targets = teacher_hidden.flatten(0, 1)[targets.positions]
    teacher: TeacherRows = FullRows(hidden_of_targets, head)
    if case.top_k is not None:
        states = top_states(hidden_of_targets, head, named_ids, case.top_k, case.temperature)
        teacher = TopRows(states.ids.long(), states.log_probabilities)
    token_loss = DivergenceLoss(
        teacher,
        targets.ids,
        named_ids,
        case.divergence,
        case.jsd_beta,
        case.temperature,
        case.sft_weight,
        batch.is_supervised,
    )
    bytes_per_token = len(student.weight) * (8 + token_loss.bytes_per_logit)  # and logits, log-probabilities in fp32
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(lm_head_loss._CHUNK_BYTES, "cpu", case.tokens_per_chunk * bytes_per_token)
        total, values = summed_token_loss(student.hidden, student.weight, student.bias, targets.positions, token_loss)
    gradients = torch.autograd.grad(total, student.leaves)

    assert_close(total, expected.total)
    assert_close(values[1], expected.divergences)
    assert_close(values[2], expected.cross_entropies)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert_close(gradient, expected_gradient)
