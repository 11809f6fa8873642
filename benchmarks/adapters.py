"""Train adapters of SmolLM2-135M on CPU on the rows of a full training, LoRA also compiled and with TRL and peft."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.measure import ROOT, Spread, interleave, run, spread
from benchmarks.report import Report
from benchmarks.training import (
    MAX_LENGTH,
    THREADS,
    WARM_UP_STEPS,
    RunLength,
    TrainingRun,
    our_command,
    peer_command,
    run_ours,
    run_peer,
    tokenize_command,
)
from fabric_train.sample_data import real_data

REPETITIONS = 2
LENGTH = RunLength(steps=6, accumulation=2)
RANK = 16
FULL = "all weights"
LORA = "LoRA"
QLORA = "QLoRA"
PEER = "LoRA, TRL with peft"
_COMPILED = ", compiled"
_LARGEST_DIFFERENCE = 1e-3  # between the losses of LoRA here and in TRL, in fp32


@dataclass(frozen=True)
class AdapterSystem:
    """One system over its repetitions. ``checkpoint_bytes`` is the size of our last checkpoint, and 0 for the peer."""

    tokens_per_second: Spread
    peak_rss_bytes: Spread
    checkpoint_bytes: int


@dataclass(frozen=True)
class AdapterSummary:
    """All systems. ``largest_loss_difference`` is between the losses of LoRA here and in TRL."""

    systems: dict[str, AdapterSystem]
    largest_loss_difference: float


def measure(work: Path) -> Report:
    """Measure the systems in turn; those with an adapter begin with the same one.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        ChildProcessError: a system failed, or the losses of LoRA differ.
    """
    tokens = work / "tokens"
    model = real_data.smollm2().relative_to(ROOT)
    start = work / "start"
    run(tokenize_command(model, tokens))
    first = our_command(model, tokens, start, RunLength(1, 1))
    run(replace(first, words=(*first.words, "--lora_rank", str(RANK))))
    adapter = start / "checkpoints" / "step-00000001"
    from_start = ("--init_adapter", str(adapter))
    options: dict[str, tuple[str, ...]] = {
        FULL: (),
        LORA: from_start,
        LORA + _COMPILED: (*from_start, "--compile", "true"),
        QLORA: (*from_start, "--base_weights", "nf4"),
    }
    commands = {}
    systems = {}
    for name, words in options.items():
        target = _run_folder(work, name)
        plain = our_command(model, tokens, target, LENGTH)
        commands[name] = replace(plain, words=(*plain.words, *words))
        systems[name] = partial(run_ours, commands[name], target)
    for name, compiled in ((PEER, False), (PEER + _COMPILED, True)):
        peer = peer_command("trl", model, tokens, LENGTH, compiled=compiled)
        commands[name] = replace(peer, words=(*peer.words, "--adapter", str(adapter)))
        systems[name] = partial(run_peer, commands[name])
    runs: dict[str, list[TrainingRun]] = interleave(systems, dict.fromkeys(systems, REPETITIONS), "adapters", {})
    sizes = {name: _checkpoint_bytes(ROOT / _run_folder(work, name)) for name in options}
    pairs = zip(runs[LORA][0].losses, runs[PEER][0].losses, strict=True)
    summary = AdapterSummary(
        {
            name: AdapterSystem(
                spread([spread(one.tokens_per_second[WARM_UP_STEPS:]).median for one in of_system]),
                spread([one.peak_rss_bytes for one in of_system]),
                sizes.get(name, 0),
            )
            for name, of_system in runs.items()
        },
        largest_loss_difference=max(abs(one - other) for one, other in pairs),
    )
    if not summary.largest_loss_difference <= _LARGEST_DIFFERENCE:
        difference = f"the losses of {LORA} and {PEER} differ by up to {summary.largest_loss_difference:.1e}"
        raise ChildProcessError(f"{difference}, so their speeds cannot be compared")
    settings = {"model": "SmolLM2-135M", "precision": "fp32", "max_length": MAX_LENGTH, "rank": RANK}
    settings |= {"steps": LENGTH.steps, "accumulation": LENGTH.accumulation, "threads": THREADS}
    return Report("adapters", settings, commands, runs, summary)


def _run_folder(work: Path, name: str) -> Path:
    return work / name.replace(",", "").replace(" ", "-")


def _checkpoint_bytes(run_folder: Path) -> int:
    last = max((run_folder / "checkpoints").iterdir())
    return sum(path.stat().st_size for path in last.rglob("*.safetensors"))


def table(report: Report) -> Table:
    """Return a table of medians, with ratios to training all weights."""
    summary: AdapterSummary = report.summary
    full = summary.systems[FULL]
    title = f"SmolLM2-135M, fp32, rows of {MAX_LENGTH}, rank {RANK}, {THREADS} threads, median of {REPETITIONS} runs"
    columns = ("system", "tokens/s", "ratio", "RSS, GB", "ratio", "weights and optimizer on disk")
    shown = Table(*columns, title=title, title_justify="left", box=box.SIMPLE)
    for name, system in summary.systems.items():
        speed = system.tokens_per_second.median
        memory = system.peak_rss_bytes.median
        shown.add_row(
            name,
            f"{speed:.1f}",
            f"{speed / full.tokens_per_second.median:.2f}×",
            f"{memory / 1e9:.2f}",
            f"{memory / full.peak_rss_bytes.median:.2f}×",
            f"{system.checkpoint_bytes / 1e6:,.0f} MB" if system.checkpoint_bytes else "",
        )
    shown.add_row(f"losses of {LORA} and {PEER} differ by", f"{summary.largest_loss_difference:.1e}", "", "", "", "")
    return shown
