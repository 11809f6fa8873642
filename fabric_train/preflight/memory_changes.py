"""Find the cheapest changes of arguments that make a run fit into the memory of its devices."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from fabric_train.cli.argument_types import show_size
from fabric_train.model.row_tiles import TILE_SIZE
from fabric_train.preflight.memory_activations import TraceError
from fabric_train.preflight.memory_forecast import RunRequest
from fabric_train.preflight.memory_layout import why_no_tiles
from fabric_train.preflight.memory_samplers import PLANNED_SAMPLERS
from fabric_train.training.step_plan import StepPlan


def change_that_fits(request: RunRequest) -> str:
    """Return, in words, the arguments with which a run would fit.

    Changes are added one after the other, the cheapest first; then unnecessary ones are left out.
    """

    def needed_bytes(changes: list[dict[str, Any]]) -> float:
        try:
            return _apply_changes(request, changes).forecast().device_bytes
        except TraceError:  # experts, for example, are traced in some dtypes only
            return math.inf

    # add changes until the run fits
    changes: list[dict[str, Any]] = []
    for change in _candidate_changes(request):
        changes.append(change)
        if needed_bytes(changes) <= request.device_memory:
            break
    else:
        return "no change of the arguments makes the run fit; use a smaller model or shorter rows"

    # the last change was needed; each of the others only if the run does not fit without it
    for change in changes[:-1]:
        remaining = [candidate for candidate in changes if candidate is not change]
        if needed_bytes(remaining) <= request.device_memory:
            changes = remaining
    options = []
    for change in changes:
        for name, value in change.items():
            options.append(f"--{name} {'false' if value is False else value}")
    return f"with {' '.join(options)} it would need {show_size(int(needed_bytes(changes)))}"


def _apply_changes(request: RunRequest, changes: Iterable[Mapping[str, Any]]) -> RunRequest:
    """Return a run's request with changed arguments, applied in order, so that later changes see earlier ones."""
    for change in changes:
        for name, value in change.items():
            request = _apply_change(request, name, value)
    return request


def _apply_change(request: RunRequest, name: str, value: Any) -> RunRequest:
    """Return a run's request with one argument changed, and with the plan that follows from it."""
    arguments = request.arguments
    plan = request.plan
    if name == "devices":
        world_size = value * arguments.device.num_nodes
        return replace(request, plan=_split_again(plan, arguments.training.micro_batch_size, world_size))
    if name == "micro_batch_size":
        plan = _split_again(plan, value, plan.world_size)
        arguments = replace(arguments, training=replace(arguments.training, micro_batch_size=value))
        return replace(request, arguments=arguments, plan=plan)
    if name == "context_parallel_size":
        num_data_ranks = plan.num_data_ranks * arguments.fsdp.context_parallel_size // value
        accumulation = max(1, plan.rows_per_window // (plan.micro_batch_size * num_data_ranks))
        plan = replace(plan, num_data_ranks=num_data_ranks, accumulation=accumulation)
        arguments = replace(arguments, fsdp=replace(arguments.fsdp, context_parallel_size=value))
        return replace(request, arguments=arguments, plan=plan)
    if name == "precision":
        return replace(request, arguments=replace(arguments, model=replace(arguments.model, precision=value)))
    options: dict[str, Any] = {name: value}
    if hasattr(arguments.rollouts, name):
        return replace(request, arguments=replace(arguments, rollouts=replace(arguments.rollouts, **options)))
    # all others are arguments of FSDP
    arguments = replace(arguments, fsdp=replace(arguments.fsdp, **options))
    parallelism = value if name == "parallelism" else request.parallelism
    return replace(request, arguments=arguments, parallelism=parallelism)


def _candidate_changes(request: RunRequest) -> Iterator[dict[str, Any]]:
    """Yield changes of arguments that reduce the memory on a device, the cheapest first."""
    arguments = request.arguments
    fsdp = arguments.fsdp
    world_size = request.plan.world_size
    num_nodes = arguments.device.num_nodes
    is_fsdp2 = request.parallelism == "fsdp2"
    sharded = "fsdp2" if arguments.training.orthogonalizes else "fsdp"

    # take less memory for sampling, such as for fewer completions at once
    if request.prompts is not None:
        yield from PLANNED_SAMPLERS[arguments.rollouts.sampler].smaller_changes(arguments.rollouts)

    # shard everything
    if world_size > 1 and request.parallelism == "ddp":
        yield {"parallelism": sharded}
    if world_size > 1 and fsdp.sharding_strategy != "FULL_SHARD":
        yield {"sharding_strategy": "FULL_SHARD"}
    can_reduce_often = is_fsdp2 or not (fsdp.cpu_offload or arguments.model.float8)
    if world_size > 1 and can_reduce_often:
        reduction: dict[str, Any] = {"gradient_reduction": "micro_batch"}
        if fsdp.compile is True and not is_fsdp2:
            reduction["compile"] = False
        yield reduction

    # keep fewer activations: recompute, smaller micro-batches, tiles, several ranks for the same rows
    if fsdp.activation_checkpointing != "full":
        yield {"activation_checkpointing": "full"}
    micro_batch_size = arguments.training.micro_batch_size
    while micro_batch_size > 1:
        micro_batch_size //= 2
        yield {"micro_batch_size": micro_batch_size}
    tiles = change_to_tiles(request)
    if tiles:
        yield tiles
    num_copies = num_nodes if fsdp.is_hybrid else 1
    ranks_per_copy = world_size // num_copies // fsdp.tensor_parallel_size
    for context_size in range(2 * fsdp.context_parallel_size, ranks_per_copy + 1):
        if ranks_per_copy % context_size == 0 and arguments.model.attention == "sdpa":
            change: dict[str, Any] = {"context_parallel_size": context_size}
            yield change if is_fsdp2 else {"parallelism": "fsdp2", **change}

    # lower precision, then more devices
    if arguments.model.precision != "bf16-true":
        yield {"precision": "bf16-true"}
    num_devices = world_size // num_nodes
    for factor in (2, 4, 8):
        more_devices: dict[str, Any] = {"devices": factor * num_devices}
        yield {"parallelism": sharded, **more_devices} if request.parallelism == "single" else more_devices


def change_to_tiles(request: RunRequest) -> dict[str, Any]:
    """Return the change to tiles; empty if the model does not support tiles."""
    fsdp = request.arguments.fsdp
    has_tiles = isinstance(fsdp.mlp_tile_size, int)
    is_possible = fsdp.tensor_parallel_size == 1 and not request.arguments.model.float8
    if has_tiles or not is_possible or why_no_tiles(request.largest):
        return {}
    change: dict[str, Any] = {"activation_checkpointing": "full", "mlp_tile_size": TILE_SIZE}
    if fsdp.compile is True:
        change["compile"] = False
    return change


def _split_again(plan: StepPlan, micro_batch_size: int, world_size: int) -> StepPlan:
    """Split the same window among a different number of ranks or micro-batches."""
    num_data_ranks = world_size * plan.num_data_ranks // plan.world_size
    accumulation = max(1, plan.rows_per_window // (micro_batch_size * num_data_ranks))
    return replace(
        plan,
        accumulation=accumulation,
        micro_batch_size=micro_batch_size,
        world_size=world_size,
        num_data_ranks=num_data_ranks,
    )
