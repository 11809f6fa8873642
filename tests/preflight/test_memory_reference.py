"""The plan of reinforcement learning counts the reference and the loss as a run has them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Fabric
from transformers import AutoModelForCausalLM, LlamaConfig

from fabric_train.arguments import TrainArguments, parse
from fabric_train.data.rollout_values import RolloutValues
from fabric_train.model.divergence_loss import TeacherHead
from fabric_train.model.hf_model import read_shape
from fabric_train.model.lm_head_loss import compute_loss_in_head
from fabric_train.preflight.memory_activations import MicroBatch, _LiveBytes, _make_batch, trace_activations
from fabric_train.preflight.memory_forecast import make_request
from fabric_train.preflight.memory_objective import TracedPolicy, TracedTeacher, _EmptyTeacher
from fabric_train.training.live_reference import BaseOfPolicy, ReferenceBesidePolicy, set_up_live_reference
from fabric_train.training.policy_gradient import PolicyGradient
from fabric_train.training.teacher import LiveTeacher
from tests.preflight.test_memory_sampling import prepare_run

LORA = {"adapter": "lora", "lora_rank": 4}
ON_CPU = {"accelerator": "cpu", "devices": 1, "parallelism": "single", "precision": "32-true"}
ON_GPU = {"plan": "true", "accelerator": "cuda", "device_memory": "80GB"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16-mixed"},
        {**LORA, "train_also": "norm"},
        {**LORA, "train_also": "norm", "base_weights": "nf4", "precision": "bf16-mixed"},
    ],
)
def test_the_forecast_is_the_size_of_the_reference_that_is_set_up(
    tiny_model_dir: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    options = {**ON_CPU, "kl_weight": 0.1, **options}
    run = prepare_run(tmp_path, tiny_model_dir, **options)
    forecast = make_request(run).forecast_teacher()
    _, reference = set_up_live_reference(Fabric(accelerator="cpu", devices=1), run)
    assert isinstance(reference, ReferenceBesidePolicy)
    model = reference.reader
    assert isinstance(model, LiveTeacher)
    tensors: list[torch.Tensor] = [*model.model.parameters(), model.head.weight]
    assert forecast is not None
    assert forecast.device_bytes == sum(tensor.nbytes for tensor in tensors)

    # a plan reads no weights
    planned = prepare_run(tmp_path, tiny_model_dir, plan="true", device_memory="8GB", **options)
    assert make_request(planned).forecast_teacher() == forecast


def test_a_sharded_reference_is_counted_in_every_phase(tiny_model_dir: Path, tmp_path: Path) -> None:
    request = make_request(prepare_run(tmp_path, tiny_model_dir, kl_weight=0.1, **ON_GPU))
    without = make_request(prepare_run(tmp_path, tiny_model_dir, **ON_GPU)).forecast()
    forecast = request.forecast()
    model = request.largest
    # each rank has the head, and a shard of all weights, among them the embedding that the head is tied to
    num_bytes = 2 * model.vocab_size * model.config.get_text_config().hidden_size + 2 * model.num_parameters // 8
    assert {phase.parts["reference"] for phase in forecast.budget.phases} == {num_bytes}
    assert [phase.name for phase in forecast.budget.phases[:3]] == ["sampling", "reference's pass", "loss"]
    assert forecast.flops_of_step == pytest.approx(4 / 3 * without.flops_of_step, rel=0.01)  # one more forward pass
    assert forecast.collectives[-1].name == "all-gather of the reference's weights"
    assert not any("reference" in phase.parts for phase in without.budget.phases)


def test_the_base_of_a_new_adapter_is_not_counted_twice(tiny_model_dir: Path, tmp_path: Path) -> None:
    options = {**ON_GPU, **LORA}
    without = make_request(prepare_run(tmp_path, tiny_model_dir, **options)).forecast()
    forecast = make_request(prepare_run(tmp_path, tiny_model_dir, kl_weight=0.1, **options)).forecast()
    phases = {phase.name: phase for phase in forecast.budget.phases}
    assert not any("reference" in phase.parts for phase in phases.values())
    assert forecast.device_bytes == pytest.approx(without.device_bytes, rel=1e-3)
    # the pass of the base holds what sampling and the policy's pass hold too
    assert phases["reference's pass"].total < phases["loss"].total

    # another reference takes as much time, and memory for its weights
    other = prepare_run(tmp_path, tiny_model_dir, kl_weight=0.1, reference=tiny_model_dir, **options)
    beside = make_request(other).forecast()
    assert forecast.flops_of_step == pytest.approx(beside.flops_of_step, rel=0.05)  # the adapter's are counted too
    assert forecast.flops_of_step > 1.2 * without.flops_of_step
    assert forecast.collectives[-1] == beside.collectives[-1]
    assert all(phase.parts["reference"] > 0 for phase in beside.budget.phases)


def test_the_base_of_a_new_adapter_is_not_set_up_again(tiny_model_dir: Path, tmp_path: Path) -> None:
    run = prepare_run(tmp_path, tiny_model_dir, kl_weight=0.1, **ON_CPU, **LORA)
    assert run.frozen_model is None
    recorded, reference = set_up_live_reference(Fabric(accelerator="cpu", devices=1), run)
    assert isinstance(reference, BaseOfPolicy)
    assert recorded.reference is not None
    assert recorded.reference.location == str(tiny_model_dir)


@pytest.mark.parametrize("has_reference", [False, True])
def test_the_loss_of_rewards_is_traced_as_a_step_computes_it(tmp_path: Path, has_reference: bool) -> None:
    """The logits of 254 tokens are 4 MB; the trace also has the values of the completions, 18 kB."""
    config = LlamaConfig(
        vocab_size=4096, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4
    )
    config.save_pretrained(tmp_path)
    arguments = parse(
        TrainArguments, ["--train_data_dir", "x", "--output_dir", "y", "--activation_checkpointing", "none"]
    )
    teacher = TracedTeacher(num_rows=4096, hidden_size=64) if has_reference else None
    rows = MicroBatch(
        num_rows=2,
        length=128,
        dtype=torch.float32,
        autocast=None,
        has_borders=False,
        on_gpu=False,
        by_unit=False,
        teacher=teacher,
        policy=TracedPolicy(num_rewards=1),
    )
    traced = trace_activations(read_shape(str(tmp_path), attention="sdpa"), arguments, rows)

    model = AutoModelForCausalLM.from_config(config)
    compute_loss_in_head(model)
    model.get_output_embeddings().requires_grad_(False)  # the plan counts its gradient apart
    live = _LiveBytes(model)
    reference = None
    if teacher is not None:
        head = TeacherHead(torch.zeros(4096, 64), bias=None)
        live.leave_out(head.weight)
        reference = ReferenceBesidePolicy(_EmptyTeacher(teacher, head))
    objective = PolicyGradient(
        ("reward",), temperature=1.0, max_new_tokens=128, kl_weight=float(has_reference), reference=reference
    )
    batch = _make_batch(rows)
    rollout = RolloutValues.without_content(num_targets=254, num_rewards=1)
    with live:
        objective.loss(model, replace(batch, rollout=rollout))
    assert traced.most == pytest.approx(live.most, rel=0.01)

    cross_entropy = trace_activations(
        read_shape(str(tmp_path), attention="sdpa"), arguments, replace(rows, teacher=None, policy=None)
    )
    # on a CPU, cross entropy has one tensor of 4 bytes for each logit less
    assert traced.most - cross_entropy.most == pytest.approx(4 * 254 * 4096, rel=0.02)
