"""Windows of reinforcement learning equal plain PyTorch, however they are split."""

import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch

from fabric_train.training.objective import name_metrics
from fabric_train.training.policy_gradient import PolicyGradient
from tests.support.forked_runs import ForkedRuns
from tests.support.policy_windows import (
    REWARD_NAMES,
    ROWS_PER_WINDOW,
    PolicyCase,
    StepNumbers,
    draw_windows,
    make_batch,
    train_plainly,
)

TOLERANCE = 1e-5  # relative, in fp32


@dataclass(frozen=True)
class Split:
    """How the rows of a window are divided."""

    parallelism: str
    num_ranks: int
    micro_batch_size: int
    tensor_parallel_size: int = 1

    def __str__(self) -> str:
        name = f"{self.parallelism} {self.num_ranks}x{self.micro_batch_size}"
        if self.tensor_parallel_size > 1:
            name += f" of {self.tensor_parallel_size}"
        return name


SPLITS = [
    Split("single", 1, ROWS_PER_WINDOW),
    Split("single", 1, 2),
    Split("ddp", 2, 1),
    Split("fsdp", 3, 1),  # two ranks have no row left for their last micro-batch
    Split("fsdp2", 2, 3),
    Split("fsdp2", 2, 3, tensor_parallel_size=2),
    Split("fsdp2", 4, 2, tensor_parallel_size=2),
]
CASES = [
    PolicyCase(),
    PolicyCase("constant", temperature=1.0),
    PolicyCase("tokens", temperature=1.3, kl_weight=0.2),
]


def train(runs: ForkedRuns, folder: Path, case: PolicyCase, split: Split, before: str = "") -> list[StepNumbers]:
    """Train on the ranks of a split; each executes ``before`` first."""
    file = folder / "steps.json"
    paths = ["--model_name", "none", "--train_data_dir", "none", "--output_dir", "none"]
    options = ["--accelerator", "cpu", "--precision", "32-true", "--micro_batch_size", str(split.micro_batch_size)]
    options += ["--parallelism", split.parallelism, "--devices", str(split.num_ranks)]
    options += ["--tensor_parallel_size", str(split.tensor_parallel_size)]
    argv = [json.dumps(asdict(case)), file, *paths, *options]
    runs.start(argv, split.num_ranks, program="tests.support.policy_windows", before=before).finish()
    return [StepNumbers(**numbers) for numbers in json.loads(file.read_text())]


@functools.cache
def plain_steps(case: PolicyCase) -> list[StepNumbers]:
    return train_plainly(case)


def assert_equals_plain_pytorch(steps: list[StepNumbers], case: PolicyCase) -> None:
    """Compare all numbers of all steps."""
    for numbers, expected in zip(steps, plain_steps(case), strict=True):
        assert numbers.loss == pytest.approx(expected.loss, rel=TOLERANCE, abs=TOLERANCE)
        assert numbers.grad_norm == pytest.approx(expected.grad_norm, rel=TOLERANCE)
        assert numbers.metrics == pytest.approx(expected.metrics, rel=TOLERANCE)
        for metrics, expected_metrics in zip(numbers.source_metrics, expected.source_metrics, strict=True):
            assert metrics == pytest.approx(expected_metrics, rel=TOLERANCE)


@pytest.mark.numerical
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=["tokens", "constant", "reference"])
def test_every_split_equals_plain_pytorch(
    forked_runs: ForkedRuns, tmp_path: Path, case: PolicyCase, split: Split
) -> None:
    assert_equals_plain_pytorch(train(forked_runs, tmp_path, case, split), case)


def test_the_compared_windows_have_what_is_hard_to_weigh() -> None:
    for numbers in plain_steps(CASES[0]):
        metrics = {name: value or 0.0 for name, value in numbers.metrics.items()}
        assert 0.1 < metrics["weights_cut"] < 0.9
        assert 0 < metrics["cut_completions"] < 1
        assert 0 < metrics["flat_groups"] < 1
        assert numbers.grad_norm > 0.5  # it is clipped


# ------------------------------------------------------------------------------------------------------------- defects

DEFECTS = {
    "a mean of the means of micro-batches": """
import torch
from dataclasses import replace
from fabric_train.training.policy_gradient import PolicyGradient
count, loss = PolicyGradient.count, PolicyGradient.loss
def mean_loss(self, model, batch, scale=None):
    loss_of_batch = loss(self, model, batch)
    num_tokens = count(self, batch).clamp(min=1)
    return replace(loss_of_batch, total=loss_of_batch.total / num_tokens)
PolicyGradient.loss = mean_loss
PolicyGradient.count = lambda self, batch: (count(self, batch) > 0).long()
""",
    "no temperature in the trainer": """
import functools
from fabric_train.training import policy_gradient
from fabric_train.model.policy_loss import PolicyLoss
def at_temperature_1(*arguments, temperature, **options):
    return PolicyLoss(*arguments, temperature=1.0, **options)
policy_gradient.PolicyLoss = at_temperature_1
""",
    "prompts are counted": """
from fabric_train.training.policy_gradient import PolicyGradient
PolicyGradient.count = lambda self, batch: (batch.labels == batch.labels).sum()
""",
    "the weight is differentiated": """
import torch
from fabric_train.model.policy_loss import PolicyLoss
compute = PolicyLoss.compute
def compute_differentiated(self, logits, chunk, needs_gradient):
    values = compute(self, logits, chunk, needs_gradient)
    loss, weight, is_cut = values[:3]
    log_probability = -loss / (self.advantages[chunk] * weight)
    logits *= torch.where(is_cut == 1, 1, 1 + log_probability)[:, None]
    return values
PolicyLoss.compute = compute_differentiated
""",
    "the end of a completion is dropped": """
from dataclasses import replace
from fabric_train.training.policy_gradient import PolicyGradient
from tests.support.policy_windows import EOS
loss = PolicyGradient.loss
def loss_without_end(self, model, batch, scale=None):
    if batch.rollout is not None:
        advantages = batch.rollout.advantages * (batch.targets.ids != EOS)
        batch = replace(batch, rollout=replace(batch.rollout, advantages=advantages))
    return loss(self, model, batch, scale)
PolicyGradient.loss = loss_without_end
""",
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_caught(forked_runs: ForkedRuns, tmp_path: Path, defect: str) -> None:
    steps = train(forked_runs, tmp_path, CASES[0], Split("single", 1, 2), before=DEFECTS[defect])
    with pytest.raises(AssertionError, match="±"):
        assert_equals_plain_pytorch(steps, CASES[0])


# ------------------------------------------------------------------------------------------------------------- metrics


def make_objective(loss_normalisation: Literal["tokens", "constant"]) -> PolicyGradient:
    return PolicyGradient(REWARD_NAMES, temperature=1.0, max_new_tokens=9, loss_normalisation=loss_normalisation)


def test_metrics_do_not_depend_on_what_the_sums_are_divided_by() -> None:
    """A window is divided by what the loss is divided by, and a source by its number of tokens."""
    objective = make_objective("constant")
    sums = dict.fromkeys(objective.metric_names, 3.0) | {
        "reward": 2.5,
        "completions": 3.9999998,  # the shares of four completions, with their rounding
        "completion_tokens": 10.0,
        "cut_completions": 1.0000001,
        "weights_cut": 2.0,
        "entropy": 7.0,
    }
    for count in (10, 4 * 9, 1000):
        metrics = name_metrics(objective, [total / count for total in sums.values()], count)
        assert metrics["reward"] == pytest.approx(0.625)
        assert metrics["completions"] == 4
        assert metrics["completion_tokens"] == 2.5
        assert metrics["cut_completions"] == 0.25
        assert metrics["weights_cut"] == 0.2
        assert metrics["entropy"] == pytest.approx(0.7)


def test_metrics_of_nothing_are_unknown() -> None:
    objective = make_objective("tokens")
    metrics = name_metrics(objective, [0.0] * len(objective.metric_names), 0)
    assert metrics.pop("completions") == 0
    assert set(metrics.values()) == {None}


def test_a_constant_counts_completions_exactly() -> None:
    """The shares of a completion are rounded, but not their number."""
    window = draw_windows()[0]
    objective = make_objective("constant")
    num_completions = sum(len(row) for row in window)
    counts = torch.stack([objective.count(make_batch([row])) for row in window])
    assert counts.dtype == torch.int64
    assert int(counts.sum()) == 9 * num_completions
    assert int(objective.count(make_batch(window))) == 9 * num_completions
    assert int(objective.count(make_batch([]))) == 0
