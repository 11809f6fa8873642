"""Count kernels, bytes, collectives, host waits and peak memory of a step of real Llamas as rank 0 of many ranks.

Nothing is measured in time, and no GPU is needed: ``fake_rank`` runs the program on tensors without content.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table

from benchmarks.fake_rank import DOCUMENTS, LENGTH, FakeRun
from benchmarks.fake_teacher import FORMS
from benchmarks.measure import Command, run
from benchmarks.op_counts import COLLECTIVES, OF_TEACHER, PARTS, StepCounts, Work
from benchmarks.report import Report
from fabric_train.tokenization.corpus import available_cores

TOLERANCE = 0.05
"""Of the plan's peak memory, relative to the counted one."""


ADAPTERS = {"LoRA": "--adapter lora", "QLoRA": "--adapter lora --base_weights nf4"}


@dataclass(frozen=True)
class Case:
    """A preset on ``num_nodes`` machines of 8 devices, or on one device (``single``).

    All weights are trained, or one of ``ADAPTERS``. With ``is_dpo``, rows are of preference pairs, nearly all of whose
    tokens are supervised. With a ``teacher``, which is a preset, the run is a distillation; ``form`` is a value of
    ``fake_teacher.FORMS``.
    """

    preset: str
    num_nodes: int
    parallelism: str
    checkpointing: str
    adapter: str | None = None
    is_dpo: bool = False
    teacher: str | None = None
    form: str = "live"

    def __str__(self) -> str:
        adapter = f", {self.adapter}" if self.adapter else ""
        pairs = " on pairs" if self.is_dpo else ""
        teacher = f", teacher {self.teacher} ({self.form})" if self.teacher else ""
        num_devices = self.devices_per_node * self.num_nodes
        return f"{self.preset} of {num_devices}{pairs}, {self.parallelism}, {self.checkpointing}{adapter}{teacher}"

    @property
    def devices_per_node(self) -> int:
        return 1 if self.parallelism == "single" else 8

    @property
    def argv(self) -> list[str]:
        """The arguments of the run: micro-batches of one row, one per step."""
        words = f"--config configs/{self.preset}.yaml --devices {self.devices_per_node} --num_nodes {self.num_nodes}"
        words += f" --parallelism {self.parallelism} --activation_checkpointing {self.checkpointing}"
        words += " --micro_batch_size 1 --gradient_accumulation_steps 1"
        words += " --objective dpo" * self.is_dpo
        if self.teacher is not None:
            words += f" --teacher_preset {self.teacher} --teacher_form {self.form}"
        return [*words.split(), *ADAPTERS.get(self.adapter or "", "").split()]


CASES = [
    *(
        Case(preset, num_nodes, parallelism, checkpointing)
        for preset, num_nodes in (("llama-3-8b", 1), ("llama-3-8b", 32), ("llama-3-70b", 8))
        for parallelism in ("fsdp", "fsdp2")
        for checkpointing in ("none", "selective", "full")
    ),
    *(Case("llama-3-8b", 1, parallelism, "full", adapter) for parallelism in ("fsdp", "fsdp2") for adapter in ADAPTERS),
    *(
        Case("llama-3-8b", 1, parallelism, checkpointing, adapter, is_dpo=True)
        for parallelism in ("fsdp", "fsdp2")
        for checkpointing, adapter in (("none", None), ("full", "LoRA"))
    ),
    Case("llama-3.2-1b", 1, "single", "none"),
    *(Case("llama-3.2-1b", 1, "single", "none", teacher="llama-3-8b", form=form) for form in FORMS),
    Case("llama-3-8b", 1, "fsdp", "selective", teacher="llama-3-70b"),
    *(Case("llama-3-8b", 1, "fsdp2", "selective", teacher="llama-3-70b", form=form) for form in FORMS),
]


@dataclass(frozen=True)
class RehearsalSummary:
    """Figures by case.

    Attributes:
        plan_errors: of the plan's peak memory, relative to the counted one.
        pairs_per_text: of a case on pairs, its kernels over the kernels of the same case on as many tokens of texts.
    """

    plan_errors: dict[str, float]
    pairs_per_text: dict[str, float]


def measure(work: Path) -> Report:
    """Count every case.

    Args:
        work: not used: every case has a temporary folder.

    Raises:
        ChildProcessError: a case failed.
    """
    del work
    commands = {str(case): Command(("python", "-m", "benchmarks.fake_rank", *case.argv)) for case in CASES}

    def count(name: str) -> FakeRun:
        print(f"rehearsal: {name}", flush=True)
        return read_fake_run(run(commands[name]).output.splitlines()[-1])

    with ThreadPoolExecutor(available_cores()) as pool:  # no times are measured
        runs = {name: [found] for name, found in zip(commands, pool.map(count, commands), strict=True)}
    settings = {"length": LENGTH, "documents of a row": DOCUMENTS, "rows of a rank": 1}
    errors = {name: plan_error(found) for name, (found,) in runs.items()}
    pairs = {str(case): str(replace(case, is_dpo=False)) for case in CASES if case.is_dpo}
    kernels = {name: num_kernels(found) for name, (found,) in runs.items()}
    ratios = {name: kernels[name] / kernels[on_texts] for name, on_texts in pairs.items()}
    return Report("rehearsal", settings, commands, runs, RehearsalSummary(errors, ratios))


def read_fake_run(line: str) -> FakeRun:
    """Return what ``fake_rank`` prints."""
    content = json.loads(line)
    step: dict[str, Any] = content["step"]
    for kind in ("parts", "collectives"):
        step[kind] = {name: Work(**work) for name, work in step[kind].items()}
    return FakeRun(StepCounts(**step), content["planned"])


def plan_error(found: FakeRun) -> float:
    """Return the error of the plan's peak memory, relative to the counted one."""
    return sum(found.planned.values()) / found.step.peak_bytes - 1


def num_kernels(found: FakeRun) -> int:
    """Return the kernels of all parts of a step."""
    return sum(part.number for part in found.step.parts.values())


def table(report: Report) -> Group:
    """Return a table for each model and number of ranks."""
    places = dict.fromkeys(name.partition(", ")[0] for name in report.runs)
    return Group(*(_table_of(place, report) for place in places))


def _table_of(place: str, report: Report) -> Table:
    runs = {name.partition(", ")[2]: found for name, (found,) in report.runs.items() if name.startswith(f"{place}, ")}
    title = f"{place}, rank 0, a step of one row of 8,192 tokens: kernels, and GB read and written, by part"
    shown = Table("", *runs, title=title, title_justify="left", box=box.SIMPLE)
    steps = [found.step for found in runs.values()]
    for part in (*PARTS, COLLECTIVES + OF_TEACHER):
        cells = [_cell(_parts(step).get(part)) for step in steps]
        if any(cells):
            shown.add_row(part, *cells)
    shown.add_row("all kernels", *(f"{num_kernels(found):,}" for found in runs.values()))
    shown.add_row("TFLOP", *(f"{sum(part.flops for part in step.parts.values()) / 1e12:,.0f}" for step in steps))
    summary: RehearsalSummary = report.summary
    ratios = [summary.pairs_per_text.get(f"{place}, {name}") for name in runs]
    if any(ratios):
        shown.add_row("over those on texts", *(f"{ratio:.3f}" if ratio else "" for ratio in ratios))
    shown.add_row("host waits", *(str(sum(step.host_waits.values())) for step in steps))
    shown.add_row("peak memory, GB", *(f"{step.peak_bytes / 1e9:.2f}" for step in steps))
    shown.add_row("error of the plan", *(f"{plan_error(found):+.1%}" for found in runs.values()))
    return shown


def _parts(step: StepCounts) -> dict[str, Work]:
    """Return the parts of a step, with all collectives as one, and those of a teacher as another."""
    parts = dict(step.parts)
    for name, work in step.collectives.items():
        part = COLLECTIVES + OF_TEACHER if name.endswith(OF_TEACHER) else COLLECTIVES
        before = parts.get(part, Work())
        parts[part] = Work(before.number + work.number, before.read + work.read, before.written + work.written)
    return parts


def _cell(part: Work | None) -> str:
    return f"{part.number:,} {(part.read + part.written) / 1e9:,.1f}" if part else ""
