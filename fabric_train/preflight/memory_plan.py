"""Whether a run fits: ``--plan`` prints what it takes and what would fit, and ``auto`` becomes what fits and pays.

``auto`` stands for compiled or not, how much is computed again, and tiles along the row or not.
"""

import importlib.util
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fabric_train.cli.argument_types import parse_size, show_size
from fabric_train.cli.errors import InputError
from fabric_train.data.streaming import Stream
from fabric_train.distributed.decoder_layers import missing_compiler
from fabric_train.distributed.memory import machine_memory
from fabric_train.distributed.precision import compute_dtype
from fabric_train.distributed.strategy import why_not_compiled
from fabric_train.model.context_parallel import borders_of, count_keys, deal_chunks
from fabric_train.model.flops import ModelFlops, peak_flops
from fabric_train.model.row_tiles import TILE_SIZE
from fabric_train.preflight.memory_activations import TraceError
from fabric_train.preflight.memory_forecast import DOES_NOT_FIT, Forecast, RunRequest, faults_of_disk, make_request
from fabric_train.preflight.memory_layout import why_no_tiles
from fabric_train.preflight.save_interval import describe_saves
from fabric_train.training.components import component
from fabric_train.training.data_tables import describe_mixture, describe_phases
from fabric_train.training.prepared_run import PreparedRun
from fabric_train.training.run_log import note, show
from fabric_train.training.step_plan import StepPlan
from fabric_train.training.summary import describe_parts
from fabric_train.training.tables import facts_table

_BALANCED_MICRO_BATCHES = 64  # micro-batches in which the work of ranks that share rows is compared
_KINDS = ("weights", "optimizer", "gradients", "gathered weights", "activations", "communication")
_USABLE_SHARE = 0.9
"""Of a device's memory. The rest is for what the plan does not know, such as gaps between the allocator's blocks."""
_CHOICES: list[dict[str, Any]] = [
    {"activation_checkpointing": "none"},
    *({"activation_checkpointing": "selective", "activation_memory_budget": tenths / 10} for tenths in range(9, 0, -1)),
    {"activation_checkpointing": "full"},
]
"""What ``--activation_checkpointing auto`` chooses from; each takes less memory than the one before."""

# On an H200 (docs/performance.md, "Measured on a GPU"), the first compiled step took 7 s more and each later one a
# fifth less; without compiling, MFU was 46 %. Evaluation and rows of several documents are compiled again, and not
# every host is that fast.
_SECONDS_TO_COMPILE = 30.0
_SHARE_SAVED = 0.15
_UTILIZATION = 0.45
_A100_PEAK_FLOPS = 312e12  # FLOP/s, taken for a GPU whose peak is not known


def print_plan(run: PreparedRun) -> None:
    """Print memory, disk and traffic of a run, traced on fake tensors, and its mixture; refuse what does not fit."""
    faults: list[str] = []
    for successive_run in run.successive_runs:
        faults += _plan_successive_run(successive_run)
    for line in run.notes:
        note(line)
    objective = component(run.components, "objective")
    if not objective.is_own:
        note(f"the activations are those of cross entropy; the {objective} may need more memory")
    if faults:
        raise InputError(*faults)
    show(Text("it fits", "bold green"))


def _plan_successive_run(run: PreparedRun) -> list[str]:
    """Print the plan of the steps with the same token datasets, and return why it does not fit."""
    request = make_request(run)
    try:
        forecast = request.forecast()
    except TraceError as error:
        reason = f"the memory of its activations cannot be computed ({error})"
        kind = run.model.config.model_type
        raise InputError(f"--plan true: {run.model.source} ({kind}): {reason}; leave --plan out") from error
    planning = run.arguments.planning
    show(
        Group(
            _facts_table(forecast, run),
            _memory_table(forecast, request.device_memory),
            _storage_table(forecast, request.num_checkpoints()),
            _traffic_table(forecast, _bandwidth(planning.interconnect), _bandwidth(planning.network)),
            describe_saves(run, forecast.budget.checkpoint),
        )
    )
    for table in (*describe_mixture(run), *describe_phases(run)):
        show(table)
    return faults_of(request, forecast)


def _bandwidth(argument: str | None) -> float | None:
    """Return bytes per second; None if the argument is not given."""
    size = parse_size(argument or "")
    return float(size) if size else None


def busiest_rank(flops: ModelFlops, borders: np.ndarray, num_ranks: int) -> float:
    """Return the FLOPs of the rank with the most, as a multiple of the mean, for rows that several ranks compute.

    ``borders``, int64 [documents + 1], are of the documents in all rows. Parameters take FLOPs by the tokens of a rank,
    attention by the keys that each of them sees.
    """
    ranks, chunk_size = deal_chunks(borders, num_ranks)  # the rank of each chunk of tokens
    num_keys = np.bincount(ranks, count_keys(borders, len(ranks)), num_ranks)  # [num_ranks], float64
    flops_per_key = sum(12.0 * attention.num_layers * attention.width for attention in flops.attention)
    tokens_per_rank = len(ranks) * chunk_size // num_ranks
    parameter_flops = replace(flops, attention=()).count([tokens_per_rank])
    rank_flops = parameter_flops + flops_per_key * num_keys
    return float(rank_flops.max() / rank_flops.mean())


def _show_balance(run: PreparedRun) -> str:
    """Say how evenly the ranks that compute the same rows share the work, in some micro-batches of the run."""
    assert not isinstance(run.data, Stream)
    rows = run.data.train
    num_ranks = run.arguments.fsdp.context_parallel_size
    micro_batch_size = run.arguments.training.micro_batch_size
    starts = range(0, len(rows), max(micro_batch_size, len(rows) // _BALANCED_MICRO_BATCHES))
    worst = 1.0
    for start in starts:
        end = min(start + micro_batch_size, len(rows))
        batch = rows.__getitems__([*range(start, end)])
        worst = max(worst, busiest_rank(run.model.flops, borders_of(batch), num_ranks))
    return (
        f"{num_ranks} devices each; the busiest has {worst:.3f} × the mean FLOPs in the worst of {len(starts)} "
        "micro-batches"
    )


def faults_of(request: RunRequest, forecast: Forecast) -> list[str]:
    """Return a line for what does not fit into a device, host memory or disk, and what to change."""
    faults = []
    if forecast.device_bytes > request.device_memory:
        sizes = {**forecast.budget.most.parts, "the process itself": forecast.process}
        size_list = ", ".join(f"{kind} {show_size(size)}" for kind, size in sizes.items() if size)
        needed = show_size(forecast.device_bytes)
        available = show_size(request.device_memory)
        unit = "a device" if forecast.on_gpu else "a rank"
        advice = _change_that_fits(request)
        faults.append(
            f"the run needs {needed} on {unit}, which has {available}: {size_list}; {advice} ({DOES_NOT_FIT})"
        )
    if request.is_elsewhere:  # host memory and disk of the other machines are not known
        return faults
    if request.on_gpu and forecast.host_bytes > machine_memory():
        needed = show_size(forecast.host_bytes)
        available = show_size(machine_memory())
        faults.append(f"the ranks of a machine need {needed} of its {available} of memory; give --async_save false")
    # one checkpoint more while it is written
    return [*faults, *faults_of_disk(request, request.num_checkpoints() + 1)]


def _change_that_fits(request: RunRequest) -> str:
    """Try changes one after the other, cheapest first; then leave out those that are not needed."""

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
        return "no change of its arguments makes it fit; take a smaller model or shorter rows"

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
    """Return the request of a run with changed arguments, in whose order later ones see the earlier ones."""
    for change in changes:
        for name, value in change.items():
            request = _apply_change(request, name, value)
    return request


def _apply_change(request: RunRequest, name: str, value: Any) -> RunRequest:
    """Return the request of a run with one argument changed, and with the plan that follows from it."""
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
    # all others are arguments of FSDP
    options: dict[str, Any] = {name: value}
    arguments = replace(arguments, fsdp=replace(arguments.fsdp, **options))
    parallelism = value if name == "parallelism" else request.parallelism
    return replace(request, arguments=arguments, parallelism=parallelism)


def _candidate_changes(request: RunRequest) -> Iterator[dict[str, Any]]:
    """Yield changes of arguments that take memory from a device, the cheapest first."""
    arguments = request.arguments
    fsdp = arguments.fsdp
    world_size = request.plan.world_size
    num_nodes = arguments.device.num_nodes
    is_fsdp2 = request.parallelism == "fsdp2"

    # shard everything
    if world_size > 1 and request.parallelism == "ddp":
        yield {"parallelism": "fsdp"}
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
        yield {"parallelism": "fsdp", **more_devices} if request.parallelism == "single" else more_devices


def change_to_tiles(request: RunRequest) -> dict[str, Any]:
    """Return the change to tiles, empty if these do not work."""
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


def _facts_table(forecast: Forecast, run: PreparedRun) -> Table:
    """Return the parameters, devices, steps and FLOPs of a run."""
    units = forecast.units
    layout = forecast.layout
    plan = run.plan
    table = facts_table(f"Plan{run.steps_suffix}")

    trained = ""
    if units.trained != units.total:
        trained = f"; {units.trained + units.adapter:,} train"
    if units.adapter:
        trained += f", {units.adapter:,} of them the adapter's"
    if units.parameters == units.total:
        units_text = f"{units.num_layers} layers of {units.layer:,}, {units.rest:,} else{trained}"
    else:
        units_text = f"the layers' matrices in 4 bits{trained}"
    table.add_row("parameters", f"{units.parameters:,}: {units_text}")
    for name, text in describe_parts(run.model, changes=run.models.change):
        table.add_row(name, text)

    if run.arguments.fsdp.context_parallel_size > 1 and not isinstance(run.data, Stream):
        table.add_row("rows", _show_balance(run))
    sharding = f"weights cut in {layout.num_shards}" if layout.is_sharded else "nothing cut"
    table.add_row("devices", f"{layout.world_size} × {layout.name} on {layout.num_nodes} machines, {sharding}")

    num_tokens = plan.rows_per_window * plan.tokens_per_row
    num_steps = plan.num_steps
    if run.steps_suffix:  # one of several successive runs
        num_steps = plan.last_step - plan.data_starts_after
    table.add_row("steps", f"{num_steps:,} of up to {num_tokens:,} tokens, {num_steps * num_tokens:,} in all")
    table.add_row("computing", f"{forecast.flops_of_step / 1e12:,.1f} TFLOP a step on each device")
    return table


def _memory_table(forecast: Forecast, device_memory: int) -> Table:
    """Return the bytes of a device in each phase of a step, by kind."""
    phases = forecast.budget.phases
    table = _number_table("memory, GB", *(phase.name for phase in phases))
    for kind in _KINDS:
        table.add_row(kind, *(_gigabytes(phase.parts.get(kind, 0)) for phase in phases))
    staging = 0 if forecast.on_gpu else forecast.budget.staging
    if staging:
        table.add_row("copy being saved", *(_gigabytes(staging) for _ in phases))
    process_label = "CUDA and NCCL, set aside" if forecast.on_gpu else "the process itself"
    table.add_row(process_label, *(_gigabytes(forecast.process) for _ in phases))
    totals = [phase.total + forecast.process + staging for phase in phases]
    table.add_row("in all", *map(_gigabytes, totals), style="bold")
    share = f"{forecast.device_bytes / device_memory:.0%} of {show_size(device_memory)}"
    table.add_row("at most", f"{forecast.device_bytes / 1e9:,.3f} GB", share)
    return table


def _storage_table(forecast: Forecast, num_checkpoints: int) -> Table:
    """Return the host memory of a machine and the bytes on the disk at the end of the run."""
    table = facts_table("")
    ranks_per_machine = forecast.layout.world_size // forecast.layout.num_nodes
    table.add_row("host memory", f"{show_size(forecast.host_bytes)} of {ranks_per_machine} ranks on a machine")
    size = forecast.budget.checkpoint
    total_size = show_size(size * num_checkpoints)
    table.add_row("disk", f"{total_size}: {num_checkpoints} checkpoints of {show_size(size)}; one more while writing")
    return table


def _traffic_table(forecast: Forecast, interconnect: float | None, network: float | None) -> Table:
    """Return what a rank sends in a step, and the time for it if the bandwidth is given."""
    table = _number_table("sent a step", "by a rank", "leaving a machine", "at least")
    for collective in forecast.collectives:
        seconds = collective.seconds(interconnect, network)
        if seconds:
            time = f"{seconds:.3f} s"
        elif not interconnect:
            time = "give --interconnect"
        else:
            time = "give --network"
        leaving = show_size(collective.leaving_machine) if collective.leaving_machine else ""
        table.add_row(collective.name, show_size(collective.sent), leaving, time)
    if not forecast.collectives:
        table.add_row("nothing: one device", "", "", "")
    return table


def _number_table(*columns: str) -> Table:
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.2f}" if size else ""


def resolve_automatic(run: PreparedRun) -> PreparedRun:
    """Return the run with ``auto`` replaced in its arguments, and a note on each choice.

    Nothing is recomputed or compiled without a GPU, or for evaluation alone, and there is no note.
    """
    fsdp = run.arguments.fsdp
    evaluation = run.arguments.evaluation
    is_trivial = run.devices.accelerator != "cuda" or evaluation.eval_only
    # in this order: compiled layers keep less, and tiles are the last resort if everything is recomputed
    if fsdp.compile == "auto":
        if is_trivial or evaluation.self_check:
            run = _with_options(run, compile=False)
        else:
            run = _choose_compile(run)
    if fsdp.activation_checkpointing == "auto":
        run = _with_options(run, activation_checkpointing="none") if is_trivial else _choose_checkpointing(run)
    if fsdp.mlp_tile_size == "auto":
        run = _with_options(run, mlp_tile_size="none") if is_trivial else _choose_tiles(run)
    elif fsdp.mlp_tile_size != "none":
        obstacle = why_no_tiles(run.model)
        if obstacle:
            run = _with_options(
                run, f"--mlp_tile_size {fsdp.mlp_tile_size}: none, since {obstacle}", mlp_tile_size="none"
            )
    return run


def _choose_checkpointing(run: PreparedRun) -> PreparedRun:
    """Take the least recomputation with which the plan fits into the memory of a device."""
    usable_bytes = round(_USABLE_SHARE * make_request(run).device_memory)

    @cache
    def needed_bytes(choice: int) -> int:
        return make_request(_with_options(run, **_CHOICES[choice])).forecast().device_bytes

    def fits(choice: int) -> bool:
        return needed_bytes(choice) <= usable_bytes

    try:
        choice = 0
        if not fits(choice):
            # each choice needs less than the one before: a bisection finds the first that fits, or takes the last one
            candidates = range(1, len(_CHOICES) - 1)
            num_too_large = bisect_left(candidates, x=True, key=fits)
            choice = 1 + num_too_large
        reason = (
            f"which needs {show_size(needed_bytes(choice))} of the {show_size(usable_bytes)} that a run may take of a "
            "device"
        )
        if choice:
            reason += f"; none would need {show_size(needed_bytes(0))}"
    except TraceError as error:
        reason = f"the memory of the model's activations cannot be computed ({error})"
        return _with_options(
            run, f"--activation_checkpointing auto: none, since {reason}", activation_checkpointing="none"
        )
    options = _CHOICES[choice]
    chosen = options["activation_checkpointing"]
    if "activation_memory_budget" in options:
        chosen += f" --activation_memory_budget {options['activation_memory_budget']}"
    return _with_options(run, f"--activation_checkpointing auto: {chosen}, {reason}", **options)


def _choose_tiles(run: PreparedRun) -> PreparedRun:
    """Take tiles if all layers are recomputed and the run would still not fit."""
    fsdp = run.arguments.fsdp
    request = make_request(run)
    without_tiles = _with_options(run, mlp_tile_size="none")
    usable_bytes = round(_USABLE_SHARE * request.device_memory)
    is_compiled = fsdp.compile is True and run.user_arguments.fsdp.compile != "auto"
    if fsdp.activation_checkpointing != "full" or is_compiled:
        return without_tiles
    change = change_to_tiles(request)
    if not change:
        return without_tiles
    try:
        bytes_without = request.forecast().device_bytes
        if bytes_without <= usable_bytes:
            return without_tiles
        needed_bytes = make_request(_with_options(run, **change)).forecast().device_bytes
    except TraceError:
        return without_tiles
    text = f"--mlp_tile_size auto: {TILE_SIZE} without compiling, which needs {show_size(needed_bytes)} of the "
    text += f"{show_size(usable_bytes)} that a run may take of a device; none would need {show_size(bytes_without)}"
    return _with_options(run, text, **change)


def _choose_compile(run: PreparedRun) -> PreparedRun:
    """Compile if it is possible and the time that it saves is longer than the time to compile."""
    fsdp = run.arguments.fsdp
    if run.arguments.model.float8:
        return _with_options(run, "--compile auto: true, since float8 needs it", compile=True)
    if isinstance(fsdp.mlp_tile_size, int):
        return _with_options(
            run, f"--compile auto: false, since --mlp_tile_size {fsdp.mlp_tile_size} is given", compile=False
        )
    obstacle = why_not_compiled(fsdp, run.devices.parallelism)
    if obstacle:
        return _with_options(
            run, f"--compile auto: false, since fsdp cannot with {obstacle}, but fsdp2 can", compile=False
        )
    missing = missing_compiler()
    if not missing and not importlib.util.find_spec("triton"):
        missing = "package triton"
    if missing and not run.arguments.planning.plans_for_others:
        return _with_options(run, f"--compile auto: false, since there is no {missing}", compile=False)
    seconds = _seconds_of_training(run)
    pays = _SHARE_SAVED * seconds > _SECONDS_TO_COMPILE
    reason = f"the run takes about {_show_time(seconds)} and compiling about {_show_time(_SECONDS_TO_COMPILE)}"
    return _with_options(run, f"--compile auto: {str(pays).lower()}, since {reason}", compile=pays)


def _seconds_of_training(run: PreparedRun) -> float:
    """Estimate how long the run's steps take without compiling, also those before a resume: nothing changes by it."""
    plan = run.plan
    device_name = "" if run.arguments.planning.plans_for_others else torch.cuda.get_device_name()
    flops_per_second = peak_flops(device_name, compute_dtype(run.arguments.model.precision))
    if not flops_per_second:
        flops_per_second = _A100_PEAK_FLOPS
    flops_per_row = run.model.flops.count([plan.tokens_per_row])
    flops_of_step = flops_per_row * plan.rows_per_window / plan.world_size  # of each device
    return plan.num_steps * flops_of_step / (flops_per_second * _UTILIZATION)


def _show_time(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} hours" if seconds >= 3600 else f"{seconds / 60:,.1f} minutes"


def _with_options(run: PreparedRun, note: str | None = None, **options: Any) -> PreparedRun:
    """Return the run with changed arguments of FSDP, and a note on them."""
    arguments = replace(run.arguments, fsdp=replace(run.arguments.fsdp, **options))
    notes = run.notes if note is None else (*run.notes, note)
    return replace(run, arguments=arguments, notes=notes)
