"""Build what a run with --prompts needs to sample and reward its rows, and the completions of held-out prompts."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning import Fabric
from lightning.fabric.wrappers import _FabricModule

from fabric_train.data.data_order import KEYED, MOST_SHUFFLED, SHUFFLED
from fabric_train.data.step_sampler import TrainBatches, WindowOrder
from fabric_train.distributed.ranks import data_ranks
from fabric_train.distributed.signals import Heartbeat, StepPhase
from fabric_train.model.hf_model import load_hf_tokenizer
from fabric_train.rollouts.prompts import Prompts, ValidationPrompts
from fabric_train.rollouts.reward_errors import RewardErrors
from fabric_train.rollouts.rewards import RewardLimits, Rewards, open_rewards
from fabric_train.rollouts.sampler import SamplingSettings
from fabric_train.rollouts.store import RolloutStore
from fabric_train.rollouts.windows import RolloutPlan, RolloutWindows
from fabric_train.training.prepared_run import PreparedRun
from fabric_train.training.prompt_validation import PromptEvaluator
from fabric_train.training.samplers import SAMPLERS, SamplerContext

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments

_DECIDING_GROUPS = ("model", "adapter", "preference", "training", "rollouts")
"""The groups of arguments whose values decide the weights of a step, and so its completions."""
_NOT_DECIDING = (
    "micro_batch_size",
    "keep_rollouts",
    "sampler_batch_size",
    "vllm_python",
    "sampler_devices",
    "max_step",
)
"""Arguments of these groups that only decide how the work is done."""
_HASH_DIGITS = 16
_BEFORE_MICRO_BATCHES = 1 << 20
"""Subtracted from the index of a batch of completions: its border comes before those of the step's micro-batches."""
_AFTER_MICRO_BATCHES = 1 << 20
"""Added to the index of a batch of an evaluation: its border comes after those of the step's micro-batches."""


def build_rollout_windows(
    fabric: Fabric,
    model: _FabricModule,
    run: PreparedRun,
    prompts: Prompts,
    heartbeat: Heartbeat,
    open_copy: Callable[[], Any],
) -> RolloutWindows:
    """Build the windows of a run whose rows are sampled; all ranks call this together.

    ``open_copy`` returns a model for sampling, see ``ProcessSampler``.
    """
    arguments = run.arguments
    rollouts = arguments.rollouts
    settings = SamplingSettings(rollouts.temperature, rollouts.max_new_tokens, prompts.stop_token_ids)

    enter_batch = partial(_enter_batch, heartbeat)
    context = SamplerContext(fabric, run, prompts, settings, open_copy=open_copy, on_batch=enter_batch)
    sampler = SAMPLERS[rollouts.sampler].open(context)
    rewards = open_run_rewards(arguments)
    fabric.barrier()  # rank 0 has written the tokenizer
    return RolloutWindows(
        fabric=fabric,
        model=model,
        prompts=prompts,
        order=run.plan.window_order(arguments.data.seed, data_ranks(fabric).rank),
        plan=RolloutPlan(
            group_size=rollouts.group_size,
            seed=arguments.data.seed,
            advantage=rollouts.advantage,
            refills=rollouts.refill,
            deciding_values=_describe_deciding_values(run, rewards),
            sampler_name=rollouts.sampler,
        ),
        sampler=sampler,
        rewards=rewards,
        reward_errors=RewardErrors(fabric, heartbeat.stop_border, rollouts.on_reward_error),
        store=RolloutStore(run.folder, fabric, rollouts.keep_rollouts),
        tokenizer=load_hf_tokenizer(prompts.tokenizer_folder),
        heartbeat=heartbeat,
        data_starts_after=run.plan.data_starts_after,
        rows_beside=_open_rows_beside(fabric, run, prompts),
        known_step=run.start.state.step,
        known_hash=run.start.state.rows_hash or "",
    )


def _enter_batch(heartbeat: Heartbeat) -> None:
    """Record that this rank samples or scores another batch, for a step or an evaluation.

    Raises:
        RunStopped: The ranks have agreed to stop here after a signal.
    """
    step = heartbeat.position.step
    index = heartbeat.position.index + 1
    if heartbeat.position.phase == StepPhase.VALIDATION:
        heartbeat.enter(StepPhase.VALIDATION, index)
        heartbeat.take_time()
        heartbeat.stop_border.enter(step, index + _AFTER_MICRO_BATCHES)
    else:
        heartbeat.enter(StepPhase.ROLLOUT, index)
        heartbeat.stop_border.enter(step, index - _BEFORE_MICRO_BATCHES)


def build_prompt_evaluator(run: PreparedRun, prompts: ValidationPrompts, windows: RolloutWindows) -> PromptEvaluator:
    """Build the evaluator of held-out prompts, which samples and scores with the parts of a run's windows."""
    rollouts = run.arguments.rollouts
    fabric = windows.fabric
    groups_of_rank = math.ceil(rollouts.prompts_per_step / fabric.world_size)
    return PromptEvaluator(
        fabric=fabric,
        model=windows.model,
        prompts=prompts,
        plan=windows.plan,
        sampler=windows.sampler,
        rewards=windows.rewards,
        reward_errors=RewardErrors(fabric, windows.heartbeat.stop_border, rollouts.on_reward_error),
        tokenizer=windows.tokenizer,
        heartbeat=windows.heartbeat,
        enter_batch=partial(_enter_batch, windows.heartbeat),
        completions_per_call=groups_of_rank * rollouts.group_size,
        rows=_hash_evaluation(run, prompts, windows.rewards),
    )


def _hash_evaluation(run: PreparedRun, prompts: ValidationPrompts, rewards: Rewards) -> str:
    """Return a hash of all that decides the rewards of an evaluation, except for the model.

    Rewards are comparable only if their hashes are equal.
    """
    rollouts = run.arguments.rollouts
    values = [
        prompts.fingerprint,
        rollouts.temperature,
        rollouts.max_new_tokens,
        rollouts.rewards,
        rewards.weights,
        rollouts.reward_settings,
        rewards.sources,
    ]
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:_HASH_DIGITS]


def _open_rows_beside(fabric: Fabric, run: PreparedRun, prompts: Prompts) -> TrainBatches | None:
    """Return the windows of the token dataset beside the prompts; None if there is none."""
    dataset = prompts.dataset
    rows_per_window = run.arguments.training.total_batch_size
    if dataset is None or rows_per_window is None:
        return None
    ranks = data_ranks(fabric)
    order = WindowOrder(
        num_rows=len(dataset.train),
        rows_per_window=rows_per_window,
        micro_batch_size=run.arguments.training.micro_batch_size,
        world_size=ranks.size,
        rank=ranks.rank,
        seed=run.arguments.data.seed,
        version=SHUFFLED if len(dataset.train) <= MOST_SHUFFLED else KEYED,
    )
    return TrainBatches(
        dataset.train,
        order,
        run.arguments.data.num_workers,
        pin_memory=fabric.device.type == "cuda",
        data_starts_after=run.plan.data_starts_after,
    )


def open_run_rewards(arguments: "TrainArguments") -> Rewards:
    """Open the rewards of a run, whose processes start now.

    Raises:
        InputError: A reward does not exist or cannot be loaded, or a weight or a setting is wrong.
    """
    rollouts = arguments.rollouts
    limits = RewardLimits(
        call_seconds=rollouts.reward_timeout,
        retry_seconds=rollouts.reward_retry_seconds,
        memory_bytes=int(rollouts.reward_memory_gb * 1e9),
    )
    if not rollouts.rewards:  # distillation needs none
        return Rewards([], rollouts.on_reward_error, limits)
    return open_rewards(
        rollouts.rewards, rollouts.reward_weights, rollouts.reward_settings, rollouts.on_reward_error, limits
    )


def _describe_deciding_values(run: PreparedRun, rewards: Rewards) -> str:
    """Return the values that decide the weights of a run's steps, as JSON, see ``RolloutPlan.deciding_values``."""
    values: dict[str, Any] = {
        "versions": run.versions,
        "order": asdict(run.order),
        "reward_files": rewards.sources,
    }
    for group in _DECIDING_GROUPS:
        group_values = asdict(getattr(run.arguments, group))
        values |= {name: value for name, value in group_values.items() if name not in _NOT_DECIDING}
    return json.dumps(values, sort_keys=True, default=str)
