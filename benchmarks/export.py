"""Export a bf16 checkpoint in the shape of Llama-3 8B: seconds and memory of writing and of verification."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.large_checkpoint import LLAMA_8B, NUM_SHARDS, write_checkpoint
from benchmarks.measure import ROOT, Command, Measurement, run
from benchmarks.peers.export_step import MAX_SHARD_SIZE
from benchmarks.report import Report
from fabric_train.sample_data import real_data

_KINDS = {"full": ("copy", "ours", "verification", "transformers"), "sharded": ("copy", "ours", "verification")}
_FREE_BYTES = 4_000_000_000  # that stay free on the disk


@dataclass(frozen=True)
class ExportRun:
    """One step of an export.

    Attributes:
        seconds: without the imports; of the verification, the seconds of the whole command.
        peak_rss_bytes: peak of the resident memory, with pages of files.
        peak_anonymous_bytes: without pages of files, which the kernel can drop; None where it is not reported.
    """

    seconds: float
    peak_rss_bytes: int
    peak_anonymous_bytes: int | None


@dataclass(frozen=True)
class ExportSummary:
    """All steps, by the kind of checkpoint and the step.

    Attributes:
        weight_bytes: the size of the weights.
        method: how the verification ran the models.
        speed: bytes per second of our writing over the copy's, by the kind of checkpoint.
        steps: every step that did not fail.
        left_out: why a step is missing, such as too little memory for ``from_pretrained``.
    """

    weight_bytes: int
    method: str
    speed: dict[str, float]
    steps: dict[str, ExportRun]
    left_out: dict[str, str]


def measure(work: Path) -> Report:
    """Measure every step, one after the other.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        ChildProcessError: our writing failed, or the disk is too small.
    """
    left_out: dict[str, str] = {}
    runs: dict[str, list[ExportRun]] = {}
    method = "unknown"
    commands: dict[str, Command] = {}
    for kind, steps in _KINDS.items():
        print(f"export: writing a {kind} checkpoint", flush=True)
        checkpoint = work / f"{kind}-checkpoint"
        weight_bytes = write_checkpoint(ROOT / checkpoint, LLAMA_8B, real_data.smollm2(), kind == "sharded")
        if shutil.disk_usage(ROOT / work).free < weight_bytes + _FREE_BYTES:
            raise ChildProcessError(f"an export needs {weight_bytes / 1e9:.0f} GB more of the disk")
        for step in steps:
            name = f"{kind}, {step}"
            print(f"export: {name}", flush=True)
            target = work / "target"
            commands[name] = (words := command(step, checkpoint, target))
            try:
                runs[name] = [_measured(run(words))]
            except ChildProcessError as error:
                if step == "ours":
                    raise
                left_out[name] = str(error)
            print(f"  {left_out.get(name) or runs[name][0]}", flush=True)
            if step == "verification" and name in runs:
                method = json.loads((ROOT / target / "verification.json").read_text())["method"]
            if step != "ours":  # which is verified next
                shutil.rmtree(ROOT / target, ignore_errors=True)
        shutil.rmtree(ROOT / checkpoint)
    settings = {
        "model": f"the shape of Llama-3 8B, {LLAMA_8B.num_hidden_layers} layers, random weights",
        "dtype": "bfloat16",
        "sharded": f"one file for each of {NUM_SHARDS} ranks",
        "max_shard_size": MAX_SHARD_SIZE,
    }
    return Report("export", settings, commands, runs, summarize(runs, weight_bytes, method, left_out))


def command(step: str, checkpoint: Path, target: Path) -> Command:
    """Return the command of a step; ``convert_to_hf.py`` verifies in the same way."""
    if step == "verification":
        return Command(("python", "-m", "fabric_train.export.verification", str(target), str(checkpoint), "bfloat16"))
    return Command(("python", "-m", "benchmarks.peers.export_step", step, str(checkpoint), str(target)))


def summarize(
    runs: Mapping[str, list[ExportRun]], weight_bytes: int, method: str, left_out: dict[str, str]
) -> ExportSummary:
    """Return the steps and how fast our writing is, compared with the copy of the same run."""
    steps = {name: of_step[0] for name, of_step in runs.items()}
    speed = {
        kind: steps[f"{kind}, copy"].seconds / steps[f"{kind}, ours"].seconds
        for kind in _KINDS
        if f"{kind}, copy" in steps
    }
    return ExportSummary(weight_bytes, method, speed, steps, left_out)


def table(report: Report) -> Table:
    """Return a table of all steps."""
    summary: ExportSummary = report.summary
    speed = ", ".join(f"{ratio:.2f} ({kind})" for kind, ratio in summary.speed.items())
    title = (
        f"Exporting {summary.weight_bytes / 1e9:.1f} GB of bf16 weights, verified {summary.method}; "
        f"our speed of writing over a copy's: {speed}"
    )
    columns = ("checkpoint, step", "seconds", "MB/s", "peak memory, GB", "without pages of files, GB")
    shown = Table(*columns, title=title, title_justify="left", box=box.SIMPLE)
    for name, step in summary.steps.items():
        anonymous = f"{step.peak_anonymous_bytes / 1e9:.2f}" if step.peak_anonymous_bytes else "unknown"
        speed = f"{summary.weight_bytes / 1e6 / step.seconds:,.0f}"
        shown.add_row(name, f"{step.seconds:.0f}", speed, f"{step.peak_rss_bytes / 1e9:.2f}", anonymous)
    shown.caption = "\n".join(f"{name} left out: {reason}" for name, reason in summary.left_out.items())
    return shown


def _measured(measured: Measurement) -> ExportRun:
    lines = [line for line in measured.output.splitlines() if line.startswith("{")]
    seconds = json.loads(lines[-1])["seconds"] if lines else measured.seconds
    return ExportRun(seconds, measured.peak_rss_bytes, measured.peak_anonymous_bytes)
