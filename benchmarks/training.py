"""Train SmolLM2-135M on CPU with ``fabric_train`` and other trainers on the same rows, each eager and compiled."""

import csv
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.measure import ROOT, Command, Measurement, Spread, interleave, run, spread
from benchmarks.packages import install_packages
from benchmarks.report import Report
from fabric_train.data.step_sampler import WindowOrder
from fabric_train.data.token_dataset import open_dataset
from fabric_train.sample_data import real_data

REPETITIONS = 2
STEPS = 6
WARM_UP_STEPS = 2  # not counted: the first steps compile layers and allocate memory
ACCUMULATION = 4
MAX_LENGTH = 512
NUM_TOKENS = 100_000  # of Shakespeare; more than the steps need
LR = 2e-5
THREADS = 2
OURS = "fabric_train"
BARE = "bare_pytorch"
PEERS: Mapping[str, tuple[str, ...]] = {  # module in peers/ and its own options
    BARE: ("bare_pytorch",),
    "lightning": ("lightning_trainer",),
    "transformers": ("huggingface_trainers",),
    "trl": ("huggingface_trainers", "--trl"),
    "litgpt": ("litgpt_pretrain",),
}
_WITH_PACKAGES = ("trl", "litgpt")
_COMPILED = ", compiled"
_LARGEST_DIFFERENCE = 1e-3  # between the losses of two systems in fp32


@dataclass(frozen=True)
class RunLength:
    """The number of optimizer steps, and of micro-batches of one row in a step."""

    steps: int
    accumulation: int


@dataclass(frozen=True)
class TrainingRun:
    """One run of one system, with speeds and losses of every step, the first ones included.

    Attributes:
        peak_rss_bytes: as the process itself reports it after the last step, before any save.
        command_seconds: of the whole command; ours includes the checkpoint at the end.
        command_peak_rss_bytes: of the whole command with its data workers; PSS likewise.
    """

    tokens_per_second: list[float]
    losses: list[float]
    peak_rss_bytes: int
    command_seconds: float
    command_peak_rss_bytes: int
    command_peak_pss_bytes: int | None


@dataclass(frozen=True)
class SystemSummary:
    """One system over its repetitions; ``tokens_per_second`` is the spread of their medians over the steps."""

    tokens_per_second: Spread
    peak_rss_bytes: Spread
    largest_loss_difference: float


@dataclass(frozen=True)
class TrainingSummary:
    """All systems. Ratios are of medians, loss differences are to the bare loop.

    Attributes:
        speed_ratio: ours over the bare loop, both eager; ``rss_ratio`` likewise.
        fastest_ratio: our faster setting over the fastest peer, ``fastest_peer``, in its faster setting.
        left_out: a system that has no result → the reason.
    """

    systems: dict[str, SystemSummary]
    speed_ratio: float
    rss_ratio: float
    fastest_ratio: float
    fastest_peer: str
    left_out: dict[str, str]


def measure(work: Path) -> Report:
    """Measure the systems on the same rows.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        ChildProcessError: ours or the bare loop failed, or the losses differ.
    """
    tokens = work / "tokens"
    model = real_data.smollm2().relative_to(ROOT)
    print("training: making the token dataset", flush=True)
    run(tokenize_command(model, tokens))
    length = RunLength(STEPS, ACCUMULATION)
    commands: dict[str, Command] = {}
    left_out: dict[str, str] = {}
    for suffix in ("", _COMPILED):
        commands[OURS + suffix] = our_command(model, tokens, work / OURS, length, compiled=bool(suffix))
        for name in PEERS:
            try:
                commands[name + suffix] = peer_command(name, model, tokens, length, compiled=bool(suffix))
            except ChildProcessError as error:
                left_out[name + suffix] = str(error)
    systems = {
        name: partial(run_ours, command, work / OURS) if name.startswith(OURS) else partial(run_peer, command)
        for name, command in commands.items()
    }
    runs: dict[str, list[TrainingRun]] = interleave(systems, dict.fromkeys(systems, REPETITIONS), "training", left_out)
    settings = {
        "model": "SmolLM2-135M",
        "precision": "fp32",
        "max_length": MAX_LENGTH,
        "micro_batch_size": 1,
        "accumulation": ACCUMULATION,
        "steps": STEPS,
        "warm_up_steps": WARM_UP_STEPS,
        "threads": THREADS,
        "repetitions": REPETITIONS,
    }
    return Report("training", settings, commands, runs, _summarize(runs, left_out))


def table(report: Report) -> Table:
    """Return a table of medians, lowest and highest values."""
    summary: TrainingSummary = report.summary
    title = (
        f"Training: SmolLM2-135M, fp32, rows of {MAX_LENGTH}, micro-batch 1, accumulation {ACCUMULATION}, "
        f"{THREADS} threads, median of {REPETITIONS} runs"
    )
    columns = ("system", "tokens/s", "lowest–highest", "RSS, GB", "losses differ by")
    shown = Table(*columns, title=title, title_justify="left", box=box.SIMPLE)
    for name, system in summary.systems.items():
        speeds = system.tokens_per_second
        between = f"{speeds.lowest:.1f}–{speeds.highest:.1f}"
        difference = "" if name == BARE else f"{system.largest_loss_difference:.1e}"
        shown.add_row(name, f"{speeds.median:.1f}", between, f"{system.peak_rss_bytes.median / 1e9:.2f}", difference)
    shown.add_row("ours / bare loop", f"{summary.speed_ratio:.3f}×", "", f"{summary.rss_ratio:.2f}×", "")
    shown.add_row(f"our fastest / {summary.fastest_peer}", f"{summary.fastest_ratio:.3f}×", "", "", "")
    return shown


def tokenize_command(model: Path, tokens: Path) -> Command:
    """Return the command that makes the token dataset."""
    words = f"python tokenize_dataset.py --dataset {real_data.shakespeare().relative_to(ROOT)} --tokenizer_name {model}"
    words += f" --output_dir {tokens} --max_length {MAX_LENGTH} --validation_split 0 --max_tokens {NUM_TOKENS}"
    return Command(tuple(words.split()))


def our_command(model: Path, tokens: Path, target: Path, length: RunLength, *, compiled: bool = False) -> Command:
    """Return the command that trains into the run folder ``target``."""
    words = "python -m fabric_train --parallelism single --accelerator cpu --precision 32-true"
    words += f" --model_name {model} --train_data_dir {tokens} --output_dir {target} --max_step {length.steps}"
    words += f" --micro_batch_size 1 --total_batch_size {length.accumulation} --lr {LR} --lr_schedule constant"
    words += " --loggers csv --isolate_documents false"  # the peers do not isolate documents either
    if compiled:
        words += " --compile true"
    return Command(tuple(words.split()), {"OMP_NUM_THREADS": str(THREADS)})


def peer_command(name: str, model: Path, tokens: Path, length: RunLength, *, compiled: bool = False) -> Command:
    """Return the command that trains a peer on the rows in the order of ``fabric_train``."""
    script, *options = PEERS[name]
    dataset = open_dataset(str(ROOT / tokens))
    order = WindowOrder(len(dataset.train), length.accumulation, 1, world_size=1, rank=0, seed=0)
    rows = ",".join(str(row) for row in order.epoch_order(0)[: length.steps * length.accumulation])
    words = f"python -m benchmarks.peers.{script} --model_name {model} --train_data_dir {tokens}"
    words += f" --rows {rows} --accumulation {length.accumulation} --lr {LR}"
    environment = {"OMP_NUM_THREADS": str(THREADS)}
    if name in _WITH_PACKAGES:
        environment["PYTHONPATH"] = str(install_packages(name).relative_to(ROOT))
    return Command((*words.split(), *options, *(["--compile"] if compiled else [])), environment)


def run_ours(command: Command, target: Path) -> TrainingRun:
    """Run our command and read the metrics in the run folder ``target``."""
    shutil.rmtree(ROOT / target, ignore_errors=True)
    measured = run(command)
    with (ROOT / target / "metrics.csv").open(newline="", encoding="utf-8") as file:
        steps = list(csv.DictReader(file))
    return _training_run(
        measured,
        speeds=[float(step["tokens_per_second"]) for step in steps],
        losses=[float(step["train_loss"]) for step in steps],
        peak=round(float(steps[-1]["peak_memory_gb"]) * 1e9),
    )


def run_peer(command: Command) -> TrainingRun:
    """Run a peer's command and read the metrics that it prints."""
    measured = run(command)
    printed = json.loads(measured.output.splitlines()[-1])
    return _training_run(measured, printed["tokens_per_second"], printed["losses"], printed["peak_rss_bytes"])


def _training_run(measured: Measurement, speeds: list[float], losses: list[float], peak: int) -> TrainingRun:
    return TrainingRun(
        tokens_per_second=speeds,
        losses=losses,
        peak_rss_bytes=peak,
        command_seconds=measured.seconds,
        command_peak_rss_bytes=measured.peak_rss_bytes,
        command_peak_pss_bytes=measured.peak_pss_bytes,
    )


def _summarize(runs: dict[str, list[TrainingRun]], left_out: dict[str, str]) -> TrainingSummary:
    for name in (OURS, BARE):
        if name not in runs:
            raise ChildProcessError(left_out[name])
    expected = runs[BARE][0].losses
    systems = {name: _summarize_system(of_system, expected) for name, of_system in runs.items()}
    for name, system in systems.items():
        if not system.largest_loss_difference <= _LARGEST_DIFFERENCE:
            difference = f"the losses of {name} and {BARE} differ by up to {system.largest_loss_difference:.1e}"
            raise ChildProcessError(f"{difference}, so their speeds cannot be compared")
    ours = systems[OURS]
    bare = systems[BARE]
    peers = {name: system for name, system in systems.items() if not name.startswith(OURS)}
    fastest_peer = max(peers, key=lambda name: peers[name].tokens_per_second.median)
    our_fastest = max(system.tokens_per_second.median for name, system in systems.items() if name.startswith(OURS))
    return TrainingSummary(
        systems=systems,
        speed_ratio=ours.tokens_per_second.median / bare.tokens_per_second.median,
        rss_ratio=ours.peak_rss_bytes.median / bare.peak_rss_bytes.median,
        fastest_ratio=our_fastest / peers[fastest_peer].tokens_per_second.median,
        fastest_peer=fastest_peer,
        left_out=left_out,
    )


def _summarize_system(runs: list[TrainingRun], expected: list[float]) -> SystemSummary:
    differences = [abs(loss - other) for run in runs for loss, other in zip(run.losses, expected, strict=True)]
    return SystemSummary(
        tokens_per_second=spread([spread(run.tokens_per_second[WARM_UP_STEPS:]).median for run in runs]),
        peak_rss_bytes=spread([run.peak_rss_bytes for run in runs]),
        largest_loss_difference=max(differences),
    )
