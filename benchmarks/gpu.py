"""Train Llama shapes on one GPU: speed and model FLOPs utilization (MFU), adapters, other trainers, the largest shape.

All in bf16 on rows of 4,096 tokens.
"""

import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich import box
from rich.table import Table

from arguments import TrainArguments, parse
from benchmarks.large_checkpoint import LLAMA_8B, write_checkpoint
from benchmarks.measure import ROOT, Command, Spread, interleave, run, spread
from benchmarks.packages import install_packages
from benchmarks.report import Report
from fabric_train.cli.errors import InputError
from fabric_train.model.init_weights import new_shape
from tests.support.plan_accuracy import write_rows
from tests.support.tiny_model import write_tokenizer

REPETITIONS = 2
STEPS, WARM_UP_STEPS = 10, 4
ACCUMULATION, LENGTH = 4, 4096
LR = 1e-4
SMALL, MIDDLE, LARGE = "llama-3.2-1b", "llama-3-8b", "llama-3-70b"
ROWS = {SMALL: 4, MIDDLE: 1, LARGE: 1}  # in a micro-batch
WAYS: dict[str, tuple[str, str]] = {  # preset and options
    f"{preset}, {parallelism}{', compiled' if compiled else ''}": (
        preset,
        f"--parallelism {parallelism} --compile {str(compiled).lower()}",
    )
    for preset in (SMALL, MIDDLE)
    for parallelism in ("single", "fsdp", "fsdp2")
    for compiled in (False, True)
}
PEERS = {f"{SMALL}, transformers": "", f"{SMALL}, transformers, compiled": "--compile"}  # and options
ADAPTED = {  # options of ours, and of TRL with peft
    f"{MIDDLE}, LoRA": ("--adapter lora --lora_rank 16", "--lora_rank 16"),
    f"{MIDDLE}, QLoRA": ("--adapter lora --lora_rank 16 --base_weights nf4", "--lora_rank 16 --nf4"),
}
OF_PEFT = ", TRL with peft"
LAYERS_OF_LARGE = (30, 28, 26, 24, 22, 20)  # each of width 8,192; the first number that trains is the result
LARGE_OPTIONS = "--parallelism single --activation_checkpointing full --optimizer_states 8bit"


@dataclass(frozen=True)
class GpuRun:
    """Every step of one run.

    ``mfu`` follows ``fabric_train/model/flops.py``; None for the peer, which reports none, and on a device without a
    known peak.
    """

    tokens_per_second: list[float]
    mfu: list[float] | None
    peak_bytes: int


@dataclass(frozen=True)
class WaySummary:
    """One way to train.

    ``mfu`` is that of the median speed; None on a device without a known peak, and for a peer if none of our runs
    trained its shape.
    """

    tokens_per_second: Spread
    mfu: float | None
    peak_bytes: Spread


@dataclass(frozen=True)
class GpuSummary:
    """All ways to train; ``gpu`` is the device's name, ``left_out`` maps a system to why it has no result."""

    gpu: str
    ways: dict[str, WaySummary]
    left_out: dict[str, str]


def measure(work: Path) -> Report:
    """Measure all ways to train.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        InputError: there is no GPU.
        ChildProcessError: none of our runs trained.
    """
    import torch

    if not torch.cuda.is_available():
        raise InputError("torch finds no GPU; run the benchmark gpu on a machine with one")
    rows, config = work / "rows", work / "config"
    write_rows(ROOT / rows, num_rows=STEPS * ACCUMULATION * max(ROWS.values()), length=LENGTH)
    given = parse(TrainArguments, list(our_command(SMALL, "", rows, work / "unused").words[3:]))
    new_shape(given.model, given.fsdp.auto_wrap_policy).config.save_pretrained(ROOT / config)
    commands = {name: our_command(preset, options, rows, work / "run") for name, (preset, options) in WAYS.items()}
    commands |= {name: peer_command(SMALL, options, rows, config) for name, options in PEERS.items()}
    left_out: dict[str, str] = {}
    commands |= _adapter_commands(work, rows, left_out)
    systems: dict[str, Callable[[], GpuRun]] = {
        name: partial(_run_peer if _is_peer(name) else partial(_run_ours, work / "run"), command)
        for name, command in commands.items()
    }
    runs = interleave(systems, dict.fromkeys(systems, REPETITIONS), "gpu", left_out)
    for layers in LAYERS_OF_LARGE:
        name = f"{LARGE} with {layers} layers, single, 8-bit moments, full checkpointing"
        commands[name] = our_command(LARGE, f"{LARGE_OPTIONS} --num_layers {layers}", rows, work / "run")
        largest: dict[str, Callable[[], GpuRun]] = {name: partial(_run_ours, work / "run", commands[name])}
        runs |= interleave(largest, {name: 1}, "gpu", left_out)
        if name in runs:
            break
    settings = {
        "precision": "bf16-true",
        "length": LENGTH,
        "accumulation": ACCUMULATION,
        "rows of a micro-batch": ROWS,
        "steps": STEPS,
        "warm_up_steps": WARM_UP_STEPS,
        "repetitions": REPETITIONS,
    }
    return Report("gpu", settings, commands, runs, summarize(runs, left_out, torch.cuda.get_device_name()))


def table(report: Report) -> Table:
    """Return a table of the medians."""
    summary: GpuSummary = report.summary
    title = f"{summary.gpu}, bf16, rows of {LENGTH} tokens, median of {REPETITIONS} runs"
    if not any(way.mfu for way in summary.ways.values()):
        title += "\nno MFU: the peak of this device is not in fabric_train/model/flops.py"
    shown = Table(
        "system", "tokens/s", "lowest–highest", "MFU", "memory, GB", title=title, title_justify="left", box=box.SIMPLE
    )
    for name, way in summary.ways.items():
        speeds = way.tokens_per_second
        between = f"{speeds.lowest:,.0f}–{speeds.highest:,.0f}"
        memory = f"{way.peak_bytes.median / 1e9:.1f}"
        shown.add_row(name, f"{speeds.median:,.0f}", between, f"{way.mfu:.1%}" if way.mfu else "", memory)
    for name, reason in summary.left_out.items():
        shown.add_row(name, "–", "", "", reason[-80:])
    return shown


def our_command(preset: str, options: str, rows: Path, target: Path, base: Path | None = None) -> Command:
    """Return the command that trains a preset with random weights, or the ``base``, into the run folder ``target``."""
    model = f"--model_name {base}" if base else f"--config configs/{preset}.yaml"
    words = f"python -m benchmarks.peers.train_without_saving {model} --train_data_dir {rows}"
    words += f" --output_dir {target} --accelerator cuda --devices 1 --precision bf16-true --max_step {STEPS}"
    words += f" --micro_batch_size {ROWS[preset]} --gradient_accumulation_steps {ACCUMULATION}"
    words += f" --lr {LR} --lr_schedule constant --loggers csv {options}"
    return Command(tuple(words.split()))


def peer_command(preset: str, options: str, rows: Path, config: Path) -> Command:
    """Return the command that trains a model like the preset, of the configuration in ``config``, with a peer.

    Adapters are of the model in that folder, which has weights too.
    """
    words = f"python -m benchmarks.peers.huggingface_gpu --config {config} --train_data_dir {rows} --steps {STEPS}"
    words += f" --accumulation {ACCUMULATION} --micro_batch_size {ROWS[preset]} --lr {LR} {options}"
    return Command(tuple(words.split()))


def _adapter_commands(work: Path, rows: Path, left_out: dict[str, str]) -> dict[str, Command]:
    """Write a base of the middle shape, and return the commands that train its adapters, ours and TRL's."""
    base, tokenizer = work / "base", work / "tokenizer"
    write_tokenizer(ROOT / tokenizer, ["one two three"])
    write_checkpoint(ROOT / base, LLAMA_8B, ROOT / tokenizer, sharded=False)
    shutil.copytree(ROOT / tokenizer, ROOT / base, dirs_exist_ok=True)  # trl asks for one; the rows are token ids
    commands = adapter_commands(rows, base, work / "run")
    try:
        packages = str(install_packages("trl").relative_to(ROOT))
    except ChildProcessError as error:
        peers = [name for name in commands if _is_peer(name)]
        left_out |= dict.fromkeys(peers, str(error))
        return {name: command for name, command in commands.items() if name not in peers}
    return {
        name: replace(command, environment={"PYTHONPATH": packages}) if _is_peer(name) else command
        for name, command in commands.items()
    }


def adapter_commands(rows: Path, base: Path, target: Path) -> dict[str, Command]:
    """Return the commands that train adapters of ``base``: ours into the run folder ``target``, and the peer's."""
    commands = {}
    for name, (ours, peer) in ADAPTED.items():
        commands[name] = our_command(MIDDLE, f"--parallelism single {ours}", rows, target, base)
        options = f"--trl --gradient_checkpointing {peer}"
        commands[f"{name}{OF_PEFT}"] = peer_command(MIDDLE, options, rows, base)
    return commands


def _is_peer(name: str) -> bool:
    return name in PEERS or name.endswith(OF_PEFT)


def _run_ours(target: Path, command: Command) -> GpuRun:
    shutil.rmtree(ROOT / target, ignore_errors=True)
    run(command)
    return read_run(target)


def _run_peer(command: Command) -> GpuRun:
    return read_peer(run(command).output)


def read_run(target: Path) -> GpuRun:
    """Return the metrics in a run folder."""
    with (ROOT / target / "metrics.csv").open(newline="", encoding="utf-8") as file:
        steps = list(csv.DictReader(file))
    speeds = [float(step["tokens_per_second"]) for step in steps]
    shares = [float(step["mfu"]) for step in steps] if steps[-1]["mfu"] else None  # empty without a known peak
    return GpuRun(speeds, shares, round(float(steps[-1]["peak_memory_gb"]) * 1e9))


def read_peer(output: str) -> GpuRun:
    """Return what a peer printed."""
    printed = json.loads(output.splitlines()[-1])
    return GpuRun(printed["tokens_per_second"], None, printed["peak_device_bytes"])


def summarize(runs: dict[str, list[GpuRun]], left_out: dict[str, str], gpu: str) -> GpuSummary:
    """Return the medians of all runs.

    Raises:
        ChildProcessError: none of our runs trained.
    """
    if all(map(_is_peer, runs)):
        raise ChildProcessError("; ".join(left_out.values()))
    mfu_per_speed = {  # MFU at one token per second, which depends on the shape and on what trains alone
        _trained(name): of_way[0].mfu[-1] / of_way[0].tokens_per_second[-1]
        for name, of_way in runs.items()
        if of_way[0].mfu
    }
    ways = {}
    for name, of_way in runs.items():
        speeds = spread([spread(found.tokens_per_second[WARM_UP_STEPS:]).median for found in of_way])
        factor = mfu_per_speed.get(_trained(name))
        mfu = factor * speeds.median if factor else None
        ways[name] = WaySummary(speeds, mfu, spread([found.peak_bytes for found in of_way]))
    return GpuSummary(gpu, ways, left_out)


def _trained(name: str) -> str:
    """Return the part of a system's name that says what it trains: a shape, or an adapter of one."""
    name = name.removesuffix(OF_PEFT)
    return name if name in ADAPTED else name.split(",")[0]
