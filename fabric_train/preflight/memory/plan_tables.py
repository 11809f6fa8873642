"""The tables that ``--plan`` prints."""

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table

from fabric_train.files.sizes import show_size
from fabric_train.preflight.memory.forecast import Forecast

if TYPE_CHECKING:
    from fabric_train.training.prepared_run import StepPlan

_KINDS = ("weights", "optimizer", "gradients", "gathered weights", "activations", "communication")


def report(
    forecast: Forecast,
    plan: "StepPlan",
    num_kept: int,
    device_memory: int,
    interconnect: float | None,
    network: float | None,
) -> Group:
    """Return the forecast as tables: model and steps, memory by phase, host memory and disk, traffic.

    Args:
        forecast: of the run.
        plan: its windows and steps.
        num_kept: checkpoints on the disk at the end of the run.
        device_memory: bytes that a device has.
        interconnect: bytes per second from a device to the others of its machine, None if not given.
        network: bytes per second from a machine to the others, None if not given.
    """
    return Group(
        _counts(forecast, plan),
        _memory(forecast, device_memory),
        _storage(forecast, num_kept),
        _traffic(forecast, interconnect, network),
    )


def _counts(forecast: Forecast, plan: "StepPlan") -> Table:
    units, layout = forecast.units, forecast.layout
    table = _table("Plan")
    table.add_row("parameters", f"{units.total:,}: {units.num_layers} layers of {units.layer:,}, {units.rest:,} else")
    cut = f"weights cut in {layout.num_shards}" if layout.is_sharded else "nothing cut"
    table.add_row("devices", f"{layout.world_size} × {layout.name} on {layout.num_nodes} machines, {cut}")
    tokens = plan.rows_per_window * plan.tokens_per_row
    table.add_row("steps", f"{plan.num_steps:,} of up to {tokens:,} tokens, {plan.num_steps * tokens:,} in all")
    table.add_row("computing", f"{forecast.flops_of_step / 1e12:,.1f} TFLOP a step on each device")
    return table


def _memory(forecast: Forecast, device_memory: int) -> Table:
    """Return the memory of a rank by kind, one column per phase."""
    phases = forecast.budget.phases
    table = Table("memory, GB", *(phase.name for phase in phases), title_justify="left", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
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
    table = _table("")
    per_machine = forecast.layout.world_size // forecast.layout.num_nodes
    table.add_row("host memory", f"{show_size(forecast.host_bytes)} of {per_machine} ranks on a machine")
    size = forecast.budget.checkpoint
    table.add_row(
        "disk", f"{show_size(size * num_kept)}: {num_kept} checkpoints of {show_size(size)}; one more while writing"
    )
    return table


def _traffic(forecast: Forecast, interconnect: float | None, network: float | None) -> Table:
    """Return what a rank sends in a step, and the time for it if the bandwidth is given."""
    table = Table("sent a step", "by a rank", "leaving a machine", "at least", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for collective in forecast.collectives:
        seconds = collective.seconds(interconnect, network)
        shown = f"{seconds:.3f} s" if seconds else "give --interconnect" if not interconnect else "give --network"
        leaving = show_size(collective.leaving_machine) if collective.leaving_machine else ""
        table.add_row(collective.what, show_size(collective.sent), leaving, shown)
    if not forecast.collectives:
        table.add_row("nothing: one device", "", "", "")
    return table


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.2f}" if size else ""


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table
