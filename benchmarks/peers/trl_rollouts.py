"""Compare the loss of ``--objective rl`` with that of TRL's GRPOTrainer on the same completions; print JSON.

TRL's own code computes its loss from completions that a run of ours has sampled. The model is the one that sampled them
with noise on its weights, so that the ratios π/μ of tokens differ from 1 and some are above the cap. The reference is
the model without noise.

TRL has two forms of the sum that ours equals. With ``cispo``, its code computes the weights min(π/μ, 2). ``dapo`` and
``dr_grpo`` multiply a ratio whose value is 1 by weights from outside, which are computed here; their loss has the
gradient of ours, but another value.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from fabric_train.model.lm_head_loss import compute_loss_in_head
from fabric_train.model.policy_loss import WEIGHT_CAP
from fabric_train.model.teacher_head import TeacherHead
from fabric_train.rollouts.completion_rows import batch_completions, pack_rows
from fabric_train.rollouts.store import StoredCompletion, read_rollouts
from fabric_train.training.policy_gradient import PolicyGradient
from fabric_train.training.teacher import LiveTeacher

ROW_LENGTH = 512
NOISE = 0.03
"""The standard deviation of the noise on each matrix, relative to that of its weights."""
CASES: tuple[tuple[str, str, float], ...] = (
    ("cispo", "tokens", 0.0),
    ("cispo", "tokens", 0.04),
    ("dapo", "tokens", 0.0),
    ("dapo", "tokens", 0.04),
    ("dr_grpo", "constant", 0.0),
    ("dr_grpo", "constant", 0.04),
)
"""The name of the loss in TRL, ``--loss_normalisation``, and the weight of the divergence from the reference."""


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

    differences = {}
    for loss_type, normalisation, kl_weight in CASES:
        expected_loss, expected, cut_share = _compute_with_trl(options, completions, loss_type, kl_weight)
        policy_gradient = PolicyGradient(
            [f"reward {index}" for index in range(rewards_per_completion)],
            temperature=options.temperature,
            max_new_tokens=options.max_new_tokens,
            loss_normalisation=normalisation,
            kl_weight=kl_weight,
            reference=_open_reference(options.model_name) if kl_weight else None,
        )
        loss, gradients = _compute_with_ours(policy_gradient, options.model_name, completions)
        squared_distance = sum(float((gradients[name] - expected[name]).double().square().sum()) for name in expected)
        squared_norm = sum(float(gradient.double().square().sum()) for gradient in expected.values())
        differences[f"{loss_type}, kl_weight {kl_weight:g}"] = {
            "gradient_distance": (squared_distance / squared_norm) ** 0.5,
            "loss_difference": abs(loss - expected_loss),
            "loss": loss,
            "cut_share": cut_share,
        }
    print(json.dumps(differences))


def _compute_with_trl(
    options: argparse.Namespace, completions: list[StoredCompletion], loss_type: str, kl_weight: float
) -> tuple[float, dict[str, torch.Tensor], float]:
    """Return TRL's loss and its gradients by parameter, and the share of the tokens whose weight is cut."""
    configuration = GRPOConfig(
        output_dir=".cache/unused",
        per_device_train_batch_size=len(completions),
        num_generations=len(completions),
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
        train_dataset=Dataset.from_list([{"prompt": "unused"}] * len(completions)),
        processing_class=AutoTokenizer.from_pretrained(options.model_name),
    )
    model = trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = _pad(completions)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    num_columns = inputs["completion_ids"].shape[1]

    with torch.no_grad():
        policy, _, _ = trainer._get_per_token_logps_and_entropies(model, ids, attention, num_columns)
        if kl_weight:
            reference = trainer.ref_model
            inputs["ref_per_token_logps"] = trainer._get_per_token_logps_and_entropies(
                reference, ids, attention, num_columns
            )[0]
    ratios = (policy - inputs["sampled_log_probabilities"]).exp()
    is_cut = (ratios > WEIGHT_CAP) * inputs["completion_mask"]
    if loss_type == "cispo":
        inputs["old_per_token_logps"] = inputs["sampled_log_probabilities"]
    else:
        trainer.use_vllm = True  # its loss then reads the weights of the tokens
        inputs["importance_sampling_ratio"] = ratios.clamp(max=WEIGHT_CAP)
    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    cut_share = float(is_cut.sum() / inputs["completion_mask"].sum())
    return loss.item(), _read_gradients(model), cut_share


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
        "num_items_in_batch": completion_mask.sum(),
    }


def _compute_with_ours(
    objective: PolicyGradient, model_name: str, completions: list[StoredCompletion]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return our loss and its gradients by parameter, from packed rows in two micro-batches."""
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
    return total, _read_gradients(model)


def _open_policy(model_name: str) -> Any:
    """Return the model with noise on its matrices."""
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += NOISE * parameter.std() * noise
    return model


def _open_reference(model_name: str) -> LiveTeacher:
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32).eval()
    head = TeacherHead(model.lm_head.weight.detach().clone(), None)
    model.set_output_embeddings(torch.nn.Identity())
    return LiveTeacher(model, head)


def _read_gradients(model: Any) -> dict[str, torch.Tensor]:
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradients[name] = parameter.grad.clone()
    return gradients


if __name__ == "__main__":
    main()
