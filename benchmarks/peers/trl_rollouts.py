"""Compare the loss of ``--objective rl`` with that of TRL's GRPOTrainer on the same completions; print JSON.

TRL's own code computes its loss from completions that a run of ours has sampled. The model is the one that sampled them
with noise on its weights, so that the ratios π/μ of tokens differ from 1 and some are above the cap. The reference is
the model without noise.

TRL has two forms of the sum that ours equals. With ``cispo``, its code computes the weights min(π/μ, 2). ``dapo`` and
``dr_grpo`` multiply a ratio whose value is 1 by weights from outside, which are computed here; their loss has the
gradient of ours, but another value.

TRL itself shows how much rounding matters: its ``cispo`` also reads the completions one by one, without padding.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from benchmarks.rollouts import Comparison
from fabric_train.model.lm_head_loss import compute_loss_in_head
from fabric_train.model.policy_loss import WEIGHT_CAP
from fabric_train.model.teacher_head import TeacherHead
from fabric_train.rollouts.completion_rows import batch_completions, pack_rows
from fabric_train.rollouts.store import StoredCompletion, read_rollouts
from fabric_train.training.live_reference import ReferenceBesidePolicy
from fabric_train.training.policy_gradient import PolicyGradient
from fabric_train.training.teacher import LiveTeacher

ROW_LENGTH = 512
NOISE = 0.03
"""The standard deviation of the noise on each matrix, relative to that of its weights."""
CASES: tuple[tuple[str, Literal["tokens", "constant"], float], ...] = (
    ("cispo", "tokens", 0.0),
    ("cispo", "tokens", 0.04),
    ("dapo", "tokens", 0.0),
    ("dapo", "tokens", 0.04),
    ("dr_grpo", "constant", 0.0),
    ("dr_grpo", "constant", 0.04),
)
"""The name of the loss in TRL, ``--loss_normalisation``, and the weight of the divergence from the reference."""
_ROUNDING_CASE = ("cispo", 0.0)


def main() -> None:
    """Compare all cases on the completions of a step."""
    parser = argparse.ArgumentParser()
    for name in ("--model_name", "--step_folder"):
        parser.add_argument(name, required=True)
    parser.add_argument("--max_new_tokens", type=int, required=True)
    parser.add_argument("--temperature", type=float, required=True)
    options = parser.parse_args()
    completions = list(read_rollouts(Path(options.step_folder)).completions)
    rewards_per_completion = len(completions[0].rewards)

    comparisons = {}
    for loss_type, normalisation, kl_weight in CASES:
        padded = _compute_with_trl(options, [completions], loss_type, kl_weight)
        policy_gradient = PolicyGradient(
            [f"reward {index}" for index in range(rewards_per_completion)],
            temperature=options.temperature,
            max_new_tokens=options.max_new_tokens,
            loss_normalisation=normalisation,
            kl_weight=kl_weight,
            reference=_open_reference(options.model_name) if kl_weight else None,
        )
        ours = _compute_with_ours(policy_gradient, options.model_name, completions)
        comparisons[f"{loss_type}, kl_weight {kl_weight:g}"] = _compare(ours, padded)
    one_by_one = _compute_with_trl(options, [[completion] for completion in completions], *_ROUNDING_CASE)
    padded = _compute_with_trl(options, [completions], *_ROUNDING_CASE)
    comparisons["TRL beside itself, without padding"] = _compare(one_by_one, padded)
    print(json.dumps({name: asdict(comparison) for name, comparison in comparisons.items()}))


@dataclass(frozen=True)
class LossAndGradients:
    """The loss of a step's completions, and its gradients by parameter."""

    loss: float
    gradients: dict[str, torch.Tensor]
    num_cut: int = 0
    """The tokens whose weight is cut."""
    num_tokens: int = 0


def _compare(result: LossAndGradients, expected: LossAndGradients) -> Comparison:
    squared_distance = 0.0
    squared_norm = 0.0
    for name, gradient in expected.gradients.items():
        squared_distance += float((result.gradients[name] - gradient).double().square().sum())
        squared_norm += float(gradient.double().square().sum())
    return Comparison(
        gradient_distance=(squared_distance / squared_norm) ** 0.5,
        loss_difference=abs(result.loss - expected.loss),
        loss=result.loss,
        cut_share=expected.num_cut / expected.num_tokens,
    )


def _compute_with_trl(
    options: argparse.Namespace, batches: Sequence[list[StoredCompletion]], loss_type: str, kl_weight: float
) -> LossAndGradients:
    """Return TRL's loss and gradients of completions that are padded within each batch."""
    num_completions = sum(len(batch) for batch in batches)
    configuration = GRPOConfig(
        output_dir=".cache/unused",
        per_device_train_batch_size=num_completions,
        num_generations=num_completions,
        max_completion_length=options.max_new_tokens,
        temperature=options.temperature,
        beta=kl_weight,
        loss_type=loss_type,
        epsilon_high=WEIGHT_CAP if loss_type == "cispo" else 0.2,
        use_bias_correction_kl=False,
        scale_rewards="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
    )
    trainer: Any = GRPOTrainer(
        _open_policy(options.model_name),
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        args=configuration,
        train_dataset=Dataset.from_list([{"prompt": "unused"}] * num_completions),
        processing_class=AutoTokenizer.from_pretrained(options.model_name),
    )
    model = trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    num_tokens = sum(len(completion.token_ids) for batch in batches for completion in batch)
    loss = 0.0
    num_cut = 0
    for batch in batches:
        inputs = _pad(batch)
        inputs["num_items_in_batch"] = torch.tensor(num_tokens)
        policy = _log_probabilities(trainer, model, inputs)
        if kl_weight:
            inputs["ref_per_token_logps"] = _log_probabilities(trainer, trainer.ref_model, inputs)
        ratios = (policy - inputs["sampled_log_probabilities"]).exp()
        num_cut += int(((ratios > WEIGHT_CAP) * inputs["completion_mask"]).sum())
        if loss_type == "cispo":
            inputs["old_per_token_logps"] = inputs["sampled_log_probabilities"]
        else:
            trainer.use_vllm = True  # its loss then reads the weights of the tokens
            inputs["importance_sampling_ratio"] = ratios.clamp(max=WEIGHT_CAP)
        batch_loss = trainer._compute_loss(model, inputs)
        batch_loss.backward()
        loss += float(batch_loss.detach())
    return LossAndGradients(loss, _read_gradients(model), num_cut, num_tokens)


@torch.no_grad()
def _log_probabilities(trainer: Any, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the log-probabilities of completion tokens as TRL computes them, [completions, T]."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    num_columns = inputs["completion_ids"].shape[1]
    values: torch.Tensor = trainer._get_per_token_logps_and_entropies(model, ids, attention, num_columns)[0]
    return values


def _pad(completions: list[StoredCompletion]) -> dict[str, torch.Tensor]:
    """Return completions as TRL has them: prompts padded on the left, completions on the right, [completions, T]."""
    longest_prompt = max(len(completion.prompt_token_ids) for completion in completions)
    longest_completion = max(len(completion.token_ids) for completion in completions)
    prompt_ids = torch.zeros(len(completions), longest_prompt, dtype=torch.int64)
    completion_ids = torch.zeros(len(completions), longest_completion, dtype=torch.int64)
    log_probabilities = torch.zeros(len(completions), longest_completion)
    prompt_mask = torch.zeros_like(prompt_ids)
    completion_mask = torch.zeros_like(completion_ids)
    for row, completion in enumerate(completions):
        begin = longest_prompt - len(completion.prompt_token_ids)
        end = len(completion.token_ids)
        prompt_ids[row, begin:] = torch.from_numpy(completion.prompt_token_ids.copy())
        prompt_mask[row, begin:] = 1
        completion_ids[row, :end] = torch.from_numpy(completion.token_ids.copy())
        completion_mask[row, :end] = 1
        log_probabilities[row, :end] = torch.from_numpy(completion.log_probabilities.copy())
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "sampled_log_probabilities": log_probabilities,
        "advantages": torch.tensor([completion.advantage for completion in completions]),
    }


def _compute_with_ours(
    objective: PolicyGradient, model_name: str, completions: list[StoredCompletion]
) -> LossAndGradients:
    """Return our loss and gradients, from packed rows in two micro-batches."""
    model = _open_policy(model_name).train()
    assert compute_loss_in_head(model)
    rows = pack_rows(completions, ROW_LENGTH)
    middle = len(rows) // 2
    num_rewards = len(completions[0].rewards)
    batches = [batch_completions(half, num_rewards) for half in (rows[:middle], rows[middle:]) if half]
    count = sum(int(objective.count(batch)) for batch in batches)
    total = 0.0
    for batch in batches:
        loss = objective.loss(model, batch)
        (loss.total / count).backward()
        total += float(loss.total.detach()) / count
    return LossAndGradients(total, _read_gradients(model))


def _open_policy(model_name: str) -> Any:
    """Return the model with noise on its matrices."""
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(NOISE * parameter.std() * noise)
    return model


def _open_reference(model_name: str) -> ReferenceBesidePolicy:
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32).eval()
    head = TeacherHead(model.lm_head.weight.detach().clone(), None)
    model.set_output_embeddings(torch.nn.Identity())
    return ReferenceBesidePolicy(LiveTeacher(model, head))


def _read_gradients(model: Any) -> dict[str, torch.Tensor]:
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradients[name] = parameter.grad.clone()
    return gradients


if __name__ == "__main__":
    main()
