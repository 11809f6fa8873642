"""Take steps of reinforcement learning on fixed completions: on several ranks, and in plain PyTorch.

``main`` trains a random Llama on ``draw_windows`` by SGD, and writes each step's loss, gradient norm and metrics as
JSON. ``train_plainly`` returns the same numbers from plain PyTorch, which computes one completion at a time.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from lightning import Fabric
from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fabric_train.arguments import TrainArguments, parse
from fabric_train.data.batch import IGNORED_LABEL, Batch, Pieces, find_targets, pad_rows
from fabric_train.data.rollout_values import RolloutValues
from fabric_train.data.step_sampler import Window
from fabric_train.distributed.gradients import clip_grad_norm
from fabric_train.distributed.ranks import StepSync, data_ranks
from fabric_train.distributed.strategy import LayerClasses, build_fabric
from fabric_train.model.divergence_loss import TeacherHead
from fabric_train.model.parallelize import setup_model
from fabric_train.training.live_reference import ReferenceBesidePolicy
from fabric_train.training.objective import name_metrics
from fabric_train.training.policy_gradient import PolicyGradient
from fabric_train.training.step import backpropagate
from fabric_train.training.step_exchange import RankReport, exchange_step
from fabric_train.training.teacher import LiveTeacher
from tests.support.tiny_model import random_llama

NUM_WINDOWS = 2
ROWS_PER_WINDOW = 7  # no number of ranks divides it
MAX_NEW_TOKENS = 9
REWARD_NAMES = ("exact", "polite")
NUM_SOURCES = 2
EOS = 1
LEARNING_RATE = 0.05
GRAD_CLIP = 0.5
VOCABULARY = 60
_WEIGHT_CAP = 2.0
LAYERS: LayerClasses = frozenset([LlamaDecoderLayer])


@dataclass(frozen=True)
class PolicyCase:
    """The settings of an objective."""

    loss_normalisation: Literal["tokens", "constant"] = "tokens"
    temperature: float = 0.8
    kl_weight: float = 0.0
    """Above 0, there is a reference."""


@dataclass(frozen=True)
class SampledCompletion:
    """A completion with its prompt and its values."""

    prompt_ids: np.ndarray
    token_ids: np.ndarray
    log_probabilities: np.ndarray
    """fp32 [T]."""
    advantage: float
    rewards: list[float]
    """The weighted sum and then each reward."""
    is_cut: bool
    lacks_variance: bool
    has_failed: bool
    source: int


Row = Sequence[SampledCompletion]


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of a step."""

    loss: float
    grad_norm: float
    metrics: dict[str, float | None]
    source_metrics: list[dict[str, float | None]]


def build_policy() -> LlamaForCausalLM:
    """Return the model that trains."""
    return random_llama(_model_config(hidden_size=32))


def build_reference() -> LlamaForCausalLM:
    """Return a model with other weights and another width."""
    return random_llama(_model_config(hidden_size=48))


def _model_config(hidden_size: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,  # so large that the distributions are far from uniform
        dtype="float32",
    )


def draw_windows() -> list[list[Row]]:
    """Return windows of rows with one to three completions of very different lengths."""
    random = np.random.default_rng(0)
    windows = []
    for _ in range(NUM_WINDOWS):
        rows: list[Row] = []
        for _ in range(ROWS_PER_WINDOW):
            num_completions = int(random.integers(1, 4))
            rows.append([_draw_completion(random) for _ in range(num_completions)])
        windows.append(rows)
    return windows


def _draw_completion(random: np.random.Generator) -> SampledCompletion:
    length = min(int(random.integers(1, 12)), MAX_NEW_TOKENS)
    token_ids = random.integers(2, VOCABULARY, length)
    is_cut = length == MAX_NEW_TOKENS
    if not is_cut:
        token_ids[-1] = EOS
    rewards = random.integers(0, 3, len(REWARD_NAMES)) / 2
    return SampledCompletion(
        prompt_ids=random.integers(2, VOCABULARY, int(random.integers(1, 8))),
        token_ids=token_ids,
        # around those of the policy, so that some weights are cut and others are not
        log_probabilities=random.normal(-4.5, 1.5, length).clip(max=-0.01).astype(np.float32),
        advantage=float(random.normal()),
        rewards=[float(rewards.sum()), *rewards.tolist()],
        is_cut=is_cut,
        lacks_variance=bool(random.random() < 0.3),
        has_failed=bool(random.random() < 0.3),
        source=int(random.integers(0, NUM_SOURCES)),
    )


def make_batch(rows: Sequence[Row]) -> Batch:
    """Return the batch of some rows; without rows, that of a rank that has none left."""
    if not rows:
        return pad_rows([], [], [])
    input_ids = []
    labels = []
    document_starts = []
    completions: list[SampledCompletion] = []
    for row in rows:
        row_ids: list[np.ndarray] = []
        row_labels: list[np.ndarray] = []
        starts = []
        position = 0
        for completion in row:
            starts.append(position)
            row_ids += [completion.prompt_ids, completion.token_ids]
            row_labels += [np.full(len(completion.prompt_ids), IGNORED_LABEL), completion.token_ids]
            position += len(completion.prompt_ids) + len(completion.token_ids)
        input_ids.append(np.concatenate(row_ids))
        labels.append(np.concatenate(row_labels))
        document_starts.append(np.array(starts))
        completions += row
    batch = pad_rows(input_ids, labels, document_starts)
    lengths = torch.tensor([len(completion.token_ids) for completion in completions])
    pieces = Pieces(
        num_targets=lengths,
        sources=torch.tensor([completion.source for completion in completions]),
        num_bytes=torch.full((len(completions),), torch.nan, dtype=torch.float64),
    )
    return Batch(
        batch.input_ids,
        batch.labels,
        batch.documents,
        targets=find_targets(batch.labels),
        lengths=batch.lengths,
        pieces=pieces,
        rollout=_rollout_values(completions, lengths),
    )


def _rollout_values(completions: Sequence[SampledCompletion], lengths: torch.Tensor) -> RolloutValues:
    shares = 1 / lengths.double()

    def by_token(values: Sequence[float] | torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.float64).repeat_interleave(lengths)

    log_probabilities = [completion.log_probabilities for completion in completions]
    rewards = torch.tensor([completion.rewards for completion in completions]).T  # [1 + R, completions]
    return RolloutValues(
        log_probabilities=torch.from_numpy(np.concatenate(log_probabilities)),
        advantages=by_token([completion.advantage for completion in completions]).float(),
        completion_shares=by_token(shares),
        is_cut=by_token(shares * torch.tensor([completion.is_cut for completion in completions])),
        lacks_variance=by_token(shares * torch.tensor([completion.lacks_variance for completion in completions])),
        has_failed=by_token(shares * torch.tensor([completion.has_failed for completion in completions])),
        rewards=torch.stack([by_token(shares * reward) for reward in rewards]),
    )


# ------------------------------------------------------------------------------------------------------ plain PyTorch


def train_plainly(case: PolicyCase) -> list[StepNumbers]:
    """Return the numbers of each step."""
    model = build_policy()
    reference = build_reference() if case.kl_weight else None
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    steps = []
    for window in draw_windows():
        completions: list[SampledCompletion] = []
        for row in window:
            completions += row
        values = [_plain_values(model, reference, completion, case) for completion in completions]
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        divisor = num_tokens if case.loss_normalisation == "tokens" else len(completions) * MAX_NEW_TOKENS
        loss = torch.cat([losses for losses, _ in values]).sum() / divisor
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad()

        token_values = [token_values for _, token_values in values]
        source_metrics = []
        for source in range(NUM_SOURCES):
            indices = [index for index, completion in enumerate(completions) if completion.source == source]
            source_completions = [completions[index] for index in indices]
            source_metrics.append(_plain_metrics(source_completions, [token_values[index] for index in indices]))
        metrics = _plain_metrics(completions, token_values)
        steps.append(StepNumbers(loss.item(), float(norm), metrics, source_metrics))
    return steps


def _plain_values(
    model: nn.Module, reference: nn.Module | None, completion: SampledCompletion, case: PolicyCase
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of each token of a completion, and its other values by name, [T] each."""
    policy = plain_distributions(model, completion, case.temperature)
    token_ids = torch.from_numpy(completion.token_ids)
    log_probabilities = policy.gather(1, token_ids[:, None])[:, 0]
    ratios = torch.exp(log_probabilities.detach() - torch.from_numpy(completion.log_probabilities))
    weights = ratios.clamp(max=_WEIGHT_CAP)
    losses = -completion.advantage * weights * log_probabilities
    values = {
        "sampler_weight": weights,
        "weights_cut": (ratios > _WEIGHT_CAP).float(),
        "sampler_kl": ratios - 1 - ratios.log(),
        "entropy": -(policy.exp() * policy).sum(dim=1).detach(),
    }
    if reference is not None:
        with torch.no_grad():
            reference_policy = plain_distributions(reference, completion, case.temperature)
        differences = reference_policy.gather(1, token_ids[:, None])[:, 0] - log_probabilities
        kl = differences.exp() - differences - 1
        values["reference_kl"] = kl.detach()
        losses = losses + case.kl_weight * kl
    return losses, values


def plain_distributions(model: Any, completion: SampledCompletion, temperature: float) -> torch.Tensor:
    """Return the log-probabilities of all tokens where a completion's tokens are predicted, [T, V]."""
    document = torch.from_numpy(np.concatenate([completion.prompt_ids, completion.token_ids]))
    logits = model(document[None]).logits[0, len(completion.prompt_ids) - 1 : -1]
    return F.log_softmax(logits / temperature, dim=1)


def _plain_metrics(
    completions: Sequence[SampledCompletion], values: Sequence[dict[str, torch.Tensor]]
) -> dict[str, float | None]:
    """Return the means over completions, and those over tokens."""
    metrics: dict[str, float | None] = {}
    for index, name in enumerate(("reward", *(f"reward_{name}" for name in REWARD_NAMES))):
        metrics[name] = float(np.mean([completion.rewards[index] for completion in completions]))
    metrics["completions"] = len(completions)
    metrics["completion_tokens"] = float(np.mean([len(completion.token_ids) for completion in completions]))
    metrics["cut_completions"] = float(np.mean([completion.is_cut for completion in completions]))
    metrics["flat_groups"] = float(np.mean([completion.lacks_variance for completion in completions]))
    metrics["failed_rewards"] = float(np.mean([completion.has_failed for completion in completions]))
    for name in values[0]:
        metrics[name] = float(torch.cat([token_values[name] for token_values in values]).double().mean())
    return metrics


# ------------------------------------------------------------------------------------------------------ on the ranks


def main() -> None:
    """Train on this rank's rows.

    The arguments of the program are a :class:`PolicyCase` as JSON, the file of the steps, and arguments of a run.
    """
    case = PolicyCase(**json.loads(sys.argv[1]))
    arguments = parse(TrainArguments, sys.argv[3:])
    fabric = build_fabric(arguments, LAYERS)
    reference = set_up_reference(fabric, arguments) if case.kl_weight else None
    objective = PolicyGradient(
        REWARD_NAMES,
        temperature=case.temperature,
        max_new_tokens=MAX_NEW_TOKENS,
        loss_normalisation=case.loss_normalisation,
        kl_weight=case.kl_weight,
        reference=reference,
    )
    model: _FabricModule = setup_model(fabric, build_policy(), LAYERS, arguments)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    assert isinstance(optimizer, _FabricOptimizer)
    steps = []
    for step, rows in enumerate(draw_windows(), 1):
        batches = _rank_batches(rows, fabric, arguments.training.micro_batch_size)
        row_indices = np.arange(len(rows))
        window = Window(step, epoch=0, ends_epoch=False, rows=row_indices, micro_batch_size=1, batches=batches)
        loss = backpropagate(fabric, model, window, objective, num_sources=NUM_SOURCES)
        grad_norm = clip_grad_norm(fabric, model, optimizer, GRAD_CLIP)
        rank_report = RankReport(loss, num_tokens=0, flops=0, own_seconds=0, sync=StepSync(0))
        report = exchange_step(fabric, rank_report, grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        source_metrics = [name_metrics(objective, source.metrics, source.count) for source in report.sources]
        metrics = name_metrics(objective, report.metrics, report.count)
        steps.append(StepNumbers(float(report.loss), float(report.grad_norm), metrics, source_metrics))
    if fabric.is_global_zero:
        Path(sys.argv[2]).write_text(json.dumps([asdict(numbers) for numbers in steps]))


def _rank_batches(rows: Sequence[Row], fabric: Fabric, micro_batch_size: int) -> list[Batch]:
    """Return the micro-batches of a window that this rank trains on; all ranks have as many."""
    ranks = data_ranks(fabric)
    rank_rows = rows[ranks.rank :: ranks.size]
    most_rows = -(-len(rows) // ranks.size)
    batches = []
    for begin in range(0, most_rows, micro_batch_size):
        batches.append(make_batch(rank_rows[begin : begin + micro_batch_size]))
    return batches


def set_up_reference(fabric: Fabric, arguments: TrainArguments) -> ReferenceBesidePolicy:
    """Set up the reference as ``training.teacher`` does, without a folder of the model."""
    model = build_reference()
    head = TeacherHead(model.lm_head.weight.detach().clone(), None)
    model.set_output_embeddings(nn.Identity())
    model.requires_grad_(False)
    wrapped: _FabricModule = setup_model(fabric, model, LAYERS, arguments)
    return ReferenceBesidePolicy(LiveTeacher(wrapped.eval(), head))
