"""A divergence computed in chunks in the head equals plain PyTorch over full fp64 distributions, with its gradients."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from fabric_train.model import lm_head_loss
from fabric_train.model.divergence_loss import DivergenceLoss, FullRows, NamedIds, TeacherHead, TeacherRows, TopRows
from fabric_train.model.lm_head_loss import summed_token_loss
from fabric_train.preflight.memory_activations import _LiveBytes
from tests.support.plain_distillation import coarsen, plain_divergence

NUM_TOKENS = 23
WIDTH = 16
TEACHER_WIDTH = 24
NUM_IDS = 90
NUM_ROWS = 96
NUM_TEACHER_ROWS = 100
GAPS = (3, 7)
NUM_TOP = 5
JSD_BETA = 0.3
# A value and its gradient are sums of about a hundred products in fp32, of numbers up to a few hundred.
TOLERANCE = 3e-5


@dataclass(frozen=True)
class Problem:
    """A student and a teacher with random weights. Both heads have rows that no token names."""

    hidden: torch.Tensor
    weight: torch.Tensor
    teacher_hidden: torch.Tensor
    teacher_weight: torch.Tensor
    named: torch.Tensor
    """The ids of tokens, int64."""
    targets: torch.Tensor
    temperature: float

    @property
    def student(self) -> torch.Tensor:
        """The student's log-probabilities of the named ids, fp64."""
        logits = (self.hidden @ self.weight.T)[:, self.named]
        return F.log_softmax(logits.double() / self.temperature, dim=1)

    @property
    def teacher(self) -> torch.Tensor:
        logits = (self.teacher_hidden @ self.teacher_weight.T)[:, self.named]
        return F.log_softmax(logits.double() / self.temperature, dim=1)


def draw_problem(gaps: tuple[int, ...], temperature: float) -> Problem:
    torch.manual_seed(0)
    weight = torch.randn(NUM_ROWS, WIDTH)
    weight[list(GAPS)] *= 3  # an id without a token often has the highest logit
    named = torch.tensor([token_id for token_id in range(NUM_IDS) if token_id not in gaps])
    return Problem(
        hidden=torch.randn(NUM_TOKENS, WIDTH, requires_grad=True),
        weight=weight.requires_grad_(),
        teacher_hidden=torch.randn(NUM_TOKENS, TEACHER_WIDTH),
        teacher_weight=torch.randn(NUM_TEACHER_ROWS, TEACHER_WIDTH),
        named=named,
        targets=named[torch.randint(0, len(named), (NUM_TOKENS,))],
        temperature=temperature,
    )


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=TOLERANCE * max(scale, 1.0))


@pytest.mark.parametrize("is_coarsened", [False, True], ids=["full", "top"])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize(("gaps", "temperature", "weight"), [((), 1.0, 0.0), (GAPS, 2.0, 0.5)])
def test_loss_and_gradients_equal_those_of_full_distributions(
    monkeypatch: pytest.MonkeyPatch,
    divergence: str,
    gaps: tuple[int, ...],
    temperature: float,
    weight: float,
    is_coarsened: bool,
) -> None:
    problem = draw_problem(gaps, temperature)
    student = problem.student
    teacher = problem.teacher
    rows: TeacherRows = FullRows(problem.teacher_hidden, TeacherHead(problem.teacher_weight, None))
    if is_coarsened:
        top = teacher.topk(NUM_TOP, dim=1).indices
        student = coarsen(student, top)
        teacher = coarsen(teacher, top)
        rows = TopRows(problem.named[top], teacher.float())
    divergences = plain_divergence(divergence, student, teacher, JSD_BETA)
    cross_entropies = F.cross_entropy((problem.hidden @ problem.weight.T).double(), problem.targets, reduction="none")
    expected = (divergences + weight * cross_entropies).sum()
    expected_gradients = torch.autograd.grad(expected, [problem.hidden, problem.weight])

    named_ids = NamedIds(NUM_IDS, torch.tensor(gaps, dtype=torch.int64))
    token_loss = DivergenceLoss(rows, problem.targets, named_ids, divergence, JSD_BETA, temperature, weight)
    monkeypatch.setitem(lm_head_loss._CHUNK_BYTES, "cpu", 5 * NUM_ROWS * (4 + token_loss.bytes_per_logit))
    total, values = summed_token_loss(problem.hidden, problem.weight, None, torch.arange(NUM_TOKENS), token_loss)
    gradients = torch.autograd.grad(total, [problem.hidden, problem.weight])

    assert_close(total, expected)
    assert_close(values[1], divergences)
    assert_close(values[2], cross_entropies)
    likeliest = problem.named[problem.teacher.argmax(1)]
    student_likeliest = problem.named[problem.student.argmax(1)]
    assert values[3].tolist() == (likeliest == student_likeliest).float().tolist()
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_all_tokens_as_classes_equal_the_full_distribution(divergence: str) -> None:
    """With k equal to the number of tokens, nothing is left for the rest."""
    problem = draw_problem((), 1.0)
    named_ids = NamedIds(NUM_IDS, torch.tensor([], dtype=torch.int64))
    sorted_teacher = problem.teacher.sort(dim=1, descending=True)
    no_rest = torch.full((NUM_TOKENS, 1), -1e4, dtype=torch.float64)
    top_rows = TopRows(sorted_teacher.indices, torch.cat([sorted_teacher.values, no_rest], dim=1).float())
    full_rows = FullRows(problem.teacher_hidden, TeacherHead(problem.teacher_weight, None))

    results = []
    for rows in (top_rows, full_rows):
        token_loss = DivergenceLoss(rows, problem.targets, named_ids, divergence, JSD_BETA)
        total, _ = summed_token_loss(problem.hidden, problem.weight, None, torch.arange(NUM_TOKENS), token_loss)
        results.append((total, torch.autograd.grad(total, problem.weight)[0]))
    for top_value, full_value in zip(*results, strict=True):
        assert_close(top_value, full_value)


def test_cross_entropy_counts_at_supervised_tokens_only() -> None:
    problem = draw_problem((), 1.0)
    named_ids = NamedIds(NUM_IDS, torch.tensor([], dtype=torch.int64))
    rows = FullRows(problem.teacher_hidden, TeacherHead(problem.teacher_weight, None))
    is_supervised = torch.arange(NUM_TOKENS) % 3 == 0
    cross_entropies = F.cross_entropy((problem.hidden @ problem.weight.T).double(), problem.targets, reduction="none")
    expected = (
        plain_divergence("forward_kl", problem.student, problem.teacher, JSD_BETA)
        + 0.5 * cross_entropies * is_supervised
    )
    expected_gradient = torch.autograd.grad(expected.sum(), problem.weight)[0]

    token_loss = DivergenceLoss(
        rows, problem.targets, named_ids, "forward_kl", cross_entropy_weight=0.5, is_supervised=is_supervised
    )
    total, values = summed_token_loss(problem.hidden, problem.weight, None, torch.arange(NUM_TOKENS), token_loss)

    assert_close(values[0], expected)
    assert_close(torch.autograd.grad(total, problem.weight)[0], expected_gradient)


def test_a_student_that_is_certain_still_learns_the_rest() -> None:
    """The probability of all tokens but the k likeliest may be too small for fp32."""
    logits = torch.zeros(1, 6)
    logits[0, 0] = 200
    hidden = torch.eye(1, requires_grad=True)
    weight = logits.T.clone().requires_grad_()  # [V, 1], so the logits are the weight
    ids = torch.tensor([[0]])
    teacher = torch.tensor([[0.5, 0.5]]).log()
    named_ids = NamedIds(6, torch.tensor([], dtype=torch.int64))

    token_loss = DivergenceLoss(TopRows(ids, teacher), torch.tensor([1]), named_ids, "forward_kl")
    total, _ = summed_token_loss(hidden, weight, None, torch.arange(1), token_loss)
    (gradient,) = torch.autograd.grad(total, weight)

    # KL = log 0.5 - 0.5 * (log p_0 + log p_rest), with log p_0 = 0 and log p_rest = log 5 - 200
    assert float(total) == pytest.approx(-0.6931472 + 0.5 * (200 - 1.6094379), rel=1e-6)
    torch.testing.assert_close(gradient[:, 0], torch.tensor([0.5, -0.1, -0.1, -0.1, -0.1, -0.1]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_gpu_reads_the_head_of_a_teacher_few_times_and_in_little_memory(
    monkeypatch: pytest.MonkeyPatch, is_frozen: bool
) -> None:
    """Each read of the head of Llama-3-70B takes 2.1 GB, so a slice must have many tokens."""
    num_tokens = 2048
    vocabulary = 128_256
    slice_lengths: list[int] = []
    compute_logits = FullRows.compute_logits

    def count_logits(rows: FullRows, chunk: slice) -> torch.Tensor:
        logits = compute_logits(rows, chunk)
        slice_lengths.append(len(logits))
        return logits

    monkeypatch.setattr(FullRows, "compute_logits", count_logits)
    monkeypatch.setattr(lm_head_loss, "_has_liger", lambda: False)
    with FakeTensorMode():
        hidden = torch.zeros(num_tokens, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.zeros(vocabulary, WIDTH, dtype=torch.bfloat16, requires_grad=not is_frozen)
        teacher_weight = torch.zeros(vocabulary, TEACHER_WIDTH, dtype=torch.bfloat16)
        rows = FullRows(torch.zeros(num_tokens, TEACHER_WIDTH, dtype=torch.bfloat16), TeacherHead(teacher_weight, None))
        positions = torch.arange(num_tokens)
        named_ids = NamedIds(vocabulary, torch.zeros(0, dtype=torch.int64))
        token_loss = DivergenceLoss(rows, torch.zeros_like(positions), named_ids, "forward_kl")
        with _LiveBytes(torch.nn.Module()) as live:
            summed_token_loss(hidden, weight, None, positions, token_loss, memory_device="cuda", is_frozen=is_frozen)
    assert sum(slice_lengths) == num_tokens
    assert len(slice_lengths) <= 16
    assert live.most < 1.1e9
