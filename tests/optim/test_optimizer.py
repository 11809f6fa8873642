"""The learning rate is a pure function of the step; weight decay is on matrices alone."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from fabric_train.arguments import DecayForm, Schedule, TrainingArguments
from fabric_train.distributed.sharded_parameters import original_name
from fabric_train.optim.adamw import MOMENTS, AdamW
from fabric_train.optim.learning_rate import learning_rate, set_learning_rate
from fabric_train.optim.optimizer import build_optimizer, decayed_names

DECAYING = [schedule for schedule in get_args(Schedule) if schedule != "constant"]


@st.composite
def runs(draw: st.DrawFn, schedules: list[str] = DECAYING) -> tuple[int, TrainingArguments]:
    """Steps of a run and its training arguments, min_lr at most lr."""
    num_steps = draw(st.integers(1, 2000))
    lr = draw(st.floats(1e-8, 10))
    schedule: Any = draw(st.sampled_from(schedules))
    lowest_rate = lr * 1e-6 if schedule == "exponential" else 0.0  # an exponential decay cannot end at 0
    min_lr = draw(st.floats(lowest_rate, lr, allow_subnormal=False) | st.sampled_from([lowest_rate, lr]))
    warmup_steps = draw(st.integers(0, num_steps))
    arguments = TrainingArguments(lr=lr, min_lr=min_lr, lr_schedule=schedule, warmup_steps=warmup_steps)
    if schedule != "wsd":
        return num_steps, arguments
    # warm-up, then some steps at lr, then the decay
    decay_steps = draw(st.integers(1, 2000))
    decay_form: Any = draw(st.none() | st.sampled_from(get_args(DecayForm)))
    stable_steps = draw(st.integers(0, 20))
    num_steps = max(warmup_steps, 1) + stable_steps + decay_steps
    return num_steps, replace(arguments, decay_steps=decay_steps, decay_form=decay_form)


def rates(num_steps: int, arguments: TrainingArguments) -> list[float]:
    return [learning_rate(step, num_steps, arguments) for step in range(1, num_steps + 1)]


@settings(deadline=None)
@given(runs())
def test_schedules_reach_min_lr_exactly_one_step_after_the_last(run: tuple[int, TrainingArguments]) -> None:
    num_steps, arguments = run
    assert learning_rate(num_steps + 1, num_steps, arguments) == arguments.min_lr


@settings(deadline=None)
@given(runs([schedule for schedule in DECAYING if schedule != "exponential"]))
def test_every_step_changes_something_where_min_lr_is_0(run: tuple[int, TrainingArguments]) -> None:
    num_steps, arguments = run
    assert min(rates(num_steps, replace(arguments, min_lr=0.0))) > 0


@settings(deadline=None)
@given(runs(["constant"]))
def test_a_constant_schedule_stays_at_lr(run: tuple[int, TrainingArguments]) -> None:
    num_steps, arguments = run
    assert set(rates(num_steps, arguments)[arguments.warmup_steps :]) <= {arguments.lr}


@settings(deadline=None)
@given(runs(list(get_args(Schedule))))
def test_without_decay_every_schedule_is_constant(run: tuple[int, TrainingArguments]) -> None:
    num_steps, decaying = run
    constant = TrainingArguments(
        lr=decaying.lr, lr_decay=False, lr_schedule=decaying.lr_schedule, warmup_steps=decaying.warmup_steps
    )
    assert set(rates(num_steps, constant)[constant.warmup_steps :]) <= {constant.lr}


@settings(deadline=None)
@given(runs(list(get_args(Schedule))))
def test_rate_rises_linearly_to_lr_and_then_never_rises_again(
    run: tuple[int, TrainingArguments],
) -> None:
    num_steps, arguments = run
    warmup = arguments.warmup_steps
    all_rates = rates(num_steps, arguments)
    for step in range(1, warmup + 1):
        assert math.isclose(all_rates[step - 1], arguments.lr * step / warmup, rel_tol=1e-12)
    peak_step = max(warmup, 1)
    rates_from_peak = all_rates[peak_step - 1 :]
    assert rates_from_peak[0] == arguments.lr
    for rate, next_rate in itertools.pairwise(rates_from_peak):
        assert next_rate <= rate * (1 + 1e-12)
    lowest_rate = arguments.min_lr if arguments.lr_schedule != "constant" else arguments.lr
    for rate in rates_from_peak:
        assert lowest_rate * (1 - 1e-12) <= rate <= arguments.lr


@settings(deadline=None)
@given(runs(list(get_args(Schedule))), st.data())
def test_the_rate_of_a_step_does_not_depend_on_what_was_asked_before(
    run: tuple[int, TrainingArguments], data: st.DataObject
) -> None:
    num_steps, arguments = run
    in_order = rates(num_steps, arguments)
    for step in data.draw(st.lists(st.integers(1, num_steps), max_size=20)):
        assert learning_rate(step, num_steps, arguments) == in_order[step - 1]


def test_cosine_is_the_one_worked_out_by_hand() -> None:
    # Of 89 steps, warm-up to step 10, then half a cosine from 1 to 0.2, which it reaches after 80 more, one after the
    # last. cos(π/4) = 0.70710678:
    #   a quarter, step 30: 0.2 + 0.8 · (1 + 0.70710678) / 2 = 0.88284271
    #   half,      step 50: 0.2 + 0.8 · (1 + 0) / 2          = 0.6
    #   3 quarters, step 70: 0.2 + 0.8 · (1 - 0.70710678) / 2 = 0.31715729
    arguments = TrainingArguments(lr=1.0, min_lr=0.2, warmup_steps=10)
    actual = [learning_rate(step, 89, arguments) for step in (1, 5, 10, 30, 50, 70, 90)]
    assert actual == pytest.approx([0.1, 0.5, 1.0, 0.88284271, 0.6, 0.31715729, 0.2], abs=1e-8)


@pytest.mark.parametrize(
    "schedule, min_lr, expected",
    [
        # of 12 steps: the start, a quarter, half, three quarters, and the step after the last
        ("linear", 0.0, [1.0, 0.75, 0.5, 0.25, 0.0]),
        ("exponential", 0.0001, [1.0, 0.1, 0.01, 0.001, 0.0001]),
        ("step", 0.0, [1.0, 1.0, 2 / 3, 1 / 3, 0.0]),
        ("step", 0.001, [1.0, 1.0, 0.1, 0.01, 0.001]),
        ("cosine", 0.0, [1.0, 0.85355339, 0.5, 0.14644661, 0.0]),
    ],
)
def test_schedules_are_the_ones_worked_out_by_hand(schedule: Any, min_lr: float, expected: list[float]) -> None:
    arguments = TrainingArguments(lr=1.0, min_lr=min_lr, lr_schedule=schedule)
    assert [learning_rate(step, 12, arguments) for step in (1, 4, 7, 10, 13)] == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("form", get_args(DecayForm))
def test_wsd_follows_the_published_formula(form: Any) -> None:
    # N = 40 steps, 10 of them warm-up, D = 8 decay. MiniCPM (2404.06395): s/W · lr while s < W, lr up to step N - D,
    # then f · lr. Hägele et al. (2405.18392): f = 1 - sqrt((n - (N' - D')) / D'). Ours reaches min_lr one step after
    # the last: N' = N + 1, D' = D + 1. So p = 1/9, 4/9, 1 at steps 33, 36, 41, and 1 - sqrt(p) = 2/3, 1/3, 0.
    # cos(π/9) = 0.93969262, cos(4π/9) = 0.17364818.
    shares = {
        "1-sqrt": [2 / 3, 1 / 3, 0],
        "linear": [8 / 9, 5 / 9, 0],
        "cosine": [0.96984631, 0.58682409, 0],
    }[form]
    arguments = TrainingArguments(
        lr=3.0, min_lr=0.3, lr_schedule="wsd", warmup_steps=10, decay_steps=8, decay_form=form
    )
    actual = [learning_rate(step, 40, arguments) for step in (1, 9, 10, 11, 32, 33, 36, 41)]
    decayed = [0.3 + 2.7 * share for share in shares]
    assert actual == pytest.approx([0.3, 2.7, 3.0, 3.0, 3.0, *decayed], abs=1e-7)

    by_share = replace(arguments, decay_steps=None, decay_share=0.2)
    assert rates(40, by_share) == rates(40, arguments)

    # a longer run continues the stable phase
    longer = rates(60, arguments)
    assert longer[:32] == rates(40, arguments)[:32]
    assert longer[32:52] == [3.0] * 20
    assert longer[52:] == rates(40, arguments)[32:]


@pytest.mark.parametrize("schedule", [schedule for schedule in get_args(Schedule) if schedule != "wsd"])
def test_a_run_of_one_step_trains_at_lr(schedule: Any) -> None:
    for warmup in (0, 1):
        arguments = TrainingArguments(lr=0.5, min_lr=0.01, lr_schedule=schedule, warmup_steps=warmup)
        assert learning_rate(1, 1, arguments) == 0.5


def test_every_group_gets_the_rate_of_the_step(tiny_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    optimizer = build_optimizer(model.named_parameters(), decayed_names(model), TrainingArguments())
    set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


def test_only_matrices_decay_and_every_parameter_is_in_one_group(tiny_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    arguments = TrainingArguments(weight_decay=0.1, beta1=0.8, beta2=0.99, lr=0.25)
    optimizer = build_optimizer(model.named_parameters(), decayed_names(model), arguments)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    names_by_decay = {}
    for group in optimizer.param_groups:
        names_by_decay[group["weight_decay"]] = [names[id(parameter)] for parameter in group["params"]]
        assert group["betas"] == (0.8, 0.99)
        assert group["lr"] == 0.25
    assert set(names_by_decay) == {0.1, 0.0}
    undecayed = names_by_decay[0.0]
    decayed = names_by_decay[0.1]
    # 2 layers of 2 norms, and the last norm; 7 matrices a layer, and the embedding, which is the head too
    assert len(undecayed) == 5
    assert all("norm" in name for name in undecayed)
    assert len(decayed) == 15
    assert not any("norm" in name for name in decayed)
    assert sorted(undecayed + decayed) == sorted(names.values())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert decayed.count("model.embed_tokens.weight") == 1


@pytest.mark.parametrize("wrapper", ["_forward_module.", "_fsdp_wrapped_module.", "_orig_mod.", "module."])
def test_parameters_decay_under_the_names_of_their_wrappers_too(wrapper: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    wrapped = [(wrapper + name, parameter) for name, parameter in model.named_parameters()]
    optimizer = build_optimizer(wrapped, decayed_names(model), TrainingArguments(weight_decay=0.5))
    decay_by_parameter = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            decay_by_parameter[parameter] = group["weight_decay"]
    # weight and bias of the linear layer, then those of the norm
    assert [decay_by_parameter[parameter] for _, parameter in wrapped] == [0.5, 0.0, 0.0, 0.0]


def test_biases_have_no_weight_decay() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2), torch.nn.Embedding(4, 2))
    assert decayed_names(model) == {"0.weight", "2.weight"}
    optimizer = build_optimizer(model.named_parameters(), decayed_names(model), TrainingArguments(weight_decay=0.5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    set_learning_rate(optimizer, 0.1)
    optimizer.step()  # a gradient of 0 leaves the decay alone: 1 - 0.1 · 0.5
    for name, parameter in model.named_parameters():
        expected = 0.95 if name in ("0.weight", "2.weight") else 1.0
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, expected))


def test_a_model_without_norms_or_biases_has_one_group() -> None:
    model = torch.nn.Embedding(4, 2)
    optimizer = build_optimizer(model.named_parameters(), decayed_names(model), TrainingArguments())
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]


@pytest.mark.parametrize(
    "wrapped",
    [
        "_forward_module.module.model.layers.0.self_attn.q_proj.weight",
        "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.self_attn.q_proj.weight",
        "model.layers.0._orig_mod.self_attn.q_proj.weight",
        "module.model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
    ],
)
def test_a_wrapped_parameter_is_known_by_its_own_name(wrapped: str) -> None:
    assert original_name(wrapped) == "model.layers.0.self_attn.q_proj.weight"
    assert original_name("model.submodule.weight") == "model.submodule.weight"


def test_a_restored_count_is_where_torch_keeps_it() -> None:
    """AdamW counts on the host unless it is fused: a count on the device is read in every step."""
    weight = torch.nn.Parameter(torch.zeros(4, device="meta"))
    optimizer = AdamW([weight])
    moments = {key: torch.zeros(4, device="meta") for key in MOMENTS}
    optimizer.restore_states(weight, {**moments, "step": torch.tensor(3.0)})
    assert float(optimizer.state[weight]["step"]) == 3
