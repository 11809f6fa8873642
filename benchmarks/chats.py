"""Train SmolLM2-135M on chats of very different lengths: ``fabric_train`` on packed rows, TRL padded and packed."""

import csv
import itertools
import json
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.measure import ROOT, Command, Spread, interleave, run, spread
from benchmarks.packages import install_packages
from benchmarks.report import Report
from fabric_train.sample_data import real_data

REPETITIONS = 2
NUM_CHATS = 48
MAX_LENGTH = 1024
PACKED_ACCUMULATION = 8  # rows of up to 1024 tokens in a step
# chats in a micro-batch, padded to the longest of them
PADDED_BATCH = 4
PADDED_ACCUMULATION = 4
WARM_UP_STEPS = 1
LR = 2e-5
THREADS = 2
OURS = "fabric_train"
PADDED = "trl, padded"
PACKED = "trl, bfd"


@dataclass(frozen=True)
class ChatRun:
    """One run: tokens per second of every step, without padding, and the process's peak memory after the last step."""

    tokens_per_second: list[float]
    peak_rss_bytes: int


@dataclass(frozen=True)
class SystemSummary:
    """A system over its repetitions; ``tokens_per_second`` is the spread of their medians over the steps."""

    tokens_per_second: Spread
    peak_rss_bytes: Spread


@dataclass(frozen=True)
class ChatSummary:
    """All systems; the ratios are our median over the peer's."""

    systems: dict[str, SystemSummary]
    speed_ratio: dict[str, float]
    rss_ratio: dict[str, float]


def measure(work: Path) -> Report:
    """Measure the systems on the same chats, with all tokens supervised.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        ChildProcessError: a system failed.
    """
    model = real_data.smollm2().relative_to(ROOT)
    chats = work / "chats.jsonl"
    with real_data.chats().open(encoding="utf-8") as lines:
        (ROOT / chats).write_text("".join(itertools.islice(lines, NUM_CHATS)), encoding="utf-8")
    print("chats: making the token dataset", flush=True)
    words = f"python tokenize_dataset.py --dataset {chats} --tokenizer_name {model} --output_dir {work / 'tokens'}"
    words += f" --max_length {MAX_LENGTH} --packing best_fit --train_on all --validation_split 0"
    run(Command(tuple(words.split())))
    commands = {
        OURS: _our_command(model, work),
        PADDED: _trl_command(model, chats, PADDED_BATCH, PADDED_ACCUMULATION),
        PACKED: _trl_command(model, chats, 1, PACKED_ACCUMULATION, "--packing"),
    }
    systems = {
        name: partial(_run_ours, command, work / OURS) if name == OURS else partial(_run_trl, command)
        for name, command in commands.items()
    }
    runs = interleave(systems, dict.fromkeys(systems, REPETITIONS), "chats")
    settings = {
        "model": "SmolLM2-135M",
        "precision": "fp32",
        "chats": NUM_CHATS,
        "max_length": MAX_LENGTH,
        "packed rows in a step": PACKED_ACCUMULATION,
        "padded chats in a micro-batch and micro-batches in a step": [PADDED_BATCH, PADDED_ACCUMULATION],
        "warm_up_steps": WARM_UP_STEPS,
        "threads": THREADS,
        "repetitions": REPETITIONS,
    }
    return Report("chats", settings, commands, runs, _summarize(runs))


def table(report: Report) -> Table:
    """Return a table of the medians."""
    summary: ChatSummary = report.summary
    title = f"Chats of up to {MAX_LENGTH} tokens: SmolLM2-135M, fp32, {THREADS} threads, median of {REPETITIONS} runs"
    shown = Table(
        "system", "real tokens/s", "lowest–highest", "RSS, GB", title=title, title_justify="left", box=box.SIMPLE
    )
    for name, system in summary.systems.items():
        speeds = system.tokens_per_second
        between = f"{speeds.lowest:.1f}–{speeds.highest:.1f}"
        shown.add_row(name, f"{speeds.median:.1f}", between, f"{system.peak_rss_bytes.median / 1e9:.2f}")
    for name, ratio in summary.speed_ratio.items():
        shown.add_row(f"ours / {name}", f"{ratio:.2f}×", "", f"{summary.rss_ratio[name]:.2f}×")
    return shown


def _our_command(model: Path, work: Path) -> Command:
    words = "python -m fabric_train --parallelism single --accelerator cpu --precision 32-true --number_epochs 1"
    words += f" --model_name {model} --train_data_dir {work / 'tokens'} --output_dir {work / OURS} --loggers csv"
    words += f" --micro_batch_size 1 --total_batch_size {PACKED_ACCUMULATION} --lr {LR} --lr_schedule constant"
    return Command(tuple(words.split()), {"OMP_NUM_THREADS": str(THREADS)})


def _trl_command(model: Path, chats: Path, micro_batch_size: int, accumulation: int, *options: str) -> Command:
    words = f"python -m benchmarks.peers.trl_chats --model_name {model} --dataset {chats} --max_length {MAX_LENGTH}"
    words += f" --micro_batch_size {micro_batch_size} --accumulation {accumulation} --lr {LR}"
    environment = {"OMP_NUM_THREADS": str(THREADS), "PYTHONPATH": str(install_packages("trl").relative_to(ROOT))}
    return Command((*words.split(), *options), environment)


def _run_ours(command: Command, target: Path) -> ChatRun:
    shutil.rmtree(ROOT / target, ignore_errors=True)
    run(command)
    with (ROOT / target / "metrics.csv").open(newline="", encoding="utf-8") as file:
        steps = list(csv.DictReader(file))
    peak = round(float(steps[-1]["peak_memory_gb"]) * 1e9)
    return ChatRun([float(step["tokens_per_second"]) for step in steps], peak)


def _run_trl(command: Command) -> ChatRun:
    printed = json.loads(run(command).output.splitlines()[-1])
    return ChatRun(printed["tokens_per_second"], printed["peak_rss_bytes"])


def _summarize(runs: dict[str, list[ChatRun]]) -> ChatSummary:
    systems = {
        name: SystemSummary(
            spread([spread(run.tokens_per_second[WARM_UP_STEPS:]).median for run in of_system]),
            spread([run.peak_rss_bytes for run in of_system]),
        )
        for name, of_system in runs.items()
    }
    ours = systems[OURS]
    return ChatSummary(
        systems,
        {n: ours.tokens_per_second.median / systems[n].tokens_per_second.median for n in (PADDED, PACKED)},
        {n: ours.peak_rss_bytes.median / systems[n].peak_rss_bytes.median for n in (PADDED, PACKED)},
    )
