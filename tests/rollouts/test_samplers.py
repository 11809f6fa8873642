"""The tables of samplers and of arguments agree."""

from dataclasses import fields
from typing import get_args, get_type_hints

from fabric_train.arguments import REWARD_ARGUMENTS, SAMPLER_ARGUMENTS, RolloutArguments
from fabric_train.preflight.memory_samplers import PLANNED_SAMPLERS
from fabric_train.training.samplers import SAMPLERS


def test_the_argument_offers_each_sampler_of_the_table() -> None:
    assert get_args(get_type_hints(RolloutArguments)["sampler"]) == tuple(SAMPLERS)
    assert tuple(SAMPLER_ARGUMENTS) == tuple(SAMPLERS)
    assert tuple(PLANNED_SAMPLERS) == tuple(SAMPLERS)


def test_arguments_of_another_sampler_are_refused() -> None:
    names = {field.name for field in fields(RolloutArguments)}
    assert names.issuperset(name for sampler_names in SAMPLER_ARGUMENTS.values() for name in sampler_names)
    for sampler in ("in_process", "vllm"):
        arguments = RolloutArguments(sampler=sampler, sampler_batch_size=3, vllm_python="python")
        (fault,) = arguments.faults()
        refused = "vllm_python" if sampler == "in_process" else "sampler_batch_size"
        assert fault == f"--{refused} does not apply to --sampler {sampler}; leave it out"


def test_the_arguments_of_rewards_are_arguments_of_completions() -> None:
    assert set(REWARD_ARGUMENTS) <= {field.name for field in fields(RolloutArguments)}
    arguments = RolloutArguments(refill=True, group_size=3)
    assert arguments.changed_names == ["group_size", "refill"]
    assert arguments.changed_reward_names == ["refill"]
