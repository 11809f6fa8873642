"""Print what a run needs, whether it fits, and what would fit, for ``--plan``."""

from dataclasses import replace

import numpy as np
import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fabric_train.cli.argument_types import parse_size, show_size
from fabric_train.cli.errors import InputError
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.data.token_mixture import TokenMixture
from fabric_train.distributed.memory import machine_memory
from fabric_train.distributed.precision import compute_dtype
from fabric_train.model.context_parallel import borders_of, count_keys, deal_chunks
from fabric_train.model.flops import ModelFlops
from fabric_train.preflight.duration import USUAL_GPUS, describe_duration, describe_least_sampling
from fabric_train.preflight.memory_activations import TraceError
from fabric_train.preflight.memory_changes import change_that_fits
from fabric_train.preflight.memory_forecast import (
    DOES_NOT_FIT,
    SAMPLING,
    Forecast,
    RunRequest,
    faults_of_disk,
    make_request,
)
from fabric_train.preflight.memory_sampling import SamplingForecast
from fabric_train.preflight.save_interval import describe_saves
from fabric_train.training.components import component
from fabric_train.training.data_tables import describe_mixture, describe_phases
from fabric_train.training.expected_speed import measured_peak_share
from fabric_train.training.prepared_run import PreparedRun
from fabric_train.training.run_log import note, show
from fabric_train.training.summary import describe_parts
from fabric_train.training.tables import facts_table

_BALANCED_MICRO_BATCHES = 64  # micro-batches in which the work of ranks that share rows is compared
_KINDS = (
    *("weights", "teacher", "reference", "copy that samples", "vLLM", "optimizer", "gradients", "gathered weights"),
    *("keys and values", "activations", "communication"),
)
_OPTIONAL_KINDS = ("teacher", "reference", "copy that samples", "vLLM", "keys and values")
"""Kinds that a table has only if a phase has bytes of them."""


def print_plan(run: PreparedRun) -> None:
    """Print a run's memory, disk and traffic, traced on fake tensors, and its mixture; refuse what does not fit."""
    faults: list[str] = []
    for successive_run in run.successive_runs:
        faults += _plan_successive_run(successive_run)
    for line in run.notes:
        note(line)
    objective = component(run.components, "objective")
    if not objective.is_own:
        note(f"the memory for activations is estimated for cross entropy; the {objective} may need more")
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
            _facts_table(forecast, run, request),
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
    """Return the FLOPs of the busiest rank, as a multiple of the mean, for rows that several ranks compute.

    ``borders``, int64 [documents + 1], are the borders of the documents in all rows. Parameters take FLOPs by the
    tokens of a rank, attention by the keys that each token sees.
    """
    ranks, chunk_size = deal_chunks(borders, num_ranks)  # the rank of each chunk of tokens
    num_keys = np.bincount(ranks, count_keys(borders, len(ranks)), num_ranks)  # [num_ranks], float64
    flops_per_key = sum(12.0 * attention.num_layers * attention.width for attention in flops.attention)
    tokens_per_rank = len(ranks) * chunk_size // num_ranks
    parameter_flops = replace(flops, attention=()).count([tokens_per_rank])
    rank_flops = parameter_flops + flops_per_key * num_keys
    return float(rank_flops.max() / rank_flops.mean())


def _show_balance(run: PreparedRun) -> str:
    """Describe how evenly the ranks that compute the same rows share the work, in some micro-batches of the run."""
    assert isinstance(run.data, TokenDataset | TokenMixture)
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
        f"{num_ranks} devices each; in the worst of {len(starts)} micro-batches, the busiest device has {worst:.3f} "
        "× the mean FLOPs"
    )


def faults_of(request: RunRequest, forecast: Forecast) -> list[str]:
    """Return a message for each of device memory, host memory and disk that is too small, with what to change."""
    faults = []
    if forecast.device_bytes > request.device_memory:
        faults.append(_fault_of_device(request, forecast))
    if request.is_elsewhere:  # the run is planned for other machines, whose host memory and disk are not known
        return faults

    if request.on_gpu and forecast.host_bytes > machine_memory():
        needed = show_size(forecast.host_bytes)
        available = show_size(machine_memory())
        faults.append(
            f"the ranks of a machine need {needed} of host memory, but the machine has {available}; give --async_save "
            "false"
        )
    # while a checkpoint is written, all that are kept are still on the disk
    most_checkpoints = request.num_checkpoints() + 1
    faults += faults_of_disk(request, most_checkpoints)
    return faults


def _fault_of_device(request: RunRequest, forecast: Forecast) -> str:
    """Return the message for a run that does not fit into a device, with its bytes by kind and a change that fits."""
    sizes = {**forecast.budget.most.parts, "the process itself": forecast.process}
    size_list = ", ".join(f"{kind} {show_size(size)}" for kind, size in sizes.items() if size)
    needed = show_size(forecast.device_bytes)
    available = show_size(request.device_memory)
    unit = "a device" if forecast.on_gpu else "a rank"
    advice = change_that_fits(request)
    return f"the run needs {needed} on {unit}, which has {available}: {size_list}; {advice} ({DOES_NOT_FIT})"


def _facts_table(forecast: Forecast, run: PreparedRun, request: RunRequest) -> Table:
    """Return a table of the parameters, devices, steps and FLOPs of a run."""
    units = forecast.units
    layout = forecast.layout
    plan = run.plan
    table = facts_table(f"Plan{run.steps_suffix}")

    trained = ""
    if units.trained != units.total:
        trained = f"; {units.trained + units.adapter:,} trained"
    if units.adapter:
        trained += f", {units.adapter:,} of them the adapter's"
    if units.parameters == units.total:
        units_text = f"{units.num_layers} layers of {units.layer:,}, {units.rest:,} else{trained}"
    else:
        units_text = f"layer matrices in 4 bits{trained}"
    table.add_row("parameters", f"{units.parameters:,}: {units_text}")
    for name, text in describe_parts(run.model, changes=run.models.change):
        table.add_row(name, text)

    if run.arguments.fsdp.context_parallel_size > 1 and isinstance(run.data, TokenDataset | TokenMixture):
        table.add_row("rows", _show_balance(run))
    sharding = f"weights sharded over {layout.num_shards}" if layout.is_sharded else "not sharded"
    table.add_row("devices", f"{layout.world_size} × {layout.name} on {layout.num_nodes} machines, {sharding}")

    num_tokens = plan.most_rows_per_step * plan.tokens_per_row
    num_steps = plan.num_steps
    if run.steps_suffix:  # one of several successive runs
        num_steps = plan.last_step - plan.data_starts_after
    table.add_row("steps", f"{num_steps:,} of up to {num_tokens:,} tokens, {num_steps * num_tokens:,} in total")
    table.add_row("computing", f"{forecast.flops_of_step / 1e12:,.1f} TFLOP per step on each device")
    device_names: tuple[str, ...] = ()
    if forecast.on_gpu:
        device_names = USUAL_GPUS
        if not run.arguments.planning.plans_for_others:
            device_names = (torch.cuda.get_device_name(),)
        dtype = compute_dtype(run.arguments.model.precision)
        num_flops = num_steps * forecast.flops_of_step
        share = measured_peak_share(run.arguments, is_partly_frozen=bool(run.model.frozen))
        table.add_row("time", describe_duration(num_flops, num_steps * num_tokens, device_names, dtype, share))
    sampling = forecast.sampling
    if sampling is not None:
        text = sampling.describe(_bytes_for_sampling(forecast, sampling, request.device_memory))
        if device_names:
            dtype = compute_dtype(run.arguments.model.precision)
            text += f"; {describe_least_sampling(sampling.work, num_steps, device_names, dtype)}"
        table.add_row("sampling", text)
    return table


def _bytes_for_sampling(forecast: Forecast, sampling: SamplingForecast, device_memory: int) -> int:
    """Return the bytes of a device that are left for what sampling frees again."""
    (phase,) = [phase for phase in forecast.budget.phases if phase.name == SAMPLING]
    freed_kinds: set[str] = set()
    for moment in sampling.moments:
        freed_kinds.update(moment)
    kept_bytes = sum(size for kind, size in phase.parts.items() if kind not in freed_kinds)
    return device_memory - forecast.process - kept_bytes


def _memory_table(forecast: Forecast, device_memory: int) -> Table:
    """Return a table of the bytes on a device in each phase of a step, by kind."""
    phases = forecast.budget.phases
    table = _number_table("memory, GB", *(phase.name for phase in phases))
    for kind in _KINDS:
        if kind in _OPTIONAL_KINDS and not any(phase.parts.get(kind) for phase in phases):
            continue
        table.add_row(kind, *(_gigabytes(phase.parts.get(kind, 0)) for phase in phases))
    staging = 0 if forecast.on_gpu else forecast.budget.staging
    if staging:
        table.add_row("copy being saved", *(_gigabytes(staging) for _ in phases))
    process_label = "CUDA and NCCL, reserved" if forecast.on_gpu else "the process itself"
    table.add_row(process_label, *(_gigabytes(forecast.process) for _ in phases))
    totals = [phase.total + forecast.process + staging for phase in phases]
    table.add_row("in all", *map(_gigabytes, totals), style="bold")
    share = f"{forecast.device_bytes / device_memory:.0%} of {show_size(device_memory)}"
    table.add_row("at most", f"{forecast.device_bytes / 1e9:,.3f} GB", share)
    return table


def _storage_table(forecast: Forecast, num_checkpoints: int) -> Table:
    """Return a table of a machine's host memory and the bytes on the disk at the end of the run."""
    table = facts_table("")
    ranks_per_machine = forecast.layout.world_size // forecast.layout.num_nodes
    table.add_row("host memory", f"{show_size(forecast.host_bytes)} for {ranks_per_machine} ranks on a machine")
    size = forecast.budget.checkpoint
    total_size = show_size(size * num_checkpoints)
    table.add_row(
        "disk", f"{total_size}: {num_checkpoints} checkpoints of {show_size(size)}; plus one while it is written"
    )
    return table


def _traffic_table(forecast: Forecast, interconnect: float | None, network: float | None) -> Table:
    """Return a table of what a rank sends in a step, and the time for it if the bandwidth is given."""
    table = _number_table("sent per step", "by a rank", "leaving a machine", "at least")
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
