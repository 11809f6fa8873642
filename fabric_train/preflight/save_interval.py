"""How often to save: the interval that loses the least time to saves and failures, and the goodput to expect.

The interval is the one of J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps"
(Future Generation Computer Systems 22, 2006), which refines J. W. Young's (Communications of the ACM 17(9), 1974).
Failures come at random, at a constant rate.
"""

import math
from dataclasses import dataclass

from rich.table import Table

from fabric_train.cli.argument_types import counted, show_size
from fabric_train.training.prepared_run import PreparedRun
from fabric_train.training.run_times import RunTimes, describe_seconds, read_times
from fabric_train.training.summary import facts_table

LLAMA_3_HOURS = 16_384 * 54 * 24 / 419
"""Hours between two failures of a GPU in the pretraining of Llama 3: 419 unexpected interruptions in 54 days on 16,384
GPUs (arXiv:2407.21783, section 3.3.4)."""
_WRITTEN = 1e9  # bytes per second that a machine writes to the disk; an assumption
_COPIED = 10e9  # bytes per second that a device copies to its machine's memory; an assumption
_START = 300.0  # seconds; an assumption


@dataclass(frozen=True)
class Costs:
    """What saves and failures cost, in seconds.

    ``stall`` is the time that steps wait for a save, ``save`` the time until the checkpoint is complete, ``restart``
    the time from a failure until steps go on, and ``between_failures`` the mean time between two failures of the run.
    """

    stall: float
    save: float
    restart: float
    between_failures: float

    @property
    def best_interval(self) -> float:
        """The seconds of training between two saves that lose the least (Daly 2006).

        A save begins when the one before is complete: no interval is shorter than what a save does in the background.
        """
        ratio = self.stall / (2 * self.between_failures)
        if ratio >= 1:
            return max(self.between_failures, self.background)
        young = math.sqrt(2 * self.stall * self.between_failures)
        return max(young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - self.stall, self.background)

    @property
    def background(self) -> float:
        """The seconds of a save in which steps go on."""
        return max(self.save - self.stall, 0.0)

    def goodput(self, interval: float) -> float:
        """Return the share of the time that trains steps which count (Daly 2006).

        ``interval`` is in seconds of training between two saves. A save in the background keeps the steps that it has
        until it is complete at risk: that costs as much as a restart that takes longer by this time. If it takes longer
        than the interval, the next save waits for it.
        """
        behind, cycle = self.restart + self.background, self.stall + max(interval, self.background)
        exponents = behind / self.between_failures, cycle / self.between_failures
        if sum(exponents) > 500 or not interval:  # next to nothing
            return 0.0
        return interval / (self.between_failures * math.exp(exponents[0]) * math.expm1(exponents[1]))


def describe_saves(run: PreparedRun, checkpoint_bytes: int) -> Table:
    """Return the rate of failures, what a save and a start cost, the best interval of saves, and the run's."""
    given, table = run.arguments, facts_table("Saves and failures")
    hours, world_size = given.planning.mtbf_hours or LLAMA_3_HOURS, run.plan.world_size
    rate = f"one in {describe_seconds(3600 * hours / world_size)}: "
    rate += f"{counted(world_size, 'device')}, each one in {hours:,.0f} h"
    rate += "" if given.planning.mtbf_hours else ", the rate of Llama 3: 419 in 54 days on 16,384 GPUs"
    table.add_row("failures", rate)
    times = read_times(run.folder)
    costs, sources = _costs(run, times, checkpoint_bytes, 3600 * hours / world_size)
    stalled = f"steps wait {describe_seconds(costs.stall)}, complete after {describe_seconds(costs.save)}"
    table.add_row("a save", f"{stalled} ({sources[0]})")
    table.add_row("a restart", f"{describe_seconds(costs.restart)} ({sources[1]})")
    step, best, interval = (times.step if times else None), costs.best_interval, given.save.save_step_interval
    if step is None:
        advice = (
            f"train some steps with --output_dir {run.folder}, and plan again with --resume true to have it in steps"
        )
        table.add_row("best interval", f"{describe_seconds(best)}, goodput {costs.goodput(best):.2%}; {advice}")
        return table
    steps = min(max(round(best / step), 1), run.plan.num_steps)
    goodput, chosen = costs.goodput(steps * step), costs.goodput(min(interval, run.plan.num_steps) * step)
    table.add_row(
        "best interval",
        f"--save_step_interval {steps}, {describe_seconds(steps * step)}: goodput {goodput:.2%}; a step takes "
        f"{describe_seconds(step)} (mean in {run.folder})",
    )
    table.add_row(
        "this run's",
        f"--save_step_interval {interval}, {describe_seconds(interval * step)}: goodput {chosen:.2%}; that costs "
        f"{max(goodput - chosen, 0) * 24 * world_size:,.2f} hours of a device more a day",
    )
    return table


def _costs(
    run: PreparedRun, times: RunTimes | None, checkpoint_bytes: int, between_failures: float
) -> tuple[Costs, tuple[str, str]]:
    """Return the costs, if possible of the run in the output folder, and where save and start are from."""
    machines, is_async = run.arguments.device.num_nodes, run.arguments.save.async_save
    save = checkpoint_bytes / (_WRITTEN * machines)
    stall = min(checkpoint_bytes / (_COPIED * run.plan.world_size), save) if is_async else save
    copied = f", copied at {show_size(_COPIED)}/s a device" if is_async else ""
    of_save = f"assumed: {show_size(checkpoint_bytes)}{copied}, written at {show_size(_WRITTEN)}/s a machine"
    restart, of_start = _START, "assumed"
    if times and times.stall is not None and times.save is not None:
        stall, save = times.stall, times.save
        of_save = f"median of {len(times.saves)} in {run.folder}, on {counted(times.num_devices, 'device')}"
    if times and times.start is not None:
        restart = times.start
        of_start = f"median of {counted(len(times.starts), 'start')} in {run.folder}, without the wait for machines"
    return Costs(stall, save, restart, between_failures), (of_save, of_start)
