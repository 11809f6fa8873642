"""Check that a forecast fits into memory and disk; otherwise find a change of arguments that makes it fit."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric_train.checkpoint.manager import free_bytes
from fabric_train.distributed.resources import machine_memory
from fabric_train.files.sizes import show_size
from fabric_train.preflight.memory.forecast import Forecast, RunRequest

if TYPE_CHECKING:
    from fabric_train.training.prepared_run import StepPlan


def faults_of(request: RunRequest, forecast: Forecast) -> list[str]:
    """Return a line for what does not fit into a device, host memory or disk, and what to change."""
    faults = []
    if forecast.device_bytes > request.device_memory:
        faults.append(_fault_of_memory(request, forecast))
    if request.is_elsewhere:
        return faults
    if request.on_gpu and forecast.host_bytes > machine_memory():
        needed, there = show_size(forecast.host_bytes), show_size(machine_memory())
        faults.append(f"the ranks of a machine need {needed} of its {there} of memory; give --async_save false")
    return [*faults, *_faults_of_disk(request, request.num_checkpoints() + 1)]


def faults_without_trace(request: RunRequest) -> list[str]:
    """Return faults that need no tracing: weights, gradients and optimizer in memory, one checkpoint on the disk."""
    layout, ranks = request.layout(), request.plan.world_size // request.arguments.device.num_nodes
    num_parts = layout.num_shards * layout.world_size // layout.num_data_ranks
    least = request.shape.num_parameters * (2 * layout.held + layout.states) // num_parts
    faults = []
    if not layout.offloads and least > request.device_memory:
        faults.append(
            f"weights, gradients and optimizer are {show_size(least)} a rank, and {ranks} ranks have "
            f"{show_size(request.device_memory)} each: --plan true says what would fit"
        )
    return [*faults, *_faults_of_disk(request, 1)]


def _faults_of_disk(request: RunRequest, number: int) -> list[str]:
    """Return a line if ``number`` checkpoints are more than the free space on the disk."""
    layout, folder = request.layout(), Path(request.arguments.save.output_dir)
    size = request.shape.num_parameters * (layout.held + layout.states)
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = free_bytes(nearest)
    if size * number <= free:
        return []
    fitting = free // size - 2  # besides the best by validation loss and the one being written
    fix = f"give --keep_checkpoints {fitting}, or make room" if fitting > 0 else "make room there"
    checkpoints = "a checkpoint needs" if number == 1 else f"{number} checkpoints, one being written, need"
    return [f"--output_dir {folder}: {checkpoints} {show_size(size * number)}, {show_size(free)} are free; {fix}"]


def _fault_of_memory(request: RunRequest, forecast: Forecast) -> str:
    parts = {**forecast.budget.most.parts, "the process itself": forecast.process}
    listed = ", ".join(f"{name} {show_size(size)}" for name, size in parts.items() if size)
    needed, there = show_size(forecast.device_bytes), show_size(request.device_memory)
    where = "a device" if forecast.on_gpu else "a rank"
    return f"the run needs {needed} on {where}, which has {there}: {listed}; {_change_that_fits(request)}"


def _change_that_fits(request: RunRequest) -> str:
    """Try changes one after the other, cheapest first; then leave out those that are not needed."""
    changes = []
    for change in _changes(request):
        changes.append(change)
        if _apply(request, changes).forecast().device_bytes <= request.device_memory:
            break
    else:
        return "no change of its arguments makes it fit; take a smaller model or shorter rows"
    for change in changes[:-1]:
        others = [other for other in changes if other is not change]
        if _apply(request, others).forecast().device_bytes <= request.device_memory:
            changes = others
    needed = _apply(request, changes).forecast().device_bytes
    options = " ".join(
        f"--{name} {str(value).lower() if value is False else value}"
        for change in changes
        for name, value in change.shown
    )
    return f"with {options} it would need {show_size(needed)}"


@dataclass(frozen=True)
class _Change:
    """A change of arguments. ``shown`` are its options on the command line."""

    shown: tuple[tuple[str, Any], ...]

    def on(self, request: RunRequest) -> RunRequest:
        """Return the run with these arguments instead."""
        arguments, plan, parallelism = request.arguments, request.plan, request.parallelism
        for name, value in self.shown:
            if name == "devices":
                num_ranks = value * arguments.device.num_nodes
                plan = _split_again(plan, arguments.training.micro_batch_size, num_ranks)
            elif name == "micro_batch_size":
                arguments = replace(arguments, training=replace(arguments.training, micro_batch_size=value))
                plan = _split_again(plan, value, plan.world_size)
            elif name == "precision":
                arguments = replace(arguments, model=replace(arguments.model, precision=value))
            else:
                given: Any = {name: value}
                arguments = replace(arguments, fsdp=replace(arguments.fsdp, **given))
                parallelism = value if name == "parallelism" else parallelism
        return replace(request, arguments=arguments, plan=plan, parallelism=parallelism)


def _apply(request: RunRequest, changes: list[_Change]) -> RunRequest:
    for change in changes:
        request = change.on(request)
    return request


def _changes(request: RunRequest) -> Iterator[_Change]:
    arguments, world_size = request.arguments, request.plan.world_size
    if world_size > 1 and request.parallelism == "ddp":
        yield _Change((("parallelism", "fsdp"),))
    if world_size > 1 and arguments.fsdp.sharding_strategy != "FULL_SHARD":
        yield _Change((("sharding_strategy", "FULL_SHARD"),))
    is_fsdp2 = request.parallelism == "fsdp2"
    if world_size > 1 and (is_fsdp2 or not (arguments.fsdp.cpu_offload or arguments.model.float8)):
        eager = (("compile", False),) if arguments.fsdp.compile is True and not is_fsdp2 else ()
        yield _Change((("gradient_reduction", "micro_batch"), *eager))
    if arguments.fsdp.activation_checkpointing != "full":
        yield _Change((("activation_checkpointing", "full"),))
    size = arguments.training.micro_batch_size
    while size > 1:
        size //= 2
        yield _Change((("micro_batch_size", size),))
    if arguments.model.precision != "bf16-true":
        yield _Change((("precision", "bf16-true"),))
    devices = world_size // arguments.device.num_nodes
    for number in (2 * devices, 4 * devices, 8 * devices):
        sharded = (("parallelism", "fsdp"),) if request.parallelism == "single" else ()
        yield _Change((*sharded, ("devices", number)))


def _split_again(plan: "StepPlan", micro_batch_size: int, world_size: int) -> "StepPlan":
    """Split the same window among other ranks or into other micro-batches."""
    num_data_ranks = world_size * plan.num_data_ranks // plan.world_size
    accumulation = max(1, plan.rows_per_window // (micro_batch_size * num_data_ranks))
    return replace(
        plan,
        accumulation=accumulation,
        micro_batch_size=micro_batch_size,
        world_size=world_size,
        num_data_ranks=num_data_ranks,
    )
