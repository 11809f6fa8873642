"""Find how often to save: the costs of saves and failures, and the interval that loses the least time.

The best interval follows J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps" (Future Generation Computer Systems 22, 2006), which refines J. W. Young's (Communications of the ACM 17(9),
1974). Failures come at random, at a constant rate.
"""

import math
from dataclasses import dataclass

from rich.table import Table

from fabric_train.cli.argument_types import counted, show_size
from fabric_train.training.prepared_run import PreparedRun
from fabric_train.training.run_times import RunTimes, describe_seconds, read_times
from fabric_train.training.tables import facts_table

LLAMA_3_HOURS = 16_384 * 54 * 24 / 419
"""Hours between two failures of a GPU in the pretraining of Llama 3: 419 unexpected interruptions in 54 days on 16,384
GPUs (arXiv:2407.21783, section 3.3.4)."""
# assumptions, as long as no run has measured them
_WRITE_SPEED = 1e9  # bytes per second from a machine to the disk
_COPY_SPEED = 10e9  # bytes per second from a device to its machine's memory
_RESTART_SECONDS = 300.0
_MAX_EXPONENT = 500.0  # math.exp overflows a little above 700
_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Costs:
    """The costs of saves and failures, in seconds."""

    stall: float
    """The time that steps wait for a save."""
    save: float
    """The time until the checkpoint is complete."""
    restart: float
    """The time from a failure until steps continue."""
    between_failures: float
    """The mean time between two failures of the run."""

    @property
    def best_interval(self) -> float:
        """The seconds of training between two saves that lose the least time (Daly 2006).

        A save begins when the previous one is complete, so the interval is never shorter than the part of a save in the
        background.
        """
        ratio = self.stall / (2 * self.between_failures)
        if ratio >= 1:
            return max(self.between_failures, self.background)
        first_order = math.sqrt(2 * self.stall * self.between_failures)  # Young 1974
        interval = first_order * (1 + math.sqrt(ratio) / 3 + ratio / 9) - self.stall
        return max(interval, self.background)

    @property
    def background(self) -> float:
        """The seconds of a save during which steps continue."""
        return max(self.save - self.stall, 0.0)

    def goodput(self, interval: float) -> float:
        """Return the share of the time spent on steps that are not lost (Daly 2006).

        ``interval`` is in seconds of training between two saves. A background save leaves the steps that it has
        at risk until it is complete, which costs as much as a restart that is longer by this time. If it takes longer
        than the interval, the next save waits for it.
        """
        lost_per_failure = (self.restart + self.background) / self.between_failures
        cycle = (self.stall + max(interval, self.background)) / self.between_failures
        if lost_per_failure + cycle > _MAX_EXPONENT or not interval:  # next to nothing
            return 0.0
        return interval / (self.between_failures * math.exp(lost_per_failure) * math.expm1(cycle))


@dataclass(frozen=True)
class _CostEstimate:
    """The costs, and their origin."""

    costs: Costs
    save_source: str
    restart_source: str


def describe_saves(run: PreparedRun, checkpoint_bytes: int) -> Table:
    """Return the rate of failures, what a save and a start cost, the best interval of saves, and the run's."""
    arguments = run.arguments
    table = facts_table("Saves and failures")

    # failures
    hours = arguments.planning.mtbf_hours or LLAMA_3_HOURS
    world_size = run.plan.world_size
    between_failures = _SECONDS_PER_HOUR * hours / world_size
    rate = (
        f"one in {describe_seconds(between_failures)}: {counted(world_size, 'device')}, each fails once in "
        f"{hours:,.0f} h"
    )
    if not arguments.planning.mtbf_hours:
        rate += ", the rate of Llama 3: 419 in 54 days on 16,384 GPUs"
    table.add_row("failures", rate)

    # costs
    times = read_times(run.folder)
    estimate = _estimate_costs(run, times, checkpoint_bytes, between_failures)
    costs = estimate.costs
    save = f"steps wait {describe_seconds(costs.stall)}, complete after {describe_seconds(costs.save)}"
    table.add_row("a save", f"{save} ({estimate.save_source})")
    table.add_row("a restart", f"{describe_seconds(costs.restart)} ({estimate.restart_source})")

    # the best interval, in steps if a step has been measured
    step_seconds = times.step if times else None
    if step_seconds is None:
        seconds = costs.best_interval
        advice = (
            f"to get it in steps, train some steps with --output_dir {run.folder} and plan again with --resume true"
        )
        table.add_row("best interval", f"{describe_seconds(seconds)}, goodput {costs.goodput(seconds):.2%}; {advice}")
        return table
    num_steps = run.plan.num_steps
    best_steps = min(max(round(costs.best_interval / step_seconds), 1), num_steps)
    best_goodput = costs.goodput(best_steps * step_seconds)
    table.add_row(
        "best interval",
        f"--save_step_interval {best_steps}, {describe_seconds(best_steps * step_seconds)}: goodput "
        f"{best_goodput:.2%}; a step takes {describe_seconds(step_seconds)} (mean in {run.folder})",
    )

    # the run's interval, and what it costs
    interval = arguments.save.save_step_interval
    goodput = costs.goodput(min(interval, num_steps) * step_seconds)
    lost_hours = max(best_goodput - goodput, 0) * 24 * world_size
    table.add_row(
        "this run's",
        f"--save_step_interval {interval}, {describe_seconds(interval * step_seconds)}: goodput {goodput:.2%}; that "
        f"costs {lost_hours:,.2f} more device hours per day",
    )
    return table


def _estimate_costs(
    run: PreparedRun, times: RunTimes | None, checkpoint_bytes: int, between_failures: float
) -> _CostEstimate:
    """Return the costs, which are those that the run in the output folder has measured if it has."""
    # a save
    if times and times.stall is not None and times.save is not None:
        stall = times.stall
        save = times.save
        devices = counted(times.num_devices, "device")
        save_source = f"median of {len(times.saves)} in {run.folder}, on {devices}"
    else:
        save = checkpoint_bytes / (_WRITE_SPEED * run.arguments.device.num_nodes)
        stall = save
        save_source = f"assumed: {show_size(checkpoint_bytes)}"
        if run.arguments.save.async_save:
            stall = min(checkpoint_bytes / (_COPY_SPEED * run.plan.world_size), save)
            save_source += f", copied at {show_size(_COPY_SPEED)}/s per device"
        save_source += f", written at {show_size(_WRITE_SPEED)}/s per machine"

    # a restart
    if times and times.start is not None:
        restart = times.start
        starts = counted(len(times.starts), "start")
        restart_source = f"median of {starts} in {run.folder}, not counting the wait for machines"
    else:
        restart = _RESTART_SECONDS
        restart_source = "assumed"
    costs = Costs(stall=stall, save=save, restart=restart, between_failures=between_failures)
    return _CostEstimate(costs, save_source, restart_source)
