"""Count where the time of an 8B's steps with adapters goes, beside the least time that an H100 needs for them.

Nothing is measured in time: ``fake_rank`` counts the kernels of a step on tensors without content. The step has one
micro-batch of the benchmark ``gpu``. The time of a kernel is that of its bytes or its FLOPs on an H100, whichever is
longer.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Group
from rich.table import Table

from benchmarks.fake_rank import FakeRun
from benchmarks.gpu import LENGTH, MIDDLE
from benchmarks.kernels import BANDWIDTH, GPU
from benchmarks.least_work import LlamaSizes, least_seconds_of_step
from benchmarks.measure import Command, run
from benchmarks.op_counts import ADAPTER, COMPILED, DEQUANTIZATION, NORMS_OF_DORA, PRODUCTS, StepCounts, Work
from benchmarks.rehearsal import num_kernels, read_fake_run
from benchmarks.report import Report
from fabric_train.tokenization.corpus import available_cores

RANK = 16
DOCUMENTS_OF_PAIRS = 4  # of a row
ADAPTERS = {
    "LoRA": "--adapter lora",
    "QLoRA": "--adapter lora --base_weights nf4",
    "DoRA": "--adapter dora",
    "LoRA, DPO": "--adapter lora --objective dpo",
}
ELEMENT_WISE = "element-wise operations of the layers"
GROUPS = {
    "matrix products": (PRODUCTS,),
    "attention": ("attention",),
    "head and loss": ("head",),
    ELEMENT_WISE: ("norm", "rotary", "mlp", "residual", COMPILED),
    "adapter": (ADAPTER,),
    NORMS_OF_DORA: (NORMS_OF_DORA,),
    DEQUANTIZATION: (DEQUANTIZATION,),
    "embedding, clip, optimizer, others": ("embedding", "clip", "optimizer", "others"),
}
"""The parts of a step that the table adds up, by the name of the sum."""


@dataclass(frozen=True)
class StepTime:
    """The times of a step, by group, in milliseconds."""

    roofline: dict[str, float]
    """The least time of the kernels that were counted, each by itself."""
    least: dict[str, float]
    """The least time that the job needs, see ``least_work``."""


@dataclass(frozen=True)
class AdapterStepsSummary:
    """The times of the steps, by case."""

    times: dict[str, StepTime]


def cases() -> dict[str, Command]:
    """Return the command that counts a step of each case, by its name."""
    commands: dict[str, Command] = {}
    for name, options in ADAPTERS.items():
        for compiles in (False, True):
            words = f"python -m benchmarks.fake_rank --config configs/{MIDDLE}.yaml --devices 1 --parallelism single"
            words += " --activation_checkpointing none --micro_batch_size 1 --gradient_accumulation_steps 1"
            words += f" --lora_rank {RANK} {options}"
            words += f" --compile {str(compiles).lower()} --row_tokens {LENGTH}"
            words += f" --row_documents {DOCUMENTS_OF_PAIRS if 'dpo' in options else 1}"
            commands[f"{name}, {'compiled' if compiles else 'eager'}"] = Command(tuple(words.split()))
    return commands


def measure(work: Path) -> Report:
    """Count a step of every case.

    Args:
        work: not used: every case has a temporary folder.

    Raises:
        ChildProcessError: a case failed.
    """
    del work
    commands = cases()

    def count(name: str) -> FakeRun:
        print(f"adapter_steps: {name}", flush=True)
        return read_fake_run(run(commands[name]).output.splitlines()[-1])

    with ThreadPoolExecutor(available_cores()) as pool:  # no times are measured
        steps = dict(zip(commands, pool.map(count, commands), strict=True))
    settings = {
        "tokens of a row": LENGTH,
        "rows of a micro-batch": 1,
        "accumulation": 1,
        "rank": RANK,
        "GPU": GPU,
        "bytes per second": BANDWIDTH,
    }
    times = {name: time_of_step(name, found.step) for name, found in steps.items()}
    runs = {name: [found] for name, found in steps.items()}
    return Report("adapter_steps", settings, commands, runs, AdapterStepsSummary(times))


def time_of_step(name: str, step: StepCounts) -> StepTime:
    """Return the times of a step by group."""
    roofline: dict[str, float] = {}
    for group, parts in GROUPS.items():
        seconds = sum(step.parts.get(part, Work()).least_seconds for part in parts)
        roofline[group] = 1000 * seconds
    document = LENGTH // DOCUMENTS_OF_PAIRS if "DPO" in name else LENGTH
    sizes = LlamaSizes(rank=RANK, tokens=LENGTH, document=document)
    seconds_by_group = least_seconds_of_step(sizes, in_4_bits="QLoRA" in name, has_norms="DoRA" in name)
    least = {group: 1000 * seconds_by_group.get(group, 0.0) for group in GROUPS}
    return StepTime(roofline, least)


def table(report: Report) -> Group:
    """Return a table for each kind of adapter, eager beside compiled."""
    return Group(*(_table_of(name, report) for name in ADAPTERS))


def _table_of(name: str, report: Report) -> Table:
    title = f"{MIDDLE}, {name}: a step of a row of {LENGTH:,} tokens, least milliseconds on an {GPU}"
    columns = ["kernels", "GB", "TFLOP", "ms"]
    shown = Table("", *columns, *columns, "least ms", title=title, title_justify="left", box=box.SIMPLE)
    summary: AdapterStepsSummary = report.summary
    least = summary.times[f"{name}, eager"].least
    for group, parts in GROUPS.items():
        cells: list[str] = []
        for way in ("eager", "compiled"):
            case = f"{name}, {way}"
            step = report.runs[case][0].step
            works = [step.parts[part] for part in parts if part in step.parts]
            cells.append(f"{sum(work.number for work in works):,}")
            cells.append(f"{sum(work.read + work.written for work in works) / 1e9:,.1f}")
            cells.append(f"{sum(work.flops for work in works) / 1e12:,.1f}")
            cells.append(f"{summary.times[case].roofline[group]:,.1f}")
        shown.add_row(group, *cells, f"{least[group]:,.1f}")
    totals: list[str] = []
    for way in ("eager", "compiled"):
        case = f"{name}, {way}"
        totals += [
            f"{num_kernels(report.runs[case][0]):,}",
            "",
            "",
            f"{sum(summary.times[case].roofline.values()):,.1f}",
        ]
    shown.add_row("in all", *totals, f"{sum(least.values()):,.1f}")
    return shown
