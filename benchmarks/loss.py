"""Measure the cross entropy over a large vocabulary and its gradients: ours, whole logits, and torch's in chunks."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.measure import Command, Spread, interleave, run, spread
from benchmarks.report import Report

REPETITIONS = 2
TIMED = 3  # repetitions in each process
THREADS = 2
OURS = "ours"
PEER = "logits"
FORMS = (PEER, "torch_sum", "torch_none", OURS)
_LARGEST_DIFFERENCE = 1e-4  # relative


@dataclass(frozen=True)
class Shape:
    """The size of one measurement; ``supervised`` of the tokens have a loss, ``width`` is the hidden size."""

    name: str
    tokens: int
    supervised: int
    vocabulary: int
    width: int


SHAPES = (
    Shape("SmolLM2-135M, text", 512, 511, 49_152, 576),
    Shape("SmolLM2-135M, chats", 1024, 512, 49_152, 576),
    Shape("Llama-3.2-1B, text", 512, 511, 128_256, 2048),
)


@dataclass(frozen=True)
class LossRun:
    """One process: the seconds of each repetition, and the memory needed in addition to hidden states and weight."""

    seconds: list[float]
    peak_bytes: int
    loss: float
    gradient_norm: float


@dataclass(frozen=True)
class LossSummary:
    """One shape and form; the ratios are of medians, relative to whole logits."""

    seconds: Spread
    peak_bytes: Spread
    time_ratio: float
    memory_ratio: float


@dataclass(frozen=True)
class LossSummaries:
    """All results, by shape and form."""

    shapes: dict[str, dict[str, LossSummary]]


def measure(work: Path) -> Report:
    """Measure every form on every shape, each in its own process. ``work`` is not used.

    Raises:
        ChildProcessError: a form failed, or the forms compute different results.
    """
    commands = {f"{shape.name}: {form}": _command(shape, form) for shape in SHAPES for form in FORMS}
    systems = {name: partial(_run, command) for name, command in commands.items()}
    runs = interleave(systems, dict.fromkeys(systems, REPETITIONS), "loss")
    settings = {"precision": "fp32", "threads": THREADS, "repetitions": REPETITIONS, "timed_in_each": TIMED}
    summaries = {shape.name: {form: runs[f"{shape.name}: {form}"] for form in FORMS} for shape in SHAPES}
    summary = LossSummaries({name: _summarize(name, forms) for name, forms in summaries.items()})
    return Report("loss", settings, commands, runs, summary)


def table(report: Report) -> Table:
    """Return a table of the medians and their ratios to whole logits."""
    title = f"Loss and gradients from hidden states, fp32, {THREADS} threads, median of {REPETITIONS} processes"
    columns = ("shape", "form", "seconds", "lowest–highest", "of logits'", "memory, MB", "of logits'")
    shown = Table(*columns, title=title, title_justify="left", box=box.SIMPLE)
    summary: LossSummaries = report.summary
    for shape, forms in summary.shapes.items():
        for form, found in forms.items():
            seconds = found.seconds
            between = f"{seconds.lowest:.3f}–{seconds.highest:.3f}"
            memory = f"{found.peak_bytes.median / 1e6:,.0f}"
            ratios = (f"{found.time_ratio:.2f}×", f"{found.memory_ratio:.2f}×")
            shown.add_row(shape, form, f"{seconds.median:.3f}", between, ratios[0], memory, ratios[1])
    return shown


def _command(shape: Shape, form: str) -> Command:
    words = f"python -m benchmarks.peers.head_loss --form {form} --tokens {shape.tokens}"
    words += f" --supervised {shape.supervised} --vocabulary {shape.vocabulary} --width {shape.width}"
    return Command((*words.split(), "--repetitions", str(TIMED)), {"OMP_NUM_THREADS": str(THREADS)})


def _run(command: Command) -> LossRun:
    return LossRun(**json.loads(run(command).output.splitlines()[-1]))


def _summarize(shape: str, forms: dict[str, list[LossRun]]) -> dict[str, LossSummary]:
    expected = forms[PEER][0]
    summaries: dict[str, LossSummary] = {}
    for form, runs in forms.items():
        for found in runs:
            pairs = ((found.loss, expected.loss), (found.gradient_norm, expected.gradient_norm))
            if any(abs(here - there) > _LARGEST_DIFFERENCE * abs(there) for here, there in pairs):
                raise ChildProcessError(f"{shape}: {form} and {PEER} compute different results: {found}, {expected}")
        seconds = spread([spread(found.seconds).median for found in runs])
        peaks = spread([found.peak_bytes for found in runs])
        peer = summaries.get(PEER)  # the first form
        time_ratio = seconds.median / peer.seconds.median if peer else 1
        memory_ratio = peaks.median / peer.peak_bytes.median if peer else 1
        summaries[form] = LossSummary(seconds, peaks, time_ratio, memory_ratio)
    return summaries
