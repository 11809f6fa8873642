"""Compare the memory that ``--plan`` predicts for a rank with the resident memory of real CPU ranks that train.

A run keeps freed memory to use it again (``host_memory``), and so does glibc. The plan is therefore compared with ranks
in which glibc returns freed blocks at once. The result also has the resident memory of unchanged ranks.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.measure import ROOT, Command
from benchmarks.report import Report
from fabric_train.sample_data import real_data
from tests.support.forked_runs import start_forked_runs
from tests.support.plan_accuracy import RETURN_FREED, STEPS, TOLERANCE, Case, case_argv, planned_bytes, resident_bytes
from tests.support.random_inputs import LAYERS, LENGTH, WIDTH, write_model, write_rows

CASES = (
    Case("single", 1),
    Case("single", 1, ("--gradient_accumulation_steps", "2")),
    Case("single", 1, ("--activation_checkpointing", "full", "--micro_batch_size", "4")),
    Case("single", 1, ("--micro_batch_size", "4")),
    Case("ddp", 2),
    Case("fsdp", 2),
    Case("fsdp", 2, ("--gradient_accumulation_steps", "2")),
    Case("fsdp", 2, ("--gradient_accumulation_steps", "2", "--gradient_reduction", "micro_batch")),
    Case("fsdp", 2, ("--sharding_strategy", "SHARD_GRAD_OP")),
    Case("fsdp2", 2),
    Case("fsdp2", 2, ("--gradient_accumulation_steps", "2")),
    Case("fsdp2", 2, ("--precision", "bf16-mixed", "--gradient_accumulation_steps", "2")),
    Case("fsdp2", 4),
    # here the shards are larger than what a rank gathers
    *(
        Case(parallelism, ranks, is_real=True)
        for parallelism, ranks in (("single", 1), ("ddp", 2), ("fsdp", 2), ("fsdp2", 2))
    ),
)


@dataclass(frozen=True)
class Resident:
    """Bytes of a rank: planned, and the largest resident memory of any rank after its first step.

    ``measured`` is with freed memory returned at once, ``as_it_is`` is of an unchanged run.
    """

    planned: int
    measured: int
    as_it_is: int

    @property
    def error(self) -> float:
        """Return the plan's error relative to the measured bytes."""
        return self.planned / self.measured - 1


@dataclass(frozen=True)
class PlanSummary:
    """The largest absolute error of the plan over all cases."""

    largest_error: float


def measure(work: Path) -> Report:
    """Plan and train every case.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        ChildProcessError: a run failed, or the error of a plan is above ``TOLERANCE``.
    """
    folder = ROOT / work
    small = write_model(folder / "model")
    tokens = write_rows(folder / "tokens")
    models = {case: real_data.smollm2() if case.is_real else small for case in CASES}
    runs = start_forked_runs(folder / "output")
    results = {}
    try:
        for number, case in enumerate(CASES):
            print(f"plan: {case}", flush=True)
            case_folder = folder / str(number)
            model = models[case]
            planned = planned_bytes(runs, case, model, tokens, case_folder)
            measured, usual = (
                resident_bytes(runs, case, model, tokens, case_folder / name, before)
                for name, before in (("returned", RETURN_FREED), ("usual", ""))
            )
            results[str(case)] = [Resident(planned, measured, usual)]
            shutil.rmtree(case_folder)
    finally:
        runs.close()
    largest = max(abs(found.error) for (found,) in results.values())
    if largest > TOLERANCE:
        raise ChildProcessError(f"the error of the plan is {largest:.1%}, above {TOLERANCE:.0%}: {results}")
    settings = {"parameters": 28_000_000, "layers": LAYERS, "width": WIDTH, "length": LENGTH, "steps": STEPS}
    commands = {
        str(case): Command(
            ("python", "-m", "fabric_train", *case_argv(case, models[case].relative_to(ROOT), work / "tokens", work))
        )
        for case in CASES
    }
    return Report("plan", settings, commands, results, PlanSummary(largest))


def table(report: Report) -> Table:
    """Return a table of the plan and the measurement of every case."""
    title = f"Resident memory of a CPU rank, MB: {LAYERS} layers of width {WIDTH}, rows of {LENGTH} tokens"
    columns = ("case", "planned", "resident", "error of the plan", "unchanged run")
    shown = Table(*columns, title=title, title_justify="left", box=box.SIMPLE)
    for name, (found,) in report.runs.items():
        sizes = [f"{size / 1e6:,.0f}" for size in (found.planned, found.measured, found.as_it_is)]
        shown.add_row(name, sizes[0], sizes[1], f"{found.error:+.1%}", sizes[2])
    return shown
