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
from fabric_train.training.prepared_run import PreparedRun, StepPlan
from fabric_train.training.run_log import note, show
from fabric_train.training.summary import describe_parts
from fabric_train.training.tables import facts_table

_BALANCED = 64  # micro-batches in which the work of ranks that share rows is compared
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
_PEAK_OF_A100 = 312e12  # FLOP/s, taken for a GPU whose peak is not known


def print_plan(run: PreparedRun) -> None:
    """Print memory, disk and traffic of a run, traced on fake tensors, and its mixture; refuse what does not fit."""
    faults = [fault for part in run.successive_runs for fault in _plan_part(part)]
    for line in run.notes:
        note(line)
    objective = component(run.components, "objective")
    if not objective.is_own:
        note(f"the activations are those of cross entropy; the {objective} may need more memory")
    if faults:
        raise InputError(*faults)
    show(Text("it fits", "bold green"))


def _plan_part(run: PreparedRun) -> list[str]:
    """Print the plan of the steps with the same token datasets, and return why it does not fit."""
    request = make_request(run)
    given = run.arguments.planning
    try:
        forecast = request.forecast()
    except TraceError as error:
        reason = f"the memory of its activations cannot be computed ({error})"
        kind = run.model.config.model_type
        raise InputError(f"--plan true: {run.model.source} ({kind}): {reason}; leave --plan out") from error
    lines = [float(size) if (size := parse_size(line or "")) else None for line in (given.interconnect, given.network)]
    show(
        Group(
            _counts(forecast, run),
            _memory(forecast, request.device_memory),
            _storage(forecast, request.num_checkpoints()),
            _traffic(forecast, *lines),
            describe_saves(run, forecast.budget.checkpoint),
        )
    )
    for table in (*describe_mixture(run), *describe_phases(run)):
        show(table)
    return faults_of(request, forecast)


def busiest_rank(flops: ModelFlops, borders: np.ndarray, num_ranks: int) -> float:
    """Return the FLOPs of the rank with the most, as a multiple of the mean, for rows that several ranks compute.

    ``borders``, int64 [documents + 1], are of the documents in all rows. Parameters take FLOPs by the tokens of a rank,
    attention by the keys that each of them sees.
    """
    ranks, size = deal_chunks(borders, num_ranks)
    keys = np.bincount(ranks, count_keys(borders, len(ranks)), num_ranks)
    of_key = sum(12.0 * one.num_layers * one.width for one in flops.attention)
    work = replace(flops, attention=()).count([len(ranks) * size // num_ranks]) + of_key * keys
    return float(work.max() / work.mean())


def _show_balance(run: PreparedRun) -> str:
    """Say how evenly the ranks that compute the same rows share the work, in some micro-batches of the run."""
    size = run.arguments.fsdp.context_parallel_size
    number = run.arguments.training.micro_batch_size
    assert not isinstance(run.data, Stream)
    starts = range(0, len(run.data.train), max(number, len(run.data.train) // _BALANCED))
    worst = 1.0
    for start in starts:
        batch = run.data.train.__getitems__([*range(start, min(start + number, len(run.data.train)))])
        worst = max(worst, busiest_rank(run.model.flops, borders_of(batch), size))
    return (
        f"{size} devices each; the busiest has {worst:.3f} × the mean FLOPs in the worst of {len(starts)} micro-batches"
    )


def faults_of(request: RunRequest, forecast: Forecast) -> list[str]:
    """Return a line for what does not fit into a device, host memory or disk, and what to change."""
    faults = []
    if forecast.device_bytes > request.device_memory:
        parts = {**forecast.budget.most.parts, "the process itself": forecast.process}
        listed = ", ".join(f"{name} {show_size(size)}" for name, size in parts.items() if size)
        needed = show_size(forecast.device_bytes)
        there = show_size(request.device_memory)
        where = "a device" if forecast.on_gpu else "a rank"
        change = _change_that_fits(request)
        faults.append(f"the run needs {needed} on {where}, which has {there}: {listed}; {change} ({DOES_NOT_FIT})")
    if request.is_elsewhere:
        return faults
    if request.on_gpu and forecast.host_bytes > machine_memory():
        needed = show_size(forecast.host_bytes)
        there = show_size(machine_memory())
        faults.append(f"the ranks of a machine need {needed} of its {there} of memory; give --async_save false")
    return [*faults, *faults_of_disk(request, request.num_checkpoints() + 1)]


def _change_that_fits(request: RunRequest) -> str:
    """Try changes one after the other, cheapest first; then leave out those that are not needed."""

    def needed(changes: list[dict[str, Any]]) -> float:
        try:
            return _apply(request, changes).forecast().device_bytes
        except TraceError:  # experts, for example, are traced in some dtypes only
            return math.inf

    changes: list[dict[str, Any]] = []
    for change in _changes(request):
        changes.append(change)
        if needed(changes) <= request.device_memory:
            break
    else:
        return "no change of its arguments makes it fit; take a smaller model or shorter rows"
    for change in changes[:-1]:
        others = [other for other in changes if other is not change]
        changes = others if needed(others) <= request.device_memory else changes
    options = (f"--{name} {'false' if value is False else value}" for one in changes for name, value in one.items())
    return f"with {' '.join(options)} it would need {show_size(int(needed(changes)))}"


def _apply(request: RunRequest, changes: Iterable[Mapping[str, Any]]) -> RunRequest:
    arguments = request.arguments
    plan = request.plan
    parallelism = request.parallelism
    for name, value in (item for change in changes for item in change.items()):
        if name == "devices":
            plan = _split_again(plan, arguments.training.micro_batch_size, value * arguments.device.num_nodes)
        elif name == "micro_batch_size":
            arguments = replace(arguments, training=replace(arguments.training, micro_batch_size=value))
            plan = _split_again(plan, value, plan.world_size)
        elif name == "context_parallel_size":
            ranks = plan.num_data_ranks * arguments.fsdp.context_parallel_size // value
            accumulation = max(1, plan.rows_per_window // (plan.micro_batch_size * ranks))
            plan = replace(plan, num_data_ranks=ranks, accumulation=accumulation)
            arguments = replace(arguments, fsdp=replace(arguments.fsdp, context_parallel_size=value))
        elif name == "precision":
            arguments = replace(arguments, model=replace(arguments.model, precision=value))
        else:
            given: Any = {name: value}
            arguments = replace(arguments, fsdp=replace(arguments.fsdp, **given))
            parallelism = value if name == "parallelism" else parallelism
    return replace(request, arguments=arguments, plan=plan, parallelism=parallelism)


def _changes(request: RunRequest) -> Iterator[dict[str, Any]]:
    arguments = request.arguments
    world_size = request.plan.world_size
    if world_size > 1 and request.parallelism == "ddp":
        yield {"parallelism": "fsdp"}
    if world_size > 1 and arguments.fsdp.sharding_strategy != "FULL_SHARD":
        yield {"sharding_strategy": "FULL_SHARD"}
    is_fsdp2 = request.parallelism == "fsdp2"
    if world_size > 1 and (is_fsdp2 or not (arguments.fsdp.cpu_offload or arguments.model.float8)):
        eager = {"compile": False} if arguments.fsdp.compile is True and not is_fsdp2 else {}
        yield {"gradient_reduction": "micro_batch", **eager}
    if arguments.fsdp.activation_checkpointing != "full":
        yield {"activation_checkpointing": "full"}
    size = arguments.training.micro_batch_size
    while size > 1:
        size //= 2
        yield {"micro_batch_size": size}
    if tiles := change_to_tiles(request):
        yield tiles
    of_copy = world_size // (arguments.device.num_nodes if arguments.fsdp.is_hybrid else 1)
    of_copy //= arguments.fsdp.tensor_parallel_size
    for size in range(2 * arguments.fsdp.context_parallel_size, of_copy + 1):
        if of_copy % size == 0 and arguments.model.attention == "sdpa":
            yield {**({} if is_fsdp2 else {"parallelism": "fsdp2"}), "context_parallel_size": size}
    if arguments.model.precision != "bf16-true":
        yield {"precision": "bf16-true"}
    devices = world_size // arguments.device.num_nodes
    for number in (2 * devices, 4 * devices, 8 * devices):
        sharded = {"parallelism": "fsdp"} if request.parallelism == "single" else {}
        yield {**sharded, "devices": number}


def change_to_tiles(request: RunRequest) -> dict[str, Any]:
    """Return the change to tiles, empty if these do not work."""
    fsdp = request.arguments.fsdp
    is_possible = fsdp.tensor_parallel_size == 1 and not request.arguments.model.float8
    if isinstance(fsdp.mlp_tile_size, int) or not is_possible or why_no_tiles(request.largest):
        return {}
    change = {"activation_checkpointing": "full", "mlp_tile_size": TILE_SIZE}
    return change | ({"compile": False} if fsdp.compile is True else {})


def _split_again(plan: StepPlan, micro_batch_size: int, world_size: int) -> StepPlan:
    """Split the same window among other ranks or into other micro-batches."""
    ranks = world_size * plan.num_data_ranks // plan.world_size
    accumulation = max(1, plan.rows_per_window // (micro_batch_size * ranks))
    return replace(
        plan, accumulation=accumulation, micro_batch_size=micro_batch_size, world_size=world_size, num_data_ranks=ranks
    )


def _counts(forecast: Forecast, run: PreparedRun) -> Table:
    units = forecast.units
    layout = forecast.layout
    plan = run.plan
    table = facts_table(f"Plan{run.steps_suffix}")
    trained = "" if units.trained == units.total else f"; {units.trained + units.adapter:,} train"
    if units.adapter:
        trained += f", {units.adapter:,} of them the adapter's"
    each = f"{units.num_layers} layers of {units.layer:,}, {units.rest:,} else{trained}"
    if units.parameters != units.total:
        each = f"the layers' matrices in 4 bits{trained}"
    table.add_row("parameters", f"{units.parameters:,}: {each}")
    for name, text in describe_parts(run):
        table.add_row(name, text)
    if run.arguments.fsdp.context_parallel_size > 1 and not isinstance(run.data, Stream):
        table.add_row("rows", _show_balance(run))
    cut = f"weights cut in {layout.num_shards}" if layout.is_sharded else "nothing cut"
    table.add_row("devices", f"{layout.world_size} × {layout.name} on {layout.num_nodes} machines, {cut}")
    tokens = plan.rows_per_window * plan.tokens_per_row
    number = plan.num_steps if not run.steps_suffix else plan.last_step - plan.data_starts_after
    table.add_row("steps", f"{number:,} of up to {tokens:,} tokens, {number * tokens:,} in all")
    table.add_row("computing", f"{forecast.flops_of_step / 1e12:,.1f} TFLOP a step on each device")
    return table


def _memory(forecast: Forecast, device_memory: int) -> Table:
    phases = forecast.budget.phases
    table = _numbers("memory, GB", *(phase.name for phase in phases))
    for kind in _KINDS:
        table.add_row(kind, *(_gigabytes(phase.parts.get(kind, 0)) for phase in phases))
    staging = 0 if forecast.on_gpu else forecast.budget.staging
    if staging:
        table.add_row("copy being saved", *(_gigabytes(staging) for _ in phases))
    name = "CUDA and NCCL, set aside" if forecast.on_gpu else "the process itself"
    table.add_row(name, *(_gigabytes(forecast.process) for _ in phases))
    totals = [phase.total + forecast.process + staging for phase in phases]
    table.add_row("in all", *map(_gigabytes, totals), style="bold")
    of_all = f"{forecast.device_bytes / device_memory:.0%} of {show_size(device_memory)}"
    table.add_row("at most", f"{forecast.device_bytes / 1e9:,.3f} GB", of_all)
    return table


def _storage(forecast: Forecast, num_kept: int) -> Table:
    table = facts_table("")
    per_machine = forecast.layout.world_size // forecast.layout.num_nodes
    table.add_row("host memory", f"{show_size(forecast.host_bytes)} of {per_machine} ranks on a machine")
    size = forecast.budget.checkpoint
    table.add_row(
        "disk", f"{show_size(size * num_kept)}: {num_kept} checkpoints of {show_size(size)}; one more while writing"
    )
    return table


def _traffic(forecast: Forecast, interconnect: float | None, network: float | None) -> Table:
    """Return what a rank sends in a step, and the time for it if the bandwidth is given."""
    table = _numbers("sent a step", "by a rank", "leaving a machine", "at least")
    for collective in forecast.collectives:
        seconds = collective.seconds(interconnect, network)
        shown = f"{seconds:.3f} s" if seconds else "give --interconnect" if not interconnect else "give --network"
        leaving = show_size(collective.leaving_machine) if collective.leaving_machine else ""
        table.add_row(collective.what, show_size(collective.sent), leaving, shown)
    if not forecast.collectives:
        table.add_row("nothing: one device", "", "", "")
    return table


def _numbers(*columns: str) -> Table:
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
    if fsdp.compile == "auto":
        run = _with(run, compile=False) if is_trivial or evaluation.self_check else _choose_compile(run)
    if fsdp.activation_checkpointing == "auto":  # compiled layers keep less
        run = _with(run, activation_checkpointing="none") if is_trivial else _choose_checkpointing(run)
    if fsdp.mlp_tile_size == "auto":
        run = _with(run, mlp_tile_size="none") if is_trivial else _choose_tiles(run)
    elif fsdp.mlp_tile_size != "none" and (obstacle := why_no_tiles(run.model)):
        run = _with(run, f"--mlp_tile_size {fsdp.mlp_tile_size}: none, since {obstacle}", mlp_tile_size="none")
    return run


def _choose_checkpointing(run: PreparedRun) -> PreparedRun:
    """Take the least recomputation with which the plan fits into the memory of a device."""
    usable = round(_USABLE_SHARE * make_request(run).device_memory)

    @cache
    def needed(choice: int) -> int:
        return make_request(_with(run, **_CHOICES[choice])).forecast().device_bytes

    try:
        choice = 0
        if needed(0) > usable:  # the last one is taken if nothing fits
            choice = 1 + bisect_left(range(1, len(_CHOICES) - 1), True, key=lambda each: needed(each) <= usable)
        reason = f"which needs {show_size(needed(choice))} of the {show_size(usable)} that a run may take of a device"
        more = f"; none would need {show_size(needed(0))}" if choice else ""
    except TraceError as error:
        reason = f"the memory of the model's activations cannot be computed ({error})"
        return _with(run, f"--activation_checkpointing auto: none, since {reason}", activation_checkpointing="none")
    options = _CHOICES[choice]
    chosen = " --activation_memory_budget ".join(map(str, options.values()))
    return _with(run, f"--activation_checkpointing auto: {chosen}, {reason}{more}", **options)


def _choose_tiles(run: PreparedRun) -> PreparedRun:
    """Take tiles if all layers are recomputed and the run would still not fit."""
    fsdp = run.arguments.fsdp
    request = make_request(run)
    whole = _with(run, mlp_tile_size="none")
    usable = round(_USABLE_SHARE * request.device_memory)
    is_compiled = fsdp.compile is True and run.user_arguments.fsdp.compile != "auto"
    if fsdp.activation_checkpointing != "full" or is_compiled or not (change := change_to_tiles(request)):
        return whole
    try:
        without = request.forecast().device_bytes
        if without <= usable:
            return whole
        needed = make_request(_with(run, **change)).forecast().device_bytes
    except TraceError:
        return whole
    text = f"--mlp_tile_size auto: {TILE_SIZE} without compiling, which needs {show_size(needed)} of the "
    text += f"{show_size(usable)} that a run may take of a device; none would need {show_size(without)}"
    return _with(run, text, **change)


def _choose_compile(run: PreparedRun) -> PreparedRun:
    fsdp = run.arguments.fsdp
    if run.arguments.model.float8:
        return _with(run, "--compile auto: true, since float8 needs it", compile=True)
    if isinstance(fsdp.mlp_tile_size, int):
        return _with(run, f"--compile auto: false, since --mlp_tile_size {fsdp.mlp_tile_size} is given", compile=False)
    if obstacle := why_not_compiled(fsdp, run.devices.parallelism):
        return _with(run, f"--compile auto: false, since fsdp cannot with {obstacle}, but fsdp2 can", compile=False)
    missing = missing_compiler() or (None if importlib.util.find_spec("triton") else "package triton")
    if missing and not run.arguments.planning.plans_for_others:
        return _with(run, f"--compile auto: false, since there is no {missing}", compile=False)
    seconds = _seconds_of_training(run)
    pays = _SHARE_SAVED * seconds > _SECONDS_TO_COMPILE
    reason = f"the run takes about {_show_time(seconds)} and compiling about {_show_time(_SECONDS_TO_COMPILE)}"
    return _with(run, f"--compile auto: {str(pays).lower()}, since {reason}", compile=pays)


def _seconds_of_training(run: PreparedRun) -> float:
    """Estimate how long the run's steps take without compiling, also those before a resume: nothing changes by it."""
    plan = run.plan
    precision = run.arguments.model.precision
    name = "" if run.arguments.planning.plans_for_others else torch.cuda.get_device_name()
    peak = peak_flops(name, compute_dtype(precision)) or _PEAK_OF_A100
    flops_of_step = run.model.flops.count([plan.tokens_per_row]) * plan.rows_per_window / plan.world_size
    return plan.num_steps * flops_of_step / (peak * _UTILIZATION)


def _show_time(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} hours" if seconds >= 3600 else f"{seconds / 60:,.1f} minutes"


def _with(run: PreparedRun, note: str | None = None, **options: Any) -> PreparedRun:
    arguments = replace(run.arguments, fsdp=replace(run.arguments.fsdp, **options))
    return replace(run, arguments=arguments, notes=(*run.notes, *([note] if note else [])))
